"""`generate_one` and `generate_all` of the engine and of the client: whole texts, their times."""

import asyncio
import itertools
import time
from contextlib import asynccontextmanager, suppress

import pytest

from aioserve import AsyncClient, AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.errors import (
    EngineDeadError,
    PromptsFailedError,
    RequestError,
)
from aioserve.outputs import FinishReason
from aioserve.server.app import listening
from aioserve.server.sockets import bind, bind_unix
from tests.processes import PATIENCE

SIMULATED = RunnerConfig(
    runner="simulated", step_base_ms=1, step_prefill_token_us=1, step_decode_us=1
)
CONFIG = EngineConfig(runner=SIMULATED)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)
PROMPTS = ["Once upon", [5, 6, 7], [{"role": "user", "content": "Who's there?"}], "Hello", "Nay"]


@asynccontextmanager
async def asked_by(way, config=CONFIG):
    """An engine, and what is asked: itself, or a client of a server in front of it."""
    async with AsyncEngine(config) as engine:
        if way == "engine":
            yield engine, engine
            return
        async with (
            listening(engine, bind("127.0.0.1", 0)) as url,
            AsyncClient(url) as client,
        ):
            yield engine, client


@pytest.fixture(params=["engine", "client"])
async def pair(request):
    async with asked_by(request.param) as pair:
        yield pair


async def streamed(engine, prompt, params):
    """The text and the token ids of the deltas, joined."""
    outputs = [output async for output in engine.generate(prompt, params)]
    return "".join(o.text for o in outputs), list(itertools.chain(*(o.token_ids for o in outputs)))


async def until(is_so) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110 - an engine tells nobody when its numbers change
            await asyncio.sleep(0.002)


def is_idle(engine) -> bool:
    stats = engine.get_stats()
    return not (stats.num_running_reqs or stats.num_waiting_reqs or stats.num_used_kv_blocks)


@pytest.mark.parametrize("params", [SHORT, SamplingParams(max_tokens=20, stop=("e",)), None])
async def test_one_output_has_the_text_of_the_whole_stream(pair, params):
    engine, asked = pair
    for prompt in PROMPTS:
        output = await asked.generate_one(prompt, params)
        assert (output.text, output.token_ids) == await streamed(engine, prompt, params)
        assert output.finished
        assert output.num_output_tokens == len(output.token_ids)


async def test_the_last_output_alone_has_times_and_they_are_in_order(pair):
    engine, asked = pair
    before = time.monotonic()
    outputs = [output async for output in asked.generate("Hello", SHORT)]
    times = [output.times for output in outputs]
    assert times[:-1] == [None] * (len(times) - 1)
    for found in (times[-1], (await asked.generate_one("Hello", SHORT)).times):
        assert before <= found.arrival < found.first_token < found.finished <= time.monotonic()
        assert found.duration > found.to_first_token > 0
        if asked is engine:
            assert found.arrival <= found.scheduled < found.first_token
        else:
            assert found.scheduled is None


async def test_times_of_a_request_that_ended_without_a_token(pair):
    _, asked = pair
    output = await asked.generate_one("Hello", ENDLESS, timeout=1e-6)
    assert output.finish_reason is FinishReason.TIMEOUT
    assert output.times.first_token is None
    assert output.times.to_first_token is None
    assert output.times.duration >= 0


async def test_the_texts_of_many_come_in_the_order_of_their_prompts(pair):
    engine, asked = pair
    outputs = await asked.generate_all(PROMPTS, SHORT, max_concurrency=2)
    assert [(o.text, o.token_ids) for o in outputs] == [
        await streamed(engine, prompt, SHORT) for prompt in PROMPTS
    ]
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 1, 4, 2, 3)]
    outputs = await asked.generate_all(iter(PROMPTS), lengths)
    assert [len(o.token_ids) for o in outputs] == [5, 1, 4, 2, 3]
    assert await asked.generate_all([], SHORT) == []


@asynccontextmanager
async def most_at_once(engine):
    """A list of one number: the most requests that the engine had at a time in the block."""
    most = [0]

    async def watch():
        while True:
            stats = engine.get_stats()
            most[0] = max(most[0], stats.num_running_reqs + stats.num_waiting_reqs)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    try:
        yield most
    finally:
        watching.cancel()


async def test_no_more_run_at_once_than_was_said(pair):
    engine, asked = pair
    async with most_at_once(engine) as most:
        await asked.generate_all(["Hello"] * 12, SHORT, max_concurrency=3)
    assert most == [3]


