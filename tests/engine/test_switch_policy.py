"""The policy of a running engine changes between two steps: nothing is lost, no token differs."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.policies.priority import PriorityScheduler

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import ConfigError, PolicyError
from aioserve.scheduler import BaseScheduler, Request
from tests import kit
from tests.kit import case, stats_of


def run(main: Callable[[AsyncEngine], Any], depth: int = 1) -> Any:
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        cache=CacheConfig(num_kv_blocks=300, watermark=0),  # small: preemptions happen
        scheduler=SchedulerConfig(pipeline_depth=depth),
    )

    return kit.run(main, config)


async def serve_many(engine: AsyncEngine) -> list[list[int]]:
    async def one(i: int) -> list[int]:
        await asyncio.sleep(0.01 * i)
        params = SamplingParams(max_tokens=80, ignore_eos=True)
        outputs = engine.generate([i + 3] * (20 + 13 * (i % 20)), params, priority=i % 3)
        return [token_id async for output in outputs for token_id in output.token_ids]

    return await asyncio.gather(*(one(i) for i in range(40)))


@pytest.mark.parametrize("depth", [1, 2])
def test_switching_back_and_forth_under_load_changes_no_token(depth: int) -> None:
    async def undisturbed(engine: AsyncEngine) -> list[list[int]]:
        return await serve_many(engine)

    async def switched(engine: AsyncEngine) -> list[list[int]]:
        task = asyncio.create_task(serve_many(engine))
        policies = ["fcfs", "priority", "chunked_prefill"]
        switches = 0
        while not task.done():
            engine.switch_policy(policies[switches % 3])
            switches += 1
            await asyncio.sleep(0.017)
        assert switches > 30
        stats = stats_of(engine)
        assert stats.num_preemptions > 5
        assert stats.num_running_reqs == stats.num_waiting_reqs == 0
        await asyncio.sleep(1)
        assert engine.get_stats().num_used_kv_blocks == 0  # type: ignore[union-attr]
        return task.result()

    assert run(switched, depth) == run(undisturbed, depth)


def test_the_new_order_holds_for_those_who_wait_already() -> None:
    async def main(engine: AsyncEngine) -> list[str]:
        finished = []

        async def one(name: str, priority: int) -> None:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            async for _ in engine.generate([1] * 4000, params, priority=priority):
                pass
            finished.append(name)

        tasks = [asyncio.create_task(one(name, p)) for name, p in (("a", 9), ("b", 5), ("c", 1))]
        await asyncio.sleep(0.001)
        engine.switch_policy("priority")
        await asyncio.gather(*tasks)
        return finished

    assert run(main) == ["c", "b", "a"]


class CannotOrder(FCFSScheduler):
    def order(self, request: Request) -> float:
        raise ValueError("no idea")


class CannotBegin(FCFSScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise ValueError("no idea")


class CannotTakeOver(PriorityScheduler):
    def take_over(self, other: BaseScheduler) -> None:
        super().take_over(other)
        raise ValueError("no idea")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("fcsf", {}, "unknown policy"),
    ("chunked_prefill", {"chunk_size": 0}, "chunk_size"),
    ("chunked_prefill", {"chunk_sise": 8}, "chunk_sise"),
    (f"{__name__}:CannotOrder", {}, "no idea"),
    (f"{__name__}:CannotBegin", {}, r"CannotBegin raised ValueError\('no idea'\)"),
    (f"{__name__}:CannotTakeOver", {}, r"CannotTakeOver raised ValueError\('no idea'\)"),
    (f"{__name__}:Request", {}, "not a SchedulerInterface"),
]


def test_a_bad_switch_is_refused_and_the_old_policy_goes_on() -> None:
    async def main(engine: AsyncEngine) -> list[list[int]]:
        task = asyncio.create_task(serve_many(engine))
        await asyncio.sleep(0.1)
        for policy, options, message in BAD:
            with case(policy, options):
                with pytest.raises((ConfigError, PolicyError), match=message):
                    engine.switch_policy(policy, options)
                snapshot = engine.inspect()
                assert snapshot is not None
                assert snapshot.policy_class == "ChunkedPrefillScheduler"
                await asyncio.sleep(0.02)
        assert not task.done()
        return await task

    assert run(main) == run(serve_many)
