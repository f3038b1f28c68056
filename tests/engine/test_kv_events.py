"""An observer of the KV cache hears of everything between steps, and can hurt nobody."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig
from aioserve.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from aioserve.lab import VirtualClockEventLoop
from tests.kit import stats_of


def run(
    main: Callable[[AsyncEngine], Any],
    on_kv_event: Callable[[KVEvent], None],
    policy: str = "chunked_prefill",
) -> Any:
    """On the virtual clock, with a pool in which every other request evicts."""
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        cache=CacheConfig(num_kv_blocks=8),
        scheduler=SchedulerConfig(policy=policy),
    )

    async def with_engine() -> Any:
        async with AsyncEngine(config, on_kv_event=on_kv_event) as engine:
            return await main(engine)

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return runner.run(with_engine())


async def serve(engine: AsyncEngine, count: int) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for i in range(count):
        outputs = [o async for o in engine.generate([i + 3] * 60, params)]
        assert sum(len(o.token_ids) for o in outputs) == 20


def test_an_observer_that_raises_hurts_nobody_and_is_logged_once_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[KVEvent] = []

    def observer(event: KVEvent) -> None:
        heard.append(event)
        raise ValueError("no idea")

    async def main(engine: AsyncEngine) -> None:
        with caplog.at_level(logging.ERROR):
            await serve(engine, 8)
        stats = stats_of(engine)
        assert stats.num_used_kv_blocks == 0
        assert engine.reset_prefix_cache()
        assert engine.errored is None

    run(main, observer)
    assert {type(event) for event in heard} == {BlockStored, BlockRemoved, AllBlocksCleared}
    assert 1 <= len(caplog.records) < len(heard)
    assert "on_kv_event failed: no idea" in caplog.text


class Known(ChunkedPrefillScheduler):
    """Can be asked while it plans."""

    latest: ClassVar["Known | None"] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Known.latest = self


def test_an_observer_is_called_only_when_no_step_is_under_construction() -> None:
    under_construction: list[bool] = []

    async def main(engine: AsyncEngine) -> None:
        await serve(engine, 8)

    def observer(event: KVEvent) -> None:
        scheduler = Known.latest
        assert scheduler is not None
        under_construction.append(scheduler.book.open_step is not None)
        if isinstance(event, BlockRemoved):
            assert scheduler.kv_cache.pool.lookup(event.block_hash) is None

    run(main, observer, f"{__name__}:Known")
    assert len(under_construction) > 20
    assert not any(under_construction)


def test_an_observer_may_forget_the_prefixes_and_hears_of_that_last() -> None:
    heard: list[KVEvent] = []

    async def main(engine: AsyncEngine) -> None:
        engines.append(engine)
        await serve(engine, 1)
        await asyncio.sleep(0)

    engines: list[AsyncEngine] = []

    def observer(event: KVEvent) -> None:
        heard.append(event)
        if len(heard) == 1:
            engines[0].reset_prefix_cache()

    run(main, observer)
    first = heard.index(AllBlocksCleared())
    assert [type(event) for event in heard[:first]] == [BlockStored] * first
    assert first == 3
