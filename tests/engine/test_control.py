"""An engine is paused, put to sleep, given other weights: streams survive, tokens stay right."""

import asyncio
import itertools
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aioserve.policies.fcfs import FCFSScheduler

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import (
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from aioserve.engine.core import EngineCore
from aioserve.engine.operations import HealthCheck
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    EnginePausedError,
    PolicyError,
    RunnerDeadError,
)
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import FinishReason
from aioserve.runner.cpu.runner import SleepingRunner
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler import Request, RequestStatus
from tests.kit import executor_of, run, stats_of
from tests.models import make_model
from tests.processes import COMPUTING_SECONDS
from tests.slow import mostly_slow
from tests.tokenizing import hold_tokenizing

PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0, detokenize=False)
CACHE = CacheConfig(num_kv_blocks=64)


def simulated(**scheduler: Any) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        cache=CACHE,
        scheduler=SchedulerConfig(policy="chunked_prefill", **scheduler),
    )


async def read(engine: AsyncEngine, prompt: Any, params: SamplingParams = PARAMS) -> list[int]:
    outputs = engine.generate(prompt, params)
    return [token_id async for output in outputs for token_id in output.token_ids]


async def serve_many(engine: AsyncEngine) -> list[list[int]]:
    return await asyncio.gather(*(read(engine, [i + 3] * (20 + 13 * i)) for i in range(12)))


def num_steps(engine: AsyncEngine) -> int:
    stats = stats_of(engine)
    return stats.num_steps


@pytest.mark.parametrize("depth", [1, 2])
def test_a_paused_engine_computes_no_step_and_goes_on_where_it_was(depth: int) -> None:
    async def undisturbed(engine: AsyncEngine) -> list[list[int]]:
        return await serve_many(engine)

    async def paused(engine: AsyncEngine) -> list[list[int]]:
        task, late = asyncio.create_task(serve_many(engine)), []
        for _ in range(5):
            await asyncio.sleep(0.02)
            await engine.pause()
            before = num_steps(engine)
            late.append(asyncio.create_task(read(engine, [9] * 30)))
            await asyncio.sleep(50)  # longer than a policy may serve nobody
            assert num_steps(engine) == before
            assert not task.done()
            assert (await engine.ask(HealthCheck())).status == "paused"
            await engine.resume()
        assert [len(tokens) for tokens in await asyncio.gather(*late)] == [PARAMS.max_tokens] * 5
        assert engine.policy_error is None
        return await task

    config = simulated(pipeline_depth=depth)
    assert run(paused, config) == run(undisturbed, config)


def test_requests_that_come_in_a_pause_wait_or_are_refused_as_it_says() -> None:
    async def main(engine: AsyncEngine) -> None:
        await engine.pause(arrivals="refuse")
        with pytest.raises(EnginePausedError, match="paused") as refused:
            await engine.add_request([5], PARAMS)
        assert refused.value.retry_after > 0
        await engine.pause(arrivals="wait")
        waits = asyncio.create_task(read(engine, [5]))
        await asyncio.sleep(1)
        assert not waits.done()
        await engine.resume()
        assert len(await waits) == PARAMS.max_tokens

    run(main, simulated())


def test_requests_that_are_not_kept_end_with_what_they_have() -> None:
    async def main(engine: AsyncEngine) -> None:
        stream = await engine.add_request([5] * 20, PARAMS)
        first = await anext(stream)
        await engine.pause(running="abort")
        assert first.finish_reason is None
        reasons = [output.finish_reason async for output in stream]
        assert reasons[-1] is FinishReason.ABORT
        stats = stats_of(engine)
        assert stats.num_used_kv_blocks == 0
        await engine.resume()
        assert len(await read(engine, [5])) == PARAMS.max_tokens

    run(main, simulated())


def test_deadlines_pass_in_a_pause() -> None:
    async def main(engine: AsyncEngine) -> None:
        stream = await engine.add_request([5] * 20, PARAMS, timeout=3)
        await engine.pause()
        async with asyncio.timeout(10):
            reasons = [output.finish_reason async for output in stream]
        assert reasons[-1] is FinishReason.TIMEOUT

    run(main, simulated())


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_paused_engine_can_be_shut_down(sleeps: bool) -> None:
    async def main(engine: AsyncEngine) -> None:
        stream = await engine.add_request([5] * 20, PARAMS)
        await (engine.sleep() if sleeps else engine.pause())
        await engine.shutdown(drain_timeout=100)
        reasons = [output.finish_reason async for output in stream]
        assert reasons[-1] is (FinishReason.ABORT if sleeps else FinishReason.LENGTH)
        with pytest.raises(EngineDeadError):
            await engine.resume()

    run(main, simulated())


