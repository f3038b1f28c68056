"""Fewer compute threads while they wait for cores: on files as Linux writes them, and on Linux."""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aioserve.kernels import compute_thread_ids
from aioserve.runner.cpu import machine as this_machine
from aioserve.runner.cpu.machine import (
    ENOUGH,
    MAX_PAUSE,
    MIN_PAUSE,
    ComputeThreads,
    Look,
    num_neighbours,
)

STEP = 0.2  # seconds, and as many between two

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the number is fixed")


class Machine:
    """A clock, and a folder like /proc that says who waited and how long cores were idle."""

    def __init__(self, proc: Path, most: int) -> None:
        self.now = 100.0
        self.proc = proc
        self.started: list[int] = []
        self.files: dict[str, int] = {}
        self.idle, self.waited = 3.0, [5.0] * most
        for thread_id in range(most):
            (proc / "self" / "task" / str(thread_id)).mkdir(parents=True)
        self.write(range(most))
        self.threads = ComputeThreads(most, self.start, proc=proc, clock=lambda: self.now)

    def start(self, count: int) -> Iterable[int]:
        self.started.append(count)
        return range(count)

    def write(self, thread_ids: Iterable[int]) -> None:
        for thread_id in thread_ids:
            waited = round(self.waited[thread_id] * 1e9)
            self.put(f"self/task/{thread_id}/schedstat", f"1234567 {waited:020} 89\n")
        ours, ticks = min(os.sched_getaffinity(0)), round(self.idle * os.sysconf("SC_CLK_TCK"))
        self.put(
            "stat",
            f"cpu  1 2 3 99999 5 6 7 0 0 0\ncpu{ours} 1 2 3 {ticks:020} 5 6 7 0 0 0\n"
            f"cpu99999 1 2 3 {2 * ticks:020} 5 6 7 0 0 0\nintr 1 2 3\n",
        )

    def put(self, name: str, text: str) -> None:
        """Of the same length each time: files that are cut and grow again take 20 times as long."""
        if name not in self.files:
            self.files[name] = os.open(self.proc / name, os.O_WRONLY | os.O_CREAT)
        os.pwrite(self.files[name], text.encode(), 0)

    def close(self) -> None:
        self.threads.close()
        for file in self.files.values():
            os.close(file)

    def run(
        self,
        seconds: float,
        waiting: float = 0.0,
        idle: float = 0.0,
        waiting_between: float = 0.0,
        idle_between: float | None = None,
    ) -> None:
        """Steps, one after the other. Threads wait and cores idle in them, and
        between them: there, those of the compute threads as well, if nothing else is said.
        """
        end = self.now + seconds
        while self.now < end:
            rest = idle + self.threads.count if idle_between is None else idle_between
            self.spend(waiting_between, rest)
            self.threads.begin_step()
            self.spend(waiting, idle)
            self.threads.end_step()

    def run_until_fewer(self, waiting: float) -> None:
        """Steps until a thread has gone, or for so long that none will go."""
        for _ in range(round(20 * ENOUGH / STEP)):
            self.run(STEP, waiting=waiting)
            if self.threads.count < self.threads.most:
                break

    def spend(self, waiting: float, idle: float) -> None:
        """The first thread waits a third of it, the last one the rest."""
        count = self.threads.count
        self.now += STEP
        self.idle += idle * STEP
        if waiting or count < self.threads.most:  # where all compute, nobody asks who idles
            self.waited[0] += waiting * STEP / 3
            self.waited[count - 1] += waiting * STEP * 2 / 3
            self.write({0, count - 1})


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    """A machine of two cores, or of the number given."""
    machine = Machine(tmp_path, getattr(request, "param", 2))
    yield machine
    machine.close()


def test_all_threads_compute_while_few_steps_wait(machine: Machine) -> None:
    machine.run(20, waiting=0.44)
    assert machine.started == [2]


def test_steps_that_wait_go_on_with_fewer_threads(machine: Machine) -> None:
    machine.run(1, waiting=0.6)
    assert machine.threads.count == 1
    assert machine.started == [2, 1]


def test_waiting_between_steps_does_not_count(machine: Machine) -> None:
    machine.run(20, waiting_between=2)
    assert machine.started == [2]


@pytest.mark.parametrize("machine", [8], indirect=True)
@pytest.mark.parametrize(("waiting", "left"), [(0.12, 7), (8 / 9, 7), (8 * 4 / 12, 4), (7.99, 1)])
def test_each_neighbour_costs_a_thread(machine: Machine, waiting: float, left: int) -> None:
    machine.run_until_fewer(waiting)
    assert machine.threads.count == left


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_neighbours_are_counted_by_what_they_leave(count: int) -> None:
    for others in range(200):
        waiting = count - count * count / (count + others)
        assert num_neighbours(waiting, count) == others


