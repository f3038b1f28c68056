"""What aioserve is told inside vLLM: its own settings, vLLM's limits, and what is refused at start.

Its own settings come from `--additional-config '{"aioserve": {...}}'`, or from a YAML file of
aioserve's that is named there. What vLLM decides (batch size, token budget, blocks, drafts) is
taken from vLLM. A feature of vLLM's that is not translated is refused by its name before a request
comes, never met half-way.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY, MultiModalRegistry
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from aioserve.config import EngineConfig, SchedulerConfig, deciding_settings
from aioserve.config.load import convert, read_file
from aioserve.errors import ConfigError

#: The key of `--additional-config` under which aioserve's settings are.
KEY = "aioserve"
#: As many as anybody has: vLLM bounds its queue itself (`--max-num-queued-reqs`).
UNBOUNDED = 2**31

#: Settings of `SchedulerConfig` that vLLM decides, and by which of its own.
OF_VLLM = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_loras": "--max-loras",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "num_lookahead_tokens": "--speculative-config",
    "pipeline_depth": "--async-scheduling",
    "max_encoder_tokens": "--max-num-batched-tokens",
    "encoder_cache_tokens": "--max-num-batched-tokens",
    "encoder_chunk_tokens": "--disable-chunked-mm-input",
}
#: Ways of vLLM's to guess tokens that are served: n-grams of the text, draft heads, a small model.
DRAFTERS = ("ngram", "eagle", "eagle3", "mtp", "draft_model")
#: Settings of `SchedulerConfig` that are not translated yet.
NOT_YET = ("request_log",)
#: Settings that belong under `KEY`, and that no other part of vLLM has beside it.
OURS = (*deciding_settings(), "decision_log", "shadow", "check")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a scheduler inside vLLM, checked against vLLM's own."""

    scheduler: SchedulerConfig  # aioserve's, with vLLM's limits in it
    max_model_len: int  # most tokens of prompt and output together
    num_blocks: int  # KV blocks that requests can have
    block_size: int  # tokens
    watermark: float  # share of the KV blocks that stays free at admissions
    max_draft_tokens: int  # of a request in one step
    has_draft_head: bool  # drafts come of hidden states, which no cached block brings back
    enable_prefix_caching: bool
    enable_kv_events: bool
    check: bool  # whether every step is checked by the rules of the contract
    shadow: Any  # `ShadowSettings` of a second policy that is tried beside; None: there is none


def read_settings(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_size: int,
    mm_registry: MultiModalRegistry = MULTIMODAL_REGISTRY,
) -> Settings:
    """Return the settings of one engine. Raises `ConfigError` for settings that cannot work, and
    for features of vLLM's that are not translated: all of them in one message.
    """
    if refused := list(_refusals(vllm_config, kv_cache_config, block_size)):
        raise ConfigError(
            "aioserve.vllm.Scheduler cannot serve with "
            + "; ".join(refused)
            + ". Leave these out, or leave out --scheduler-cls"
        )
    theirs, cache = vllm_config.scheduler_config, vllm_config.cache_config
    drafts = vllm_config.speculative_config
    given, check, shadow = _given(vllm_config.additional_config)
    if "policy" not in given and theirs.policy == "priority":
        given["policy"] = "priority"
    if theirs.policy == "priority" and given.get("policy") != "priority":
        raise ConfigError(
            f"vLLM has --scheduling-policy priority and aioserve the policy {given['policy']!r}: "
            "one of them decides; leave out vLLM's"
        )
    limits = _limits(vllm_config, mm_registry)
    for name, flag in OF_VLLM.items():
        if name in given and given[name] != limits.get(name):
            raise ConfigError(
                f"{KEY}.{name} is {given[name]!r}, but inside vLLM its {flag} decides "
                f"({limits.get(name)!r} now): leave it out"
            )
    if check and _has_kv_events(vllm_config):
        raise ConfigError(
            f"{KEY}.check takes the events of KV blocks that --kv-events-config publishes: leave "
            "one of them out"
        )
    defaults = {"max_waiting_requests": UNBOUNDED}
    return Settings(
        scheduler=convert(defaults | given | limits, SchedulerConfig, f"--additional-config {KEY}"),
        max_model_len=vllm_config.model_config.max_model_len,
        num_blocks=kv_cache_config.num_blocks - 1,  # the first is vLLM's null block
        block_size=block_size,
        watermark=theirs.watermark,
        max_draft_tokens=vllm_config.num_speculative_tokens,
        has_draft_head=drafts is not None and drafts.use_eagle_block_drop(),
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        enable_kv_events=_has_kv_events(vllm_config),
        check=check,
        shadow=shadow,
    )


