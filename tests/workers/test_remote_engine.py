"""The front half in a worker: requests, outputs and refusals as in the engine's process."""

import asyncio
import gc
import weakref
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

import aioserve
from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from aioserve.engine.operations import (
    AbortElsewhere,
    HealthCheck,
    LoadAdapter,
    ResetPrefixCache,
    SetLogLevel,
    ShowMetrics,
    SwitchPolicy,
    UnloadAdapter,
    commands,
)
from aioserve.engine.operations.command import Counted
from aioserve.engine.output_processor import OutputProcessor
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    NoAdapterError,
    RequestError,
    RequestFailedError,
    RequestIdInUseError,
    RunnerDeadError,
    UnknownModelError,
)
from aioserve.fleet.workers import remote_engine
from aioserve.fleet.workers.messages import Add, EndLease, Line, Listening, Stopped
from aioserve.fleet.workers.remote_engine import RemoteEngine, RemoteResponses
from aioserve.outputs import FinishReason
from aioserve.params import PoolingParams, SamplingParams, StructuredOutputs
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler import BaseScheduler
from aioserve.server.running import Kept
from tests.adapters import make_adapter
from tests.processes import PATIENCE
from tests.server.serving import SIMULATED
from tests.workers.joined import idle, joined, read

MODEL = EngineConfig(cache=CacheConfig(num_kv_blocks=256), runner=RunnerConfig(threads=1))
SLOW = msgspec.structs.replace(SIMULATED, runner=RunnerConfig(runner="simulated", step_base_ms=5))
ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True)

CASES = {
    "greedy": ("Who's there?", SamplingParams(temperature=0, max_tokens=24)),
    "seeded": ("Who's there?", SamplingParams(seed=7, max_tokens=24)),
    "samples": ("Who's there?", SamplingParams(seed=7, n=3, max_tokens=9, stop="e")),
    "at the end": ("Enter", SamplingParams(seed=1, max_tokens=20, output_kind="final_only")),
    "at the end, all of them": (
        "Enter",
        SamplingParams(seed=1, n=2, max_tokens=20, output_kind="final_only", stop=("th", "zz")),
    ),
    "stopped": (
        "O Romeo",
        SamplingParams(temperature=0, max_tokens=60, stop=(",",), include_stop_str_in_output=True),
    ),
    "logprobs": ("O Romeo", SamplingParams(seed=3, max_tokens=5, logprobs=2, prompt_logprobs=1)),
    "ids": (
        [5, 6, 7],
        SamplingParams(seed=3, max_tokens=5, logit_bias={9: 20.0}, detokenize=False),
    ),
    "chat": ([{"role": "user", "content": "Speak!"}], SamplingParams(temperature=0, max_tokens=9)),
    "choice": (
        "Say",
        SamplingParams(structured_outputs=StructuredOutputs(choice=("yes", "no")), seed=5),
    ),
    "bad words": ("the", SamplingParams(temperature=0, max_tokens=9, bad_words=("the", "and"))),
    "pooled": ("A vector", PoolingParams()),
}


async def test_all_that_comes_of_a_request_is_the_same_with_a_worker():
    async with joined(MODEL) as (engine, _, [remote], _):
        for name, (prompt, params) in CASES.items():
            here = await read(engine, prompt, params, request_id="x", cache_salt="here")
            there = await read(remote, prompt, params, request_id="x", cache_salt="there")
            await idle(engine)  # what a stop string has ended, it hears of later than the reader
            for one, other in zip(here, there, strict=True):
                if one.embedding is not None:
                    np.testing.assert_array_equal(one.embedding, other.embedding)
                    one.embedding = other.embedding = None
                one.times = other.times = None  # they are two requests, one after the other
                assert one == other, name
        long = "A prompt with some tokens that are found the second time. " * 4
        for front in (engine, remote):
            [output] = await read(front, long, SamplingParams(max_tokens=1, temperature=0))
            cached = output.num_cached_tokens
        assert cached > 16


@pytest.mark.usefixtures("own_processes")
async def test_what_renders_the_chats_of_a_worker_ends_with_it():
    before = {*psutil.Process().children()}
    async with joined(MODEL) as (_, _, [remote], _):
        asked = [{"role": "user", "content": "Speak"}]
        await remote.chat_one(asked, SamplingParams(max_tokens=2))
        [renderer] = {*psutil.Process().children()} - before
    assert psutil.wait_procs([renderer], PATIENCE)[0] == [renderer]


