"""An evaluation has the stages that a candidate passed, a score, and the story of its failure."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aioserve.cli.main import main
from aioserve.errors import ConfigError
from aioserve.lab.evaluate import Evaluator, Trials, evaluate
from aioserve.lab.evaluate.evaluator import STAGES, read_policy
from tests.lab.evaluate import cheats

SMALL = Trials(
    workloads=("documents",),
    held_out=("code",),
    held_out_seeds=(201,),
    requests=30,
    random_days=1,
    waiting=20,
    seconds=600,
)


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(SMALL) as made:
        yield made


def test_a_sound_policy_passes_every_stage(evaluator: Evaluator) -> None:
    found = evaluator.evaluate(read_policy("chunked_prefill"), "mine.py")
    assert found.artifacts == {}
    assert found.metrics["stages_passed"] == len(STAGES)
    assert 0 < found.score == found.metrics["in_time_documents"] <= 1
    assert found.metrics["held_out_gain"] == 0, "it is its own reference"
    assert all(isinstance(value, float) for value in found.metrics.values())


@pytest.mark.parametrize(
    ("source", "failure", "words"),
    [
        (cheats.NONSENSE, "unparsable", "mine.py:1"),
        (cheats.READS_FILE, "refused", "mine.py:13: uses open"),
        (cheats.LOSES, "broken", "Broken rule: every request ends"),
        ("x = 1", "failed", "defines no policy"),
        (cheats.policy(begin="1 / 0"), "broken", "ZeroDivisionError"),
    ],
)
def test_a_failing_candidate_comes_back_with_its_story(
    evaluator: Evaluator, source: str, failure: str, words: str
) -> None:
    found = evaluator.evaluate(source, "mine.py")
    assert found.score == 0
    assert found.metrics["stages_passed"] == 0
    assert found.failure == failure, found
    assert found.artifacts["failure_stage"] == STAGES[0]
    assert words in found.artifacts["story"]


def test_the_same_candidate_has_the_same_score_in_another_process(evaluator: Evaluator) -> None:
    first = evaluator.evaluate(cheats.HONEST, "mine.py", stages=2)
    with Evaluator(SMALL) as other:
        assert other.evaluate(cheats.HONEST, "mine.py", stages=2) == first


def test_open_evolve_gets_a_result_of_its_own_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its class is stood in for by its public fields, which are all that is used of it."""

    @dataclass
    class EvaluationResult:
        metrics: dict[str, float]
        artifacts: dict[str, str] = field(default_factory=dict)

    module: Any = ModuleType("openevolve.evaluation_result")
    module.EvaluationResult = EvaluationResult
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = tmp_path / "program.py"
    path.write_text(cheats.NONSENSE)
    found = evaluate(str(path), requests=60)
    assert isinstance(found, EvaluationResult)
    assert found.metrics["combined_score"] == 0
    assert found.artifacts["failure"] == "unparsable"


def test_the_command_prints_the_story_and_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, data = tmp_path / "mine.py", tmp_path / "found.json"
    path.write_text(cheats.READS_CLOCK)
    assert main(["evaluate", str(path), "--json", str(data)]) == 1
    assert "mine.py:1: imports time" in capsys.readouterr().out
    assert json.loads(data.read_text())["metrics"]["combined_score"] == 0


def test_what_trains_is_not_held_out() -> None:
    with pytest.raises(ConfigError, match="code trains and is held out with the same seed"):
        Trials(workloads=("code",), seeds=(201,), held_out=("code",))
