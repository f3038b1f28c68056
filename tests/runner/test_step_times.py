"""Step-time sources are found by name, file, module and YAML, and hold their contract."""

from pathlib import Path

import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.simulation.run import simulate, simulated
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.runner.step_times import (
    LinearStepTimes,
    available_profiles,
    available_step_times,
    load_profile,
    make_step_times,
)
from aioserve.scheduler.output import StepFeatures
from aioserve.testing.step_times import StepTimesContract, StepTimesSubject
from aioserve.testing.violation import StepTimesViolation

STEADY = """
from aioserve.runner.step_times import StepTimeOptions, StepTimeSource

class Steady(StepTimeSource):
    class Options(StepTimeOptions, frozen=True, kw_only=True):
        each_ms: float

    def seconds(self, features, prefills):
        return 1e-3 * self.options.each_ms
"""
#: Sources that break a rule each, by what they return and by what is said of them.
BROKEN = {
    "1 / (1 + features.num_context_tokens)": "less than",
    "-1.0": "is no time",
    "float('nan')": "is no time",
    "__import__('time').perf_counter()": "asked again",
    "prefills[0][1] * 1e-3 if prefills else 9.0": "in the other order",
}


@pytest.fixture
def steady(tmp_path: Path) -> Path:
    path = tmp_path / "steady.py"
    path.write_text(STEADY)
    return path


@pytest.mark.parametrize("name", available_profiles())
class TestShipped(StepTimesContract):
    """Every profile that comes with the package."""

    @pytest.fixture
    def subject(self, name: str) -> StepTimesSubject:
        return StepTimesSubject.named(name, {})


def test_a_source_is_found_by_file_by_yaml_and_with_options(steady: Path, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("step_times: steady.py:Steady\neach_ms: 7\nidle_ms: 2\n")
    sources = [
        make_step_times(f"{steady}:Steady", {"each_ms": 7.0}),
        make_step_times(str(steady), {"each_ms": 7.0}),
        make_step_times(str(profile), {}),
    ]
    assert [each.seconds(StepFeatures(0, 1, 9, 0), ()) for each in sources] == [0.007] * 3
    assert sources[2].rates.idle_ms == 2
    assert make_step_times(str(profile), {"each_ms": 9}).options.each_ms == 9


def test_the_linear_formula_is_a_source_with_options() -> None:
    options = {"base_ms": 3, "prefill_token_us": 1, "decode_us": 1000, "context_token_us": 0}
    found = make_step_times("linear", options)
    assert isinstance(found, LinearStepTimes)
    assert found.seconds(StepFeatures(0, 2, 9, 0)) == pytest.approx(0.005)
    assert "linear" in available_step_times()


def test_a_simulation_takes_what_the_source_and_the_host_take(steady: Path) -> None:
    def seconds_of(*settings: tuple[str, object]) -> float:
        config = EngineConfig.load(
            None,
            [
                ("runner.profile", f"{steady}:Steady"),
                ("runner.profile_options.each_ms", "10"),
                *settings,
            ],
        )
        workload = Workload("one", (WorkloadRequest(0.0, (Piece(1, 100),), 5),))
        outcome = simulate(simulated(config), workload)
        times = outcome.requests[0].token_times
        return times[2] - times[1]

    assert seconds_of() == pytest.approx(0.010)
    assert seconds_of(("runner.step_host_ms", 2.5)) == pytest.approx(0.0125)
    assert seconds_of(("scheduler.policy", "chunked_prefill")) == pytest.approx(0.010)


@pytest.mark.parametrize(
    ("profile", "given", "message"),
    [
        ("exampel", {}, "'exampel' .did you mean 'example'"),
        ("linear", {"base_ms": 1}, "prefill_token_us"),
        ("example", {"base_ms": -1}, "base_ms"),
        ("nowhere.py:Nothing", {}, "no file nowhere.py .*to take a step-time source from"),
        ("nowhere.yaml", {}, "cannot read step-time profile nowhere.yaml"),
        ("json:JSONDecoder", {}, "is not a StepTimeSource; derive from StepTimeSource"),
        (
            "STEADY",
            {"each_mss": 1},
            "source Steady: .*each_mss.*; options it has: .*host",
        ),
        ("STEADY", {"each_ms": 1, "base_ms": 3}, "step-time source Steady: .*base_ms"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    profile: str, given: dict[str, object], message: str, steady: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_step_times(profile.replace("STEADY", f"{steady}:Steady"), given)
    assert "\n" not in str(caught.value)


def test_a_file_of_a_source_is_no_linear_profile(steady: Path, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("step_times: steady.py:Steady\neach_ms: 7\n")
    with pytest.raises(ConfigError, match="is not one of the linear formula"):
        load_profile(str(profile))


@pytest.mark.parametrize("formula", BROKEN)
def test_the_contract_catches_a_broken_source(formula: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(STEADY.replace("1e-3 * self.options.each_ms", formula))
    subject = StepTimesSubject.named(str(path), {"each_ms": 1})
    said = []
    for name in filter(lambda name: name.startswith("test_"), vars(StepTimesContract)):
        try:
            getattr(StepTimesContract(), name)(subject)
        except StepTimesViolation as error:
            said.append(str(error))
    assert any(BROKEN[formula] in each for each in said), said


def test_the_contract_catches_decodes_in_a_row_that_are_others(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    others = "    def seconds_of_decodes(self, *counts):\n        return [0.001] * counts[2]\n"
    path.write_text(f"{STEADY}\n{others}")
    subject = StepTimesSubject.named(str(path), {"each_ms": 2})
    with pytest.raises(StepTimesViolation, match="and one by one"):
        StepTimesContract().test_decodes_in_a_row_are_single_steps(subject)
