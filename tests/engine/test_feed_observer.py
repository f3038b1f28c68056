"""What an onlooker tells is what the scheduler did, and the server does not notice it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig
from aioserve.engine.core import EngineCore, EngineLoop
from aioserve.engine.live_feed import Ended, Events, FeedObserver, shown_id
from aioserve.engine.prompt import Encoded
from aioserve.lab import VirtualClockEventLoop
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import EncoderInput, RequestStatus
from aioserve.scheduler import SchedulerInterface, SchedulerOutput
from aioserve.scheduler.delegate import DelegatingScheduler


def shown(counts: dict[str, int]) -> dict[str, int]:
    return {shown_id(request_id): count for request_id, count in counts.items()}


class Truth(DelegatingScheduler):
    """What really was planned, came back and ended."""

    def __init__(self, live: Any) -> None:
        super().__init__(live)
        self.plans: list[tuple[int, dict[str, int]]] = []
        self.results: list[tuple[int, dict[str, int]]] = []
        self.ended: list[str] = []

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        if output.num_scheduled_tokens:
            self.plans.append((output.step_id, shown(output.num_scheduled_tokens)))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        counts = map(len, model_runner_output.sampled_token_ids)
        got = shown(dict(zip(model_runner_output.req_ids, counts, strict=True)))
        self.results.append((scheduler_output.step_id, got))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for one in outputs.values():
            ended = [o.request_id for o in one.outputs if o.finish_reason is not None]
            self.ended += map(shown_id, ended)
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        ended = super().finish_requests(request_ids, finished_status)
        self.ended += map(shown_id, ended)
        return ended


class Told:
    """What a reader makes of the events, as the page does."""

    def __init__(self) -> None:
        self.ids: dict[int, str] = {}
        self.rows: list[int] = []
        self.rows_of: dict[int, list[int]] = {}
        self.plans: list[tuple[int, dict[str, int]]] = []
        self.results: list[tuple[int, dict[str, int]]] = []
        self.ended: list[Ended] = []
        self.reasons: Counter[str] = Counter()
        self.preempted: list[int] = []

    def take(self, events: Events) -> None:
        self.ids |= {came.number: came.shown_id for came in events.came}
        for plan in events.planned:
            self.rows = [row for row in self.rows if row not in plan.left] + plan.joined
            tokens = dict(plan.tokens)
            rows = {self.ids[row]: tokens.get(row, 1) for row in self.rows}
            assert sum(rows.values()) == plan.num_tokens
            self.preempted += plan.preempted
            if rows:
                self.plans.append((plan.step_id, rows))
            self.rows_of[plan.step_id] = list(self.rows)
        for back in events.back:
            counts = dict(back.tokens)
            got = {self.ids[row]: counts.get(row, 1) for row in self.rows_of[back.step_id]}
            self.results.append((back.step_id, got))
        self.ended += events.ended
        self.reasons.update(wait.reason for wait in events.waits)


async def make_traffic(engine: AsyncEngine) -> None:
    """Waiting, preemption, aborts, an id that comes again, short chunks, a switch."""

    async def one(i: int) -> None:
        await asyncio.sleep(0.013 * i)
        params = SamplingParams(max_tokens=10 + 7 * (i % 5), ignore_eos=True)
        async for _ in engine.generate([i + 3] * (20 + 37 * (i % 4)), params):
            if i % 7 == 6:
                return  # a reader that leaves

    async def again() -> None:
        for _ in range(20):
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            async for _ in engine.generate([2] * 5, params, request_id="again"):
                pass

    async def switch() -> None:
        await asyncio.sleep(0.3)
        engine.switch_policy("fcfs")

    await asyncio.gather(*(one(i) for i in range(60)), again(), switch())


@asynccontextmanager
async def looked_at(
    config: EngineConfig, watch: Callable[[SchedulerInterface], SchedulerInterface]
) -> AsyncIterator[tuple[AsyncEngine, FeedObserver]]:
    """An engine of what `watch` makes of its scheduler, and an onlooker."""
    found: list[FeedObserver] = []
    begin = EngineCore.__init__

    def watched(core: EngineCore, loop: EngineLoop, *args: Any, **more: Any) -> None:
        policy: Any = loop.scheduler
        loop.scheduler = watch(loop.scheduler)
        time = asyncio.get_running_loop().time
        found.append(FeedObserver(lambda: loop.scheduler, policy, time))
        loop.observers.subscribe(found[-1])
        begin(core, loop, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "__init__", watched)
        async with AsyncEngine(config) as engine:
            yield engine, found[0]


def watched(depth: int, blocks: int) -> tuple[Told, Truth, FeedObserver]:
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        cache=CacheConfig(num_kv_blocks=blocks),
        scheduler=SchedulerConfig(
            options={"chunk_size": 48}, max_num_seqs=8, pipeline_depth=depth, stall_timeout=60
        ),
    )

    async def main() -> tuple[Told, Truth, FeedObserver]:
        told, truths = Told(), []

        def watch(live: SchedulerInterface) -> Truth:
            truths.append(Truth(live))
            return truths[0]

        async with looked_at(config, watch) as (engine, onlooker):

            async def look() -> None:
                while True:
                    await asyncio.sleep(0.05)
                    told.take(onlooker.take_events())

            looking = asyncio.create_task(look())
            await make_traffic(engine)
            await asyncio.sleep(1)
            looking.cancel()
        return told, truths[0], onlooker

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return runner.run(main())


@pytest.mark.parametrize("depth", [1, 2])
def test_who_was_in_each_step_with_how_many_tokens_is_told(depth: int) -> None:
    told, truth, onlooker = watched(depth, blocks=30)
    assert onlooker.error is None
    assert len(truth.plans) > 100
    assert told.plans == truth.plans
    assert told.results == truth.results
    assert Counter(told.ids[ended.number] for ended in told.ended) == Counter(truth.ended)
    assert told.preempted
    assert {"blocks", "seats"} & set(told.reasons)
    assert {ended.reason for ended in told.ended} == {"length", "abort"}
    assert list(told.ids.values()).count(shown_id("again")) > 1


def test_whose_images_a_step_encodes_is_told_once() -> None:
    config = EngineConfig(runner=RunnerConfig(runner="simulated"))
    images = [EncoderInput(2, 3, "a"), EncoderInput(8, 5, "b")]

    async def main() -> Events:
        async with looked_at(config, lambda live: live) as (engine, onlooker):
            for _ in range(2):
                params = SamplingParams(max_tokens=3)
                async for _ in engine.generate(Encoded(list(range(20)), images), params):
                    pass
            assert onlooker.error is None
            return onlooker.take_events()

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        events = runner.run(main())
    assert [plan.encoded for plan in events.planned if plan.encoded] == [[(1, 8)]]


def test_one_that_fails_stops_telling_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeedObserver, "on_back", lambda *args: 1 / 0)
    told, truth, onlooker = watched(1, blocks=200)
    assert isinstance(onlooker.error, ZeroDivisionError)
    assert len(truth.ended) >= 60
    assert caplog.text.count("FeedObserver failed and hears no more") == 1
    assert len(told.plans) < len(truth.plans)
