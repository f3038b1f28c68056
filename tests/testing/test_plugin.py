"""`pytest --aioserve-policy ...`, `--aioserve-format`, `--aioserve-router`, `--aioserve-autoscaler`
as a stranger runs them: in a folder of their own, nothing else.
"""

import re
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.slow import mostly_slow

GOOD = """
from aioserve.scheduler import BaseScheduler, PolicyOptions, PositiveInt


class Good(BaseScheduler):
    class Options(PolicyOptions):
        most: PositiveInt = 100

    def schedule(self):
        step = self.new_step(self.options.most)
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


class Bad(Good):
    def finish_requests(self, request_ids, finished_status):
        super().finish_requests(request_ids, finished_status)


class Raises(Good):
    def order(self, request):
        return request.prioriti
"""


ROUTERS = """
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
AUTOSCALERS = """
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
FORMATS = """
from aioserve.features.formats.json_formats import HermesParser


class Good(HermesParser):
    pass


class Bad(HermesParser):
    def give_back(self):
        self.held = None
"""


def run_pytest(folder: Path, *arguments: str, mine: str = GOOD) -> tuple[int, str]:
    """In `folder`, with few random traffics."""
    (folder / "mine.py").write_text(mine)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--aioserve-examples=3"]
    command += ["-p", "no:schemathesis"]  # imports a lot, and says nothing here
    result = processes.run(*command, *arguments, cwd=folder)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_a_sound_policy_passes_in_an_empty_folder_whatever_it_is_called(tmp_path: Path) -> None:
    code, output = run_pytest(
        tmp_path,
        "--aioserve-policy=fcfs",
        "--aioserve-policy=mine:Good",
        f"--aioserve-policy={tmp_path / 'mine.py'}:Good",
        "-v",
    )
    assert code == 0, output
    assert output.count("test_no_rule_is_broken_under_random_traffic") == 3 * 2
    assert "[fcfs-1] PASSED" in output
    assert "[mine:Good-2] PASSED" in output
    assert re.search(
        r"fcfs: its slowest schedule\(\) took [\d.]+ ms here, with \d+ requests", output
    )


@pytest.mark.parametrize("spec", mostly_slow(["mine:Bad", "mine.py:Bad"], but=["mine:Bad"]))
def test_a_broken_policy_fails_on_a_screen_with_a_program_that_shows_it(
    tmp_path: Path, spec: str
) -> None:
    code, output = run_pytest(tmp_path, f"--aioserve-policy={spec}")
    assert code == 1, output
    assert_told_on_a_screen(output, tmp_path)


def assert_told_on_a_screen(output: str, folder: Path) -> None:
    """What `Bad` does wrong, with a program that shows it in `folder`."""
    assert "finish_requests must return a list of the ids that ended, got None" in output
    # the same would be said again and again
    assert re.search(r"1 failed, .*\b[345]\d skipped", output), output[-700:]
    assert len(output.splitlines()) <= 40, output
    program = output.split("To reproduce:")[1].split("====")[0]
    result = processes.run(sys.executable, "-c", program, cwd=folder)
    assert "finish_requests must return a list" in result.stderr


@pytest.mark.slow
def test_the_line_of_the_policy_is_shown(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, "--aioserve-policy=mine:Raises")
    assert "'Request' object has no attribute 'prioriti'" in output
    assert re.search(r"in mine.py:\d+, order\(\): return request.prioriti\n", output), output


@pytest.mark.slow
def test_maxfail_goes_on_after_the_first_broken_rule(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, "--aioserve-policy=mine:Bad", "--maxfail=2")
    assert "2 failed" in output


@pytest.mark.slow
def test_a_contract_in_a_file_of_ones_own_is_told_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(
        "from aioserve.testing.contract import PolicyContract\n"
        "from mine import Bad\n"
        "class TestBad(PolicyContract):\n"
        "    policy = Bad\n"
        "    max_examples = 3\n"
    )
    code, output = run_pytest(tmp_path, "test_bad.py", "-k", "leaves")
    assert code == 1
    assert "To reproduce:" in output
    assert "with subject.harness(" not in output
    assert "2 failed" in output


@pytest.mark.slow
def test_options_reach_the_policy(tmp_path: Path) -> None:
    arguments = ("--aioserve-policy=mine:Good", "--aioserve-policy-options")
    assert run_pytest(tmp_path, *arguments, '{"most": 5}')[0] == 0


