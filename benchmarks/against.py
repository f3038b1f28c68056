"""Two checkouts in turns: what one costs beside the other, on a machine that others use as well.

A benchmark that can `take_turns` runs here as two processes, each with the code of one checkout,
which do the same work in short rounds, one after the other, on one core. Counted is CPU time, with
the collector off. Neighbours slow both alike: of each pair of rounds the ratio is taken, then the
median of all pairs of a start, and of several starts, because where code and data come to lie makes
a process faster or slower for life. Knows nothing about what is measured.
"""

import argparse
import gc
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from harness import ROOT, Args, Opt, Table

ROUND_SECONDS = 0.015  # long beside a clock's tick, short beside what neighbours do
MAX_UNITS = 200  # of a round
# Of a start. Where one round takes long, fewer do: it has more of neighbours' ups and downs in it.
MAX_SECONDS, MIN_ROUNDS = 3.0, 6


class Work(Protocol):
    """What is measured, in a process of its own."""

    def round(self, num_units: int) -> tuple[float, float]:
        """Do this number of units of work. Returns the CPU seconds that count, and a sum that is
        equal if both sides have done the same.
        """

    def close(self) -> None:
        """End: no further round is asked for."""


class Compared(NamedTuple):
    """One case. `ratio` is this checkout's time to the other's."""

    name: str
    ratio: float
    lowest: float  # of the starts
    highest: float
    is_same_work: bool


def take_turns(make: Callable[[Any], Work]) -> None:
    """Be one of the two: `make` gets a case as plain data. Orders come on stdin, a line each."""
    _take_policies(Path(os.environ["PYTHONPATH"]))
    gc.disable()
    work: Work | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if "case" in order:
            assert work is None  # a process has one: the memory of another would be in the way
            work = make(order["case"])
            gc.collect()
            answer: tuple[float, float] = (0.0, 0.0)
        else:
            assert work is not None
            answer = work.round(order["units"])
        print(json.dumps(answer), flush=True)
    if work is not None:
        work.close()


