"""The corpus, and a few hundred cases made of it, always the same: `make fuzz` makes more.

A case that broke the promise once lies in the corpus of its target.
"""

import re
import time
from itertools import islice
from math import ceil
from pathlib import Path

import pytest

from aioserve.params import SamplingParams
from tests.fuzz.bounded import MOST_STILL, Stops
from tests.fuzz.harness import CORPUS, HangError, Runner, Target, bounded
from tests.fuzz.targets import TARGETS
from tests.slow import examples

# Cases beside the corpus and the good ones. `make test` tries a third of them, which takes some
# seconds for all targets together.
NUM_CASES = {
    **{"http": 30, "client": 60, "configs": 60, "models": 9, "starts": 9, "gguf": 42},
    **{"adapters": 30, "grammars": 42, "templates": 15, "logs": 42, "blocks": 21},
    **{"regexes": 4, "schemas": 4, "larks": 4, "stops": 3},
}


@pytest.mark.filterwarnings("ignore")  # of libraries about what they are given
@pytest.mark.parametrize("name", TARGETS)
def test_what_cannot_be_read_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    target = TARGETS[name](tmp_path)
    try:
        runner = Runner(target, seed=0)
        num_cases = runner.num_given + ceil(NUM_CASES[name] / examples(3, slow=1))
        findings = [runner.run(case) for case in islice(runner.cases(), num_cases)]
    finally:
        target.close()
    assert [finding for finding in findings if finding is not None] == []
    assert runner.num_cases == num_cases


def test_every_case_of_the_corpus_is_one_of_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= TARGETS.keys()


class Broken(Target):
    """What breaks the promise in each of its ways."""

    name = "broken"

    def seeds(self) -> list[bytes]:
        return [b"raises\n", b"hangs\n", b"unpickles\n", b"runs\n", b"lines\n", b"good\n"]

    def read(self, kind: str, data: bytes) -> None:
        import pickle
        import runpy

        from aioserve.errors import ConfigError

        if kind == "raises":
            raise KeyError("x")
        if kind == "hangs":
            raise HangError
        if kind == "unpickles":
            pickle.loads(pickle.dumps(Path()))
        if kind == "runs":
            file = self.folder / "code.py"
            file.write_text("x = 1")
            runpy.run_path(str(file))
        if kind == "lines":
            raise ConfigError("a\nb")


def test_each_way_to_break_the_promise_is_found(tmp_path: Path) -> None:
    runner = Runner(Broken(tmp_path), seed=0)
    findings = {case: runner.run(case) for case in islice(runner.cases(), runner.num_given)}
    found = {case: finding.what for case, finding in findings.items() if finding is not None}
    assert found[b"raises\n"] == "raises KeyError: 'x'"
    assert found[b"hangs\n"].startswith("does not end in")
    assert found[b"unpickles\n"].startswith("unpickles pathlib.")
    assert found[b"runs\n"].startswith("runs ")
    assert found[b"lines\n"].startswith("is refused in more than a line")
    assert b"good\n" not in found


def test_a_case_is_ended_that_takes_too_long() -> None:
    def spin() -> None:
        while True:
            pass

    with pytest.raises(HangError), bounded(0.05):
        spin()


class Costly(Stops):
    """Requests that do on the loop what no request may."""

    way = ""

    async def _ask(self, params: SamplingParams) -> None:
        way, self.way = self.way, ""  # one of the three
        if way == "memory":
            taken = bytearray(200 << 20)
            taken[:: 1 << 12] = bytes(len(taken) >> 12)
        if way == "time":
            began = time.process_time()
            while time.process_time() < began + MOST_STILL:
                pass


def test_what_a_case_may_cost_is_bounded_in_memory_and_in_time_on_the_loop(tmp_path: Path) -> None:
    target = Costly(tmp_path)
    try:
        found = {}
        for way in ("", "memory", "time"):
            target.way = way
            found[way] = Runner(target, seed=0).run(target.seeds()[0])
    finally:
        target.close()
    assert found[""] is None
    assert found["memory"] is not None
    assert re.search(r"takes \d+ MiB", found["memory"].what)
    assert found["time"] is not None
    assert "holds the loop for" in found["time"].what