@pytest.mark.parametrize("kind", ["delta", "final_only"])
async def test_the_first_token_has_its_time_whenever_the_reader_hears_of_it(kind):
    """A simulated step takes its time or longer, and so do those behind the first token."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, output_kind=kind)
    async with joined(SLOW) as (engine, _, [remote], _):
        for front in (engine, remote):
            [output] = await read(front, [5] * 7, params)
            times = output.times
            assert times.arrival < times.first_token < times.finished
            assert times.finished - times.first_token > 19 * 0.005 * 0.8


async def test_integers_that_messagepack_does_not_know_cross():
    schema = {"type": "integer", "maximum": 10**30, "default": -(10**40)}
    params = SamplingParams(
        structured_outputs=StructuredOutputs(json=schema), max_tokens=10**20, temperature=0
    )
    short = msgspec.structs.replace(MODEL, model=ModelConfig(max_model_len=64))
    async with joined(short) as (engine, _, [remote], _):
        [here], [there] = [await read(front, "Say", params) for front in (engine, remote)]
        assert here.text == there.text != ""


async def test_what_is_refused_is_refused_in_the_same_words():
    config = msgspec.structs.replace(MODEL, scheduler=SchedulerConfig(max_waiting_requests=1))
    bad = [
        ("", None, {}),
        ("x " * 5000, None, {}),
        ("x", SamplingParams(structured_outputs=StructuredOutputs(regex="(")), {}),
        ("x", SamplingParams(structured_outputs=StructuredOutputs(json={"enum": [10**30]})), {}),
        ("x", SamplingParams(stop_token_ids=(10**9,)), {}),
        ("x", PoolingParams(dimensions=3), {}),
        ("x", None, {"adapter": "nobody's"}),
        ("x", None, {"timeout": 0}),
        ("x", SamplingParams(n=3), {}),  # two of them are one too many for the queue
    ]
    async with joined(config) as (engine, _, [remote], _):
        for prompt, params, fields in bad:
            errors = []
            for front in (engine, remote):
                with pytest.raises((RequestError, EngineOverloadedError)) as caught:
                    await front.add_request(prompt, params, **fields)
                error = caught.value
                errors.append((type(error), str(error), vars(error).get("param")))
            assert errors[0] == errors[1]
        await idle(engine)


async def test_what_a_refused_prompt_holds_is_let_go_without_a_collection_of_garbage():
    class Tokens(list):
        """Token ids to which a weak reference is possible."""

    config = msgspec.structs.replace(SIMULATED, scheduler=SchedulerConfig(max_waiting_requests=2))
    async with joined(config) as (_, _, [remote], _):

        async def ask() -> weakref.ref[Tokens]:
            prompt = Tokens([5] * 40)
            try:
                await remote.add_request(prompt, SamplingParams(n=3))
            except EngineOverloadedError:
                return weakref.ref(prompt)
            raise AssertionError("there is no room for three")

        gc.disable()
        try:
            prompt = await ask()
            await asyncio.sleep(0)  # the loop lets go of what has woken this task
            assert prompt() is None
        finally:
            gc.enable()


async def test_a_reader_that_leaves_frees_its_blocks_and_its_id():
    async with joined(SLOW) as (engine, _, [remote], [client]):
        for _ in range(3):
            async with await remote.add_request([1, 2, 3], ENDLESS, request_id="x") as stream:
                await anext(stream)
                assert engine.get_stats().num_running_reqs == 1
        await idle(engine)
        assert not client._samples


async def test_an_id_that_is_used_again_at_once_gets_nothing_of_the_one_before():
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    async with joined(SIMULATED) as (_, _, [remote], _):
        [alone] = await read(remote, [9, 9, 9], params, request_id="x")
        for _ in range(5):
            async with await remote.add_request([1, 2], ENDLESS, request_id="x") as stream:
                await anext(stream)
            [again] = await read(remote, [9, 9, 9], params, request_id="x")
            assert again.token_ids == alone.token_ids


async def test_what_waits_for_a_reader_that_has_left_is_not_sent(monkeypatch):
    """Its id may be another's when there is room again."""
    async with joined(SLOW) as (engine, _, [remote], [client]):
        async with await remote.add_request([1, 2], ENDLESS, request_id="x") as stream:
            await anext(stream)
            monkeypatch.setattr(Line, "is_full", True)
            async with asyncio.timeout(PATIENCE):
                while not client.outbox.outputs:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        async with asyncio.timeout(PATIENCE):
            while client._samples:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not client.outbox.outputs
        await idle(engine)


