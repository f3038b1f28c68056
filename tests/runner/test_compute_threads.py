"""Fewer compute threads while they wait for cores: on files as Linux writes them, and on Linux."""

import os
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aioserve.kernels import compute_thread_ids
from aioserve.runner import compute_threads
from aioserve.runner.compute_threads import (
    ENOUGH,
    MAX_PAUSE,
    TASKS,
    ComputeThreads,
    num_neighbours,
)

STEP = 0.1  # seconds, and as many between two


class Machine:
    """A clock, and a folder for each thread with its times on a core and waiting for one."""

    def __init__(self, tasks: Path, most: int) -> None:
        self.now = 100.0
        self.tasks = tasks
        self.started: list[int] = []
        self.waited = [5.0] * most
        for thread_id in range(most):
            (tasks / str(thread_id)).mkdir()
        self.write(range(most))
        self.threads = ComputeThreads(most, self.start, tasks=tasks, clock=lambda: self.now)

    def start(self, count: int) -> Iterable[int]:
        self.started.append(count)
        return range(count)

    def write(self, thread_ids: Iterable[int]) -> None:
        for thread_id in thread_ids:
            waited = round(self.waited[thread_id] * 1e9)
            (self.tasks / str(thread_id) / "schedstat").write_text(f"1234567 {waited} 89\n")

    def run(self, seconds: float, waiting: float = 0.0, between_steps: float = 0.0) -> None:
        """Steps, one after the other. `waiting` threads wait in them, and so many between them."""
        end = self.now + seconds
        while self.now < end:
            self.wait(between_steps * STEP)
            self.now += STEP
            self.threads.begin_step()
            self.wait(waiting * STEP)
            self.now += STEP
            self.threads.end_step()

    def wait(self, seconds: float) -> None:
        """The first thread waits a third of it, the last one the rest."""
        if seconds:
            count = self.threads.count
            self.waited[0] += seconds / 3
            self.waited[count - 1] += seconds * 2 / 3
            self.write({0, count - 1})


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    """Of so many cores; two if nobody says."""
    return Machine(tmp_path, getattr(request, "param", 2))


def test_all_threads_compute_while_few_steps_wait(machine: Machine) -> None:
    machine.run(20, waiting=0.3)
    assert machine.started == [2]


def test_steps_that_wait_go_on_with_fewer_threads(machine: Machine) -> None:
    machine.run(1, waiting=0.6)
    assert machine.threads.count == 1
    assert machine.started == [2, 1]


def test_waiting_between_steps_does_not_count(machine: Machine) -> None:
    machine.run(20, between_steps=2)
    assert machine.started == [2]


@pytest.mark.parametrize("machine", [8], indirect=True)
@pytest.mark.parametrize(("waiting", "left"), [(0.1, 7), (8 / 9, 7), (8 * 4 / 12, 4), (7.99, 1)])
def test_each_neighbour_costs_a_thread(machine: Machine, waiting: float, left: int) -> None:
    machine.run(3 * ENOUGH, waiting=waiting)
    assert machine.threads.count == left


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_neighbours_are_counted_by_what_they_leave(count: int) -> None:
    for others in range(200):
        waiting = count - count * count / (count + others)
        assert num_neighbours(waiting, count) == others


def test_all_threads_come_back_when_the_neighbour_has_gone(machine: Machine) -> None:
    machine.run(1, waiting=0.6)
    machine.run(3)
    assert machine.threads.count == 2
    machine.run(10)
    assert machine.started == [2, 1, 2]


def test_tries_become_rare_while_the_neighbour_stays(machine: Machine) -> None:
    def run(seconds: float) -> int:
        tries = len(machine.started)
        end = machine.now + seconds
        while machine.now < end:  # it is felt only where all threads compute
            machine.run(2 * STEP, waiting=0.6 if machine.threads.count == 2 else 0.0)
        return machine.started[tries:].count(2)

    assert 3 <= run(20) <= 5
    assert run(10 * MAX_PAUSE) <= 11
    machine.run(60)  # it has gone
    assert machine.threads.count == 2
    assert 3 <= run(20) <= 5


def test_threads_that_linux_knows_nothing_of_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    threads = ComputeThreads(2, range, tasks=tmp_path)
    for _ in range(3):
        threads.begin_step()
        threads.end_step()
    assert threads.count == 2
    (record,) = caplog.records
    assert "stays at 2" in record.message
    assert "schedstat" in record.message


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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
    while (TASKS / str(thread.native_id)).exists():  # Linux is a little later than Python
        time.sleep(0.001)
    threads.end_step()
    threads.begin_step()
    threads.end_step()
    assert len(started) == 2
    assert threads.count == 2
    started[1][1].set()
    threads.close()
    threads.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_openmp_names_the_threads_that_compute() -> None:
    def ask() -> tuple[list[list[int]], int, set[int]]:
        teams = [compute_thread_ids(count) for count in (3, 1, 3)]
        return teams, threading.get_native_id(), {int(name) for name in os.listdir(TASKS)}

    with ThreadPoolExecutor(1) as executor:  # a thread with a team of its own
        (three, one, again), own, tasks = executor.submit(ask).result()
    assert one == [own]
    assert len(set(three)) == 3
    assert own in three
    assert set(again) <= tasks


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_threads_on_one_core_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_threads, "ENOUGH", 0.05)
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
