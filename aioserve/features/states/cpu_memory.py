"""What a model keeps beside KV blocks: states of layers, and layers with only a sliding window.

How many requests have a place for states, and how memory is shared between layers with windows and
the others. Loaded for models that have such layers.
"""

import logging
from dataclasses import replace

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.kv_cache import WindowSpec
from aioserve.runner.attention.backend import KVCacheSpec, WindowLayers
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.kv_memory import GIB, MIB, memory_for_requests
from aioserve.runner.interface import TYPICAL_TOKENS, useful_window_blocks, window_spec
from aioserve.runner.load_plan import LoadPlan
from aioserve.runner.served_model import ServedModel

logger = logging.getLogger(__name__)


def with_states_and_windows(plan: LoadPlan) -> LoadPlan:
    """Return the plan with what a model keeps beside KV blocks of all its layers. Raises
    `ConfigError`.
    """
    return with_windows(with_states(plan))


def with_states(plan: LoadPlan) -> LoadPlan:
    """Return the plan beside the memory of the states, which is allocated if the model has any.
    Raises `ConfigError`.
    """
    config, model = plan.config, plan.model
    if model.states is None:
        if config.cache.num_state_slots is not None:
            raise ConfigError(
                f"cache.num_state_slots is {config.cache.num_state_slots}, but no layer of "
                f"{model.name} has a state: leave it out"
            )
        return plan
    # Ranks that share out a model's heads have its other layers, and their states, each whole.
    size = model.states.bytes_per_slot * plan.num_ranks
    num_slots = plan.chosen_by_first(
        lambda: choose_num_state_slots(config, size, is_shared=bool(plan.bytes_per_token))
    )
    model.states.allocate(num_slots)
    logger.info(
        "%s: states of %.2f MiB a request; %d slots for them, up to %.0f MiB as they fill",
        model.name,
        size / MIB,
        num_slots,
        num_slots * size / MIB,
    )
    num_bytes = (num_slots + min(num_slots, _num_with_drafts(config))) * size
    return replace(plan, num_other_bytes=plan.num_other_bytes + num_bytes)


def _num_with_drafts(config: EngineConfig) -> int:
    """Return most requests whose states are kept twice in a step: those before their drafts as
    well.
    """
    return config.scheduler.max_num_seqs * config.speculation.drafts_surely


