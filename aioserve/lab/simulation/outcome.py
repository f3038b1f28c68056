"""What happened in one run, in compact arrays, and the observer that notes it.

An hour of traffic is millions of tokens: times are kept as C doubles. A reply ends in the lab as
it does in life, by an end token that only the runner foresees: the simulated runner is told the
true lengths; a real one is wrapped, and its tokens are changed so that replies end where the
workload says.
"""

import asyncio
import math
from array import array
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from aioserve.engine.clock import clock_of
from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput, SchedulerStats
from aioserve.runner.interface import RunnerInfo, RunnerInterface
from aioserve.scheduler.output import SchedulerOutput

Floats = npt.NDArray[np.float64]


class DelegatingRunner(RunnerInterface):
    """A runner that passes all on to another one: to the engine it is that one, pipeline and
    threads included.
    """

    def __init__(self, runner: RunnerInterface) -> None:
        self._runner = runner

    async def load(self) -> RunnerInfo:
        return await self._runner.load()

    @property
    def num_compute_threads(self) -> int | None:
        return self._runner.num_compute_threads

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        return self._runner.execute_model(scheduler_output)

    async def close(self) -> None:
        await self._runner.close()


def extra_stop_ids(model_info: ModelInfo) -> tuple[int, ...]:
    """Return the token that ends replies of a model that states no end token: the last of its
    ids.
    """
    return () if model_info.eos_token_ids else (model_info.vocab_size - 1,)


class ReplyEndRunner(DelegatingRunner):
    """Passes steps on to a real runner and changes what it sampled: the last token of a reply is an
    end token, and no token before it is one.

    The runner itself goes on from the token that it sampled: one id of a text is another, which
    changes no shape and no time.
    """

    def __init__(
        self,
        runner: RunnerInterface,
        output_tokens: Mapping[str, int],
        end_token_ids: Collection[int],
    ) -> None:
        """`output_tokens` is the length of each reply by request id; other requests are left as
        they are. `end_token_ids` are those of the model, at least one.
        """
        super().__init__(runner)
        self._output_tokens = output_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._end_token_id = min(end_token_ids)
        self._plain_token_id = next(i for i in range(2**31) if i not in self._end_token_ids)
        self._num_prompt: dict[str, int] = {}  # tokens, of the requests in the batch

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        first_places = self._note(scheduler_output)
        sampled = super().execute_model(scheduler_output)
        ended: asyncio.Future[ModelRunnerOutput] = sampled.get_loop().create_future()

        def pass_on(future: "asyncio.Future[ModelRunnerOutput]") -> None:
            if ended.done():
                return
            if future.cancelled():
                ended.cancel()
            elif (error := future.exception()) is not None:
                ended.set_exception(error)
            else:
                output = future.result()
                for request_id, token_ids in zip(
                    output.req_ids, output.sampled_token_ids, strict=True
                ):
                    if token_ids and (place := first_places.get(request_id)) is not None:
                        self._end(token_ids, self._output_tokens[request_id] - place)
                ended.set_result(output)

        sampled.add_done_callback(pass_on)
        return ended

    def _note(self, scheduler_output: SchedulerOutput) -> dict[str, int]:
        """Return the place in its reply of the first token that each row of the step may sample."""
        for request_id in scheduler_output.finished_req_ids:
            self._num_prompt.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.request_id] = new.num_computed_tokens
            if new.request_id in self._output_tokens:
                self._num_prompt[new.request_id] = new.num_prompt_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        return {
            request_id: computed[request_id]
            + num_tokens
            - len(drafts.get(request_id, ()))
            - self._num_prompt[request_id]
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
            if request_id in self._num_prompt
        }

    def _end(self, token_ids: list[int], num_left: int) -> None:
        """Let the reply, which has `num_left` tokens to come, end there and not before."""
        for i, token_id in enumerate(token_ids):
            if i == num_left - 1:
                token_ids[i] = self._end_token_id
            elif token_id in self._end_token_ids:
                token_ids[i] = self._plain_token_id


# What happened in one run. Times are in seconds since its start.


