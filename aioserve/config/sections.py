"""The settings of the engine, a struct for each section: model, cache, scheduler and others.

`Section` is the base of all of them: immutable, checked however it is made.
"""

import re
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError

EMBEDDED_MODEL = "embedded"
DEFAULT_STEP_BUDGET = 2048
DEFAULT_CHAT_TOKENS = 2048  # a reply of some pages; a model that repeats itself ends there

LogLevel = Literal["debug", "info", "warning", "error"]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


def doc(text: str, **limits: Any) -> Meta:
    """Return the help text of a setting, and the limits of its value, such as `ge=0`."""
    return Meta(description=text, **limits)


#: Beside a setting of `SchedulerConfig`: it chooses the policy, or decides about requests in the
#: place of the policy. What follows from that in other places needs no line there:
#: `SchedulerConfig.under` and `deciding_settings`.
DECIDES: dict[str, Any] = {"decides": True}


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


class QuantizationConfig(Section, frozen=True, kw_only=True):
    """Quantization of weights and activations. Part of the section `model`."""

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
    activations: Annotated[
        Literal["int8"] | None,
        doc(
            "quantize activations to int8 in products with quantized weights and, with "
            "--kv-cache-dtype int8, in attention: faster, but replies may differ (CPU kernels "
            "only; in bfloat16 on a CPU with AMX, products of 14 or more rows, and attention to "
            "more than 16 new tokens of a request, stay exact, which is faster there; default: "
            "activations are exact)"
        ),
    ] = None


EVERY_NAME = "*"  # among the names of a model: it also serves those that nothing has


class ModelConfig(QuantizationConfig, frozen=True, kw_only=True, dict=True):
    """Settings of the model, and of how it is loaded."""

    model: Annotated[
        str,
        doc(
            "model to serve: a local Hugging Face directory, a GGUF file, a hub name, 'smollm2' "
            "(fetched by pip), 'qwen3' (fetched from the hub) or 'embedded' (a small model that "
            "comes with aioserve)"
        ),
    ] = EMBEDDED_MODEL
    served_model_name: Annotated[
        str | tuple[str, ...] | None,
        doc(
            "model name in the HTTP API, or several names, of which metrics use the first; '*' "
            "among them: a request for any other name is served as well (default: the value of "
            "--model; for a GGUF file, its name without .gguf)"
        ),
    ] = None
    revision: Annotated[
        str | None, doc("revision of the model on the hub: a branch, tag or commit")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        doc("compute type of the model; auto: bfloat16 where it is fast, else float32"),
    ] = "auto"
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
            "cache the model on disk in the layout of the CPU kernels, and its tokenizer, for a "
            "faster next start; in the user's cache, at most 2 GiB per model and 4 GiB in all"
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
    content_special_tokens: Annotated[
        Literal["token", "text"],
        doc(
            "how a chat reads the text of a special token, such as <|im_end|>, in a message, a "
            "tool or the result of a tool; token: as that token, as other engines do; text: as "
            "plain characters, so that no content can end its turn or begin another"
        ),
    ] = "token"
    skip_tokenizer_init: Annotated[
        bool,
        doc("load no tokenizer: Python callers send and receive token ids (refused by the server)"),
    ] = False

    @cached_property  # requests ask for it
    def served_name(self) -> str:
        """The model's name for clients, the first of them."""
        return self.served_names[0]

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        """All names of the model for clients, but for `*`."""
        file, named = Path(self.model), self.served_model_name
        stem = re.sub(r"-00001-of-\d{5}$", "", file.stem)  # of the first of several files
        stated = stem if file.suffix == ".gguf" else self.model
        names = (named,) if isinstance(named, str) else named or ()
        return tuple(name for name in names if name not in ("", EVERY_NAME)) or (stated,)

    @property
    def serves_every_name(self) -> bool:
        """Whether a request for a name that nothing has is served by the model."""
        named = self.served_model_name
        return EVERY_NAME in ((named,) if isinstance(named, str) else named or ())