async def test_an_error_of_one_prompt_leaves_the_others_their_texts(pair):
    engine, asked = pair
    with pytest.raises(PromptsFailedError, match=r"^1 of 3 prompts failed; number 1,") as caught:
        await asked.generate_all(["Hello", [10**6], "Nay"], SHORT, max_concurrency=1)
    first, failed, last = caught.value.results
    assert [first.text, last.text] == [
        (await streamed(engine, prompt, SHORT))[0] for prompt in ("Hello", "Nay")
    ]
    assert isinstance(failed, RequestError)
    assert caught.value.errors == {1: failed}
    assert caught.value.__cause__ is failed


async def test_cancelled_half_way_it_aborts_its_requests(pair):
    engine, asked = pair
    task = asyncio.create_task(asked.generate_all(["Hello"] * 9, ENDLESS, max_concurrency=4))
    await until(lambda: engine.get_stats().num_running_reqs == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: is_idle(engine))
    assert engine.get_stats().num_decode_tokens < 4 * 3000


@pytest.mark.slow
@pytest.mark.parametrize("way", ["engine", "client"])
async def test_what_is_refused_for_lack_of_room_is_asked_again(way):
    config = EngineConfig(
        runner=SIMULATED, scheduler=SchedulerConfig(max_num_seqs=1, max_waiting_requests=1)
    )
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    async with asked_by(way, config) as (engine, asked):
        async with most_at_once(engine) as most:
            outputs = await asked.generate_all(["Hello"] * 3, long, max_concurrency=3)
        assert most[0] < 3  # the third was refused as long as these two were there
        assert [len(o.token_ids) for o in outputs] == [60] * 3


async def test_a_dead_engine_ends_all_at_once_and_keeps_what_there_is():
    async with AsyncEngine(CONFIG) as engine:
        lengths = [SHORT] + [ENDLESS] * 30
        task = asyncio.create_task(engine.generate_all(["Hello"] * 31, lengths, max_concurrency=2))
        await until(lambda: engine.get_stats().num_decode_tokens >= 30)
        await engine.shutdown()
        with pytest.raises(PromptsFailedError) as caught:
            await task
    first, *others = caught.value.results
    assert len(first.token_ids) == 8
    reasons = [getattr(other, "finish_reason", type(other)) for other in others]
    assert set(reasons) == {FinishReason.ABORT, EngineDeadError}
    assert reasons.count(FinishReason.ABORT) == 2


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("Hello", SHORT, "a list of prompts is expected"),
        ([5, 6, 7], SHORT, "token ids of one prompt"),
        ([{"role": "user", "content": "x"}], SHORT, "messages of one prompt"),
        (["a", "b"], [SHORT], "2 prompts and 1 parameters"),
        (["a"], SamplingParams(n=2), "n is 2"),
    ],
)
async def test_what_cannot_be_meant_is_refused_before_any_is_asked(pair, prompts, params, words):
    engine, asked = pair
    with pytest.raises(RequestError, match=words):
        await asked.generate_all(prompts, params)
    assert engine.get_stats().num_steps == 0


async def test_several_samples_of_one_prompt_are_no_whole_text(pair):
    _, asked = pair
    with pytest.raises(RequestError) as caught:
        await asked.generate_one("Hello", SamplingParams(n=3))
    assert caught.value.param == "n"


async def test_ids_of_many_are_that_of_the_call_with_a_number(pair):
    _, asked = pair
    outputs = await asked.generate_all(["a", "b"], SHORT, request_id="mine")
    assert [output.request_id for output in outputs] == ["mine-0", "mine-1"]


async def test_a_server_on_a_unix_socket_is_asked_by_its_path(tmp_path):
    path = str(tmp_path / "s.sock")
    async with AsyncEngine(CONFIG) as engine:
        sock = bind_unix(path)
        async with listening(engine, [sock]) as url, AsyncClient(url) as client:
            assert url == f"unix:{path}"
            assert await client.health()
            output = await client.generate_one("Hello", SHORT)
            assert output.token_ids == (await streamed(engine, "Hello", SHORT))[1]
    with suppress(OSError):
        sock.close()
    async with AsyncClient(f"unix:{tmp_path / 'none.sock'}") as client:
        with pytest.raises(EngineDeadError, match=r"none\.sock"):
            await client.generate_one("Hello", SHORT)