async def test_workers_draw_seeds_of_their_own(monkeypatch):
    """For requests without one: equal prompts at two workers are to get two replies."""
    drawn, add_request = [], BaseScheduler.add_request

    def note(scheduler, request):
        drawn.append(request.sampling_params.seed)
        add_request(scheduler, request)

    monkeypatch.setattr(BaseScheduler, "add_request", note)
    async with joined(SIMULATED, 2) as (_, _, remotes, _):
        for remote in remotes:
            await read(remote, [1], SamplingParams(max_tokens=1))
    assert None not in drawn
    assert drawn[0] != drawn[1]


async def test_an_id_that_another_worker_has_is_in_use():
    async with joined(SLOW, 2) as (engine, _, [one, other], _):
        async with await one.add_request([1], ENDLESS, request_id="x") as stream:
            await anext(stream)
            with pytest.raises(RequestIdInUseError):
                await other.add_request([1], ENDLESS, request_id="x")
        await idle(engine)  # it knows that the reader has left
        assert await read(other, [1], SamplingParams(max_tokens=1), request_id="x")


async def test_a_late_word_of_a_stop_string_ends_nobody_who_has_the_id_since():
    async with joined(SLOW, 2) as (engine, _, [one, other], _):
        async with (
            await one.add_request([1], ENDLESS, request_id="x") as stream,
            await one.add_request(
                [1], msgspec.structs.replace(ENDLESS, n=2), request_id="y"
            ) as two,
        ):
            await anext(stream)
            await anext(two)
            other._end.say(Stopped({"x": 1, "y-0": 1}))
            assert not await other.ask(AbortElsewhere("nobody's"))  # what came before was read
            assert len(engine.inspect().reader_ids) == 3
        await idle(engine)


async def test_an_abort_reaches_the_requests_of_other_workers():
    async with joined(SLOW, 2) as (engine, _, [one, other], _):
        async with await one.add_request([1], ENDLESS, request_id="x") as stream:
            await anext(stream)
            assert not other.abort_now("x")
            assert await other.ask(AbortElsewhere("x"))
            assert not await other.ask(AbortElsewhere("y"))
            assert [o.finish_reason async for o in stream][-1] is FinishReason.ABORT
        await idle(engine)


async def test_an_abort_of_one_that_is_being_accepted_ends_that_and_no_other_workers(monkeypatch):
    async with joined(SLOW, 2) as (engine, _, [one, other], _):
        say = other._end.say

        def say_and_abort(message, arrays=()):
            say(message, arrays)
            if isinstance(message, Add):
                other.abort_now(request_id)  # in one message with it

        monkeypatch.setattr(other._end, "say", say_and_abort)
        async with await one.add_request([1], ENDLESS, request_id="x") as stream:
            await anext(stream)
            request_id = "x"
            with pytest.raises(RequestIdInUseError):
                await other.add_request([1], ENDLESS, request_id="x")
            request_id = "y"
            [output] = await read(other, [1], ENDLESS, request_id="y")
            assert output.finish_reason is FinishReason.ABORT
            assert one.abort_now("x")
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason is FinishReason.ABORT
        await idle(engine)


async def test_an_abort_brings_what_there_is_though_nobody_looked_before():
    params = msgspec.structs.replace(ENDLESS, output_kind="final_only")
    async with joined(SLOW) as (engine, _, [remote], _):
        async with await remote.add_request([1], params, request_id="x") as stream:
            while engine.get_stats().num_decode_tokens < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert remote.abort_now("x")
            assert not remote.abort_now("x")  # before the engine has heard of it
            [output] = [output async for output in stream]
        assert output.finish_reason is FinishReason.ABORT
        assert output.num_output_tokens == len(output.token_ids) > 0


async def test_a_timeout_is_told():
    async with joined(SLOW) as (_, _, [remote], _):
        [output] = await read(remote, [1], ENDLESS, timeout=0.05)
        assert output.finish_reason is FinishReason.TIMEOUT


async def test_a_worker_that_does_not_read_holds_up_nobody_and_misses_nothing():
    params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=1)
    runner = RunnerConfig(runner="simulated", step_base_ms=0.1, step_decode_us=1)
    config = msgspec.structs.replace(SIMULATED, runner=runner)
    async with joined(config, 2) as (engine, _, [slow, quick], [client, _]):
        stream = await slow.add_request([7], params)
        loop = asyncio.get_running_loop()
        loop.remove_reader(slow._end.line._fd)  # as if it were stopped
        [beside] = await read(quick, [7], params)
        assert len(beside.token_ids) == 1500
        await idle(engine)
        assert client._line.is_full
        assert len(client.outbox.outputs) == 1  # and not thousands
        loop.add_reader(slow._end.line._fd, slow._end.line._look)
        slow._end.line._look()
        text = "".join([output.text async for output in stream])
        assert text == beside.text


