"""How a card's memory is shared out: arithmetic, and how it is told. Asks no device.

All sizes in bytes.
"""

from dataclasses import dataclass

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.runner.cuda.device import CardMemory
from aioserve.runner.kv_pool import max_useful_blocks

GIB = 1 << 30
GRAPH_RESERVE = 1 << 30  # for 23 captured sizes in one pool; a guess, said beside what they took


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory budget of a device is divided, in bytes: weights, KV pages and the rest."""

    budget: int
    weights: int
    activations: int  # of the largest step, workspaces included
    graphs: int  # a reserve; what they take is only known when the pool is there
    num_pages: int
    page_bytes: int
    adapters: int = 0  # those that are loaded at start; others take what is left

    @property
    def total(self) -> int:
        """All bytes that the plan gives out, the dummy page included."""
        pool = (self.num_pages + 1) * self.page_bytes
        return self.weights + self.activations + self.graphs + self.adapters + pool

    def describe(self, page_size: int, max_model_len: int) -> str:
        """One line with every number."""
        num_tokens = self.num_pages * page_size
        return (
            f"device memory: {self.budget / GIB:.2f} GiB to use; weights {self.weights / GIB:.2f}, "
            f"activations {self.activations / GIB:.2f}, CUDA graphs {self.graphs / GIB:.2f}, "
            f"{f'adapters {self.adapters / GIB:.2f}, ' if self.adapters else ''}"
            f"KV pool {self.num_pages * self.page_bytes / GIB:.2f}: {num_tokens} tokens, "
            f"{num_tokens / max_model_len:.1f} requests of {max_model_len}"
        )


def check_weights_fit(card: CardMemory, config: EngineConfig, weights: int) -> None:
    """Refuse, before loading, a model that cannot fit. Raises `ConfigError` with the numbers."""
    utilization = config.runner.gpu_memory_utilization
    budget = card.budget(utilization)
    if weights >= budget:
        raise ConfigError(
            f"the weights need {weights / GIB:.2f} GiB; {card.name} has {card.free / GIB:.2f} of "
            f"{card.total / GIB:.2f} GiB free, of which gpu_memory_utilization={utilization} "
            f"leaves {max(budget, 0) / GIB:.2f}: take a smaller model or dtype, or a freer card"
        )


def plan_memory(
    card: CardMemory,
    config: EngineConfig,
    *,
    weights: int,
    activations: int,
    graphs: int,
    page_bytes: int,
    max_model_len: int,
    adapters: int = 0,
) -> MemoryPlan:
    """Give the KV pool what the others leave. Raises `ConfigError` that names what to turn.

    Never more than `max_useful_blocks`, unless set.
    """
    cache = config.cache
    budget = card.budget(config.runner.gpu_memory_utilization)
    left = budget - weights - activations - graphs - adapters
    num_pages = left // page_bytes - 1  # the dummy page
    wanted = cache.num_kv_blocks
    if wanted is None and cache.kv_cache_gib is not None:
        wanted = int(cache.kv_cache_gib * GIB) // page_bytes
    if num_pages < max(wanted or 1, 1):
        of_adapters = f", adapters {adapters / GIB:.2f}" if adapters else ""
        raise ConfigError(
            f"the KV pool needs {max(wanted or 1, 1)} blocks of {page_bytes} bytes, "
            f"{max(num_pages, 0)} fit: of {budget / GIB:.2f} GiB, weights take "
            f"{weights / GIB:.2f}, activations {activations / GIB:.2f} and CUDA graphs "
            f"{graphs / GIB:.2f}{of_adapters} (raise gpu_memory_utilization, lower "
            "max_num_batched_tokens, kv_cache_gib or num_kv_blocks, or set enforce_eager)"
        )
    if wanted is None:
        wanted = min(num_pages, max_useful_blocks(config, max_model_len))
    return MemoryPlan(budget, weights, activations, graphs, wanted, page_bytes, adapters)
