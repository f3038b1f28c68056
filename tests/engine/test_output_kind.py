"""Callers that want no text, or nothing before the end, get that and the same tokens."""

import asyncio
import time

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig
from aioserve.errors import RequestError
from aioserve.lab import VirtualClockEventLoop
from aioserve.outputs import RequestOutput

SIMULATED = EngineConfig(runner=RunnerConfig(runner="simulated", step_base_ms=0.1))


async def outputs(engine: AsyncEngine, **params: object) -> list[RequestOutput]:
    fields = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0} | params
    return [o async for o in engine.generate([5, 6, 7], SamplingParams(**fields))]  # type: ignore[arg-type]


@pytest.mark.parametrize("detokenize", [True, False])
async def test_final_only_is_one_output_with_all_that_the_deltas_hold(detokenize: bool) -> None:
    async with AsyncEngine(SIMULATED) as engine:
        deltas = await outputs(engine, detokenize=detokenize)
        (final,) = await outputs(engine, detokenize=detokenize, output_kind="final_only")
    assert final.token_ids == [token_id for o in deltas for token_id in o.token_ids]
    assert final.text == "".join(o.text for o in deltas)
    assert bool(final.text) == detokenize
    assert final.num_output_tokens == len(final.token_ids) == 20
    assert final.finish_reason == deltas[-1].finish_reason == "length"


async def test_final_only_keeps_log_probabilities_and_stop_strings() -> None:
    async with AsyncEngine(SIMULATED) as engine:
        (final,) = await outputs(engine, output_kind="final_only", logprobs=0)
        assert final.logprobs is not None
        assert len(final.logprobs) == 20
        stop = final.text[8:12]
        (stopped,) = await outputs(engine, output_kind="final_only", stop=stop)
    assert stopped.finish_reason == "stop"
    assert stopped.text == final.text[: final.text.index(stop)]


def test_final_only_has_what_there_was_when_a_deadline_passed() -> None:
    async def main() -> RequestOutput:
        async with AsyncEngine(SIMULATED) as engine:
            stream = await engine.add_request(
                [5, 6, 7],
                SamplingParams(max_tokens=4000, ignore_eos=True, output_kind="final_only"),
                timeout=0.1,
            )
            (final,) = [o async for o in stream]
            return final

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        final = runner.run(main())
    assert final.finish_reason == "timeout"
    assert 0 < len(final.token_ids) == final.num_output_tokens < 4000


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_deltas_are_merged_in_time_linear_in_them_and_change_no_delta() -> None:
    """So is what a client finds who reads slowly, or asks for one output at the end."""

    def seconds(count: int) -> float:
        deltas = [RequestOutput(request_id="r", token_ids=[i] * 8) for i in range(count)]
        merged = RequestOutput(request_id="r", token_ids=first)
        began = time.process_time()
        for delta in deltas:
            merged.merge(delta)
        taken = time.process_time() - began
        assert merged.token_ids == [0, *(i for i in range(count) for _ in range(8))]
        assert all(len(delta.token_ids) == 8 for delta in deltas)
        return taken

    first = [0]
    few, many = (min(seconds(count) for _ in range(3)) for count in (1000, 8000))
    assert first == [0]
    assert many < 24 * few + 0.05  # 8 times as many; the square would be 64 times
