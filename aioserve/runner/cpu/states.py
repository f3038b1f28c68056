"""How many requests have a place for the states of layers, beside KV blocks.

Knows settings and sizes; what a state is knows `stateful_layers`.
"""

import logging
from dataclasses import replace

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.memory import GIB, MIB, memory_for_requests
from aioserve.runner.load_plan import LoadPlan

logger = logging.getLogger(__name__)


def with_states(plan: LoadPlan) -> LoadPlan:
    """The plan beside the memory of the states, which is allocated if the model has any. Raises
    `ConfigError`.
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
    """Most requests whose states are kept twice in a step: those before their drafts as well."""
    return config.scheduler.max_num_seqs * (config.speculation.speculative_method != "none")


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
