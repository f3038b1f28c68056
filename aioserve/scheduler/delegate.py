"""A scheduler that passes every call on to another one: the base of those that only watch.

Knows nothing. What stands between engine and policy derives from it and overrides what it watches.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec

from aioserve.config import SchedulerConfig
from aioserve.kv_cache import KVConnectorBase
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput, SchedulerStats
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler import Rejection, SchedulerInterface, SchedulerOutput

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class DelegatingScheduler(SchedulerInterface):
    """`live` is the one that decides, or another one that watches it. A switch replaces it."""

    is_recording = False  # whether what it watches is written down, to be replayed
    error: Exception | None = None  # what ended the watching; the scheduler goes on without it

    def __init__(self, live: SchedulerInterface) -> None:
        self.live = live

    def _try(self, note: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Note something, unless that has failed before: what follows would not fit."""
        if self.error is not None:
            return
        try:
            note(*args, **kwargs)
        except Exception as error:
            logger.error("watching the scheduler ends here", exc_info=error)
            self.error = error

    @property
    def policy(self) -> type[SchedulerInterface]:
        return self.live.policy

    def add_request(self, request: Request) -> None:
        self.live.add_request(request)

    def schedule(self) -> SchedulerOutput:
        return self.live.schedule()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        return self.live.update_from_output(scheduler_output, model_runner_output)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        return self.live.finish_requests(request_ids, finished_status)

    def check_queue(self, num_tokens: int, num_arriving: int, arriving_tokens: int) -> None:
        self.live.check_queue(num_tokens, num_arriving, arriving_tokens)

    def take_rejections(self) -> dict[str, Rejection]:
        return self.live.take_rejections()

    def next_wake(self) -> float | None:
        return self.live.next_wake()

    def next_expiry(self) -> float | None:
        return self.live.next_expiry()

    def expire_requests(self) -> list[str]:
        return self.live.expire_requests()

    def discard_step(self, last_step_id: int) -> list[str]:
        return self.live.discard_step(last_step_id)

    def abandon_step(self, scheduler_output: SchedulerOutput) -> list[str]:
        return self.live.abandon_step(scheduler_output)

    def get_num_unfinished_requests(self) -> int:
        return self.live.get_num_unfinished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        return self.live.get_request_counts()

    def has_unfinished_requests(self) -> bool:
        return self.live.has_unfinished_requests()

    def has_finished_requests(self) -> bool:
        return self.live.has_finished_requests()

    def has_requests(self) -> bool:
        return self.live.has_requests()

    def reset_prefix_cache(self) -> bool:
        return self.live.reset_prefix_cache()

    def vacate(self) -> SchedulerOutput:
        return self.live.vacate()

    def switch(self, settings: SchedulerConfig) -> SchedulerInterface:
        self.live = self.live.switch(settings)
        return self

    def get_wait_reasons(self) -> dict[str, WaitReason]:
        return self.live.get_wait_reasons()

    def make_stats(self) -> SchedulerStats | None:
        return self.live.make_stats()

    def get_kv_connector(self) -> KVConnectorBase | None:
        return self.live.get_kv_connector()

    def shutdown(self) -> None:
        self.live.shutdown()


def chain(scheduler: SchedulerInterface) -> Iterator[SchedulerInterface]:
    """Yield the schedulers that watch, then the policy that decides."""
    while isinstance(scheduler, DelegatingScheduler):
        yield scheduler
        scheduler = scheduler.live
    yield scheduler


def innermost(scheduler: SchedulerInterface) -> SchedulerInterface:
    """Return the policy that decides, at the end of a chain of schedulers that watch."""
    *_, decides = chain(scheduler)
    return decides


def without(scheduler: SchedulerInterface, leaver: DelegatingScheduler) -> SchedulerInterface:
    """Return the chain of schedulers without `leaver`, one of those that watch."""
    if scheduler is leaver:
        return leaver.live
    if isinstance(scheduler, DelegatingScheduler):
        scheduler.live = without(scheduler.live, leaver)
    return scheduler
