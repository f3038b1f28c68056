"""Calibration: the timer sees only steps of a busy engine, and a profile can be used at once."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aioserve.cli.main import main as command
from aioserve.config import EngineConfig, ModelConfig, RunnerConfig
from aioserve.errors import ConfigError
from aioserve.lab.calibration import (
    Batch,
    Crowd,
    Measurements,
    StepTimer,
    TimedStep,
    calibrate,
    make_plan,
    measure,
    write_profile,
)
from aioserve.lab.simulation.run import VirtualClockEventLoop, simulated
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.runner.simulated import SimulatedRunner
from aioserve.runner.step_times import StepTimeModel, load_profile
from aioserve.scheduler import CachedRequestData, NewRequestData, SchedulerOutput
from aioserve.scheduler.output import StepFeatures
from tests import processes
from tests.lab.traffic import record
from tests.seeing_models import make_seeing_model

TRUE = StepTimeModel(
    base_ms=5, prefill_token_us=40, decode_us=90, context_token_us=0.1, query_context_ns=2
)


def test_a_linear_machine_is_found_again_and_its_profile_can_be_used(tmp_path: Path) -> None:
    steps = [
        TimedStep(features, TRUE.seconds(features))
        for features in (
            StepFeatures(p, d, c * (1 + d), p * c)
            for p in (0, 64, 512)
            for d in (0, 1, 16)
            for c in (10, 500, 2000)
        )
    ]
    steps += [
        TimedStep(features, TRUE.seconds(features) + 3e-4 * num_tokens, num_tokens)
        for features in (StepFeatures(90, 2, 90, 4000), StepFeatures(400, 0, 400, 80_000))
        for num_tokens in (64, 256)
    ]
    prompt = StepFeatures(64, 0, 64, 2080, 1)
    first_tokens = [(prompt, TRUE.seconds(prompt) + 1e-3 * wait) for wait in (0.2, 0.3, 9.0)]
    model = calibrate(Measurements(steps, first_tokens, "arithmetic"))
    assert model.idle_ms == pytest.approx(0.3, rel=0.2)
    path = tmp_path / "profile.yaml"
    write_profile(model, str(path))
    found = load_profile(str(path))
    for name in ("base_ms", "prefill_token_us", "decode_us", "context_token_us"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.01)
    assert found.encoder_token_us == pytest.approx(300, rel=0.05)
    assert "arithmetic" in found.source
    config = simulated(EngineConfig(runner=RunnerConfig(profile=str(path))))
    SimulatedRunner(config, ModelInfo(config.model))


def test_the_recorder_leaves_out_steps_after_which_the_engine_was_idle() -> None:
    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        runner.run(time_three_steps())


async def time_three_steps() -> None:
    config = EngineConfig(runner=RunnerConfig(runner="simulated", step_base_ms=1))
    timer = StepTimer(SimulatedRunner(config, ModelInfo(config.model)))

    def step(step_id: int, is_new: bool) -> SchedulerOutput:
        new = [NewRequestData("r", [1] * 9, 9, SamplingParams(), frozenset(), [0], 0)]
        return SchedulerOutput(
            step_id,
            new if is_new else [],
            CachedRequestData([] if is_new else ["r"], [] if is_new else [8 + step_id - 1], {}),
            {"r": 9 if is_new else 1},
            9 if is_new else 1,
            [],
            [],
        )

    for step_id in (1, 2):
        result = await timer.execute_model(step(step_id, step_id == 1))
        assert isinstance(result, ModelRunnerOutput)
    assert [s.features.num_prefill_tokens for s in timer.steps] == [9]
    await asyncio.sleep(0.05)
    await timer.execute_model(step(3, False))
    assert len(timer.steps) == 1  # the second step was followed by nothing


def test_a_quick_plan_has_a_third_of_the_loads_and_of_every_kind_some() -> None:
    whole = make_plan(4096, 64, is_quick=False)
    quick = make_plan(4096, 64, is_quick=True)
    assert set(quick) < set(whole)
    assert len(quick) < len(whole) / 2.5
    assert any(isinstance(load, Crowd) and load.pause for load in quick)
    assert any(isinstance(load, Crowd) and not load.pause for load in quick)
    batches = [load for load in quick if not isinstance(load, Crowd)]
    assert any(batch.chunk_size < batch.prompt_tokens for batch in batches)  # prompts in chunks
    assert any(batch.chunk_size > batch.prompt_tokens > 1000 for batch in batches)  # whole
    assert len({batch.num_requests for batch in batches if batch.output_tokens == 40}) > 2


async def test_loads_of_a_real_model_are_counted_as_they_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = [Batch(64, 2, 100, 3), Batch(64, 1, 20, 3)]
    monkeypatch.setattr("aioserve.lab.calibration.make_plan", lambda *_, is_quick: loads[:is_quick])
    monkeypatch.setattr("aioserve.lab.calibration.CROWDS", [Crowd(512, 1, 2)])
    monkeypatch.setattr("aioserve.lab.calibration.NUM_IDLE", 2)
    told: list[int] = []

    def begin(total: int) -> Callable[[int], None]:
        told.append(total)
        return told.append

    config = EngineConfig(runner=RunnerConfig(threads=1))
    measured = await measure(config, begin, is_quick=True)
    assert told == [2, 1, 1]  # the one load, and the requests to an idle engine
    assert len(measured.first_tokens) == 2
    assert any(step.features.num_decodes for step in measured.steps)
    assert "embedded" in measured.what


@pytest.mark.parametrize("num_loads", [0, 3])
async def test_an_interrupted_measurement_keeps_the_loads_that_it_has(
    num_loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = [Batch(64, 2, 100, 9)] * 9
    monkeypatch.setattr("aioserve.lab.calibration.make_plan", lambda *_, **__: loads)
    monkeypatch.setattr("aioserve.lab.calibration.CROWDS", [Crowd(512, 1, 2)])
    monkeypatch.setattr("aioserve.lab.calibration.MAX_HANDOVER_SECONDS", 60.0)

    def begin(total: int) -> Callable[[int], None]:
        assert total == 10
        task, done = asyncio.current_task(), 0
        assert task is not None
        if not num_loads:
            task.cancel()

        def advance(more: int) -> None:
            nonlocal done
            done += more
            if done == num_loads:
                task.cancel()

        return advance

    config = EngineConfig(runner=RunnerConfig(threads=1))
    if not num_loads:  # nothing to fit a model to
        with pytest.raises(asyncio.CancelledError):
            await measure(config, begin, keeps_partial=True)
        return
    measured = await measure(config, begin, keeps_partial=True)
    assert measured.is_partial
    assert measured.first_tokens == []
    assert "interrupted after 3 of 10 loads" in calibrate(measured).source


@pytest.mark.slow
def test_ctrl_c_writes_the_profile_of_the_loads_so_far(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    command = (sys.executable, "-m", "aioserve", "calibrate", "-o", str(path))
    with processes.started(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while "Measuring loads" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        printed, told = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 130
    assert "the profile is of the loads that were measured until then" in told
    assert "interrupted after" in load_profile(str(path)).source
    assert f"written to {path}" in printed


async def test_images_are_shown_to_a_model_that_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = "aioserve.lab.calibration"
    monkeypatch.setattr(f"{module}.make_plan", lambda *_, **__: [])
    monkeypatch.setattr(f"{module}.CROWDS", [Crowd(512, 1, 2)])
    monkeypatch.setattr(f"{module}.NUM_IDLE", 0)
    monkeypatch.setattr(f"{module}.MAX_HANDOVER_SECONDS", 60.0)  # no step is left out as too late
    monkeypatch.setattr(f"{module}.IMAGE_SIZES", [(40, 30), (70, 40)])
    model = ModelConfig(model=str(make_seeing_model("idefics3", tmp_path)))
    measured = await measure(EngineConfig(model=model, runner=RunnerConfig(threads=1)))
    sizes = {step.num_encoder_tokens for step in measured.steps} - {0}
    assert sizes  # two images may share a step, and then there is one size
    for step in measured.steps:
        assert step.features.num_prefill_tokens >= step.num_encoder_tokens


async def test_a_simulated_runner_is_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match=r"runner\.runner must be 'model'"):
        await measure(EngineConfig(runner=RunnerConfig(runner="simulated")))


def test_a_decision_log_gives_a_profile_of_the_machine_that_wrote_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, other, profile = tmp_path / "one.log", tmp_path / "two.log", tmp_path / "mine.yaml"
    record(log, num_requests=100, policy="chunked_prefill")
    record(other, num_requests=30, policy="chunked_prefill")
    assert command(["calibrate", "--log", str(log), str(other), "-o", str(profile)]) == 0
    found, true = load_profile(str(profile)), load_profile("example")
    assert found.base_ms == pytest.approx(true.base_ms, rel=0.05)
    assert found.prefill_token_us == pytest.approx(true.prefill_token_us, rel=0.05)
    assert found.source.endswith("steps of decision log one.log, two.log")
    for words, message in (
        (["--outcomes", "some.csv"], "--outcomes and --log each fit to files of their own"),
        (["--quick"], "--log fits to files: give no model, settings or --quick"),
    ):
        assert command(["calibrate", "--log", str(log), *words]) == 2
        assert message in capsys.readouterr().err