async def test_a_worker_that_is_gone_takes_its_requests_along():
    async with joined(SLOW, 2) as (engine, host, [one, other], [client, _]):
        streams = [await one.add_request([i], ENDLESS) for i in range(3)]
        async with await other.add_request([1], ENDLESS) as stream:
            await anext(stream)
            assert host.close(client) == 3
            assert engine.get_stats().num_running_reqs == 1
            await anext(stream)
        await idle(engine)
        one.die("we are alone")
        for stream in streams:
            with pytest.raises(EngineDeadError, match="we are alone"):
                async for _ in stream:
                    pass


async def test_an_engine_that_dies_tells_the_readers_of_its_workers(monkeypatch):
    compute = SimulatedRunner._compute

    def die(runner, step):
        if step.step_id == 20:
            raise RunnerDeadError("the device is gone")
        return compute(runner, step)

    monkeypatch.setattr(SimulatedRunner, "_compute", die)
    async with joined(SLOW) as (_, _, [remote], _):
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await read(remote, [1], ENDLESS)
        assert "the device is gone" in (await remote.ask(HealthCheck())).reason
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await remote.add_request([1])


async def test_requests_that_fail_are_forgotten_at_once(monkeypatch):
    compute = SimulatedRunner._compute

    def fail(runner, step):
        if step.step_id == 20:
            raise ValueError("bad luck")
        return compute(runner, step)

    monkeypatch.setattr(SimulatedRunner, "_compute", fail)
    params = msgspec.structs.replace(ENDLESS, n=2)
    async with joined(SLOW) as (engine, _, [remote], [client]):
        read_by_two = [read(remote, [1], each) for each in (ENDLESS, params)]
        for error in await asyncio.gather(*read_by_two, return_exceptions=True):
            assert isinstance(error, RequestFailedError)
        assert not client._samples
        await idle(engine)


async def test_an_engine_that_shuts_down_ends_the_requests_of_its_workers():
    async with joined(SLOW) as (engine, _, [remote], _):
        async with await remote.add_request([1], ENDLESS) as stream:
            await anext(stream)
            draining = asyncio.create_task(engine.shutdown(drain_timeout=30))
            await asyncio.sleep(0)
            assert (await remote.ask(HealthCheck())).status == "draining"
            with pytest.raises(EngineDeadError, match="shutting down"):
                await remote.add_request([1])
        await draining  # the last reader has left


async def test_a_worker_of_another_version_is_refused(monkeypatch):
    async with joined(SIMULATED) as (_, host, _, [client]):
        monkeypatch.setattr(remote_engine, "__version__", "0.0.1")
        address = client._line._socket.last_endpoint.decode() + "-new"
        host.open("late", address, lambda: None)
        late = RemoteEngine(address)
        with pytest.raises(ConfigError, match=r"it is version 0\.0\.1, the engine is"):
            await late.start()
        late.close()


async def test_a_worker_that_is_not_there_yet_is_not_waited_for_and_misses_nothing():
    async with joined(SIMULATED) as (_, host, [remote], [client]):
        address = client._line._socket.last_endpoint.decode() + "-new"
        late = host.open("late", address, lambda: None)
        late.quit(5)
        assert not await remote.ask(AbortElsewhere("nobody's"))
        new = RemoteEngine(address)
        await new.start()
        assert await new.is_over == 5
        new.close()


async def test_a_worker_that_fails_tells_its_clients_and_ends(monkeypatch):
    process = OutputProcessor.process_outputs

    def fail_here(processor, outputs, now):
        """In the worker's half: the engine goes on."""
        readers = [processor.reader_of(output.request_id) for output in outputs]
        if any(reader is not None and reader.is_read_here for reader in readers):
            raise TypeError("no idea")
        return process(processor, outputs, now)

    async with joined(SLOW) as (_, _, [remote], _):
        async with await remote.add_request([1], ENDLESS) as stream:
            await anext(stream)
            monkeypatch.setattr(OutputProcessor, "process_outputs", fail_here)
            with pytest.raises(EngineDeadError, match=r"this worker has failed \(TypeError\)"):
                async for _ in stream:
                    pass
        assert await remote.is_over == 1