def test_every_other_step_is_looked_at_if_they_follow_each_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    look = machine.threads._look

    def note() -> Look | None:
        looked.append(number)
        return look()

    monkeypatch.setattr(machine.threads, "_look", note)
    for number in range(6):  # noqa: B007
        machine.threads.begin_step()
        machine.now += STEP
        machine.threads.end_step()
        machine.now += STEP / 100
    assert looked == [0, 0, 2, 2, 4, 4]


def test_threads_come_back_when_cores_idle(machine: Machine) -> None:
    machine.run(1, waiting=0.6)
    machine.run(MIN_PAUSE / 2)
    assert machine.threads.count == 1
    machine.run(MIN_PAUSE / 2 - 0.2, idle=0.5)
    assert machine.threads.count == 2
    machine.run(10)
    assert machine.started == [2, 1, 2]


@pytest.mark.parametrize("machine", [8], indirect=True)
def test_as_many_threads_come_back_as_cores_idle(machine: Machine) -> None:
    machine.run_until_fewer(waiting=8 * 4 / 12)
    machine.run(6 * ENOUGH, idle=2)
    assert machine.started[:3] == [8, 4, 6]


def test_cores_that_idle_only_between_steps_are_not_free(machine: Machine) -> None:
    machine.run(1, waiting=0.6)
    machine.run(MIN_PAUSE - 1, idle_between=1)
    assert machine.threads.count == 1


def test_tries_become_rare_while_the_neighbour_stays(machine: Machine) -> None:
    def run(seconds: float) -> int:
        tries = len(machine.started)
        end = machine.now + seconds
        while machine.now < end:  # it is felt only where all threads compute
            machine.run(STEP, waiting=0.6 if machine.threads.count == 2 else 0.0)
        return machine.started[tries:].count(2)

    first = run(5 * MIN_PAUSE)
    assert 2 <= first <= 3
    assert run(4 * MAX_PAUSE) <= 5
    machine.run(2 * MAX_PAUSE)  # it has gone, and no core idles
    assert machine.threads.count == 2
    assert run(5 * MIN_PAUSE) == first


def test_threads_that_linux_knows_nothing_of_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    threads = ComputeThreads(2, range, proc=tmp_path)
    for _ in range(3):
        threads.begin_step()
        threads.end_step()
    assert threads.count == 2
    (record,) = caplog.records
    assert "stays at 2" in record.message
    assert "schedstat" in record.message


def test_threads_that_ended_are_replaced() -> None:
    started = []

    def start(count: int) -> list[int]:
        go_on = threading.Event()
        thread = threading.Thread(target=go_on.wait)
        thread.start()
        started.append((thread, go_on))
        return [threading.get_native_id(), thread.native_id or 0]

    threads = ComputeThreads(2, start)
    threads.begin_step()
    thread, go_on = started[0]
    go_on.set()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():  # Linux is later than Python
        time.sleep(0.001)
    threads.end_step()
    threads.begin_step()
    threads.end_step()
    assert len(started) == 2
    assert threads.count == 2
    started[1][1].set()
    threads.close()
    threads.close()


def test_openmp_names_the_threads_that_compute() -> None:
    def ask() -> tuple[list[list[int]], int, set[int]]:
        teams = [compute_thread_ids(count) for count in (3, 1, 3)]
        return (
            teams,
            threading.get_native_id(),
            set(map(int, os.listdir("/proc/self/task"))),
        )

    with ThreadPoolExecutor(1) as executor:  # a thread with a team of its own
        (three, one, again), own, tasks = executor.submit(ask).result()
    assert one == [own]
    assert len(set(three)) == 3
    assert own in three
    assert set(again) <= tasks


def test_two_threads_on_one_core_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "ENOUGH", 0.05)
    core = min(os.sched_getaffinity(0))
    numbers = torch.rand(1 << 20)

    def start(count: int) -> list[int]:
        torch.set_num_threads(count)
        thread_ids = compute_thread_ids(count)
        for thread_id in thread_ids:
            os.sched_setaffinity(thread_id, {core})
        return thread_ids

    def run() -> int:
        threads = ComputeThreads(2, start)
        for _ in range(10_000):
            threads.begin_step()
            torch.exp(numbers)
            threads.end_step()
            if threads.count == 1:
                break
        threads.close()
        return threads.count

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(run).result() == 1
