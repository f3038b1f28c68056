"""What happened in one run, in compact arrays, and the runner that notes it.

An hour of traffic is millions of tokens: times are kept as C doubles. Knows nothing about what
the numbers mean.
"""

import asyncio
from array import array
from collections.abc import Callable

from aioserve.outputs import ModelRunnerOutput, SchedulerStats
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler.output import SchedulerOutput

# Times are in seconds since the start of the run.


class RequestRecord:
    """One request of the workload, under one configuration."""

    __slots__ = (
        "arrival",
        "end",
        "finish_reason",
        "num_cached_tokens",
        "num_output_tokens",
        "num_preemptions",
        "token_times",
    )

    def __init__(self) -> None:
        self.arrival = 0.0
        self.end = 0.0
        self.finish_reason = ""  # of `FinishReason`, or "refused"
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.token_times = array("d")

    @property
    def is_finished(self) -> bool:
        """Whether it was served to its last token."""
        return self.finish_reason in ("length", "stop")


class StepLog:
    """One entry per step."""

    def __init__(self) -> None:
        self.start = array("d")
        self.seconds = array("d")
        self.num_prefill_tokens = array("l")  # of rows with more than one token
        self.num_decodes = array("l")  # rows with one token


class StateLog:
    """The scheduler's state when steps were handed over, thinned to a grid of times."""

    def __init__(self) -> None:
        self.time = array("d")
        self.num_running = array("l")
        self.num_waiting = array("l")
        self.kv_usage = array("d")


class RunRecord:
    """Everything that is known about one run."""

    def __init__(self, num_requests: int) -> None:
        self.requests = [RequestRecord() for _ in range(num_requests)]
        self.steps = StepLog()
        self.states = StateLog()
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self.end = 0.0


class RecordingRunner(RunnerInterface):
    """Passes steps on to another runner and notes when they began, ended, and what they held.

    On a virtual clock a token reaches its reader at the very time at which its step ends, so the
    times noted here are those that a client would see.
    """

    def __init__(
        self, runner: RunnerInterface, record: RunRecord, *, interval: float, notes_tokens: bool
    ) -> None:
        """Every `interval` seconds the state of the scheduler is noted. `notes_tokens` says
        whether a token's time is taken here or by whoever reads it.
        """
        self._get_stats: Callable[[], SchedulerStats | None] = lambda: None
        self._runner = runner
        self._record = record
        self._interval = interval
        self._notes_tokens = notes_tokens
        self._token_times = {str(i): r.token_times for i, r in enumerate(record.requests)}
        self._has_begun = False
        self._start = 0.0
        self._next_state = 0.0
        self._last_end = 0.0

    def begin(self, start: float, get_stats: Callable[[], SchedulerStats | None]) -> None:
        """From now on; `start`, on the loop's clock, is the run's second 0."""
        self._start, self._get_stats, self._has_begun = start, get_stats, True

    async def load(self) -> None:
        await self._runner.load()

    @property
    def num_kv_blocks(self) -> int:
        return self._runner.num_kv_blocks

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        if not self._has_begun:
            return self._runner.execute_model(scheduler_output)
        now = asyncio.get_running_loop().time() - self._start
        for request_id in scheduler_output.preempted_req_ids:
            self._record.requests[int(request_id)].num_preemptions += 1
            self._record.num_preemptions += 1
        if now >= self._next_state:
            self._note_state(now)
        future = self._runner.execute_model(scheduler_output)
        if total := scheduler_output.total_num_scheduled_tokens:
            steps = self._record.steps
            num_decodes = len(scheduler_output.num_scheduled_tokens)
            if num_decodes != total:
                num_decodes = list(scheduler_output.num_scheduled_tokens.values()).count(1)
            steps.start.append(now)
            steps.seconds.append(0.0)
            steps.num_prefill_tokens.append(total - num_decodes)
            steps.num_decodes.append(num_decodes)
            self._record.num_scheduled_tokens += total
            number = len(steps.start) - 1
            future.add_done_callback(lambda future: self._note_result(number, future))
        return future

    async def close(self) -> None:
        await self._runner.close()

    def _note_state(self, now: float) -> None:
        stats = self._get_stats()
        if stats is not None:
            states = self._record.states
            states.time.append(now)
            states.num_running.append(stats.num_running_reqs)
            states.num_waiting.append(stats.num_waiting_reqs)
            states.kv_usage.append(stats.kv_cache_usage)
            self._next_state = now + self._interval

    def _note_result(self, number: int, future: "asyncio.Future[ModelRunnerOutput]") -> None:
        now = asyncio.get_running_loop().time() - self._start
        steps = self._record.steps
        # With two steps in flight the second waits for the first.
        steps.start[number] = max(steps.start[number], self._last_end)
        steps.seconds[number] = now - steps.start[number]
        self._last_end = now
        if not self._notes_tokens or future.cancelled() or future.exception() is not None:
            return
        output, times = future.result(), self._token_times
        for request_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if token_ids:
                times[request_id].append(now)
                for _ in token_ids[1:]:  # drafts that were right
                    times[request_id].append(now)
