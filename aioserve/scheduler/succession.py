"""Another policy from the next step on: one scheduler takes the place of another.

Knows how to build the new one and how to undo what a failed attempt has changed. What is handed
over, and what stays behind, is said by `BaseScheduler.take_over`.
"""

from aioserve.config import SchedulerConfig
from aioserve.errors import AioserveError, ConfigError, PolicyError
from aioserve.scheduler.base import BaseScheduler
from aioserve.scheduler.blame import place
from aioserve.scheduler.interface import SchedulerInterface


def make_successor(
    old: SchedulerInterface, policy: type[SchedulerInterface], config: SchedulerConfig
) -> BaseScheduler:
    """A scheduler of class `policy` that stands where `old` stands: between two steps, with its
    requests, KV cache, clock and length limit. From then on `old` is to be dropped.

    Raises `ConfigError` if it cannot be built or could never run a request that is there, and
    `PolicyError` if it raises. Nothing has changed then, and `old` goes on.
    """
    if not (isinstance(old, BaseScheduler) and issubclass(policy, BaseScheduler)):
        raise ConfigError("only policies that derive from BaseScheduler can be switched")
    keys = [(request, request.order_key) for request in old.get_requests()]
    try:
        new = policy(config, old.kv_cache, max_model_len=old.max_model_len, clock=old.clock)
        new.take_over(old)
    except Exception as error:
        for request, key in keys:
            request.order_key = key
        if isinstance(error, AioserveError):
            raise
        raise PolicyError(
            f"policy {policy.__name__} raised {error!r} while it took over{place(error, policy)}"
        ) from error
    return new
