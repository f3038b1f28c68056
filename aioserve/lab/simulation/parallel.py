"""Simulated runs on several cores: each is a world of its own, so they only share the machine.

Knows processes; knows nothing about what a run is made of.
"""

import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, cast

from aioserve.config import EngineConfig
from aioserve.errors import AioserveError
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import Progress, simulate
from aioserve.lab.workloads.workload import Incidents, Workload
from aioserve.runner.step_times import step_times

if TYPE_CHECKING:
    from aioserve.lab.simulation.fleet_plan import Fleet

# A process has to import everything anew, about two seconds: as long as this many requests take.
REQUESTS_WORTH_A_PROCESS = 2000
# Requests from which an engine is simulated as a fleet of one, which is quicker but imports more.
REQUESTS_WORTH_A_FLEET = 2000


def choose_num_jobs(workloads: Sequence[Workload], num_configs: int) -> int:
    """Return how many processes this work is worth: at most one per core and one per run."""
    num_runs = len(workloads) * num_configs
    num_requests = num_configs * sum(len(workload.requests) for workload in workloads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, num_runs, num_requests // REQUESTS_WORTH_A_PROCESS))


def simulate_all(
    runs: Sequence[tuple[EngineConfig, Workload, "Fleet | None"]],
    num_jobs: int,
    progress: Progress,
) -> Iterator[RunOutcome]:
    """Yield the outcomes in the order of `runs`, of one engine each, or of a fleet; the same, byte
    for byte, for any number of jobs.
    """
    if num_jobs == 1:
        for config, workload, fleet in runs:
            yield _simulate(config, workload, fleet, progress)
        return
    # Each process has one run at a time, the next one that is not taken.
    todo, found = iter(enumerate(runs)), dict[int, RunOutcome | Exception]()
    with _started(min(num_jobs, len(runs))) as others:
        busy: dict[Connection, tuple[int, _Process]] = {}

        def give(process: _Process) -> None:
            for number, run in islice(todo, 1):
                process.send(run)
                busy[process.line] = number, process

        for process in others:
            give(process)
        for number, (_, workload, _) in enumerate(runs):
            while number not in found:
                for line in wait(list(busy)):
                    place, process = busy.pop(cast(Connection, line))
                    found[place] = process.outcome()
                    give(process)
            if isinstance(outcome := found.pop(number), Exception):
                raise outcome
            yield outcome
            progress(len(workload.requests))


def _simulate(
    config: EngineConfig,
    workload: Workload,
    fleet: "Fleet | None",
    progress: Progress = lambda count: None,
) -> RunOutcome:
    if fleet is None and (
        len(workload.requests) < REQUESTS_WORTH_A_FLEET or not _can_be_one(config, workload)
    ):
        return simulate(config, workload, progress)
    from aioserve.lab.simulation.fleet import simulate_fleet
    from aioserve.lab.simulation.fleet_plan import Fleet

    return simulate_fleet(config, workload, fleet or Fleet(1, "round_robin"), progress)


def _can_be_one(config: EngineConfig, workload: Workload) -> bool:
    """Return whether a simulated fleet of one engine has the same steps as the engine alone, to the
    last bit. It keeps fewer states of the engine.
    """
    return (
        workload.incidents == Incidents()
        and config.scheduler.decision_log is None
        and config.scheduler.request_log is None
        and config.shadow.shadow_policy is None
        and config.cache.kv_connector == "none"
        and not config.speculation.drafts_surely
        and not step_times(config.runner).rates.jitter
    )


class _Process:
    """A process that computes what it is sent, one run after another, and ends with this one,
    however that ends.
    """

    def __init__(self) -> None:
        context = get_context("spawn")  # not forked: the threads of this process would be missing
        self.line, theirs = context.Pipe()
        with theirs:
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()

    def send(self, run: tuple[EngineConfig, Workload, "Fleet | None"]) -> None:
        with self._its_end_told():
            self.line.send(run)

    def outcome(self) -> RunOutcome | Exception:
        """The outcome of the run that the process was sent, or the exception that it raised."""
        with self._its_end_told():
            return cast(RunOutcome | Exception, self.line.recv())

    @contextmanager
    def _its_end_told(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self.process.join()
            how = f"has ended with exit code {self.process.exitcode}"
            raise AioserveError(f"a process that simulated {how}") from error


@contextmanager
def _started(num_jobs: int) -> Iterator[list[_Process]]:
    """`num_jobs` processes, ended after the block: no thread is left to notice an end later."""
    processes: list[_Process] = []
    try:
        with _interrupts_held():
            for _ in range(num_jobs):
                processes.append(_Process())
        yield processes
    finally:
        for process in processes:
            process.process.terminate()
        for process in processes:
            process.process.join()
            process.line.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that are started here never hear of Ctrl-C, which reaches all: this one ends them.

    A handler of theirs would come too late: they import for seconds before they could set one. Here
    it waits for the end of the block, so that no process is left half started.
    """
    if not hasattr(signal, "pthread_sigmask") or current_thread() is not main_thread():
        yield
        return
    resource_tracker.ensure_running()  # starting that one would let signals through again
    held = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by processes
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if held:  # other threads, of libraries, have let it through
        raise KeyboardInterrupt


def _serve(line: Connection) -> None:
    """Run what comes over the line, in a process of the pool, until the line closes."""
    Thread(target=_wait_for_end, daemon=True).start()
    while True:
        try:
            run = line.recv()
        except EOFError:
            return
        outcome: RunOutcome | Exception
        try:
            outcome = _simulate(*run)
        except Exception as error:
            error.add_note(traceback.format_exc())  # it does not travel by itself
            outcome = error
        line.send(outcome)


def _wait_for_end() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