async def test_who_is_tokenized_when_a_pause_begins_is_refused_as_it_says(monkeypatch: Any) -> None:
    async with AsyncEngine(simulated()) as engine:
        paused = hold_tokenizing(monkeypatch)
        asking = asyncio.create_task(engine.add_request([5], PARAMS))
        await asyncio.sleep(0)
        await engine.pause(running="abort", arrivals="refuse")
        paused.set()
        with pytest.raises(EnginePausedError):
            await asking
        stats = stats_of(engine)
        assert stats.num_waiting_reqs == 0


class Stubborn(FCFSScheduler):
    """Has no place in its line for whoever lost its blocks."""

    def order(self, request: Request) -> float:
        if request.status is RequestStatus.PREEMPTED:
            raise ValueError("no idea")
        return request.arrival_time


def test_a_policy_that_raises_when_its_requests_give_way_loses_none_of_them() -> None:
    async def main(engine: AsyncEngine) -> None:
        stream = await engine.add_request([5] * 20, PARAMS)
        await anext(stream)
        with pytest.raises(PolicyError, match=r"ValueError\('no idea'\) in order\(\)"):
            await engine.sleep()
        assert engine.state == "running"
        rest = [token_id async for output in stream for token_id in output.token_ids]
        assert len(rest) == PARAMS.max_tokens - 1
        assert len(await read(engine, [5])) == PARAMS.max_tokens
        await engine.pause(running="abort")
        await engine.sleep()
        await engine.wake()
        assert len(await read(engine, [5])) == PARAMS.max_tokens

    config = simulated()
    policy = msgspec.structs.replace(config.scheduler, policy=f"{__file__}:Stubborn")
    run(main, msgspec.structs.replace(config, scheduler=policy))


async def test_who_waits_for_a_pause_hears_that_the_engine_dies(monkeypatch: Any) -> None:
    async with AsyncEngine(simulated()) as engine:
        held: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        computes = asyncio.Event()

        def execute(runner: SimulatedRunner, step: Any) -> "asyncio.Future[Any]":
            computes.set()
            return held

        monkeypatch.setattr(SimulatedRunner, "execute_model", execute)
        stream = await engine.add_request([5], PARAMS)
        await computes.wait()
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0.01)
        assert not pausing.done()
        held.set_exception(RunnerDeadError("gone"))
        with pytest.raises(EngineDeadError, match="gone"):
            await pausing
        with pytest.raises(EngineDeadError):
            await anext(stream)


# With a real model.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_model("llama", folder / "one")


@pytest.fixture(scope="module")
def other_weights(folder: Path, model: Path) -> Path:
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(model, folder / "two")
    weights = load_file(copy / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight.roll(1, 0).contiguous() if "embed" in name else weight
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def of_model(path: Path, **sections: Any) -> EngineConfig:
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True),
        cache=CACHE,
        runner=RunnerConfig(threads=1, device="cpu"),
    )
    return msgspec.structs.replace(config, **sections)


PROMPTS = ([5] * 40, [6, 7, 8] * 20, [9] * 3)


