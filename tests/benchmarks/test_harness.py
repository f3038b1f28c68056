"""The harness of the benchmarks: command lines, turns, ratios, tables, servers that end."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import Opt, Program, Table, by_turns, percentile, ratio, serving, tree, turns

from tests.processes import run

FLAGS = ("--runner", "simulated", "--log-level", "warning")


def test_an_option_has_the_type_of_its_default() -> None:
    program = Program("A benchmark.")
    one = program.command("one", {"model": str}, rounds=3, kinds=["a"], cpu_time=False, seed=int)
    one(lambda args: {})
    program.command("two", {"models": ["x"]}, kind=Opt("a", "of 2%", "ab"))(lambda args: {})
    args = program.parse(["one", "tiny", "--rounds", "5", "--kinds", "b", "c", "--cpu-time"])
    assert (args.model, args.rounds, args.kinds) == ("tiny", 5, ["b", "c"])
    assert args.cpu_time is True
    assert args.seed is None
    args = program.parse(["two"])
    assert (args.models, args.kind) == (["x"], "a")
    for words in ([], ["one"], ["two", "--kind", "c"]):
        with pytest.raises(SystemExit):
            program.parse(words)


def test_the_last_line_is_json_with_the_machine_and_the_exit_code_is_the_commands(
    tmp_path: Path,
) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        "from harness import Program\n"
        "program = Program('One.')\n"
        "@program.command(rounds=2)\n"
        "async def measure(args):\n"
        "    return {'rounds': args.rounds, 'nothing': float('nan')}, 3\n"
        "program.main()\n"
    )
    told = run_script(script)
    assert told.returncode == 3
    found = json.loads(told.stdout.splitlines()[-1])
    assert (found["rounds"], found["nothing"]) == (2, None)
    assert found["machine"].keys() == {"cpu", "cores", "load", "revision"}


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the harness where the benchmarks find it."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    lines = f"import sys; sys.path.insert(0, {folder!r})\nexec(open({str(script)!r}).read())"
    return run(sys.executable, "-c", lines)


def test_sigterm_ends_a_program_while_a_policy_runs_and_is_no_failure_of_it(
    tmp_path: Path,
) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        "import signal\n"
        "from harness import Program\n"
        "from aioserve.policies.fcfs import FCFSScheduler\n"
        "from aioserve.testing import SchedulerHarness\n"
        "class Ended(FCFSScheduler):\n"
        "    def schedule(self):\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "        return super().schedule()\n"
        "program = Program('One.')\n"
        "@program.command()\n"
        "def measure(args):\n"
        "    harness = SchedulerHarness(Ended, tolerates_errors=True)\n"
        "    harness.add_request('a', [1, 2, 3])\n"
        "    harness.step()\n"
        "program.main()\n"
    )
    told = run_script(script)
    assert (told.returncode, told.stdout, told.stderr) == (143, "", "")


def test_each_goes_first_in_turn_and_ratios_are_within_a_round() -> None:
    assert list(turns("ab", 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    called: list[str] = []
    found = by_turns({name: lambda n=name: called.append(n) for name in "ab"}, 3)
    assert called == list("abbaab")
    assert [len(seconds) for seconds in found.values()] == [3, 3]
    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0
    assert math.isnan(ratio([1.0], [0.0]))


def test_percentiles_are_those_of_numpy() -> None:
    values = [5.0, 1.0, 4.0, 2.5]
    for which in (0, 37, 50, 99, 100):
        assert percentile(values, which) == pytest.approx(float(np.percentile(values, which)))
    assert math.isnan(percentile([], 50))


def test_a_row_is_printed_under_its_heads_and_kept_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table({"step": "<8", "ms": "8.2f", "share": "8.1%"}, "a title")
    table.add({"step": "one", "ms": 1.234, "share": 0.5, "more": 7})
    table.add({"step": "two", "ms": None})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "a title",
        "step          ms   share",
        "one         1.23   50.0%",
        "two            -       -",
    ]
    assert table.rows[0]["more"] == 7


def test_a_server_answers_in_the_block_and_has_ended_behind_it() -> None:
    with serving(*FLAGS) as server:
        assert "aioserve_" in server.get("/metrics")
        assert server.cpu_seconds() > 0
        assert server.pid in tree(server.pid)
    assert server.process.returncode is not None


def test_a_server_that_ends_at_once_is_told_with_its_log() -> None:
    with pytest.raises(RuntimeError, match="unheard-of"), serving("--unheard-of"):
        pass


def test_pages_name_programs_and_commands_that_there_are() -> None:
    root = Path(__file__).parents[2]
    pages = [*root.glob("docs/*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    named = [
        (page.name, *found)
        for page in pages
        for found in re.findall(
            r"python benchmarks/(\w+)\.py(?: +([\w-]+))?", page.read_text(encoding="utf-8")
        )
    ]
    assert len(named) > 50
    for page, name, word in named:
        source = root / "benchmarks" / f"{name}.py"
        assert source.exists(), (page, name)
        commands = re.findall(r"^@program\.command\(\s*\"([\w-]+)\"", source.read_text(), re.M)
        assert not commands or word in commands, (page, name, word)


def test_no_program_has_the_name_of_a_package_that_transformers_looks_for() -> None:
    """The folder of a program is the first on its path: transformers imported our `kernels`."""
    from transformers.utils import import_utils

    looked_for = re.findall(
        r"_is_package_available\(\s*\"(\w+)\"", Path(import_utils.__file__).read_text("utf-8")
    )
    assert len(looked_for) > 50
    programs = {path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")}
    assert not programs & {*looked_for, *sys.stdlib_module_names}
