"""A policy's draft lengths reach real drafters, the simulator, decision logs and the shadow."""

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig, ShadowConfig, SpeculationConfig
from aioserve.features.spec_decode.cpu_passes import CpuDraftRunner
from aioserve.features.spec_decode.draft_length import DraftLength
from aioserve.features.spec_decode.model_drafter import ModelDraftLength
from aioserve.features.spec_decode.ngram import NgramText
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.records import FORMAT_VERSION, MAGIC, Planned
from aioserve.lab.decision_log.replay import replay
from aioserve.outputs import RequestOutput
from aioserve.scheduler import Request, SchedulerOutput
from tests.engine.test_speculation import NGRAM, NONE, check_equal, generate
from tests.kit import run, stats_of, tokens_of
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.on_device import make_device_runner
from tests.slow import mostly_slow

DRAFT = SpeculationConfig(speculative_method="draft", draft_model="embedded")


class Fixed(ChunkedPrefillScheduler):
    """The same draft length for all; the longest drafts that came are kept."""

    class Options(ChunkedPrefillScheduler.Options):
        length: int = 0

    longest = 0  # of all schedulers of the class

    def draft_length(self, request: Request) -> int | None:
        return self.options.length

    def schedule(self) -> SchedulerOutput:
        for request in self.running:
            Fixed.longest = max(Fixed.longest, len(request.draft_token_ids))
        return super().schedule()


FIXED = f"{__name__}:Fixed"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft would pay, however busy this machine is."""
    monkeypatch.setattr(Fixed, "longest", 0)

    def stepped(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    for kind in (DraftLength, ModelDraftLength):
        monkeypatch.setattr(kind, "stepped", stepped)


@pytest.fixture(scope="module")
def plain() -> list[list[RequestOutput]]:
    return asyncio.run(generate(NONE))[0]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What drafters did: a search for n-grams, a pass of a draft model."""
    done: list[str] = []
    find, draw = NgramText.find, CpuDraftRunner.draw

    def noted_find(self: NgramText, *args: Any) -> Any:
        done.append("search")
        return find(self, *args)

    def noted_draw(self: CpuDraftRunner, *args: Any) -> Any:
        done.append("pass")
        return draw(self, *args)

    monkeypatch.setattr(NgramText, "find", noted_find)
    monkeypatch.setattr(CpuDraftRunner, "draw", noted_draw)
    return done


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize(
    "speculation", mostly_slow([NGRAM, DRAFT], but=[DRAFT]), ids=["ngram", "draft"]
)
async def test_no_drafter_works_for_a_policy_that_wants_no_drafts(
    speculation: SpeculationConfig, work: list[str], plain: list[list[RequestOutput]]
) -> None:
    """But where a grammar leaves no choice, tokens come at once all the same."""
    guessed, stats = await generate(speculation, policy=FIXED, options={"length": 0})
    check_equal(guessed, plain)
    assert not work
    assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize(
    "speculation", mostly_slow([NGRAM, DRAFT], but=[NGRAM]), ids=["ngram", "draft"]
)
async def test_every_drafter_guesses_as_many_tokens_as_the_policy_asks_for(
    speculation: SpeculationConfig, work: list[str], plain: list[list[RequestOutput]]
) -> None:
    guessed, stats = await generate(speculation, policy=FIXED, options={"length": 2})
    check_equal(guessed, plain)
    assert work
    assert stats.num_draft_tokens > 200
    assert Fixed.longest == 2


@pytest.mark.slow
@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("length", [0, 2])
async def test_a_drafter_on_a_device_guesses_as_many_tokens_as_the_policy_asks_for(
    length: int, plain: list[list[RequestOutput]]
) -> None:
    guessed, stats = await generate(
        NGRAM,
        make_runner=partial(make_device_runner, device=FakeDevice(1, eagerness=0.5)),
        pipeline_depth=1,
        policy=FIXED,
        options={"length": length},
    )
    check_equal(guessed, plain)
    assert bool(stats.num_draft_tokens > 200) == (length > 0)


class Varied(Fixed):
    """Lengths that depend on the request and its progress."""

    def draft_length(self, request: Request) -> int | None:
        return (None, 0, 1, 3)[(request.num_tokens + request.num_prompt_tokens) % 4]


VARIED = f"{__name__}:Varied"


def simulated(policy: str, log: Path | None = None, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated", simulated_draft_tokens=3),
        scheduler=SchedulerConfig(
            policy=policy, decision_log=None if log is None else str(log), **scheduler
        ),
    )


async def serve(engine: AsyncEngine) -> list[list[int]]:
    async def one(number: int) -> list[int]:
        await asyncio.sleep(0.01 * number)
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        prompt = [random.Random(number).randrange(3, 500)] * (20 + number)
        return await tokens_of(engine, prompt, params)

    found = await asyncio.gather(*map(one, range(6)))
    engine.switch_policy(VARIED)
    found += await asyncio.gather(*map(one, range(6)))
    await asyncio.sleep(30)  # the shadow lives some seconds behind
    return found


def test_simulated_drafts_are_as_long_as_the_policy_asks_for() -> None:
    async def drafts_of(engine: AsyncEngine) -> tuple[list[list[int]], int]:
        engine.switch_policy(FIXED, {"length": length})
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        tokens = [await tokens_of(engine, [7] * 20, params)]
        return tokens, stats_of(engine).num_draft_tokens

    found = {}
    for length in (0, 1, 3):
        found[length] = run(drafts_of, simulated(FIXED))
    assert found[0][1] == 0
    assert 0 < found[1][1] < found[3][1]
    assert found[0][0] == found[1][0] == found[3][0]


@pytest.mark.parametrize("depth", [1, 2])
def test_draft_lengths_are_recorded_and_come_out_again(depth: int, tmp_path: Path) -> None:
    run(serve, simulated(FIXED, tmp_path / "log", options={"length": 2}, pipeline_depth=depth))
    log = DecisionLog(tmp_path / "log")
    assert log.header.max_draft_tokens == 3
    lengths = [
        length for item in log if isinstance(item, Planned) for _, length in item.draft_lengths
    ]
    assert set(lengths) == {0, 1, 2, 3}
    assert replay(log).divergence is None


def test_a_changed_draft_length_is_found_and_named(tmp_path: Path) -> None:
    run(serve, simulated(VARIED, tmp_path / "log"))
    divergence = replay(DecisionLog(tmp_path / "log"), Fixed).divergence
    assert divergence is not None
    assert divergence.step_id == 1
    assert any("draft length" in line for line in divergence.differences)


def test_logs_of_the_format_before_draft_lengths_are_read(tmp_path: Path) -> None:
    """They had none of the fields that came at the end since."""
    run(serve, simulated("fcfs", tmp_path / "log"))
    data = (tmp_path / "log").read_bytes()
    (tmp_path / "old").write_bytes(data.replace(MAGIC + b"%d" % FORMAT_VERSION, MAGIC + b"8", 1))
    assert replay(DecisionLog(tmp_path / "old")).divergence is None


def test_the_shadow_asks_its_policy_and_changes_no_token() -> None:
    config = simulated("fcfs")
    plain = run(serve, config)
    shadow = ShadowConfig(shadow_policy=VARIED, shadow_max_share=1.0)

    async def shadowed(engine: AsyncEngine) -> list[list[int]]:
        found = await serve(engine)
        assert "aioserve_shadow_failed 0" in engine.metrics.render().decode()
        return found

    assert run(shadowed, msgspec.structs.replace(config, shadow=shadow)) == plain