@asynccontextmanager
async def serving(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(config) as engine:
        yield engine


async def whole_replies(engine: AsyncEngine) -> list[list[int]]:
    return list(await asyncio.gather(*(read(engine, prompt) for prompt in PROMPTS)))


async def begin(engine: AsyncEngine) -> list[Any]:
    """Streams of which something was read, with what that was."""
    streams = [await engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    return [(stream, (await anext(stream)).token_ids) for stream in streams]


async def finish(begun: list[Any]) -> list[list[int]]:
    rest = [[t async for output in stream for t in output.token_ids] for stream, _ in begun]
    return [first + more for (_, first), more in zip(begun, rest, strict=True)]


@pytest.mark.parametrize(
    ("kind", "weights"),  # as it is, with windows, with states
    mostly_slow(
        itertools.product(["llama", "gemma2", "mamba"], [False, True]),
        but=[("llama", True), ("gemma2", False), ("mamba", True)],
    ),
)
async def test_who_is_kept_through_a_sleep_gets_the_same_tokens(
    weights: bool, kind: str, model: Path, folder: Path
) -> None:
    path = model if kind == "llama" else folder / kind
    if not path.exists():
        make_model(kind, path)
    async with serving(of_model(path)) as engine:
        expected = await whole_replies(engine)
        begun = await begin(engine)
        await engine.sleep(weights=weights)
        executor = executor_of(engine)
        if weights:
            assert executor is None
        elif executor._backend.memory.key_caches:  # layers with states alone have none
            assert executor._backend.memory.num_committed_blocks == 0
        stats = stats_of(engine)
        assert (stats.num_used_kv_blocks, stats.num_running_reqs) == (0, 0)
        assert (await engine.ask(HealthCheck())).status == "asleep"
        with pytest.raises(ConfigError, match="asleep: wake it"):
            await engine.resume()
        late = asyncio.create_task(read(engine, PROMPTS[0]))
        await engine.wake()
        assert await finish(begun) == expected
        assert await late == expected[0]
        with pytest.raises(ConfigError, match="not asleep"):
            await engine.wake()


async def test_the_kv_cache_of_a_sleeper_is_zeros_and_found_by_nobody(model: Path) -> None:
    async with serving(of_model(model)) as engine:
        await whole_replies(engine)
        memory = executor_of(engine)._backend.memory
        assert any(cache.any() for cache in memory.key_caches)
        await engine.sleep()
        assert not any(cache.any() for cache in (*memory.key_caches, *memory.value_caches))
        await engine.wake()
        stream = await engine.add_request(PROMPTS[0], PARAMS)
        assert (await anext(stream)).num_cached_tokens == 0
        stream.close()


@pytest.mark.parametrize("sleeps", mostly_slow([False, True], but=[False]))
async def test_other_weights_of_the_same_model_are_served(
    model: Path, other_weights: Path, sleeps: bool
) -> None:
    async with serving(of_model(other_weights)) as engine:
        expected = await whole_replies(engine)
    async with serving(of_model(model)) as engine:
        before = await whole_replies(engine)
        assert before != expected
        begun = await begin(engine)
        if sleeps:
            await engine.sleep(weights=True)
        await engine.reload(str(other_weights))
        assert engine.state == "running"
        told = await finish(begun)
        assert [len(tokens) for tokens in told] == [PARAMS.max_tokens] * len(PROMPTS)
        for own, old, (_, first) in zip(told, before, begun, strict=True):
            assert own[: len(first)] == old[: len(first)]  # what was told stays told
            assert own != old
        assert await whole_replies(engine) == expected
        await engine.pause()
        await engine.reload(str(model))
        assert engine.state == "paused"
        await engine.resume()
        assert await whole_replies(engine) == before


async def test_no_lease_outlives_a_sleep_or_the_weights_that_it_was_computed_by(
    model: Path, other_weights: Path
) -> None:
    """Though the policy has pinned every prefix for a quarter of an hour."""
    async with serving(of_model(other_weights)) as engine:
        expected = await whole_replies(engine)
    config = of_model(model)
    scheduler = msgspec.structs.replace(
        config.scheduler, policy="tests.scheduler.test_leases:PinsEnded"
    )
    async with serving(msgspec.structs.replace(config, scheduler=scheduler)) as engine:

        async def until_pinned() -> None:
            """The policy hears of an end with the next step."""
            await whole_replies(engine)
            await whole_replies(engine)
            assert num_leased(engine) > 0

        await until_pinned()
        await engine.sleep()
        assert num_leased(engine) == 0
        await engine.wake()
        await until_pinned()
        await engine.reload(str(other_weights))
        assert num_leased(engine) == 0
        assert await whole_replies(engine) == expected


def num_leased(engine: AsyncEngine) -> int:
    stats = stats_of(engine)
    assert stats.num_leased_kv_blocks <= stats.num_used_kv_blocks
    return stats.num_leased_kv_blocks


async def test_requests_wait_for_other_weights_whatever_a_pause_before_said(
    model: Path, other_weights: Path
) -> None:
    async with serving(of_model(model)) as engine:
        await engine.pause(arrivals="refuse")
        await engine.resume()
        reloading = asyncio.create_task(engine.reload(str(other_weights)))
        while engine.state != "paused":  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert len(await read(engine, PROMPTS[0])) == PARAMS.max_tokens
        await reloading


async def test_weights_that_do_not_fit_leave_the_old_ones(model: Path, tmp_path: Path) -> None:
    wider = make_model("llama", tmp_path / "wider", hidden_size=96)
    damaged = shutil.copytree(model, tmp_path / "damaged")
    async with serving(of_model(model)) as engine:
        expected = await whole_replies(engine)
        begun = await begin(engine)
        with pytest.raises(ConfigError, match=r"another model .* its hidden_size is 96, not"):
            await engine.reload(str(wider), running="abort")
        with pytest.raises(ConfigError, match="no/such/model"):
            await engine.reload("/no/such/model", running="abort")
        (damaged / "model.safetensors").write_bytes(b"nothing")
        with pytest.raises(ConfigError, match="damaged"):
            await engine.reload(str(damaged))
        assert engine.state == "running"
        assert await finish(begun) == expected
        assert await whole_replies(engine) == expected


async def test_a_drain_waits_for_what_an_operator_has_begun(
    model: Path, other_weights: Path, monkeypatch: Any
) -> None:
    """Before requests have lost their blocks, and when the model is gone."""
    for begins_at, does, expected in (
        ("load_weights", lambda engine: engine.reload(str(other_weights)), FinishReason.LENGTH),
        ("sleep", lambda engine: engine.sleep(weights=True), FinishReason.ABORT),
        ("vacate", lambda engine: engine.sleep(), FinishReason.LENGTH),
    ):
        config = of_model(model)
        runner = SleepingRunner(config, ModelInfo(config.model))
        async with AsyncEngine(config, runner=runner) as engine:
            begun = await begin(engine)
            has_begun = asyncio.Event()
            place = EngineCore if begins_at == "vacate" else runner
            monkeypatch.setattr(place, begins_at, telling(getattr(place, begins_at), has_begun))
            doing = asyncio.create_task(does(engine))
            if begins_at == "vacate":  # the pause before it
                while engine.state == "running":  # noqa: ASYNC110
                    await asyncio.sleep(0)
            else:
                await has_begun.wait()
            await engine.shutdown(drain_timeout=100)
            assert engine.errored is None
            for stream, _ in begun:
                assert [output async for output in stream][-1].finish_reason is expected
            if begins_at == "vacate":
                with pytest.raises(EngineDeadError, match="shutting down"):
                    await doing
            else:
                await doing


def telling(work: Any, has_begun: asyncio.Event) -> Any:
    async def told(*args: Any, **kwargs: Any) -> Any:
        doing = asyncio.ensure_future(work(*args, **kwargs))
        await asyncio.sleep(0)
        has_begun.set()
        await asyncio.sleep(0.05)  # as if it took a while
        return await doing

    return told


async def test_who_asked_for_weights_may_leave(model: Path, other_weights: Path) -> None:
    async with serving(of_model(other_weights)) as engine:
        expected = await whole_replies(engine)
    async with serving(of_model(model)) as engine:
        asking = asyncio.create_task(engine.reload(str(other_weights)))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await engine.pause()  # after it
        await engine.resume()
        assert await whole_replies(engine) == expected


async def test_what_cannot_lose_its_blocks_is_told_before_anything_changes(
    model: Path, tmp_path: Path
) -> None:
    config = of_model(model, scheduler=SchedulerConfig(decision_log=str(tmp_path / "log")))
    async with serving(config) as engine:
        begun = await begin(engine)
        with pytest.raises(ConfigError, match="decision log"):
            await engine.sleep()
        with pytest.raises(ConfigError, match="decision log"):
            await engine.reload(str(model))
        assert engine.state == "running"
        assert all(len(tokens) == PARAMS.max_tokens for tokens in await finish(begun))


@pytest.mark.dist
async def test_all_ranks_sleep_and_load_other_weights(
    model: Path, other_weights: Path, tmp_path: Path
) -> None:
    """The second one is a process, whose memory is seen to fall."""
    ranks = RunnerConfig(threads=2, device="cpu", tensor_parallel_size=2)
    async with serving(of_model(model)) as engine:
        expected = await whole_replies(engine)
    async with serving(of_model(other_weights)) as engine:
        others = await whole_replies(engine)
    async with serving(of_model(model, runner=ranks)) as engine:
        begun = await begin(engine)
        for weights in (False, True):
            await engine.sleep(weights=weights)
            await engine.wake()
        assert await finish(begun) == expected
        await engine.reload(str(other_weights))
        assert await whole_replies(engine) == others
        damaged = shutil.copytree(model, tmp_path / "damaged")
        (damaged / "model.safetensors").write_bytes(b"no tensors")
        with pytest.raises(ConfigError, match="damaged"):
            await engine.reload(str(damaged))
        assert await whole_replies(engine) == others
        await engine.sleep(weights=True)
        with pytest.raises(ConfigError, match="damaged"):
            await engine.reload(str(damaged))
        assert engine.state == "asleep"
        await engine.wake()
        assert await whole_replies(engine) == others


async def test_with_a_decision_log_who_is_aborted_does_not_hinder(
    model: Path, tmp_path: Path
) -> None:
    settings = SchedulerConfig(decision_log=str(tmp_path / "log"))
    async with serving(of_model(model, scheduler=settings)) as engine:
        expected = await whole_replies(engine)
        begun = await begin(engine)
        await engine.sleep(running="abort")
        assert all(len(tokens) < PARAMS.max_tokens for tokens in await finish(begun))
        await engine.wake()
        assert await whole_replies(engine) == expected


def test_a_shadow_is_switched_on_and_off_while_requests_run() -> None:
    async def main(engine: AsyncEngine) -> None:
        reading = asyncio.create_task(serve_many(engine))
        await asyncio.sleep(0.05)
        assert b"aioserve_shadow" not in engine.metrics.render()
        engine.switch_shadow("fcfs")
        assert b'aioserve_shadow_policy_info{policy="fcfs"} 1.0' in engine.metrics.render()
        with pytest.raises(ConfigError, match="unknown policy 'fcsf'"):
            engine.switch_shadow("fcsf")
        with pytest.raises(ConfigError, match="chunk_size"):
            engine.switch_shadow("chunked_prefill", {"chunk_size": 0})
        assert b'aioserve_shadow_policy_info{policy="fcfs"} 1.0' in engine.metrics.render()
        engine.switch_policy("priority")  # it watches on
        engine.switch_shadow("chunked_prefill", {"chunk_size": 64})
        assert b'chunk_size="64",policy="chunked_prefill"' in engine.metrics.render()
        engine.switch_shadow(None)
        assert b"aioserve_shadow" not in engine.metrics.render()
        replies = await reading
        assert all(len(tokens) == PARAMS.max_tokens for tokens in replies)
        assert engine.config.scheduler.policy == "priority"

    run(main, simulated())


#: As a server does when it has started. In the process of the tests `gc.freeze` has no effect.
FREEZES = """
import asyncio, gc, sys, weakref
from aioserve import AsyncEngine, EngineConfig
from aioserve.config import ModelConfig
from aioserve.server.app import exempt_from_garbage_collection

async def main():
    model = ModelConfig(model=sys.argv[1], skip_tokenizer_init=True, fused=False)
    async with AsyncEngine(EngineConfig(model=model)) as engine:
        layers = [o for o in gc.get_objects() if type(o).__name__ == "LlamaDecoderLayer"]
        layers = [weakref.ref(layer) for layer in layers]
        exempt_from_garbage_collection()
        await engine.sleep(weights=True)
        num_left = sum(layer() is not None for layer in layers)
        print(len(layers) > 0, num_left, gc.get_freeze_count() > 100_000)

asyncio.run(main())
"""


#: As many objects at a time as a request of a token or two makes and drops.
COUNTS_LOOKS = """
import gc, sys
from aioserve.server.app import exempt_from_garbage_collection

def num_looks():
    before = gc.get_stats()[0]["collections"]
    for _ in range(100):
        kept = [[] for _ in range(1000)]
    return gc.get_stats()[0]["collections"] - before

by_default = num_looks()
exempt_from_garbage_collection()
print(by_default > 90, num_looks())
"""


def test_what_a_request_needs_for_a_moment_is_gone_before_cycles_are_looked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNTS_LOOKS],
        capture_output=True,
        text=True,
        timeout=COMPUTING_SECONDS,
    )
    assert done.stdout == "True 0\n", done.stderr


@pytest.mark.slow
def test_weights_are_given_back_by_a_process_that_has_frozen_them(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FREEZES, str(path)],
        capture_output=True,
        text=True,
        timeout=COMPUTING_SECONDS,
    )
    assert done.stdout == "True 0 True\n", done.stderr