class CacheConfig(Section, frozen=True, kw_only=True):
    """Settings of the paged KV cache."""

    block_size: Annotated[PositiveInt, doc("KV cache block size in tokens")] = 16
    num_kv_blocks: Annotated[
        PositiveInt | None, doc("KV cache size in blocks (default: from --kv-cache-gib)")
    ] = None
    kv_cache_gib: Annotated[
        PositiveFloat | None,
        doc(
            "KV cache limit in GiB; memory is taken as the cache fills (default on a CPU: twice "
            "the size of the weights in --dtype, at least 0.25 and one request of "
            "max_model_len, at most 4, a quarter of the free memory, and the size that "
            "max_num_seqs requests can use)"
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
        NonNegativeInt | None,
        doc(
            "KV blocks of the separate pool for sliding-window layers; 0: they have none, and keep "
            "all blocks (default: a share of the memory with which this pool serves as many "
            "requests as the other pool)"
        ),
    ] = None
    watermark: Annotated[
        float, doc("share of the KV cache that stays free when a request is admitted", ge=0, lt=1)
    ] = 0.01


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Limits that hold under every policy, the choice of the policy, and what is logged."""

    policy: Annotated[
        str,
        doc(
            "scheduling policy: an installed name, package.module:Class, or file.py:Class",
            extra=DECIDES,
        ),
    ] = "chunked_prefill"
    options: Annotated[
        dict[str, Any], doc("options of the policy, as a mapping (YAML or --set)", extra=DECIDES)
    ] = msgspec.field(default_factory=dict)
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
            "policy",
            "newest",
            "last_admitted",
            "lowest_priority",
            "least_computed",
            "most_remaining",
            "least_lost",
        ],
        doc(
            "preemption: which request loses its KV blocks when they run out; policy: the last one "
            "in the policy's order; newest: the last to arrive; last_admitted: as in vLLM",
            extra=DECIDES,
        ),
    ] = "policy"
    admit_beside_preemption: Annotated[
        bool,
        doc("admit requests in a step that has preempted one; vLLM waits for the next step"),
    ] = True
    max_leased_share: Annotated[
        float, doc("share of the KV cache that prefixes pinned by a policy may hold", ge=0, le=1)
    ] = 0.5
    max_client_leased_share: Annotated[
        float,
        doc(
            "share of the KV cache that prefixes may hold which clients ask to keep "
            "(cache_control.ttl, hint cache_seconds); 0: none",
            ge=0,
            le=1,
        ),
    ] = 0.25
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
        doc(
            "seconds for which a policy may schedule no request although requests wait; then "
            "these fail"
        ),
    ] = 30.0
    max_encoder_tokens: Annotated[
        PositiveInt, doc("encoder token budget: most encoder tokens (images, audio) in one step")
    ] = 16_384  # what Qwen2.5-VL makes of the largest image that it takes
    encoder_cache_tokens: Annotated[
        PositiveInt, doc("encoder cache size: tokens of encoder outputs kept for the decoder")
    ] = 16_384
    encoder_chunk_tokens: Annotated[
        int, doc("encoder chunk: most encoder tokens in one step beside decodes (0: any)", ge=0)
    ] = 64
    num_lookahead_tokens: Annotated[
        int, doc("KV slots reserved per request for draft tokens", ge=0)
    ] = 0
    pipeline_depth: Annotated[
        Annotated[int, Meta(ge=1, le=2)] | None,
        doc(
            "steps in flight: 2 plans a step while the runner computes the one before (default: 2 "
            "on a CUDA device and on simulated cards of engines that do so, else 1)"
        ),
    ] = None
    decision_log: Annotated[
        str | None,
        doc("file that records every scheduling decision and its input (default: none)"),
    ] = None
    request_log: Annotated[
        str | None,
        doc("file that records the arrival and lengths of every request (default: none)"),
    ] = None

    def step_budget(self, max_model_len: int) -> int:
        """Return most tokens in one step: as set, else enough for one whole request."""
        return self.max_num_batched_tokens or max(DEFAULT_STEP_BUDGET, max_model_len)

    def max_chunk(self, max_model_len: int) -> int:
        """Return most tokens of one request in one step."""
        budget = self.step_budget(max_model_len)
        return min(budget, self.long_prefill_token_threshold or budget)

    def max_whole(self, max_model_len: int) -> int:
        """Return most tokens that surely get one step to themselves: beside a decode of all others,
        with their drafts, which may come in every step. Below 1 if there are none.
        """
        others = (self.max_num_seqs - 1) * (1 + self.num_lookahead_tokens)
        return min(self.max_chunk(max_model_len), self.step_budget(max_model_len) - others)

    def under(self, policy: str) -> "SchedulerConfig":
        """Return the same limits for another policy, which alone decides about requests: its
        options and the settings that decide in its place have their defaults.
        """
        plain = SchedulerConfig(policy=policy)
        decided = {name: getattr(plain, name) for name in deciding_settings()}
        return msgspec.structs.replace(self, **decided)

    @property
    def depth(self) -> int:
        """`pipeline_depth`, once the runner has been asked; 1 until then."""
        return self.pipeline_depth or 1


@cache
def deciding_settings() -> tuple[str, ...]:
    """Return the names of the settings of `SchedulerConfig` that are marked by `DECIDES`: the
    policy that takes over from a failing one has them at their defaults, and vLLM has none of them
    beside aioserve's.
    """
    return tuple(
        name
        for name, kind in _field_types(SchedulerConfig).items()
        if any(isinstance(note, Meta) and note.extra == DECIDES for note in get_args(kind)[1:])
    )


class SimulatorConfig(Section, frozen=True, kw_only=True):
    """The simulator: step times and made-up tokens. Part of the section `runner`."""

    profile: Annotated[
        str,
        doc(
            "simulator: step times: a profile, by name or as a .yaml file, or a source of them, by "
            "name, package.module:Class or file.py:Class"
        ),
    ] = "example"
    profile_options: Annotated[
        dict[str, Any], doc("simulator: options of the step-time source, as a mapping")
    ] = msgspec.field(default_factory=dict)
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
    step_host_ms: Annotated[
        NonNegativeFloat | None,
        doc("simulator: ms of the engine's host, more for each step (default: the profile's)"),
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
    step_host_factor: Annotated[
        NonNegativeFloat | None,
        doc(
            "simulator: factor on the fixed ms of steps, for a slower host (default: the profile's)"
        ),
    ] = None
    step_cold_ms: Annotated[
        NonNegativeFloat | None,
        doc("simulator: extra ms of the first step of a run (default: the profile's)"),
    ] = None
    step_jitter: Annotated[
        NonNegativeFloat | None,
        doc(
            "simulator: standard deviation of step times as a share of them, drawn by "
            "runner.seed (default: the profile's)"
        ),
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


class SpeculationConfig(Section, frozen=True, kw_only=True):
    """Speculative decoding: how draft tokens are made."""

    speculative_method: Annotated[
        Literal["none", "auto", "ngram", "draft", "mtp"],
        doc(
            "speculative decoding: draft tokens, verified in one pass; ngram: prompt lookup, what "
            "followed the same tokens before, in this text or in recent outputs; auto: ngram where "
            "it changes no bit of a reply, for models that the compiled kernels of a CPU serve "
            "whole and steps that are not planned ahead, else none; draft: the tokens "
            "of --draft-model; mtp: those of the model's own multi-token prediction (MTP) layer, "
            "as checkpoints of DeepSeek-V3, GLM-4.5 to 4.7, Qwen3-Next and Qwen3.5 have one"
        ),
    ] = "auto"
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
        NonNegativeInt | None,
        doc(
            "ngram drafts: tokens of recent outputs, of all clients, that are searched beside the "
            "request's own text; absent: 65536, and none with auto"
        ),
    ] = None

    @property
    def drafts_by_ngrams(self) -> bool:
        """Whether drafts are what followed the same tokens before, where the model allows it."""
        return self.speculative_method in ("auto", "ngram")

    @property
    def drafts_surely(self) -> bool:
        """Whether drafts are made whatever the model is, whose memory is to have room for them."""
        return self.speculative_method not in ("none", "auto")

    @property
    def drafts_by_model(self) -> bool:
        """Whether a model makes the drafts, which has K and V of its own for all tokens."""
        return self.speculative_method in ("draft", "mtp")


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
    """Images and videos for a model that reads them: what a request may bring by HTTP, whether
    images are fetched, and what both may take of memory.
    """

    max_images: Annotated[PositiveInt, doc("most images in one request")] = 16
    max_video_frames: Annotated[
        PositiveInt, doc("most frames of all videos together in one request")
    ] = 128
    max_image_mib: Annotated[
        PositiveInt,
        doc("size limit in MiB of a request's images and frames together, as sent or fetched"),
    ] = 16
    max_image_megapixels: Annotated[
        int,
        doc(
            "size limit in megapixels of a request's images and frames together; checked before "
            "decoding",
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
            "memory limit in GiB for prepared images and videos of waiting and running requests; "
            "beyond it requests are refused with 429"
        ),
    ] = 4.0


class ShadowConfig(Section, frozen=True, kw_only=True):
    """A second policy that is evaluated on the live traffic, without tensors."""

    shadow_policy: Annotated[
        str | None,
        doc(
            "shadow policy, which is evaluated on live traffic and has no effect on it "
            "(default: none)"
        ),
    ] = None
    shadow_options: Annotated[dict[str, Any], doc("options of the shadow policy")] = msgspec.field(
        default_factory=dict
    )
    shadow_max_share: Annotated[
        float,
        doc("largest share of the event loop's time that the shadow policy may take", gt=0, le=1),
    ] = 0.05


class StructuredOutputsConfig(Section, frozen=True, kw_only=True):
    """Structured outputs: how JSON is written that keeps to a schema."""

    json_objects: Annotated[
        Literal["closed", "open"],
        doc(
            "structured outputs and tool calls: keys of JSON objects; closed: an object whose "
            "schema declares properties has no other keys, unless the schema states "
            "additionalProperties; open: it may have other keys, as in JSON Schema"
        ),
    ] = "closed"
    json_whitespace: Annotated[
        Literal["none", "blank", "lines"],
        doc(
            "structured outputs: whitespace between the parts of JSON; none; blank: one blank at "
            "most; lines: one blank, or a line break and up to 20 blanks"
        ),
    ] = "blank"
