"""Simulated runs on several cores: each is a world of its own, so they only share the machine.

Knows processes; knows nothing about what a run is made of.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from aioserve.config import EngineConfig
from aioserve.lab.record import RunRecord
from aioserve.lab.run import Progress, simulate
from aioserve.lab.workload import Workload

# A process has to import everything anew, about two seconds: what so many requests take.
REQUESTS_WORTH_A_PROCESS = 2000


def choose_num_jobs(workloads: Sequence[Workload], num_configs: int) -> int:
    """Processes that pay for so much work: at most one a core and one a run."""
    num_runs = len(workloads) * num_configs
    num_requests = num_configs * sum(len(workload.requests) for workload in workloads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, num_runs, num_requests // REQUESTS_WORTH_A_PROCESS))


def simulate_all(
    runs: Sequence[tuple[EngineConfig, Workload]], num_jobs: int, progress: Progress
) -> Iterator[RunRecord]:
    """The records in the order of `runs`; the same, byte for byte, for any number of jobs."""
    if num_jobs == 1:
        for config, workload in runs:
            yield simulate(config, workload, progress)
        return
    # Not forked: the threads of this process would be missing in a copy of it.
    with ProcessPoolExecutor(num_jobs, get_context("spawn"), initializer=_die_quietly) as pool:
        futures = [pool.submit(simulate, config, workload) for config, workload in runs]
        for (_, workload), future in zip(runs, futures, strict=True):
            yield future.result()
            progress(len(workload.requests))


def _die_quietly() -> None:
    """Ctrl-C reaches all processes; one of them has something to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