def _take_policies(root: Path) -> None:
    """An editable install would find those of its own checkout."""
    folder = root / "policies"
    spec = importlib.util.spec_from_file_location(
        "aioserve.policies", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["aioserve.policies"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import aioserve

    assert aioserve.__file__ is not None
    assert Path(aioserve.__file__).is_relative_to(root), f"{aioserve.__file__} is not in {root}"


@contextmanager
def checkout(revision_or_directory: str) -> Iterator[Path]:
    """The files of another revision of this repository, or of a directory, as they are."""
    directory = Path(revision_or_directory)
    if directory.is_dir():
        if not (directory / "aioserve").is_dir():
            raise SystemExit(f"{directory} is no checkout: it has no folder aioserve")
        yield directory.resolve()
        return
    command = ["git", "-C", str(ROOT), "archive", revision_or_directory, "aioserve", "policies"]
    packed = subprocess.run(command, capture_output=True)
    if packed.returncode:
        words = packed.stderr.decode().strip()
        raise SystemExit(f"{revision_or_directory} is no directory and no revision: {words}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder).resolve()


class _Side:
    """One of the two processes."""

    def __init__(self, words: Sequence[str], root: Path) -> None:
        # One seed for both: where dicts and sets have their entries is a matter of chance else.
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, *words, "--turns"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def tell(self, **order: Any) -> None:
        """Give an order."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()

    def hear(self) -> tuple[float, float]:
        """Wait for the answer to an order."""
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(f"one side ended with exit code {self._process.wait()}")
        seconds, check = json.loads(line)
        return seconds, check

    def ask(self, units: int) -> tuple[float, float]:
        """One round."""
        self.tell(units=units)
        return self.hear()

    def stay_on(self, core: int) -> None:
        """Run on no other from now on."""
        os.sched_setaffinity(self._process.pid, {core})

    def __enter__(self) -> "_Side":
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(
    words: Sequence[str],
    cases: Sequence[tuple[str, Any]],
    other: Path,
    *,
    num_starts: int,
    num_rounds: int,
    tolerance: float,
    beside: Callable[[Any], Any] = lambda case: case,
) -> Iterator[Compared]:
    """Each named case, given as plain data, in this checkout, and what `beside` makes of it in
    `other`. One that looks slower by more than `tolerance` is started as often again before it is
    said.
    """
    for name, case in cases:
        ratios: list[float] = []
        is_same_work = True
        while len(ratios) < num_starts or (
            len(ratios) < 2 * num_starts and statistics.median(ratios) > 1 + tolerance
        ):
            pair = (case, beside(case))
            ratio, is_same = _start(words, pair, other, len(ratios), num_rounds)
            ratios.append(ratio)
            is_same_work &= is_same
        yield Compared(name, statistics.median(ratios), min(ratios), max(ratios), is_same_work)


def _start(
    words: Sequence[str], cases: tuple[Any, Any], other: Path, number: int, num_rounds: int
) -> tuple[float, bool]:
    """This one's time to the other's in a start of both, and whether they did the same work;
    `cases` are this one's and the other's.
    """
    # Who is started first, and who goes first, changes from start to start.
    is_first = number % 2 == 1
    with ExitStack() as stack:
        sides = [
            stack.enter_context(_Side(words, root))
            for root in ((ROOT, other) if is_first else (other, ROOT))
        ]
        for side, case in zip(sides, cases if is_first else cases[::-1], strict=True):
            side.tell(case=case)
        for side in sides:
            side.hear()
            if hasattr(os, "sched_getaffinity"):
                cores = sorted(os.sched_getaffinity(0))
                side.stay_on(cores[number % len(cores)])
        units, is_same_at_first = _size(sides)
        ratios, is_same = _rounds(sides, units, num_rounds)
    ratio = statistics.median(ratios)
    return ratio if is_first else 1 / ratio, is_same and is_same_at_first


def _size(sides: Sequence[_Side]) -> tuple[int, bool]:
    """How many units a round should have; warms both up with the same work."""
    units, is_same = 1, True
    while True:
        answers = [side.ask(units) for side in sides]
        is_same &= answers[0][1] == answers[1][1]
        if max(seconds for seconds, _ in answers) > ROUND_SECONDS / 2 or units >= MAX_UNITS:
            return units, is_same
        units = min(2 * units, MAX_UNITS)


def _rounds(sides: Sequence[_Side], units: int, num_rounds: int) -> tuple[list[float], bool]:
    """The first side's time to the second's, of each pair of rounds."""
    ratios, is_same, spent = [], True, 0.0
    for number in range(num_rounds):
        if spent > MAX_SECONDS and number >= MIN_ROUNDS:
            break
        order = (0, 1) if number % 2 else (1, 0)
        answers = {place: sides[place].ask(units) for place in order}
        ratios.append(answers[0][0] / answers[1][0])
        spent += answers[0][0] + answers[1][0]
        is_same &= answers[0][1] == answers[1][1]
    return ratios, is_same


#: What a program that compares checkouts is asked besides its own options.
OPTIONS: dict[str, Any] = {
    "against": Opt(str, "compare with another checkout: a directory, or a revision"),
    "tolerance": Opt(0.03, "by which this checkout may be slower"),
    "starts": Opt(5, "of both sides, for each case"),
    "rounds": Opt(20, "of each start"),
    "turns": Opt(False, argparse.SUPPRESS),  # be one side
}


def report(
    words: Sequence[str],
    cases: Sequence[tuple[str, Any]],
    args: Args,
    beside: Callable[[Any], Any] = lambda case: case,
) -> tuple[dict[str, Any], int]:
    """Compare named cases with another checkout, this one where none is given, and print each as
    it comes. `words` are the script and its command; the code is 1 if this checkout is slower by
    more than `tolerance` somewhere.
    """
    table = Table({"": "<44", "this / other": "13.3f", "lowest": "9.3f", "highest": "9.3f"})
    slower = []
    with checkout(args.against or str(ROOT)) as other:
        found = compare(
            words,
            cases,
            other,
            num_starts=args.starts,
            num_rounds=args.rounds,
            tolerance=args.tolerance,
            beside=beside,
        )
        for one in found:
            name, ratio, lowest, highest, is_same_work = one
            row = {"": name, "this / other": ratio, "lowest": lowest, "highest": highest}
            table.add({**row, "is_same_work": is_same_work})
            if not is_same_work:
                print(f"{name}: they decide otherwise: not the same work")
            if ratio > 1 + args.tolerance:
                slower.append(name)
    if slower:
        print(f"slower by more than {args.tolerance:.0%}: {', '.join(slower)}")
    return {"rows": table.rows}, int(bool(slower))
