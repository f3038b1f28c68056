"""Runs one configuration on one workload: on the virtual clock, or for real.

The engine is the one that serves; only the clock, the runner's wrapper and the clients are ours.
`VirtualClockEventLoop` is an event loop whose clock jumps to the next timer when nothing is ready:
everything on it that takes its time from the loop runs unchanged, as fast as it computes, and in
the same order every time. Threads are not simulated: a callback from one is taken when it comes.
"""

import asyncio
import logging
import selectors
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVarTuple, Unpack

import msgspec

from aioserve.config import EngineConfig
from aioserve.engine import AsyncEngine
from aioserve.engine import step_loop as failure_log
from aioserve.engine.builder import make_runner
from aioserve.engine.clock import clock_of
from aioserve.engine.prompt import Encoded
from aioserve.errors import AioserveError, ConfigError, EngineOverloadedError, RequestFailedError
from aioserve.lab.simulation.outcome import (
    ObservedRunner,
    ReplyEndRunner,
    RequestOutcome,
    RunObserver,
    RunOutcome,
    extra_stop_ids,
)
from aioserve.lab.workloads.workload import (
    Workload,
    WorkloadRequest,
    build_images,
    build_prompt,
    followers,
    replied_to,
    text_tokens,
)
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.simulated import SimulatedRunner

_Ts = TypeVarTuple("_Ts")


class VirtualClockEventLoop(asyncio.SelectorEventLoop):
    """A loop whose clock starts at 0: `asyncio.Runner(loop_factory=VirtualClockEventLoop)`."""

    # Of asyncio's own loop, since Python 3.4: what is to run now, and the heap of timers.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._now = 0.0
        self._jumping = _JumpingSelector(self)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Move the virtual clock forward."""
        self._now += seconds

    def jump_to(self, when: float) -> bool:
        """Move the clock to `when` if nothing else would happen until then; else False.

        What would be the next timer anyhow need not become one: that is a third of the cost of a
        simulated step.
        """
        if self._ready or (self._scheduled and self._scheduled[0].when() <= when):
            return False
        self._now = max(self._now, when)
        return True

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        self._jumping.is_woken = True
        return super().call_soon_threadsafe(callback, *args, context=context)


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the clock to the next timer where a real one would sleep until then."""

    def __init__(self, loop: VirtualClockEventLoop) -> None:
        super().__init__()
        self.is_woken = False  # a thread has written to the loop's own socket
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # no timer at all: only a thread or a socket can wake the loop
            self.is_woken = False
            return super().select(None)
        events: list[Any] = []
        if self.is_woken or len(self.get_map()) > 1:  # asking the system costs a tenth of a step
            self.is_woken = False
            events = super().select(0)
        if not events and timeout > 0:
            self._loop.jump(timeout)
        return events


# Clients that ask when a workload says: at a time, or after the end of all that they follow.


Progress = Callable[[int], None]  # told how many more requests have ended


class Clients(ABC):
    """The clients of a run. Times are those of `clock`, in seconds; `start` is its second 0."""

    def __init__(self, workload: Workload, clock: Callable[[], float], progress: Progress) -> None:
        self.workload = workload
        self.clock = clock
        self.start = clock()
        self.replies: dict[int, list[int]] = {}  # token ids, of those that later prompts hold
        self.is_replied_to = replied_to(workload.requests)
        self._progress = progress
        self._followers = followers(workload.requests)
        self._num_missing = [len(request.waits_for) for request in workload.requests]
        # By the time at which they come. They share a timer: asyncio fires timers of one time in
        # any order, and a fleet has them in order of the ends that they follow.
        self._coming: dict[float, list[int]] = {}

    @abstractmethod
    async def ask(self, i: int, due: float) -> list[int]:
        """Send request number `i`, which is `due` now; the token ids of its whole reply."""

    async def come(self) -> None:
        """Ask as the workload has it; returns when the last request has ended."""
        requests = self.workload.requests
        openers = [i for i, request in enumerate(requests) if request.follows < 0]
        openers.sort(key=lambda i: requests[i].arrival)
        async with asyncio.TaskGroup() as tasks:
            for i in openers:
                due = self.start + requests[i].arrival
                if due > self.clock():
                    await asyncio.sleep(due - self.clock())
                tasks.create_task(self._serve(i, due, tasks))

    async def _serve(self, i: int, due: float, tasks: asyncio.TaskGroup) -> None:
        """One request to its end, then those that follow it."""
        reply = await self.ask(i, due)
        if i in self.is_replied_to:
            self.replies[i] = reply
        self._progress(1)
        for follower in self._followers.get(i, ()):
            self._num_missing[follower] -= 1
            if self._num_missing[follower]:
                continue
            due = self.clock() + self.workload.requests[follower].arrival
            self._coming.setdefault(due, []).append(follower)
            if len(self._coming[due]) == 1:
                tasks.create_task(self._follow(due, tasks))

    async def _follow(self, due: float, tasks: asyncio.TaskGroup) -> None:
        await asyncio.sleep(due - self.clock())
        for i in self._coming.pop(due):
            tasks.create_task(self._serve(i, due, tasks))


