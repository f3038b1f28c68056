"""Another policy from the next step on: one scheduler takes the place of another.

Knows which policy can follow which, and which one is at fault if it fails. How the book is passed
on, and what stays behind, is said by `BaseScheduler.take_over`.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from aioserve.config import SchedulerConfig
from aioserve.errors import FROM_OUTSIDE, AioserveError, ConfigError, PolicyError
from aioserve.kv_cache import KVCacheManager
from aioserve.scheduler.blame import place
from aioserve.scheduler.interface import CANNOT_BE_SWITCHED, SchedulerInterface
from aioserve.scheduler.registry import load_policy
from aioserve.scheduler.request_table import RequestTable


class Switchable(SchedulerInterface):
    """A scheduler whose place another one of its kind can take. `BaseScheduler` is one."""

    book: RequestTable
    kv_cache: KVCacheManager
    max_model_len: int
    clock: Callable[[], float]

    @abstractmethod
    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None: ...

    @abstractmethod
    def take_over(self, other: Any) -> None: ...

    @abstractmethod
    def take_charge(self) -> None:
        """`take_over` has succeeded: the limits of this scheduler count from here on, and what the
        other one has pinned ends.
        """

    def switch(self, settings: SchedulerConfig) -> SchedulerInterface:
        return make_successor(self, load_policy(settings.policy), settings)


def make_successor(
    old: SchedulerInterface, policy: type[SchedulerInterface], config: SchedulerConfig
) -> Switchable:
    """A scheduler of class `policy` that stands where `old` stands: between two steps, with its
    requests, KV cache, clock and length limit. From then on `old` is to be dropped.

    Raises `ConfigError` if it cannot be built or could never run a request that is there, and
    `PolicyError` if it raises. Nothing has changed then, and `old` goes on.
    """
    if not (isinstance(old, Switchable) and issubclass(policy, Switchable)):
        raise ConfigError(CANNOT_BE_SWITCHED)
    try:
        with old.book.restored_on_error():
            new = policy(config, old.kv_cache, max_model_len=old.max_model_len, clock=old.clock)
            new.take_over(old)
        new.take_charge()
    except AioserveError:
        raise
    except FROM_OUTSIDE:
        raise
    except BaseException as error:
        raise PolicyError(
            f"policy {policy.__name__} raised {error!r} while it took over{place(error, policy)}"
        ) from error
    return new
