"""The engine task: drives the step loop on asyncio, between a runner and the readers of outputs.

Decides nothing about a step: the step loop does. Knows nothing about text, HTTP or tensors.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Protocol

from aioserve.engine.step_loop import StepLoop
from aioserve.errors import RunnerDeadError
from aioserve.outputs import EngineCoreOutput, EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.runner.interface import RunnerInterface, check_result, check_started

# Event loops round their timers to a millisecond, so a timer may fire early: it is set again, for
# this many seconds at least.
TIMER_SECONDS = 0.001

EngineLoop = StepLoop[asyncio.Future[ModelRunnerOutput]]


class OutputSink(Protocol):
    """The place to which the engine task delivers the results of its steps."""

    def deliver(self, client_index: int, outputs: list[EngineCoreOutput]) -> list[str]:
        """Hand a step's outputs to a client; returns the ids that a stop string has ended."""

    def expire(self, request_ids: list[str]) -> None:
        """Tell these requests' readers that their time is up."""

    def fail(self, request_ids: list[str] | None, cause: BaseException) -> None:
        """Tell the readers of these requests, of all if None, why they have ended if they have."""


class EngineCore:
    """Makes turns for as long as there are requests; sleeps on an event otherwise.

    All calls come from the event loop, so nothing needs a lock: a call between two awaits of
    `run` sees, and leaves, a consistent scheduler.
    """

    def __init__(
        self,
        loop: EngineLoop,
        runner: RunnerInterface,
        sink: OutputSink,
        *,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is the scheduler's, in seconds."""
        self.loop = loop
        self._runner = runner
        self._sink = sink
        self._clock = clock
        self._is_quiet = asyncio.Event()  # of a pause: no step is in flight any more
        self._wakeup = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # for the next deadline, at `_timer_due`
        self._timer_due = math.inf
        loop.wake = self._wakeup.set
        runner.watch(self._wakeup.set)
        if (connector := loop.scheduler.get_kv_connector()) is not None:
            connector.wake = self._wakeup.set

    def add_request(self, request: Request) -> None:
        """Queue a request; raises what `StepLoop.add_request` raises."""
        self.loop.add_request(request)
        self._set_timer()

    async def pause(self) -> None:
        """Plan no further step, until `loop.resume`; return when those in flight are back and
        delivered. Idempotent.
        """
        self._is_quiet.clear()
        self.loop.pause()
        await self._is_quiet.wait()

    async def vacate(self) -> None:
        """Take their blocks from all running requests, which wait then; only in a pause. Raises
        what the scheduler raises, and what the runner does, which is told of it.
        """
        await self._runner.execute_model(self.loop.vacate())

    @property
    def step_since(self) -> float | None:
        """The time at which the runner began its step; None: it is idle. Any thread may read it."""
        return self.loop.step_since if self.loop.in_flight else None

    def step_seconds(self) -> float:
        """Return for how many seconds the runner has been at its step; 0 if it is idle."""
        return self._clock() - self.loop.step_since if self.loop.in_flight else 0.0

    async def run(self) -> None:
        """The engine task. Ends only by cancellation or by the error that killed the engine."""
        try:
            while True:
                await self.step()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def step(self) -> None:
        """Fill the pipeline, deliver while it computes, wait for the oldest step or for work."""
        loop = self.loop
        self._wakeup.clear()
        outputs: dict[int, EngineCoreOutputs] = {}
        if loop.in_flight:
            outputs = await self._take_result()
        else:
            self._runner.check()
        for step in loop.fill():
            try:
                step.handle = future = self._runner.execute_model(step.told)
                check_started(self._runner, future)
            except Exception as error:  # as good as in its result
                step.handle = asyncio.get_running_loop().create_future()
                step.handle.set_exception(error)
        # The next step computes already; only now the last one's tokens are turned into text.
        for client_index, client_outputs in outputs.items():
            if stopped := self._sink.deliver(client_index, client_outputs.outputs):
                loop.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        while loop.failed:
            self._sink.fail(*loop.failed.pop(0))
        loop.end_turn()
        if not loop.in_flight:
            if loop.is_paused:
                self._is_quiet.set()
            await self._sleep()

    async def _take_result(self) -> dict[int, EngineCoreOutputs]:
        try:
            step = self.loop.in_flight[0]
            result = await step.handle
            request_of = getattr(self.loop.scheduler, "get_request", None)
            check_result(self._runner, step.output, result, request_of)
        except RunnerDeadError:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return await self._fail_steps(error)  # the runner's own doing
        except Exception as error:
            return await self._fail_steps(error)
        return self.loop.take(result)

    async def _fail_steps(self, error: BaseException) -> dict[int, EngineCoreOutputs]:
        """Fail every step in flight, once the runner is done with them. Returns no outputs."""
        futures = [step.handle for step in self.loop.in_flight]
        for result in await asyncio.gather(*futures, return_exceptions=True):
            if isinstance(result, RunnerDeadError):
                raise result
        self.loop.fail(error)
        return {}

    def _set_timer(self) -> None:
        """Have deadlines looked at when the next one is due, whatever is in flight then."""
        due = self.loop.scheduler.next_expiry()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(due - self._clock(), TIMER_SECONDS)
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)
        self._timer_due = due

    def _on_timer(self) -> None:
        """Requests whose time is up hear it now; the blocks return when the step in flight is back.

        Never between a step's result and its delivery: nothing waits there.
        """
        self._timer = None
        if expired := self.loop.expire_requests():
            self._sink.expire(expired)
        self._set_timer()

    async def _sleep(self) -> None:
        """Wait until something happens, or for a short while if a policy holds requests back.

        The loop gets a turn in any case.
        """
        if self._wakeup.is_set():
            await asyncio.sleep(0)
            return
        self._set_timer()  # for leases: no step ends them while it is idle
        seconds = self.loop.idle_seconds()
        if seconds is None:
            await self._wakeup.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wakeup.wait()