def choose_num_state_slots(config: EngineConfig, bytes_per_slot: int, *, is_shared: bool) -> int:
    """Slots for the states of requests: the setting, else three for each that may run (its own, and
    two for prefixes), as far as they fit; if the memory `is_shared` with KV blocks, into half of
    it. Raises `ConfigError` if not even one does, or those of the setting do not.
    """
    cache = config.cache
    if cache.num_state_slots is not None:
        needed, available = cache.num_state_slots * bytes_per_slot, machine.available_memory()
        if needed > available:
            raise ConfigError(
                f"cache.num_state_slots is {cache.num_state_slots}: states of "
                f"{bytes_per_slot / MIB:.3f} MiB each need {needed / GIB:.1f} GiB, and "
                f"{available / GIB:.1f} are free"
            )
        return cache.num_state_slots
    budget = memory_for_requests(config) // (2 if is_shared else 1)
    num_slots = budget // bytes_per_slot
    if num_twice := _num_with_drafts(config):
        num_slots = max(num_slots // 2, num_slots - num_twice)
    if num_slots < 1:
        raise ConfigError(
            f"not one request fits: its state has {bytes_per_slot / MIB:.1f} MiB, and "
            f"{budget / MIB:.1f} MiB are meant for states (cache.kv_cache_gib)"
        )
    num_each = 3 if cache.enable_prefix_caching else 1
    return min(num_slots, num_each * config.scheduler.max_num_seqs)


# Which layers keep only their sliding window, and how memory is shared between them and others.
# Knows how layers call for attention, settings and sizes. Knows no tensors and no requests.


def with_windows(plan: LoadPlan, memory: int | None = None) -> LoadPlan:
    """Return the plan with blocks of their own for layers with a sliding window, where that goes
    and pays. `memory`: bytes for all KV blocks; None: ranks share those of this machine. Raises
    `ConfigError` if the settings want it where it does not go.
    """
    config, max_model_len = plan.config, plan.info.max_model_len
    found = find_window_layers(config, plan.model, max_model_len)
    if not found:
        return plan
    spec, num_ranks = plan.specs[0], plan.num_ranks if memory is None else 1
    bytes_per_token = spec.part(found).bytes_per_token
    others = plan.bytes_per_token - bytes_per_token

    def choose() -> int:
        sizes = spec, found, max_model_len, others
        made = make_window_spec(config, *sizes, num_ranks=num_ranks, memory=memory)
        return 0 if made is None else made.num_blocks

    if not (num_blocks := plan.chosen_by_first(choose)):
        return plan
    num_bytes = num_blocks * config.cache.block_size * bytes_per_token * num_ranks
    return replace(
        plan,
        bytes_per_token=others,
        num_other_bytes=plan.num_other_bytes + num_bytes,
        windows=window_spec(config, max_model_len, max(found.values()), num_blocks),
        window_layers=WindowLayers(frozenset(found), num_blocks),
    )


def find_window_layers(
    config: EngineConfig, model: ServedModel, max_model_len: int
) -> dict[int, int]:
    """Return the layers that have a pool of their own, with their windows in tokens; none where
    that does not go or does not pay. Raises `ConfigError` if the settings want it nevertheless.
    """
    found = {
        layer: call.options.sliding_window
        for layer, call in enumerate(model.attention_calls)
        if call.options.sliding_window is not None
    }
    if (wanted := config.cache.num_window_blocks) == 0:
        return {}
    if max(found.values(), default=max_model_len) >= max_model_len:
        if wanted is not None:
            raise ConfigError(
                f"cache.num_window_blocks is {wanted}, but no layer of {model.name} has a sliding "
                f"window shorter than max_model_len ({max_model_len}): leave it out"
            )
        return {}
    return found


def make_window_spec(
    config: EngineConfig,
    spec: KVCacheSpec,
    windows: dict[int, int],
    max_model_len: int,
    other_bytes_per_token: int,
    *,
    num_ranks: int = 1,
    memory: int | None = None,
) -> WindowSpec | None:
    """Return what those layers get on each of `num_ranks` ranks that share the `memory`, in bytes,
    by default that of this machine: the setting, else what as many requests use as the memory lasts
    for beside what others keep of them, each of `TYPICAL_TOKENS`. None if there is too little for
    the steps of the longest request.
    """
    cache, size = config.cache, config.cache.block_size
    bytes_per_block = spec.part(windows).bytes_per_token * size * num_ranks
    other_bytes_per_token *= num_ranks
    own = window_spec(config, max_model_len, max(windows.values()), cache.num_window_blocks)
    if cache.num_window_blocks is None:
        least = own.num_request_blocks(max_model_len, max_model_len, size)
        if cache.num_kv_blocks is not None:
            most = cache.num_kv_blocks  # as many as without a pool of their own
        else:
            memory = memory_for_requests(config) if memory is None else memory
            needed = least * bytes_per_block + max_model_len * other_bytes_per_token
            if needed > memory:
                logger.info(
                    "%d layers see %d tokens, but keep all blocks of a request: steps of up to %d "
                    "tokens of one need %.0f MiB, there are %.0f (max_num_batched_tokens)",
                    len(windows),
                    own.num_tokens,
                    own.max_chunk,
                    needed / MIB,
                    memory / MIB,
                )
                return None
            num_seqs = config.scheduler.max_num_seqs
            prompts = useful_window_blocks(config, own, max_model_len, 0)
            each = (own.num_blocks - prompts) * bytes_per_block / num_seqs
            each += min(TYPICAL_TOKENS, max_model_len) * other_bytes_per_token
            rest = max(memory - prompts * bytes_per_block, 0)
            num_seqs = min(int(rest / max(each, 1)), num_seqs)
            most = min(
                useful_window_blocks(config, own, max_model_len, num_seqs),
                (memory - max_model_len * other_bytes_per_token) // bytes_per_block,
            )
        num_blocks = min(own.num_blocks, max(most, least))
        own = window_spec(config, max_model_len, own.num_tokens, num_blocks)
    num_bytes = own.num_blocks * bytes_per_block
    logger.info(
        "%d of %d layers see %d tokens: %d KV blocks of their own, for %d requests, up to "
        "%.0f MiB as they fill",
        len(windows),
        len(spec.layers),
        own.num_tokens,
        own.num_blocks,
        own.num_blocks // min(own.num_decode_blocks(size), -(-max_model_len // size)),
        num_bytes / MIB,
    )
    return own
