"""The contract of autoscalers passes those that ship and catches planted bugs."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioserve.fleet.routing import AutoscalerInterface, available_autoscalers, load_autoscaler
from aioserve.testing.autoscalers.contract import AutoscalerContract, AutoscalerSubject
from tests import processes
from tests.slow import mostly_slow
from tests.testing.broken_autoscalers import CAUGHT_BY

RULES = [name for name in vars(AutoscalerContract) if name.startswith("test_")]
FEW = ("Fraction", "NeverGrows")  # of the planted bugs

MINE = """
import math
from aioserve.fleet.routing import AutoscalerInterface, AutoscalerOptions


class Good(AutoscalerInterface):
    class Options(AutoscalerOptions):
        requests: int = 9

    def decide(self, fleet):
        count = sum(replica.num_requests for replica in fleet.replicas)
        return self.steady(math.ceil(count / self.options.requests), fleet, 60.0)


class Bad(AutoscalerInterface):
    def decide(self, fleet):
        return fleet.max_replicas
"""


def broken_rules(autoscaler: type[AutoscalerInterface]) -> Iterator[str]:
    """What each broken rule says of it."""
    for name in RULES:
        try:
            getattr(AutoscalerContract(), name)(AutoscalerSubject(autoscaler))
        except Exception as error:
            yield str(error)


@pytest.mark.parametrize("name", mostly_slow(available_autoscalers(), but=["slo_attainment"]))
def test_an_autoscaler_that_ships_keeps_the_contract(name: str) -> None:
    assert list(broken_rules(load_autoscaler(name))) == []


@pytest.mark.parametrize(
    "broken",
    mostly_slow(CAUGHT_BY, but=[b for b in CAUGHT_BY if b.__name__ in FEW]),
    ids=lambda broken: broken.__name__,
)
def test_a_planted_bug_is_caught_by_its_own_rule(broken: type[AutoscalerInterface]) -> None:
    said = []
    for each in broken_rules(broken):
        said.append(each)
        if re.search(CAUGHT_BY[broken], each, re.DOTALL):
            return
    pytest.fail(f"caught by {said}")


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "mine.py").write_text(MINE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    result = processes.run(*command, *arguments, cwd=folder)
    return result.returncode, result.stdout + result.stderr


def test_a_sound_autoscaler_passes_by_its_file_with_options(tmp_path: Path) -> None:
    words = "--aioserve-autoscaler=mine.py:Good", '--aioserve-autoscaler-options={"requests": 5}'
    code, output = run_pytest(tmp_path, *words, "-v")
    assert code == 0, output
    assert "test_a_start_takes_its_time[mine.py:Good] PASSED" in output
    assert f"{len(RULES)} passed" in output


def test_a_broken_autoscaler_fails_with_one_sentence(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "--aioserve-autoscaler=mine.py:Bad")
    assert code == 1, output
    assert "the load ended at 660 s, and the least is 2" in " ".join(output.split())
    assert re.search(r"1 failed, .*\d skipped", output), output
    assert len(output.splitlines()) <= 30, output


def test_an_unknown_autoscaler_and_unknown_options_are_usage_errors(tmp_path: Path) -> None:
    for words, said in (
        (["--aioserve-autoscaler=queue_token"], "(did you mean 'queue_tokens'?)"),
        (
            ["--aioserve-autoscaler=mine.py:Good", '--aioserve-autoscaler-options={"wait": 2}'],
            "options of autoscaler Good: Object contains unknown field `wait`",
        ),
    ):
        code, output = run_pytest(tmp_path, *words)
        assert code == pytest.ExitCode.USAGE_ERROR
        assert said in output