def _given(additional_config: Any) -> tuple[dict[str, Any], bool, Any]:
    """Return what the user states of `SchedulerConfig`, whether steps are to be checked, and the
    settings of a shadow.
    """
    stated_all = additional_config if isinstance(additional_config, Mapping) else {}
    if KEY not in stated_all:
        _check_names(stated_all)
    tree = stated_all.get(KEY, {})
    if not isinstance(tree, Mapping):
        raise ConfigError(f"--additional-config {KEY} must be a mapping, got {tree!r:.80}")
    stated, shadow = dict(tree), read_shadow(tree)
    stated.pop("shadow", None)
    check, path = stated.pop("check", False), stated.pop("config", None)
    if not isinstance(check, bool):
        raise ConfigError(f"--additional-config {KEY}.check must be true or false, got {check!r}")
    given: dict[str, Any] = {}
    if path is not None:
        if not (isinstance(path, str) and path):
            raise ConfigError(
                f"--additional-config {KEY}.config must be the path of a YAML file, got {path!r}"
            )
        own = {f"scheduler.{name}" for name in stated}
        given = dict(read_file(path, EngineConfig, own).get("scheduler", {}))
    given |= stated
    for name in NOT_YET:
        if given.get(name) is not None:
            raise ConfigError(f"{KEY}.{name} is not written inside vLLM yet: leave it out")
    return given, check, shadow


def _check_names(additional_config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if what is stated, none of it under `KEY`, was meant to be there. The
    names of other parts of vLLM, such as plugins of its platforms, pass.
    """
    for name in map(str, additional_config):
        if name in OURS:
            raise ConfigError(
                f"--additional-config states {name!r} for all of vLLM: aioserve reads it under "
                f'"{KEY}", as in \'{{"{KEY}": {{"{name}": ...}}}}\''
            )
        if get_close_matches(name.lower(), [KEY], cutoff=0.8):
            raise ConfigError(
                f"--additional-config has {name!r}, but aioserve's settings are read under {KEY!r}"
            )


def read_shadow(stated: Mapping[str, Any]) -> Any:
    """Return the `ShadowSettings` that are stated, whose module is loaded then; None if none are.
    Raises `ConfigError` for what is wrong with them.
    """
    if stated.get("shadow") is None:
        return None
    from aioserve.vllm import shadow

    return shadow.read_shadow(stated)


def _limits(vllm_config: VllmConfig, mm_registry: MultiModalRegistry) -> dict[str, Any]:
    """vLLM's limits by the names of `SchedulerConfig`."""
    theirs, lora = vllm_config.scheduler_config, vllm_config.lora_config
    drafts = vllm_config.speculative_config
    most = theirs.max_num_scheduled_tokens or theirs.max_num_batched_tokens
    num_seqs = theirs.max_num_active_seqs or theirs.max_num_seqs
    # A draft model's input has slots of its own for each request of a step.
    num_slots = 0 if drafts is None else num_seqs * drafts.max_num_new_slots_for_drafting
    limits = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": min(most, theirs.max_num_batched_tokens - num_slots),
        "long_prefill_token_threshold": theirs.long_prefill_token_threshold or None,
        "num_lookahead_tokens": vllm_config.num_lookahead_tokens,
        "pipeline_depth": 2 if theirs.async_scheduling else 1,
    }
    if lora is not None:
        limits["max_loras"] = lora.max_loras
    if vllm_config.model_config.supports_multimodal_inputs:
        budget = MultiModalBudget(vllm_config, mm_registry)
        if budget.encoder_compute_budget and budget.encoder_cache_size:
            limits["max_encoder_tokens"] = budget.encoder_compute_budget
            limits["encoder_cache_tokens"] = budget.encoder_cache_size
            limits["encoder_chunk_tokens"] = 0  # vLLM's runner encodes whole images
    return limits


