"""An engine with a KV connector gives the tokens that it gives without, whatever is found where."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from aioserve.errors import ConfigError, RequestFailedError
from aioserve.features.kv_connector import BlockDirectory, OffloadingConnector, engine_side
from aioserve.kv_cache import KVConnectorStats
from tests.adapters import make_adapter
from tests.engine.pausing_policy import OffloadsAtEveryTurn
from tests.models import make_model
from tests.processes import PATIENCE
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.on_device import make_device_runner
from tests.slow import mostly_slow

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

ADAPTERS = ("one", "two")
# Whole prompts in order, urgent ones first, the other way round with pieces, by price.
POLICIES = ("fcfs", "priority", "chunked_prefill", "prefix_aged", "latency_budget")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model("llama", tmp_path_factory.mktemp("connector") / "base")
    for seed, name in enumerate(ADAPTERS):
        make_adapter(path, path.parent / name, seed=seed, strength=0.5)
    return path


def settings(base: Path, *, num_kv_blocks: int = 24, **cache: Any) -> EngineConfig:
    if "kv_connector" in cache:
        cache = {"kv_connector_gib": 1 / 256, **cache}  # some thousand blocks
    return EngineConfig(
        model=ModelConfig(
            model=str(base), dtype="float32", max_model_len=96, skip_tokenizer_init=True
        ),
        cache=CacheConfig(block_size=4, num_kv_blocks=num_kv_blocks, **cache),
        scheduler=SchedulerConfig(policy="fcfs", max_num_seqs=4),
        adapters=AdapterConfig(lora=tuple(f"{n}={base.parent / n}" for n in ADAPTERS)),
        runner=RunnerConfig(threads=1),
    )


def make_engine(config: EngineConfig, device: FakeDevice | None = None) -> AsyncEngine:
    """On this CPU, or on a device that is not one."""
    return AsyncEngine(config, runner=device and make_device_runner(config, device))


def make_device() -> FakeDevice:
    return FakeDevice(1, eagerness=0.3)


def requests() -> Iterator[dict[str, Any]]:
    """Prompts that share beginnings, salts, adapters; greedy and drawn; short and long."""
    for i in range(10):
        prompt = [3 + i % 2] * 20 + [(7 * i + j * j) % 50 + 3 for j in range(4 + 5 * i % 31)]
        yield {
            "prompt": prompt,
            "params": SamplingParams(
                temperature=0.8 * (i % 3 == 1),
                seed=i,
                max_tokens=10 + i,
                detokenize=False,
                output_kind="final_only",
            ),
            "priority": i % 3,
            "cache_salt": "salt" * (i % 5 == 4),
            "adapter": ADAPTERS[i % 2] if i % 4 > 1 else "",
        }


async def run_all(engine: AsyncEngine) -> list[list[int]]:
    async def run(request: dict[str, Any]) -> list[int]:
        async for output in engine.generate(
            request.pop("prompt"), request.pop("params"), **request
        ):
            last = output
        assert len(last.token_ids) == last.num_output_tokens
        return last.token_ids

    return await asyncio.gather(*(run(request) for request in requests()))


@pytest.fixture(scope="module")
def expected(base: Path) -> list[list[int]]:
    """Without a connector, in a pool with room for all."""

    async def run() -> list[list[int]]:
        async with AsyncEngine(settings(base, num_kv_blocks=500)) as engine:
            return await run_all(engine)

    return asyncio.run(run())


def stats_of(engine: AsyncEngine) -> KVConnectorStats:
    connector = engine.metrics.kv_connector.connector
    assert connector is not None
    return connector.make_stats()


def connector_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("aioserve-kv-") and "memory" not in name]


def files_in(path: Path) -> list[Path]:
    return sorted(path.glob("*/*/*"))


@pytest.mark.parametrize(
    ("kind", "make_device"),
    [
        pytest.param("memory", lambda: None, id="memory", marks=pytest.mark.slow),
        pytest.param("disk", lambda: None, id="disk"),
        pytest.param("memory", make_device, id="memory-device"),
        pytest.param("disk", make_device, id="disk-device", marks=pytest.mark.slow),
    ],
)
async def test_tokens_are_those_without_a_connector(
    base: Path,
    expected: list[list[int]],
    kind: str,
    make_device: Callable[[], FakeDevice | None],
    tmp_path: Path,
) -> None:
    """A pool for one long request, so that prompts are preempted and come again from outside."""
    path = {"kv_connector_path": str(tmp_path)} if kind == "disk" else {}
    config, device = settings(base, kv_connector=kind, **path), make_device()
    async with make_engine(config, device) as engine:
        for policy in POLICIES if device is None else POLICIES[:3:2]:
            num_hits = stats_of(engine).num_hit_tokens
            engine.switch_policy(policy)
            assert await run_all(engine) == expected
            assert stats_of(engine).num_hit_tokens > num_hits or policy == POLICIES[0]
        scheduled = engine.get_stats()
        assert scheduled is not None
        assert scheduled.num_preemptions > 0
        text = engine.metrics.render().decode()
    assert f"aioserve_kv_connector_hit_tokens_total {stats_of(engine).num_hit_tokens:.1f}" in text


@pytest.mark.parametrize("depth", mostly_slow([1, 2], but=[2]))
@pytest.mark.parametrize(
    ("kind", "make_device"),
    [
        pytest.param("memory", lambda: None, id="memory", marks=pytest.mark.slow),
        pytest.param("disk", lambda: None, id="disk"),
        pytest.param("memory", make_device, id="memory-device"),
    ],
)
async def test_a_policy_that_offloads_and_prefetches_changes_no_token(
    base: Path,
    expected: list[list[int]],
    kind: str,
    make_device: Callable[[], FakeDevice | None],
    depth: int,
    tmp_path: Path,
) -> None:
    before = OffloadsAtEveryTurn.num_offloads, OffloadsAtEveryTurn.num_prefetches
    path = {"kv_connector_path": str(tmp_path)} if kind == "disk" else {}
    config, device = settings(base, num_kv_blocks=30, kv_connector=kind, **path), make_device()
    policy = f"{OffloadsAtEveryTurn.__module__}:{OffloadsAtEveryTurn.__name__}"
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=4, pipeline_depth=depth)
    config = msgspec.structs.replace(config, scheduler=scheduler)
    async with make_engine(config, device) as engine:
        for _ in range(3):
            assert await run_all(engine) == expected
        stats = stats_of(engine)
        assert stats.num_hit_tokens > 0
    assert OffloadsAtEveryTurn.num_offloads > before[0] + 10
    assert OffloadsAtEveryTurn.num_prefetches > before[1]


@pytest.mark.parametrize("make_device", [lambda: None, make_device], ids=["cpu", "device"])
async def test_a_second_engine_finds_what_the_first_has_written(
    base: Path,
    expected: list[list[int]],
    make_device: Callable[[], FakeDevice | None],
    tmp_path: Path,
) -> None:
    cache = {"kv_connector": "disk", "kv_connector_path": str(tmp_path), "num_kv_blocks": 100}
    config = settings(base, **cache)
    async with make_engine(config, make_device()) as first:
        await run_all(first)
        async with make_engine(config, make_device()) as second:  # while the first one lives
            assert await run_all(second) == expected
            assert stats_of(second).num_fetched_tokens > 100
        assert stats_of(first).num_failures == 0


async def test_what_a_producer_has_answered_a_consumer_finds_whole(
    base: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """At once, each as soon as its prompt's answer is there; the tokens are those of one engine."""
    cache = {"kv_connector": "disk", "kv_connector_path": str(tmp_path), "num_kv_blocks": 100}

    async def hand_over(number: int, request: dict[str, Any]) -> None:
        prompt, params, more = request.pop("prompt"), request.pop("params"), request
        first = SamplingParams(max_tokens=1, detokenize=False)
        async for output in producer.generate(prompt, first, **more):
            assert len(output.token_ids) == 1
        async for output in consumer.generate(prompt, params, **more):
            last = output
        assert last.token_ids == expected[number]
        assert last.num_cached_tokens == (len(prompt) - 1) // 4 * 4

    async with (
        AsyncEngine(settings(base, **cache, kv_role="producer")) as producer,
        AsyncEngine(settings(base, **cache, kv_role="consumer")) as consumer,
    ):
        await asyncio.gather(*(hand_over(*pair) for pair in enumerate(requests())))
        assert stats_of(producer).num_hit_tokens == stats_of(consumer).num_saved_tokens == 0
        assert stats_of(consumer).num_hit_tokens > 0
    assert stats_of(consumer).num_failures == 0


