"""The contract of routers passes those that ship and catches planted bugs."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioserve.fleet.routing import BaseRouter, available_routers, load_router
from aioserve.testing.routers.contract import RouterContract, RouterSubject
from tests import processes
from tests.slow import mostly_slow
from tests.testing.broken_routers import CAUGHT_BY

RULES = [name for name in vars(RouterContract) if name.startswith("test_")]
COSTLY = (  # of a planted bug that others catch they are not asked
    "test_a_decision_costs_in_proportion",
    "test_answers_do_not_depend_on_hashes_of_strings",
)
RULES.sort(key=lambda name: name in COSTLY)
FEW = ("AlwaysFirst", "LeavesOneOut")  # of the planted bugs
# One that knows prefixes, one that keeps sessions, one that splits requests, one that moves them.
ONE_OF_A_KIND = ("prefix", "session", "prefill_decode", "llumnix")

MINE = """
from aioserve.fleet.routing import BaseRouter, RouterOptions


class Good(BaseRouter):
    class Options(RouterOptions):
        weight: float = 1.0

    def choose(self, request, replicas):
        return min(replicas, key=lambda replica: self.options.weight * replica.work)


class Bad(BaseRouter):
    def choose(self, request, replicas):
        return replicas[-1]
"""


def broken_rules(router: type[BaseRouter]) -> Iterator[str]:
    """What each broken rule says of it."""
    for name in RULES:
        try:
            getattr(RouterContract(), name)(RouterSubject(router))
        except Exception as error:
            yield str(error)


@pytest.mark.parametrize("name", mostly_slow(available_routers(), but=ONE_OF_A_KIND))
def test_a_router_that_ships_keeps_the_contract(name: str) -> None:
    assert list(broken_rules(load_router(name))) == []


@pytest.mark.parametrize(
    "broken",
    mostly_slow(CAUGHT_BY, but=[b for b in CAUGHT_BY if b.__name__ in FEW]),
    ids=lambda broken: broken.__name__,
)
def test_a_planted_bug_is_caught_by_its_own_rule(broken: type[BaseRouter]) -> None:
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


def test_a_sound_router_passes_by_its_file_and_by_its_name(tmp_path: Path) -> None:
    words = ["--aioserve-router=mine.py:Good", "--aioserve-router=mine:Good"]
    code, output = run_pytest(tmp_path, *words, '--aioserve-router-options={"weight": 2}', "-v")
    assert code == 0, output
    for spec in ("mine.py:Good", "mine:Good"):
        assert f"test_an_idle_fleet_serves[{spec}] PASSED" in output
    assert f"{2 * len(RULES)} passed" in output


def test_a_broken_router_fails_with_one_sentence(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "--aioserve-router=mine.py:Bad")
    assert code == 1, output
    assert "a replica is flooded that holds more" in " ".join(output.split())
    assert re.search(r"1 failed, .*\d skipped", output), output
    assert len(output.splitlines()) <= 30, output


def test_an_unknown_router_and_unknown_options_are_usage_errors(tmp_path: Path) -> None:
    for words, said in (
        (["--aioserve-router=sesion"], "unknown router 'sesion' (did you mean 'session'?)"),
        (
            ["--aioserve-router=mine.py:Good", '--aioserve-router-options={"wait": 2}'],
            "--aioserve-router: options of router Good: Object contains unknown field `wait`",
        ),
    ):
        code, output = run_pytest(tmp_path, *words)
        assert code == pytest.ExitCode.USAGE_ERROR
        assert said in output
