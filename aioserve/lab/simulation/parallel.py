"""Simulated runs on several cores: each is a world of its own, so they only share the machine.

Knows processes; knows nothing about what a run is made of.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from threading import Thread, current_thread, main_thread

from aioserve.config import EngineConfig
from aioserve.lab.simulation.clients import Progress
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Workload

# A process has to import everything anew, about two seconds: what so many requests take.
REQUESTS_WORTH_A_PROCESS = 2000


def choose_num_jobs(workloads: Sequence[Workload], num_configs: int) -> int:
    """Processes that pay for so much work: at most one a core and one a run."""
    num_runs = len(workloads) * num_configs
    num_requests = num_configs * sum(len(workload.requests) for workload in workloads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, num_runs, num_requests // REQUESTS_WORTH_A_PROCESS))


def simulate_all(
    runs: Sequence[tuple[EngineConfig, Workload, Fleet | None]], num_jobs: int, progress: Progress
) -> Iterator[RunOutcome]:
    """The outcomes in the order of `runs`, of one engine each, or of a fleet; the same, byte for
    byte, for any number of jobs.
    """
    if num_jobs == 1:
        for config, workload, fleet in runs:
            yield _simulate(config, workload, fleet, progress)
        return
    # Not forked: the threads of this process would be missing in a copy of it.
    context = get_context("spawn")
    others = set(active_children())
    with ProcessPoolExecutor(num_jobs, context, initializer=_end_with_parent) as pool:
        try:
            with _interrupts_held():
                futures = [pool.submit(_simulate, *run) for run in runs]
            for (_, workload, _), future in zip(runs, futures, strict=True):
                yield future.result()
                progress(len(workload.requests))
        except BaseException:  # interrupted, or a run failed: nobody wants the others
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _simulate(
    config: EngineConfig,
    workload: Workload,
    fleet: Fleet | None,
    progress: Progress = lambda count: None,
) -> RunOutcome:
    if fleet is None:
        return simulate(config, workload, progress)
    return simulate_fleet(config, workload, fleet, progress)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that are started here never hear of Ctrl-C, which reaches all: this one ends them.

    A handler of theirs would come too late: they import for seconds before they could set one. Here
    it waits for the end of the block, so that nobody is left half started.
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


def _end_with_parent() -> None:
    """However the process that wants the results ends, it leaves none behind."""
    Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