async def test_a_disk_that_hangs_holds_no_end_back_for_ever(
    base: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    monkeypatch.setattr(BlockDirectory, "_write_one", lambda *_: may_write.wait(PATIENCE))
    monkeypatch.setattr(engine_side, "HOLD_SECONDS", 0.01)
    cache = {"kv_connector": "disk", "kv_connector_path": str(tmp_path), "num_kv_blocks": 100}
    async with AsyncEngine(settings(base, **cache, kv_role="producer")) as engine:
        assert await run_all(engine) == expected
        may_write.set()


async def test_damaged_missing_and_foreign_files_are_computed_again(
    base: Path, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = {"kv_connector": "disk", "kv_connector_path": str(tmp_path), "num_kv_blocks": 100}
    async with AsyncEngine(settings(base, **cache)) as engine:
        await run_all(engine)
    files = files_in(tmp_path)
    assert len(files) > 20
    good = files[0].read_bytes()
    damages = (good[:-1], good[:60], b"", b"foreign", good + b"more", good)  # of another block
    for i, file in enumerate(files[1:]):
        if i % 8 == 6:
            file.unlink()
        elif i % 8 == 7:
            content = bytearray(file.read_bytes())
            content[-9] ^= 1
            file.write_bytes(content)
        else:
            file.write_bytes(damages[i % 8])
    async with AsyncEngine(settings(base, **cache)) as engine:
        assert await run_all(engine) == expected
        assert stats_of(engine).num_failures > 1
        num_fetched = stats_of(engine).num_fetched_tokens
    assert sum("does not believe" in line for line in caplog.messages) == 1  # one line for all
    async with AsyncEngine(settings(base, **cache)) as engine:  # and what was bad is replaced
        assert await run_all(engine) == expected
        assert stats_of(engine).num_fetched_tokens > num_fetched


async def test_a_full_disk_is_told_once_and_serving_goes_on(
    base: Path,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import errno
    import os

    def no_space(fd: int, buffers: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", no_space)
    cache = {"kv_connector": "disk", "kv_connector_path": str(tmp_path)}
    async with AsyncEngine(settings(base, **cache)) as engine:
        assert await run_all(engine) == expected
        assert await run_all(engine) == expected
    assert sum("is full, and goes on without new blocks" in m for m in caplog.messages) == 1
    assert not files_in(tmp_path)


async def test_int8_blocks_come_back_as_they_were(base: Path, tmp_path: Path) -> None:
    cache = {"kv_connector": "memory", "kv_cache_dtype": "int8"}
    async with AsyncEngine(settings(base, num_kv_blocks=500, kv_cache_dtype="int8")) as engine:
        expected = await run_all(engine)
    async with AsyncEngine(settings(base, **cache)) as engine:
        for _ in range(2):
            assert await run_all(engine) == expected
        assert stats_of(engine).num_hit_tokens > 0


async def test_other_engines_have_other_folders(base: Path, tmp_path: Path) -> None:
    cache = {"kv_connector": "disk", "kv_connector_path": str(tmp_path), "num_kv_blocks": 100}
    config = settings(base, **cache)
    async with AsyncEngine(config) as engine:
        await run_all(engine)
    others: list[tuple[dict[str, Any], FakeDevice | None]] = [
        ({"block_size": 8}, None),
        ({"kv_cache_dtype": "int8"}, None),
        ({}, make_device()),
    ]
    for number, (other, device) in enumerate(others, start=2):
        own = msgspec.structs.replace(config.cache, **other)
        async with make_engine(msgspec.structs.replace(config, cache=own), device) as engine:
            await run_all(engine)
            assert stats_of(engine).num_fetched_tokens == 0
        assert len({file.parents[1] for file in files_in(tmp_path)}) == number


async def test_a_step_that_fails_on_a_device_takes_its_blocks_along(
    base: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """Whichever launch of it: a copy into one piece, a copy out of it, or the model."""

    class Faulty(FakeDevice):
        failing, num_failed = random.Random(0), 0

        def launch(self, work: Callable[[], None]) -> None:
            if self.num_failed < 6 and self.failing.random() < 0.05:
                self.num_failed += 1
                self.fail_with = RuntimeError("no more threads")
            super().launch(work)

    device = Faulty(1, eagerness=0.3)
    cache = {"kv_connector": "disk", "kv_connector_path": str(tmp_path)}
    async with make_engine(settings(base, **cache), device) as engine:

        async def run(request: dict[str, Any]) -> None:
            with suppress(RequestFailedError):
                async for _ in engine.generate(
                    request.pop("prompt"), request.pop("params"), **request
                ):
                    pass

        while device.num_failed < 6:
            await asyncio.gather(*(run(request) for request in requests()))
        device.forget_errors()
        assert await run_all(engine) == expected
        connector = engine.metrics.kv_connector.connector
        assert isinstance(connector, OffloadingConnector)
    assert not connector.slots.num_used_blocks


async def test_what_leaves_while_its_blocks_are_read_leaves_nothing(
    base: Path, tmp_path: Path
) -> None:
    cache = {"kv_connector": "disk", "kv_connector_path": str(tmp_path), "num_kv_blocks": 100}
    async with AsyncEngine(settings(base, **cache)) as engine:
        await run_all(engine)
    async with AsyncEngine(settings(base, **cache)) as engine:
        for num_turns in range(6):
            for request in requests():
                stream = await engine.add_request(
                    request.pop("prompt"), request.pop("params"), **request
                )
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                stream.close()
        await run_all(engine)
        connector = engine.metrics.kv_connector.connector
        assert connector is not None
        stats = engine.get_stats()
        assert stats is not None
        assert stats.num_used_kv_blocks == stats.num_waiting_reqs == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"cache": CacheConfig(kv_connector="disk")},
            "there is no cache.kv_connector_path",
        ),
        (
            {"cache": CacheConfig(kv_connector="memory", kv_connector_path="x")},
            "kv_connector_path is 'x', which has no effect: cache.kv_connector is not disk",
        ),
        (
            {"cache": CacheConfig(kv_role="producer")},
            "kv_role is 'producer', which has no effect: cache.kv_connector is none",
        ),
        (
            {"cache": CacheConfig(kv_connector="memory", kv_role="consumer")},
            "no other engine sees what kv_connector memory keeps",
        ),
        (
            {"cache": CacheConfig(kv_connector="memory", enable_prefix_caching=False)},
            "enable_prefix_caching is off, so no block is found again",
        ),
        (
            {
                "cache": CacheConfig(kv_connector="memory"),
                "scheduler": SchedulerConfig(decision_log="log"),
            },
            "what it finds is not in a decision log",
        ),
        (
            {"cache": CacheConfig(kv_connector="memory", kv_connector_gib=1e-9)},
            "cache.kv_connector_gib is 1 bytes, but a block of the KV cache has",
        ),
        (
            {"cache": CacheConfig(kv_connector="disk", kv_connector_path=__file__)},
            r"cache.kv_connector_path .*test_kv_connector.py cannot be used",
        ),
    ],
)
async def test_what_a_connector_cannot_do_is_refused_in_words(
    sections: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        await AsyncEngine(EngineConfig(**sections)).start()


async def test_a_shutdown_waits_for_files_and_holds_up_nobody(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write_one = threading.Event(), BlockDirectory._write_one

    def slow(self: BlockDirectory, *arguments: Any) -> None:
        assert may_write.wait(PATIENCE)
        write_one(self, *arguments)

    monkeypatch.setattr(BlockDirectory, "_write_one", slow)
    engine = AsyncEngine(settings(base, kv_connector="disk", kv_connector_path=str(tmp_path)))
    await engine.start()
    await run_all(engine)
    shutdowns = [asyncio.create_task(engine.shutdown()) for _ in range(2)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert engine.get_stats() is None  # but for the files, all has ended
    assert not files_in(tmp_path)
    assert not any(shutdown.done() for shutdown in shutdowns)
    may_write.set()
    await asyncio.gather(*shutdowns)
    assert files_in(tmp_path)
    assert not connector_threads()


async def test_a_start_that_fails_leaves_no_thread_of_a_directory(
    base: Path, tmp_path: Path
) -> None:
    path = str(tmp_path)
    config = settings(base, num_kv_blocks=2, kv_connector="disk", kv_connector_path=path)
    with pytest.raises(ConfigError, match="the KV cache holds 8 tokens"):
        await AsyncEngine(config).start()
    assert not connector_threads()
