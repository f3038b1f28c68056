"""All settings of an engine, and which of them have an effect beside the others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aioserve.config.sections import (
    AdapterConfig,
    CacheConfig,
    ImageConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    Section,
    ShadowConfig,
    SimulatorConfig,
    SpeculationConfig,
    StructuredOutputsConfig,
)
from aioserve.config.server import AccessConfig, BatchConfig, ScoringConfig, ServerConfig
from aioserve.errors import ConfigError


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
    batches: BatchConfig = BatchConfig()
    scoring: ScoringConfig = ScoringConfig()
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()

    if TYPE_CHECKING:  # that a mapping will do for a section, which `Section` turns into one

        def __init__(
            self,
            *,
            model: ModelConfig | Mapping[str, Any] = ...,
            cache: CacheConfig | Mapping[str, Any] = ...,
            scheduler: SchedulerConfig | Mapping[str, Any] = ...,
            shadow: ShadowConfig | Mapping[str, Any] = ...,
            speculation: SpeculationConfig | Mapping[str, Any] = ...,
            adapters: AdapterConfig | Mapping[str, Any] = ...,
            runner: RunnerConfig | Mapping[str, Any] = ...,
            images: ImageConfig | Mapping[str, Any] = ...,
            server: ServerConfig | Mapping[str, Any] = ...,
            access: AccessConfig | Mapping[str, Any] = ...,
            batches: BatchConfig | Mapping[str, Any] = ...,
            scoring: ScoringConfig | Mapping[str, Any] = ...,
            structured_outputs: StructuredOutputsConfig | Mapping[str, Any] = ...,
        ) -> None: ...

    @classmethod
    def load(
        cls, path: str | Path | None = None, overrides: Sequence[tuple[str, Any]] = ()
    ) -> "EngineConfig":
        """Read a YAML file and lay `overrides`, pairs of dotted name and value, over it.

        A `path` that is a bare word is the name of a file in `configs/`, which comes with us. Its
        key `like` names another engine, whose settings count where the file states none. The file
        of a policy that it names may lie beside it, or in the working directory. Overrides may be
        strings, as they come from a command line: they are converted to the type of the field.
        Raises `ConfigError` that names the file or the setting.
        """
        from aioserve.config.load import convert, read_file, set_value

        tree: dict[str, Any] = {}
        if path is not None:  # a bad file is named before a bad flag
            tree = read_file(path, cls, {dotted for dotted, _ in overrides})
        for dotted, value in overrides:
            set_value(tree, dotted, value)
        return convert(tree, cls, None, strict=False)

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
    """A condition under which some settings of a section have an effect."""

    section: str
    names: Sequence[str]
    has_effect: Callable[[EngineConfig], bool]
    why_not: str


def _is_model(config: EngineConfig) -> bool:
    return config.runner.runner == "model"


def _may_draft(config: EngineConfig) -> bool:
    """Return whether the settings let drafts be made, of a method that drafts where it can."""
    is_possible = _is_model(config) and config.scheduler.pipeline_depth != 2
    return config.speculation.drafts_surely or is_possible


_SIMULATED = "runner.runner is simulated, so no model is run"
_RULES = (
    _Rule("model", ("dtype", "quantization", "activations", "fused"), _is_model, _SIMULATED),
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
        "server.enable_admin is off, so there are no admin routes",
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
        lambda config: _is_model(config) or not config.speculation.drafts_surely,
        "simulated drafts are asked for by runner.simulated_draft_tokens",
    ),
    _Rule(
        "speculation",
        ("speculative_method",),
        lambda config: config.scheduler.pipeline_depth != 2 or not config.speculation.drafts_surely,
        "at scheduler.pipeline_depth 2 a step begins before what to guess from is known",
    ),
    _Rule(
        "speculation",
        ("num_speculative_tokens",),
        lambda config: config.speculation.speculative_method != "none" and _may_draft(config),
        "nothing is drafted, by speculation.speculative_method",
    ),
    _Rule(
        "speculation",
        ("num_speculative_tokens",),
        lambda config: (
            config.speculation.speculative_method != "auto"
            or config.speculation.num_speculative_tokens <= 15
        ),
        "by speculation.speculative_method auto a draft has at most 15 tokens, as more would "
        "change bits of a reply; ngram drafts more",
    ),
    _Rule(
        "speculation",
        ("prompt_lookup_min", "prompt_lookup_store"),
        lambda config: config.speculation.drafts_by_ngrams and _may_draft(config),
        "no n-grams are drafted, by speculation.speculative_method",
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
    """Yield every setting as (section name, field): a section's own first, then what it
    inherits.
    """
    for section in msgspec.structs.fields(EngineConfig):
        own = section.type.__annotations__
        for field in sorted(msgspec.structs.fields(section.type), key=lambda f: f.name not in own):
            yield section.name, field
