"""Row values of a real model reach the policy; over drafts, ranks, logs and switches, too."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import ModelConfig, RunnerConfig, SchedulerConfig, ShadowConfig
from aioserve.errors import ConfigError, EngineStartError
from aioserve.features.spec_decode.draft_length import DraftLength
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.records import Updated
from aioserve.lab.decision_log.replay import replay
from aioserve.scheduler import SchedulerOutput
from tests.engine.test_speculation import NGRAM, NONE
from tests.kit import greedy, run, small_config, tokens_of
from tests.lab.traffic import record
from tests.models import make_model
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.on_device import make_device_runner

RECIPE = Path(__file__).parents[2] / "examples/recipes/confident_drafts.py"
CONFIDENT = f"{RECIPE}:ConfidentDraftsScheduler"


class Noting(ChunkedPrefillScheduler):
    """Notes the values that it finds, by prompt and number of tokens."""

    wants_row_values = ("entropy", "tests.runner.cpu.test_row_values:margin")
    noted: ClassVar[dict[tuple[int, int], dict[str, float]]] = {}

    def schedule(self) -> SchedulerOutput:
        for request in self.running:
            if request.row_values:
                place = request.token_ids[0], request.num_tokens
                Noting.noted[place] = dict(request.row_values)
        return super().schedule()


NOTING = f"{__name__}:Noting"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft would pay, however busy this machine is."""
    monkeypatch.setattr(Noting, "noted", {})

    def stepped(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    monkeypatch.setattr(DraftLength, "stepped", stepped)


async def noted_by(config: EngineConfig) -> tuple[list[list[int]], dict[Any, dict[str, float]]]:
    """Tokens of three greedy replies, and what the policy has noted of them."""
    Noting.noted.clear()
    async with AsyncEngine(config) as engine:
        params = greedy(60)
        prompts = [[number] * (20 + number) for number in (5, 6, 7)]
        tokens = await asyncio.gather(*(tokens_of(engine, p, params) for p in prompts))
        return list(tokens), dict(Noting.noted)


def embedded(**sections: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": ModelConfig(model="embedded", max_model_len=256, dtype="float32"),
            "scheduler": SchedulerConfig(policy=NOTING),
            **sections,
        }
    )


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_values_are_those_of_the_newest_token_whatever_was_guessed_with_it() -> None:
    tokens, plain = await noted_by(embedded(speculation=NONE))
    guessed_tokens, guessed = await noted_by(embedded(speculation=NGRAM))
    assert guessed_tokens == tokens
    assert len(plain) > 150
    assert 20 < len(guessed) < len(plain) - 20  # several tokens came at once
    for place, values in guessed.items():
        assert values == pytest.approx(plain[place], abs=1e-3)
    assert len({round(values["entropy"], 3) for values in plain.values()}) > 20


def check_equal(
    values: dict[Any, dict[str, float]], plain: dict[Any, dict[str, float]], least: int
) -> None:
    both = plain.keys() & values.keys()
    assert len(both) > least
    for place in both:
        assert values[place] == pytest.approx(plain[place], abs=1e-3)


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_steps_planned_ahead_change_no_value() -> None:
    tokens, plain = await noted_by(embedded(speculation=NONE))
    ahead = SchedulerConfig(policy=NOTING, pipeline_depth=2)
    again, values = await noted_by(embedded(scheduler=ahead))
    assert again == tokens
    check_equal(values, plain, 100)


@pytest.mark.dist
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_the_first_rank_computes_the_values_of_a_model_on_two(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    sections = {"scheduler": SchedulerConfig(policy=NOTING, max_num_seqs=4)}
    tokens, plain = await noted_by(small_config(tmp_path, **sections))
    ranks = RunnerConfig(tensor_parallel_size=2)
    again, values = await noted_by(small_config(tmp_path, runner=ranks, **sections))
    assert again == tokens
    check_equal(values, plain, 100)


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_runner_that_computes_none_refuses_the_policy_at_the_start_and_later() -> None:
    config = embedded(scheduler=SchedulerConfig(policy=NOTING, pipeline_depth=1))
    make = partial(make_device_runner, device=FakeDevice(1, eagerness=0.5))
    with pytest.raises((ConfigError, EngineStartError), match=r"Noting wants row values \(entropy"):
        async with AsyncEngine(config, runner=make(config)):
            pass
    plain = embedded(scheduler=SchedulerConfig(policy="fcfs", pipeline_depth=1))
    async with AsyncEngine(plain, runner=make(plain)) as engine:
        with pytest.raises(ConfigError, match="runner does not compute"):
            engine.switch_policy(NOTING)
        assert engine.config.scheduler.policy == "fcfs"


class Dreaming(ChunkedPrefillScheduler):
    wants_row_values = ("no.such.module:head",)


def test_a_function_that_cannot_be_imported_is_refused_at_the_start() -> None:
    async def main(engine: AsyncEngine) -> None:
        raise AssertionError("it has started")

    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(policy=f"{__name__}:Dreaming"),
    )
    with pytest.raises((ConfigError, EngineStartError), match=r"no\.such\.module:head"):
        run(main, config)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_failing", [False, True])
def test_values_are_recorded_and_come_out_of_a_log_again(
    depth: int, is_failing: bool, tmp_path: Path
) -> None:
    switches = [(0.3, "fcfs", {}), (0.4, NOTING, {})]
    policy = CONFIDENT if depth == 1 else NOTING
    path = tmp_path / "log"
    record(path, policy=policy, pipeline_depth=depth, is_failing=is_failing, switches=switches)
    log = DecisionLog(path)
    values = [own for item in log if isinstance(item, Updated) for _, own in item.row_values]
    assert len(values) > 100
    before, Noting.noted = Noting.noted, {}
    assert replay(log).divergence is None
    assert Noting.noted == before


def test_the_shadow_invents_values_for_a_policy_that_wants_some() -> None:
    shadow = ShadowConfig(shadow_policy=NOTING, shadow_max_share=1.0)
    config = EngineConfig(runner=RunnerConfig(runner="simulated"))

    async def main(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        await tokens_of(engine, [7] * 20, params)
        await asyncio.sleep(30)  # the shadow lives some seconds behind
        found = engine.metrics.shadow.shadow
        assert found is not None
        assert not found.stats.is_failed

    run(main, msgspec.structs.replace(config, shadow=shadow))
    assert len(Noting.noted) > 10