# The runs.


NUM_STATES = 1000  # points of queue and memory that are kept of a run, about


def simulated(config: EngineConfig, longest: int = 0) -> EngineConfig:
    """Return the configuration with its runner replaced by the simulated one, and without a
    tokenizer.

    Where it states no `max_model_len`, the `longest` request, in tokens, may raise it: what is
    simulated has no positions.
    """
    config = msgspec.structs.replace(
        config,
        runner=msgspec.structs.replace(config.runner, runner="simulated"),
        model=msgspec.structs.replace(config.model, skip_tokenizer_init=True),
    )
    if config.model.max_model_len is None and longest > ModelInfo(config.model).max_model_len:
        model = msgspec.structs.replace(config.model, max_model_len=longest)
        config = msgspec.structs.replace(config, model=model)
    return config


def check_fits(config: EngineConfig, workload: Workload) -> None:
    """Raises `ConfigError` if some request can never run under a simulated `config`."""
    model_info = ModelInfo(config.model)
    workload.check_fits(model_info.max_model_len)
    blocks = SimulatedRunner(config, model_info).info.num_kv_blocks
    # The last token is never computed, so a request needs one slot less than its length.
    num_slots = blocks * config.cache.block_size + 1
    workload.check_fits(num_slots, f"the KV pool of {blocks} blocks of {config.cache.block_size}")
    room = min(config.scheduler.max_encoder_tokens, config.scheduler.encoder_cache_tokens)
    if workload.largest_image > room:
        raise ConfigError(
            f"{workload.name}: an image has {workload.largest_image} tokens, but the smaller of "
            f"max_encoder_tokens and encoder_cache_tokens is {room}"
        )


def simulate(
    config: EngineConfig, workload: Workload, progress: Progress = lambda count: None
) -> RunOutcome:
    """Run in virtual time; byte for byte the same result every time. Call it outside of a loop.

    Raises `PolicyError` when the policy fails: numbers of such a run would mislead.
    """
    with (
        raised_not_logged(),
        asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner,
    ):
        return runner.run(_simulate(config, workload, progress))


def run_live(
    config: EngineConfig, workload: Workload, progress: Progress = lambda count: None
) -> RunOutcome:
    """Run with the configuration's own runner, in real time. Raises `AioserveError` as above."""
    with raised_not_logged(), asyncio.Runner() as runner:
        return runner.run(_run_live(config, workload, progress))


@contextmanager
def raised_not_logged() -> Iterator[None]:
    """The first failure of a step ends the run and is raised; its log would say the same again."""
    level = failure_log.logger.level
    failure_log.logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        failure_log.logger.setLevel(level)


async def _simulate(config: EngineConfig, workload: Workload, progress: Progress) -> RunOutcome:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockEventLoop)
    runner = SimulatedRunner(config, ModelInfo(config.model), jump_to=loop.jump_to)
    runner.draft_acceptance = workload.draft_acceptance
    runner.output_tokens = workload.output_tokens
    async with AsyncEngine(config, runner=runner) as engine:
        clients = _EngineClients(engine, workload, progress, is_live=False)
        runner.on_step = clients.observer.note
        outcome = await clients.run()
        outcome.saved_seconds = [runner.saved_seconds]
        return outcome