class RequestOutcome:
    """One request of the workload, under one configuration."""

    __slots__ = (
        "admitted",
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
        self.admitted: float | None = None  # its first step was handed over
        self.end = 0.0
        self.finish_reason = ""  # of `FinishReason`, or "refused"
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.token_times = array("d")

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to its first token; NaN without one."""
        return self.token_times[0] - self.arrival if self.token_times else math.nan

    @property
    def is_finished(self) -> bool:
        """Whether the request was served to its last token."""
        return self.finish_reason in ("length", "stop")


class Steps:
    """Columns of step measurements, one entry per step."""

    def __init__(self) -> None:
        self.planned = array("d")  # handed over; with two in flight, before the start
        self.start = array("d")
        self.seconds = array("d")
        self.num_prefill_tokens = array("l")  # of rows with more than one token
        self.num_decodes = array("l")  # rows with one token


class States:
    """The scheduler's state when steps were handed over, thinned to a grid of times."""

    def __init__(self) -> None:
        self.time = array("d")
        self.num_running = array("l")
        self.num_waiting = array("l")
        self.kv_usage = array("d")


class RunOutcome:
    """Everything that is known about one run."""

    def __init__(self, num_requests: int) -> None:
        self.requests = [RequestOutcome() for _ in range(num_requests)]
        self.steps = Steps()
        self.states = States()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self.num_draft_tokens = 0  # that were verified
        self.num_right_drafts = 0
        self.end = 0.0
        #: By replica, seconds of steps at full power that lower clocks have saved.
        self.saved_seconds = [0.0]

    def token_times(self) -> dict[str, "array[float]"]:
        """Return the requests' own, by the names that a run gives them: their places."""
        return {str(i): request.token_times for i, request in enumerate(self.requests)}

    def served_times(self, run: str) -> tuple[Floats, Floats, Floats]:
        """Return when each request arrived, had its first token and had its last, in seconds.
        Raises `ConfigError`, which names the `run`, where one was not served to its last token.
        """
        requests = self.requests
        if unserved := sum(not request.is_finished for request in requests):
            raise ConfigError(f"{unserved} requests of {run} were not served")
        return (
            np.array([request.arrival for request in requests]),
            np.array([request.token_times[0] for request in requests]),
            np.array([request.end for request in requests]),
        )

    def close(self) -> None:
        """Close the record of a run: drop the times of tokens sampled after their request's end."""
        for request in self.requests:
            # What a step in flight sampled after a deadline has reached no client.
            while request.token_times and request.token_times[-1] > request.end:
                request.token_times.pop()


class RunObserver:
    """Notes steps, the scheduler's state at some of them, and when tokens came."""

    def __init__(
        self,
        outcome: RunOutcome,
        *,
        start: float,
        interval: float,
        get_stats: Callable[[], SchedulerStats | None],
        notes_tokens: bool,
        token_times: dict[str, "array[float]"] | None = None,
        notes_steps: bool = True,
    ) -> None:
        """`start`, on the engine's clock, is the run's second 0. The state is noted every
        `interval` seconds, never if that is infinite. `notes_tokens` says whether a token's time is
        taken here, as the end of its step, or by its reader; `token_times` are those of the
        outcome, made once for several observers; of those that do not `notes_steps`, steps are
        counted.
        """
        self._outcome = outcome
        self._start = start
        self._interval = interval
        self._get_stats = get_stats
        self._notes_tokens = notes_tokens
        self._notes_steps = notes_steps
        self._token_times = token_times or outcome.token_times()
        # Most steps give one token each to those that had one in the step before. Such a series is
        # kept as the ids of the requests and when its steps ended.
        self._req_ids: list[str] = []
        self._ends = array("d")
        self._next_state = start if math.isfinite(interval) else interval
        self._last_end = 0.0

    def note(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, began: float, end: float
    ) -> None:
        """A step that is handed over when it `began` will end at `end` with this output."""
        if began >= self._next_state or scheduler_output.preempted_req_ids:
            self.note_start(scheduler_output, began)
        self.note_step(scheduler_output, output, began, end)

    def note_start(self, scheduler_output: SchedulerOutput, now: float) -> None:
        """A step is handed over at `now`."""
        for request_id in scheduler_output.preempted_req_ids:
            if request_id not in scheduler_output.paused_req_ids:
                self._outcome.requests[int(request_id)].num_preemptions += 1
                self._outcome.num_preemptions += 1
        if now >= self._next_state and (stats := self._get_stats()) is not None:
            states = self._outcome.states
            states.time.append(now - self._start)
            states.num_running.append(stats.num_running_reqs)
            states.num_waiting.append(stats.num_waiting_reqs)
            states.kv_usage.append(stats.kv_cache_usage)
            self._next_state = now + self._interval

    def note_step(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, began: float, end: float
    ) -> None:
        """A step that was handed over when it `began` ends at `end` with this output."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if not num_tokens:
            return
        num_decodes = len(scheduler_output.num_scheduled_tokens)
        if num_decodes != num_tokens:
            num_decodes = list(scheduler_output.num_scheduled_tokens.values()).count(1)
        planned = began - self._start
        for new in scheduler_output.scheduled_new_reqs:
            request = self._outcome.requests[int(new.request_id)]
            if request.admitted is None:  # else it was preempted
                request.admitted = planned
        end -= self._start
        # With two steps in flight the second waits for the first.
        start = max(planned, self._last_end)
        self._last_end = end
        self._outcome.num_steps += 1
        if self._notes_steps:
            steps = self._outcome.steps
            steps.planned.append(planned)
            steps.start.append(start)
            steps.seconds.append(end - start)
            steps.num_prefill_tokens.append(num_tokens - num_decodes)
            steps.num_decodes.append(num_decodes)
        self._outcome.num_scheduled_tokens += num_tokens
        if scheduler_output.scheduled_spec_decode_tokens:
            self._note_drafts(scheduler_output.scheduled_spec_decode_tokens, output)
        if self._notes_tokens:
            self._note_tokens(scheduler_output, output, end)

    def note_decodes(self, ends: list[float], num_rows: int) -> None:
        """The step that was noted last, which ends first, is followed by others of the same rows:
        each is handed over when the one before it ends.
        """
        if self._start:
            ends = [end - self._start for end in ends]
        count = len(ends) - 1
        self._last_end = ends[-1]
        self._ends.extend(ends[1:])
        self._outcome.num_scheduled_tokens += num_rows * count
        self._outcome.num_steps += count
        if self._notes_steps:
            steps = self._outcome.steps
            steps.planned.extend(ends[:-1])
            steps.start.extend(ends[:-1])
            steps.seconds.extend([end - start for start, end in pairwise(ends)])
            steps.num_prefill_tokens.extend([0] * count)
            steps.num_decodes.extend([num_rows] * count)

    def close(self) -> None:
        """Close the record of a run: end the open series, then close the outcome."""
        self.end_series()
        self._outcome.close()

    def _note_drafts(self, drafts: dict[str, list[int]], output: ModelRunnerOutput) -> None:
        for request_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if request_id in drafts and token_ids:  # the last token is no draft
                self._outcome.num_draft_tokens += len(drafts[request_id])
                self._outcome.num_right_drafts += len(token_ids) - 1

    def _note_tokens(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, end: float
    ) -> None:
        req_ids, sampled = output.req_ids, output.sampled_token_ids
        has_drafts = bool(scheduler_output.scheduled_spec_decode_tokens)
        num_tokens = sum(map(len, sampled))
        if num_tokens == len(req_ids) and not has_drafts:  # without them, a row has one or none
            if req_ids is not self._req_ids and req_ids != self._req_ids:
                self.end_series()
                self._req_ids = req_ids
            self._ends.append(end)
            return
        self.end_series()
        for request_id, token_ids in zip(req_ids, sampled, strict=True):
            self._token_times[request_id].extend([end] * len(token_ids))

    def end_series(self) -> None:
        """Write down what is known of tokens so far."""
        for request_id in self._req_ids:
            self._token_times[request_id].extend(self._ends)
        self._req_ids, self._ends = [], array("d")


class ObservedRunner(DelegatingRunner):
    """Passes steps on to a real runner and has them noted when they are back."""

    def __init__(self, runner: RunnerInterface) -> None:
        super().__init__(runner)
        self.observer: RunObserver | None = None  # None: nothing is noted yet

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        observer, clock = self.observer, clock_of(asyncio.get_running_loop())
        began = clock()
        if observer is None:
            return super().execute_model(scheduler_output)
        observer.note_start(scheduler_output, began)

        def note(future: "asyncio.Future[ModelRunnerOutput]") -> None:
            if not future.cancelled() and future.exception() is None:
                observer.note_step(scheduler_output, future.result(), began, clock())

        future = super().execute_model(scheduler_output)
        future.add_done_callback(note)
        return future