BAD_WORDS = [
    (GOOD, ("--aioserve-policy=fcsf",), "unknown policy 'fcsf'"),
    (GOOD, ("--aioserve-policy=mine.py:Good", '--aioserve-policy-options={"moist": 5}'), "moist"),
    (GOOD, ("--aioserve-policy-options=[5]",), "a JSON object is needed"),
    (
        FORMATS,
        ("--aioserve-format=hermse",),
        "--aioserve-format: unknown format 'hermse' (did you mean 'hermes'?)",
    ),
    (
        ROUTERS,
        ("--aioserve-router=sesion",),
        "unknown router 'sesion' (did you mean 'session'?)",
    ),
    (
        ROUTERS,
        ("--aioserve-router=mine.py:Good", '--aioserve-router-options={"wait": 2}'),
        "--aioserve-router: options of router Good: Object contains unknown field `wait`",
    ),
    (AUTOSCALERS, ("--aioserve-autoscaler=queue_token",), "(did you mean 'queue_tokens'?)"),
    (
        AUTOSCALERS,
        ("--aioserve-autoscaler=mine.py:Good", '--aioserve-autoscaler-options={"wait": 2}'),
        "options of autoscaler Good: Object contains unknown field `wait`",
    ),
]


@pytest.mark.parametrize(("mine", "words", "said"), BAD_WORDS)
def test_an_unknown_name_or_option_is_a_usage_error(
    mine: str,
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: such a run ends before it collects anything."""
    (tmp_path / "mine.py").write_text(mine)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    own = ["-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "aioserve.testing.plugin"]
    assert pytest.main([*own, *words]) == pytest.ExitCode.USAGE_ERROR
    assert said in capsys.readouterr().err


SOUND = [
    (FORMATS, ("--aioserve-format=mine.py:Good", "--aioserve-format=mistral"), "is_read_back"),
    (
        ROUTERS,
        (
            *("--aioserve-router=mine.py:Good", "--aioserve-router=mine:Good"),
            '--aioserve-router-options={"weight": 2}',
        ),
        "test_an_idle_fleet_serves",
    ),
    (
        AUTOSCALERS,
        ("--aioserve-autoscaler=mine.py:Good", '--aioserve-autoscaler-options={"requests": 5}'),
        "test_a_start_takes_its_time",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mine", "words", "rule"), SOUND)
def test_what_is_sound_passes_by_its_file_and_by_its_name(
    mine: str, words: tuple[str, ...], rule: str, tmp_path: Path
) -> None:
    code, output = run_pytest(tmp_path, *words, "-v", mine=mine)
    assert code == 0, output
    for word in words:
        option, _, spec = word.partition("=")
        assert option.endswith("-options") or f"{rule}[{spec}] PASSED" in output


BROKEN = [
    (
        FORMATS,
        "--aioserve-format=mine:Bad",
        "Bad loses or changes text that is no call: it reads .*The text, in 1 pieces: "
        r"\['<tool_call>\{\"a\": 1\}kept0kept'\]",
    ),
    (ROUTERS, "--aioserve-router=mine.py:Bad", "a replica is flooded that holds more"),
    (
        AUTOSCALERS,
        "--aioserve-autoscaler=mine.py:Bad",
        "the load ended at 660 s, and the least is 2",
    ),
]


@pytest.mark.parametrize(("mine", "word", "said"), mostly_slow(BROKEN, but=[BROKEN[0]]))
def test_what_is_broken_fails_on_a_screen_in_words(
    mine: str, word: str, said: str, tmp_path: Path
) -> None:
    code, output = run_pytest(tmp_path, word, mine=mine)
    assert code == 1, output
    assert re.search(said, " ".join(output.split())), output
    assert re.search(r"1 failed, .*\d skipped", output), output
    assert len(output.splitlines()) <= 30, output


@pytest.mark.slow
def test_a_policy_and_a_format_can_be_tested_in_one_run(tmp_path: Path) -> None:
    code, output = run_pytest(
        tmp_path, "--aioserve-format=hermes", "--aioserve-policy=fcfs", "-v", "-k", "cut or leaves"
    )
    assert code == 0, output
    assert "[hermes] PASSED" in output
    assert "[fcfs-1] PASSED" in output


@pytest.mark.slow
def test_the_contract_runs_alone_unless_other_tests_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    for arguments, count in (
        ([], 0),
        (["test_own.py"], 1),
        (["--pyargs", "aioserve.testing.contract", "test_own.py"], 1),
    ):
        code, output = run_pytest(tmp_path, "--aioserve-policy=mine:Good", "-v", *arguments)
        assert code == 0, output
        assert output.count("test_own PASSED") == count
        assert output.count("random_traffic") == 2


def test_without_the_option_the_plugin_loads_nothing_and_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\n"
        "def test_own():\n"
        "    heavy = ('aioserve.scheduler', 'aioserve.engine', 'torch')\n"
        "    assert [name for name in heavy if name in sys.modules] == []\n"
    )
    code, output = run_pytest(tmp_path, "-v")
    assert code == 0, output
    assert "1 passed" in output