async def _run_live(config: EngineConfig, workload: Workload, progress: Progress) -> RunOutcome:
    if config.runner.runner == "model":
        workload.refuse_images("a model would have to see them: they are simulated alone")
    model_info = ModelInfo(config.model)
    end_token_ids = [*model_info.eos_token_ids, *extra_stop_ids(model_info)]
    ending = ReplyEndRunner(make_runner(config, model_info), workload.output_tokens, end_token_ids)
    runner = ObservedRunner(ending)
    async with AsyncEngine(config, runner=runner) as engine:
        await _warm_up(engine)
        clients = _EngineClients(engine, workload, progress, is_live=True)
        runner.observer = clients.observer
        return await clients.run()


async def _warm_up(engine: AsyncEngine) -> None:
    """A first request pays for what is set up on first use; it is not measured."""
    prompt = text_tokens(0, min(64, engine.max_model_len // 2), engine.model_info.vocab_size)
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True)):
        pass


class _EngineClients(Clients):
    """Clients of an engine in this process."""

    def __init__(
        self, engine: AsyncEngine, workload: Workload, progress: Progress, *, is_live: bool
    ) -> None:
        """The run begins now. Raises `ConfigError` if a request is too long for the engine."""
        workload.check_fits(engine.max_model_len)
        super().__init__(workload, clock_of(asyncio.get_running_loop()), progress)
        self._engine = engine
        self._is_live = is_live
        self._vocab_size = engine.model_info.vocab_size
        self._max_tokens = workload.max_tokens(_max_request_tokens(engine))
        self._stop_token_ids = extra_stop_ids(engine.model_info)
        self._outcome = RunOutcome(len(workload.requests))
        self.observer = RunObserver(
            self._outcome,
            start=self.start,
            interval=max(workload.duration, 1.0) / NUM_STATES,
            get_stats=engine.get_stats,
            notes_tokens=not is_live,
        )

    async def run(self) -> RunOutcome:
        """Run until the last request has ended."""
        try:
            await self.come()
        except ExceptionGroup as group:
            failed = group.subgroup(AioserveError)
            if failed is None:
                raise
            raise _as_one(failed) from group
        self.observer.close()
        self._outcome.end = self.clock() - self.start
        return self._outcome

    async def ask(self, i: int, due: float) -> list[int]:
        outcome = self._outcome.requests[i]
        outcome.arrival = self.clock() - self.start
        token_ids: list[int] = []
        try:
            token_ids = await self._send(i, self.workload.requests[i], outcome)
        except EngineOverloadedError:
            outcome.finish_reason = "refused"
        outcome.end = self.clock() - self.start
        return token_ids

    async def _send(self, i: int, request: WorkloadRequest, outcome: RequestOutcome) -> list[int]:
        params = SamplingParams(
            max_tokens=self._max_tokens[i],
            stop_token_ids=self._stop_token_ids,
            temperature=0,
            detokenize=self._is_live,  # live, text is made as for a real client
            output_kind="delta" if self._is_live else "final_only",
        )
        stream = await self._engine.add_request(
            Encoded(build_prompt(request, self._vocab_size, self.replies), build_images(request)),
            params,
            request_id=str(i),
            priority=request.priority,
            user=request.user,
            hints=request.all_hints,
            timeout=request.timeout,
        )
        token_ids: list[int] = []
        async with stream:
            async for output in stream:
                token_ids += output.token_ids
                outcome.num_cached_tokens = output.num_cached_tokens
                if self._is_live:
                    now = self.clock() - self.start
                    outcome.token_times.extend([now] * len(output.token_ids))
                if output.finish_reason is not None:
                    outcome.finish_reason = output.finish_reason
        if (error := self._engine.internals.first_policy_error) is not None:
            raise error  # another policy plans by now, perhaps: there is nothing to compare
        outcome.num_output_tokens = len(token_ids)
        return token_ids


def _max_request_tokens(engine: AsyncEngine) -> int:
    """Return tokens that prompt and reply of a request may have together, as `Blueprint` has it."""
    if (stats := engine.get_stats()) is None:
        return engine.max_model_len
    return min(engine.max_model_len, stats.num_kv_blocks * engine.config.cache.block_size + 1)


def _as_one(group: ExceptionGroup[AioserveError]) -> AioserveError:
    """Return the first failure; what failed a step is said by its cause."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, AioserveError)
    cause = first.__cause__
    if cause is None or not isinstance(first, RequestFailedError):
        return first
    return cause if isinstance(cause, AioserveError) else RequestFailedError(f"{first}: {cause!r}")
