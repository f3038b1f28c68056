"""What watches, logs and counts may fail: streams end as they should, and the engine goes on."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig, ShadowConfig
from aioserve.engine import output_processor, request_log
from aioserve.engine.live_feed import FeedObserver
from aioserve.engine.metrics import EngineMetrics
from aioserve.engine.operations import ShowSteps
from aioserve.engine.output_processor import OutputRouter
from aioserve.errors import RequestFailedError
from aioserve.features.kv_connector import engine_side
from aioserve.features.kv_connector.engine_side import HeldBack
from aioserve.kv_cache import KVConnectorBase
from aioserve.lab.shadow import Shadow, ShadowTurns
from aioserve.outputs import EngineCoreOutput, FinishReason
from aioserve.request import Request
from tests.kit import stats_of

FULL = "/dev/full"  # every write fails: no space is left on the device
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def make_config(*, shadow: ShadowConfig | None = None, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated", step_base_ms=0.5),
        scheduler=SchedulerConfig(**scheduler),
        shadow=shadow or ShadowConfig(),
    )


async def count_tokens(engine: AsyncEngine, prompt: list[int]) -> int:
    return sum([len(o.token_ids) async for o in engine.generate(prompt, PARAMS)])


async def all_are_served(engine: AsyncEngine) -> None:
    """Two rounds of clients have all their tokens, and nothing is left."""
    for _ in range(2):
        counts = await asyncio.gather(*(count_tokens(engine, [i] * 9) for i in range(5)))
        assert counts == [PARAMS.max_tokens] * 5
    assert engine.errored is None
    await engine.pause()  # the last step is back then, and its blocks are free
    await engine.resume()
    stats = stats_of(engine)
    assert stats.num_used_kv_blocks == 0


def num_lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(
        text in record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR
    )


async def test_a_request_log_on_a_full_disk_ends_no_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncEngine(make_config(request_log=FULL)) as engine:
        await all_are_served(engine)
    assert num_lines(caplog, f"request log {FULL} loses lines: No space left on device") == 1


def test_a_decision_log_on_a_full_disk_ends_no_stream_and_the_device_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with AsyncEngine(make_config(decision_log=FULL)) as engine:
            await all_are_served(engine)

    asyncio.run(main())
    assert num_lines(caplog, f"decision log {FULL} ends here") == 1
    assert Path(FULL).is_char_device()  # an older log would have been moved away


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("as asked")


def cancels(*_: object, **__: object) -> None:
    raise asyncio.CancelledError("as asked")


def fails_in_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineMetrics, "on_finished", fails)
    monkeypatch.setattr(EngineMetrics, "on_prompt_computed", fails)


def cancels_in_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineMetrics, "on_finished", cancels)


def fails_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "log_request", fails)


def fails_in_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shadow, "note", fails)


def fails_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShadowTurns, "on_turn_end", fails)


@pytest.mark.parametrize(
    ("breaks", "line"),
    [
        (fails_in_metrics, "metrics failed: as asked"),
        (cancels_in_metrics, "metrics failed: as asked"),
        (fails_in_lines, "the line of a request failed: as asked"),
        (fails_in_shadow, "ShadowTurns failed and hears no more"),
        (fails_in_turns, "ShadowTurns failed and hears no more"),
    ],
)
async def test_an_observer_that_raises_ends_no_stream(
    breaks: Callable[[pytest.MonkeyPatch], None],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)  # at which requests have lines
    breaks(monkeypatch)
    async with AsyncEngine(make_config(shadow=ShadowConfig(shadow_policy="fcfs"))) as engine:
        await all_are_served(engine)
    assert num_lines(caplog, line) == 1


async def test_a_page_whose_notes_fail_does_not_stop_a_switch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncEngine(make_config()) as engine:
        await engine.ask(ShowSteps(0))
        monkeypatch.setattr(FeedObserver, "since_began", fails)
        engine.switch_policy("fcfs")
        await all_are_served(engine)
    assert num_lines(caplog, "FeedObserver failed and hears no more") == 1


@pytest.mark.parametrize("num_good", [0, 2])
async def test_a_request_whose_tokens_cannot_become_text_fails_alone(
    num_good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_output = output_processor.RequestState.make_output

    def make(self: output_processor.RequestState, output: EngineCoreOutput) -> Any:
        if output.request_id == "bad" and self.num_output_tokens >= num_good:
            raise ValueError("not a token")
        return make_output(self, output)

    monkeypatch.setattr(output_processor.RequestState, "make_output", make)
    async with AsyncEngine(make_config()) as engine:
        others = [asyncio.create_task(count_tokens(engine, [i] * 9)) for i in range(5)]
        stream = await engine.add_request([5] * 9, PARAMS, request_id="bad")
        with pytest.raises(RequestFailedError, match=r"could not be delivered \(ValueError\)"):
            [output async for output in stream]
        assert await asyncio.gather(*others) == [PARAMS.max_tokens] * 5
        assert not engine.abort_now("bad")
        await all_are_served(engine)


async def test_a_request_whose_reader_cannot_be_registered_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_request = output_processor.OutputProcessor.add_request

    def add(self: output_processor.OutputProcessor, request: Request, *rest: Any) -> None:
        if request.request_id == "bad-1":
            raise ValueError("no such tokenizer")
        add_request(self, request, *rest)

    monkeypatch.setattr(output_processor.OutputProcessor, "add_request", add)
    three = SamplingParams(n=3, max_tokens=6, ignore_eos=True)
    async with AsyncEngine(make_config()) as engine:
        for _ in range(2):  # the id is free again
            with pytest.raises(ValueError, match="no such tokenizer"):
                await engine.add_request([5] * 9, three, request_id="bad")
            stats = stats_of(engine)
            assert stats.num_waiting_reqs + stats.num_running_reqs == 0
        await all_are_served(engine)


async def test_a_client_process_that_cannot_be_reached_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class NoReaders:
        def process_outputs(self, outputs: list[EngineCoreOutput], now: float) -> list[str]:
            return []

    delivery = OutputRouter(NoReaders(), lambda: 0.0)  # type: ignore[arg-type]
    delivery.send_off[1] = fails
    assert delivery.deliver(1, []) == []
    assert num_lines(caplog, "sending outputs to client 1 failed: as asked") == 1


async def test_the_end_of_an_old_request_is_not_told_to_a_new_one_of_the_same_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_side, "HOLD_SECONDS", 30.0)
    is_saved: list[Callable[[], None]] = []

    class Saves:
        def when_saved(self, callback: Callable[[], None]) -> None:
            is_saved.append(callback)

    told: list[EngineCoreOutput] = []
    old, new, its = (SimpleNamespace(hands_over=False) for _ in range(3))
    readers: dict[str, Any] = {"a": old, "b": its}

    class Sink:
        def deliver(self, client_index: int, outputs: list[EngineCoreOutput]) -> list[str]:
            told.extend(outputs)
            return []

        def expire(self, request_ids: list[str]) -> None: ...
        def fail(self, request_ids: list[str] | None, cause: BaseException) -> None: ...

    connector: KVConnectorBase = Saves()  # type: ignore[assignment]
    config = CacheConfig(kv_connector="disk", kv_role="producer")
    held = HeldBack(Sink(), connector, readers.get, config)
    held.deliver(0, [EngineCoreOutput(name, [7], FinishReason.LENGTH) for name in "ab"])
    assert told == []
    readers["a"] = new  # the old reader has left, and another request took the id
    is_saved[0]()
    assert [output.request_id for output in told] == ["b"]