async def test_a_message_that_cannot_be_sent_ends_the_worker_and_its_clients_hear_it():
    async with joined(SLOW) as (_, _, [remote], _):
        async with await remote.add_request([1], ENDLESS) as stream:
            await anext(stream)
            remote._end.say(object())
            with pytest.raises(EngineDeadError, match=r"this worker has failed \(TypeError\)"):
                async for _ in stream:
                    pass
        assert await remote.is_over == 1


async def test_a_worker_whose_message_cannot_be_read_is_ended(caplog):
    async with joined(SLOW) as (_, _, [remote], _):
        assert remote._end.line.send(b"\xc1")
        async with asyncio.timeout(PATIENCE):
            assert await remote.is_over == 1
        assert "what worker-0 says cannot be read: it is ended" in caplog.text


async def test_what_a_worker_has_counted_is_told_once():
    async with joined(SIMULATED, 2) as (_, _, [one, _], _):
        told = [Counted("answers", "Sent", ("status",), [(("200",), 3)])]
        one.tell_counted = lambda: told
        lines = (await one.ask(ShowMetrics(told))).decode().splitlines()
        assert [line for line in lines if line.startswith("aioserve_answers_total")] == [
            'aioserve_answers_total{process="worker-0",status="200"} 3.0'
        ]


async def test_a_worker_that_comes_later_has_the_log_level_that_was_set(monkeypatch):
    levels: list[str] = []
    monkeypatch.setattr(commands, "set_log_level", levels.append)
    monkeypatch.setattr(remote_engine, "set_log_level", levels.append)
    async with joined(SIMULATED) as (_, _, [one], [worker]):
        await one.ask(SetLogLevel("debug"))
        assert levels == ["debug"] * 2
        worker._take(Listening(), ())  # as one does that was started again
        async with asyncio.timeout(PATIENCE):
            while len(levels) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert levels[-1] == "debug"


async def test_what_needs_no_answer_leaves_nobody_waiting_at_the_end():
    async with joined(SIMULATED) as (_, _, [one], _):
        one.tell(EndLease(1))
        assert not one._calls._open
        one.die("gone")
        one.tell(EndLease(2))


async def test_what_the_server_asks_is_answered_by_the_whole():
    async with joined(SIMULATED, 2) as (engine, _, [one, other], _):
        await read(one, [1] * 40, SamplingParams(max_tokens=3))
        await read(other, [1] * 40, SamplingParams(max_tokens=4))
        text = (await one.ask(ShowMetrics())).decode()
        assert "aioserve_generation_tokens_total 7.0" in text
        for process in ("engine", "worker-0", "worker-1"):
            assert f'aioserve_event_loop_lag_seconds{{process="{process}"}}' in text
        before = await one.ask(SwitchPolicy("priority", {}))
        assert (before.policy, engine.config.scheduler.policy) == ("chunked_prefill", "priority")
        with pytest.raises(ConfigError, match="no-such"):
            await one.ask(SwitchPolicy("no-such", {}))
        assert await other.ask(ResetPrefixCache()) is True
        await RemoteResponses(one).put("r", Kept(b"[]", b"{}"))
        assert await RemoteResponses(other).get("r") == Kept(b"[]", b"{}")
        assert await RemoteResponses(other).forget("r")
        assert await RemoteResponses(one).get("r") is None
        with pytest.raises(UnknownModelError, match="this server has 'embedded'"):
            one.adapters.check_name("x")


async def test_an_adapter_that_one_worker_loads_is_known_to_all_when_that_is_answered(tmp_path):
    embedded = Path(aioserve.__file__).parent / "model_source" / "embedded"
    path = make_adapter(embedded, tmp_path / "a")
    params = SamplingParams(temperature=0, max_tokens=9)
    async with joined(MODEL, 2) as (engine, _, [one, other], _):
        await one.ask(LoadAdapter("a", str(path)))
        assert one.adapters.paths == other.adapters.paths == engine.adapters.paths
        [here] = await read(engine, "Speak", params, adapter="a")
        [there] = await read(other, "Speak", params, adapter="a")
        [plain] = await read(other, "Speak", params)
        assert here.token_ids == there.token_ids != plain.token_ids
        with pytest.raises(NoAdapterError):
            await other.ask(LoadAdapter("b", str(tmp_path)))
        await other.ask(UnloadAdapter("a"))
        with pytest.raises(UnknownModelError):
            one.adapters.check_name("a")