def _has_kv_events(vllm_config: VllmConfig) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def _refusals(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int
) -> Iterator[str]:
    """Yield each feature that is on and is not translated, by the name that vLLM's users know."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    theirs, cache = vllm_config.scheduler_config, vllm_config.cache_config
    observed = vllm_config.observability_config
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups}) or ["none"]
        yield f"{len(groups)} KV cache groups ({', '.join(kinds)}): one of full attention is served"
    elif not isinstance(spec := groups[0].kv_cache_spec, FullAttentionSpec):
        yield f"a KV cache of {type(spec).__name__}: full attention is served"
    elif spec.block_size != block_size:
        yield f"blocks of {block_size} tokens over KV blocks of {spec.block_size}"
    drafts = vllm_config.speculative_config
    method = None if drafts is None else drafts.method
    has_weights = method not in (None, "ngram")
    is_lora, sees = vllm_config.lora_config is not None, model.is_multimodal_model
    has_events = _has_kv_events(vllm_config)
    found = {
        "a KV connector (--kv-transfer-config)": vllm_config.kv_transfer_config is not None,
        "an encoder cache connector (--ec-transfer-config)": (
            vllm_config.ec_transfer_config is not None
        ),
        "--data-parallel-size above 1": parallel.data_parallel_size > 1,
        "--pipeline-parallel-size above 1": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size above 1": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size above 1": parallel.prefill_context_parallel_size > 1,
        "--no-enable-chunked-prefill": not theirs.enable_chunked_prefill,
        "--long-prefill-token-threshold-adaptive": theirs.long_prefill_token_threshold_adaptive,
        "--no-scheduler-reserve-full-isl": not theirs.scheduler_reserve_full_isl,
        "an encoder-decoder model": model.is_encoder_decoder,
        "a diffusion model": model.is_diffusion,
        f"drafts by {method} (served: {', '.join(DRAFTERS)})": method not in (None, *DRAFTERS),
        "drafts of several MTP modules": drafts is not None and drafts.use_multi_module_mtp(),
        "parallel drafting": drafts is not None and drafts.parallel_drafting,
        "numbers of drafts by batch size": (
            drafts is not None and drafts.uses_dynamic_speculative_decoding()
        ),
        f"drafts by {method} for a model of images or sounds": has_weights and sees,
        # vLLM's runner guesses ahead of the results then, and tells the scheduler no draft.
        "drafts beside --async-scheduling (state --no-async-scheduling)": (
            method is not None and bool(theirs.async_scheduling)
        ),
        "an encoder cache manager of one's own": (
            sees and vllm_config.ec_manager_config.get_encoder_cache_manager_obj() is not None
        ),
        "KV cache metrics (--kv-cache-metrics)": observed.kv_cache_metrics,
        "KV cache events (--kv-events-config) beside --enable-lora": has_events and is_lora,
        "KV cache events (--kv-events-config) of a model of images or sounds": has_events and sees,
        "--per-request-spec-decode-metrics": observed.per_request_spec_decode_metrics != "none",
        "auxiliary outputs of the model": vllm_config.aux_output_config.enabled,
        "masks of sampled tokens": model.return_sampling_mask,
        "--prefix-match-unit": cache.prefix_match_unit not in (None, block_size),
    }
    yield from (name for name, is_on in found.items() if is_on)
