"""The mistakes of a new author: each is one line that says what is wrong and where, in a
comparison, in a server and in the kit.
"""

import sys
from pathlib import Path

import pytest

from aioserve.cli.main import main
from tests import processes

HEAD = "from aioserve.scheduler import BaseScheduler\n\n\nclass Mine(BaseScheduler):\n"  # 4 lines

# The class' body, from line 5 on, and what is said of it.
MISTAKES = {
    "forgot return": (
        "    def schedule(self):\n        self.new_step().output()\n",
        "got None (is `return step.output()` missing?)",
    ),
    "forgot output": (
        "    def schedule(self):\n        return self.new_step()\n",
        "got the step itself (return its output())",
    ),
    "returned a list": ("    def schedule(self):\n        return [1]\n", "got [1]"),
    "held for ever": (
        "    def schedule(self):\n        return self.new_step().output()\n",
        "has scheduled no request for 30 s although 3 wait",
    ),
    "admitted an id": (
        "    def schedule(self):\n"
        "        step = self.new_step()\n"
        "        step.admit(list(self.waiting)[0].request_id)\n"
        "        return step.output()\n",
        "admit() takes a Request, got '0' (mine.py:7)",
    ),
    "halved a budget": (
        "    def schedule(self):\n"
        "        step = self.new_step(5 / 2)\n"
        "        for request in list(self.running):\n            step.run(request)\n"
        "        for request in list(self.waiting):\n            step.admit(request)\n"
        "        return step.output()\n",
        "max_tokens must be ints (n // 2) (mine.py:11)",
    ),
    "misspelt an attribute": (
        "    def schedule(self):\n        return self.new_stop().output()\n",
        "'Mine' object has no attribute 'new_stop'\") in schedule() (mine.py:6)",
    ),
    "raised in order": (
        "    def order(self, request):\n        return request.prioriti\n"
        "    def schedule(self):\n        return self.new_step().output()\n",
        "in order() (mine.py:6)",
    ),
    "raised in __init__": (
        "    def __init__(self, *words, **limits):\n"
        "        super().__init__(*words, **limits)\n"
        "        self.limit = self.config.limit\n"
        "    def schedule(self):\n        return self.new_step().output()\n",
        "in __init__() (mine.py:7)",
    ),
    "misspelt the method": (
        "    def shedule(self):\n        return self.new_step().output()\n",
        "does not implement schedule (is it 'shedule'?)",
    ),
    "options of another kind": (
        "    class Options:\n        size = 3\n"
        "    def schedule(self):\n        return self.new_step().output()\n",
        "policy Mine: its Options must derive from PolicyOptions",
    ),
    "did not finish a line": ("    def schedule(self:\n", "mine.py:5: cannot import the policy"),
    "imported what is not there": (
        "    import nowhere\n",
        "mine.py:5: cannot import the policy: ModuleNotFoundError: No module named 'nowhere'",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With three requests in a file, and settings that name `mine.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text(
        '{"arrival": 0, "prompt_tokens": 9, "output_tokens": 3}\n' * 3
    )
    (tmp_path / "mine.yaml").write_text("scheduler: {policy: mine.py}\n")
    return tmp_path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_comparison_says_in_one_line_what_is_wrong(
    mistake: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body, message = MISTAKES[mistake]
    (folder / "mine.py").write_text(HEAD + body)
    assert main(["compare", "fcfs", "mine.yaml", "--workload", "t.jsonl"]) in (1, 2)
    printed = capfd.readouterr()
    assert message in printed.err
    assert printed.err.startswith("aioserve: error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_server_and_the_kit_say_it_as_well(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body, message = MISTAKES["raised in __init__"]
    (folder / "mine.py").write_text(HEAD + body)
    assert main(["serve", "--policy", "mine.py", "--runner", "simulated", "--port", "0"]) == 1
    said = capfd.readouterr().err
    assert message in said.splitlines()[-1]
    assert "Traceback" not in said
    tested = processes.run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"),
        "--aioserve-policy=mine.py",
        cwd=folder,
    )
    assert message in " ".join(tested.stdout.split())
    assert len(tested.stdout.splitlines()) < 20
