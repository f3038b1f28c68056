"""Ranks that cannot start, that die, and that nobody ends: what the first one gets to know."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from aioserve.config import EngineConfig, ModelConfig, RunnerConfig
from aioserve.errors import RunnerDeadError
from aioserve.gpu.tensor_parallel import processes
from aioserve.gpu.tensor_parallel.processes import OtherRanks, Sampled
from tests.processes import COMPUTING_SECONDS, PATIENCE, until

FAKE = "tests.runner.fake_rank"


class Ranks(OtherRanks):
    """Two fake ones beside the first; `deaths` is what was said of them."""

    program = FAKE

    def __init__(self, behaviour: str, **settings: Any) -> None:
        runner = RunnerConfig(tensor_parallel_size=3, **settings)
        config = EngineConfig(model=ModelConfig(model=behaviour), runner=runner)
        self.deaths: SimpleQueue[RunnerDeadError] = SimpleQueue()
        super().__init__(FAKE, config, self.deaths.put)


@pytest.fixture
def start() -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(behaviour: str, **settings: Any) -> Ranks:
        started.append(Ranks(behaviour, **settings))
        return started[-1]

    yield start
    for ranks in started:
        pids = ranks.pids
        ranks.close()
        assert not any(map(psutil.pid_exists, pids))


def test_ranks_that_have_loaded_are_told_and_end_when_they_are_closed(
    start: Callable[[str], Ranks],
) -> None:
    ranks = start("waits")
    assert ranks.meeting.parent.exists()
    ranks.wait_loaded()
    assert not ranks.meeting.parent.exists()  # whatever ends them leaves nothing behind
    ranks.tell(Sampled([1, 2]))
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the first rank, which drains
        os.kill(ranks.pids[0], number)
    ranks.tell(Sampled(None))
    ranks.close()
    assert ranks.deaths.empty()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [("fails", "rank [12] of 3: rank [12] says why"), ("leaves", "of 3: process .* exit code 7")],
)
def test_a_rank_that_cannot_start_says_why_in_a_line(
    behaviour: str, words: str, start: Callable[[str], Ranks]
) -> None:
    ranks = start(behaviour)
    for wait in (ranks.wait_here, ranks.wait_loaded):
        with pytest.raises(RunnerDeadError, match=words) as error:
            wait()
        assert "\n" not in str(error.value)


def test_a_rank_that_dies_is_named_although_nobody_asks(start: Callable[[str], Ranks]) -> None:
    ranks = start("waits")
    ranks.wait_loaded()
    os.kill(ranks.pids[1], signal.SIGKILL)
    words = f"rank 2 of 3: process {ranks.pids[1]} has ended, killed by SIGKILL"
    assert str(ranks.deaths.get(timeout=PATIENCE)) == words
    with pytest.raises(RunnerDeadError, match=words):
        ranks.tell(Sampled(None))
    assert str(ranks.why(ValueError("what it led to"))) == words


def test_a_rank_that_does_not_leave_is_killed(
    start: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CLOSE_SECONDS", 0.1)
    ranks = start("stays")
    ranks.wait_loaded()
    ranks.close()


def test_a_rank_that_reads_nothing_is_not_waited_for_for_ever(
    start: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "REASON_SECONDS", 0.01)
    monkeypatch.setattr(processes, "CLOSE_SECONDS", 0.1)
    ranks = start("deaf", rank_timeout=0.25)
    ranks.wait_loaded()
    long = Sampled(list(range(1 << 22)))  # more than any socket holds
    with pytest.raises(RunnerDeadError, match=r"rank 1 has not listened for 0.25 s \(runner\."):
        ranks.tell(long)
    ranks.close()


CODE = """
import os, signal
from tests.runner.test_rank_processes import Ranks
ranks = Ranks("stays")
ranks.wait_loaded()
print(*ranks.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_do_not_outlive_one_that_is_killed() -> None:
    killed = subprocess.run(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True, timeout=COMPUTING_SECONDS
    )
    assert killed.returncode == -signal.SIGKILL
    for pid in map(int, killed.stdout.split()):
        until(lambda pid=pid: _is_over(pid), f"process {pid} ends")  # type: ignore[misc]


def _is_over(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # where nobody collects them
    return True
