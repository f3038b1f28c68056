"""vLLM beside aioserve: aioserve's policies inside it, and its own scheduler in the lab.

    vllm serve MODEL --scheduler-cls aioserve.vllm.Scheduler \\
        --additional-config '{"aioserve": {"policy": "fair"}}'

No other part of aioserve knows vLLM, which is imported when `Scheduler` is asked for. docs/vllm.md
says what it needs, and which of vLLM's features it refuses. `foreign` is the other way.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioserve.vllm.scheduler import Scheduler

__all__ = ["Scheduler"]


def __getattr__(name: str) -> Any:
    if name != "Scheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aioserve.vllm.scheduler import Scheduler

    return Scheduler
