"""A scheduler that has the interface alone: for what must work without `BaseScheduler`."""

from collections.abc import Callable, Iterable

from aioserve.policies.fcfs import FCFSScheduler

from aioserve.config import SchedulerConfig
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import SchedulerInterface, SchedulerOutput

FOREIGN = f"{__name__}:ForeignScheduler"  # as the setting names it


class ForeignScheduler(SchedulerInterface):
    """First come, first served; of what the interface leaves open it tells nothing."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self._own = FCFSScheduler(config, kv_cache, max_model_len=max_model_len, clock=clock)

    def add_request(self, request: Request) -> None:
        self._own.add_request(request)

    def schedule(self) -> SchedulerOutput:
        return self._own.schedule()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        return self._own.update_from_output(scheduler_output, model_runner_output)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        return self._own.finish_requests(request_ids, finished_status)

    def get_num_unfinished_requests(self) -> int:
        return self._own.get_num_unfinished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        return self._own.get_request_counts()

    def has_unfinished_requests(self) -> bool:
        return self._own.has_unfinished_requests()

    def has_finished_requests(self) -> bool:
        return self._own.has_finished_requests()

    def reset_prefix_cache(self) -> bool:
        return self._own.reset_prefix_cache()
