"""What a policy learns of replies comes out of its log again, over switches, and in the shadow."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig, ShadowConfig
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from tests.kit import run
from tests.lab.traffic import record

RECIPE = Path(__file__).parents[2] / "examples/recipes/shortest_predicted.py"
PREDICTING = f"{RECIPE}:ShortestPredictedScheduler"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_failing", [False, True])
def test_what_was_learned_comes_out_of_a_log_again(
    depth: int, is_failing: bool, tmp_path: Path
) -> None:
    """Also by the policy that takes over from one that has not learned meanwhile."""
    switches = [(0.3, "fcfs", {}), (0.4, PREDICTING, {"usual": 50.0})]
    record(
        tmp_path / "log",
        policy=PREDICTING,
        pipeline_depth=depth,
        is_failing=is_failing,
        switches=switches,
    )
    result = replay(DecisionLog(tmp_path / "log"))
    assert result.divergence is None
    assert result.num_steps > 100


def simulated(policy: str) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(policy=policy, max_num_seqs=1),
    )


async def serve(engine: AsyncEngine) -> list[str]:
    """Two users with a reply each, long and short; then both come again, and a third before them.
    Who is done in which order.
    """
    order: list[str] = []

    async def one(user: str, prompt: int, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        async for output in engine.generate([prompt] * 20, params, user=user):
            if output.finished:
                order.append(user)

    await one("talker", 5, 90)
    await one("nodder", 6, 2)
    await asyncio.gather(one("first", 7, 40), one("talker", 8, 100), one("nodder", 9, 100))
    await asyncio.sleep(30)  # the shadow lives some seconds behind
    return order


def test_a_user_whose_replies_were_short_overtakes_one_whose_were_long() -> None:
    assert run(serve, simulated(PREDICTING))[2:] == ["nodder", "first", "talker"]
    assert run(serve, simulated("fcfs"))[2:] == ["first", "talker", "nodder"]


def test_the_shadow_learns_from_the_replies_that_it_follows() -> None:
    shadow = ShadowConfig(shadow_policy=PREDICTING, shadow_max_share=1.0)
    config = msgspec.structs.replace(simulated("fcfs"), shadow=shadow)

    async def shadowed(engine: AsyncEngine) -> None:
        await serve(engine)
        shadow = engine.metrics.shadow.shadow
        assert shadow is not None
        assert not shadow.stats.is_failed
        history = shadow.scheduler.book.reply_lengths
        assert history is not None
        assert len(history) == 3

    run(shadowed, config)
