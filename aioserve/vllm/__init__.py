"""vLLM beside aioserve: aioserve's policies inside it, and its own scheduler in the lab.

    vllm serve MODEL --scheduler-cls aioserve.vllm.Scheduler \\
        --additional-config '{"aioserve": {"policy": "fair"}}'

`Recorder` in its place leaves every decision to vLLM, and writes a decision log of them;
`PolicyScheduler` lets vLLM plan, in the order of a policy's parts. `HintsMiddleware` brings each of
them more of what clients say. No other part of aioserve knows vLLM, which is imported when one of
the four is asked for. docs/vllm.md says what they need, and which of vLLM's features `Scheduler`
refuses. `foreign` is the other way.
"""

from typing import TYPE_CHECKING

from aioserve.support import late_names

if TYPE_CHECKING:
    from aioserve.vllm.middleware import HintsMiddleware
    from aioserve.vllm.policy_scheduler import PolicyScheduler
    from aioserve.vllm.recorder import Recorder
    from aioserve.vllm.scheduler import Scheduler

__all__ = ["HintsMiddleware", "PolicyScheduler", "Recorder", "Scheduler"]

_MODULES = {
    "HintsMiddleware": "middleware",
    "PolicyScheduler": "policy_scheduler",
    "Recorder": "recorder",
    "Scheduler": "scheduler",
}

__getattr__ = late_names(__name__, _MODULES)
