"""What this machine offers to compute with: cores, threads, free memory, native bfloat16.

Asks the operating system and the CPU, not torch; where they do not answer (not Linux), the answers
are cautious. Threads that compute steps are fewer while other processes want the cores.
"""

import ctypes
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from aioserve.kernels.library import cpu_flags

_CPU_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_CGROUP = Path("/sys/fs/cgroup")
_NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def default_num_threads() -> int:
    """Physical cores that this process may use, at least 1: affinity, CPU quota and, as for torch,
    `OMP_NUM_THREADS` are respected.

    None is kept free for the event loop: on 2 cores, server and client included, 2 threads gave
    1.2 times the tokens/s of 1 to 256 streams of a 3M model, 1.6 times to 16 of a 135M model.
    """
    if hasattr(os, "sched_getaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
    else:
        cpus = list(range(os.cpu_count() or 1))
    cores = {_read(Path(_CPU_TOPOLOGY.format(cpu))) or str(cpu) for cpu in cpus}
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # the rest is of nested ones
    most = int(asked) if asked.isdigit() else len(cores)
    return max(1, min(len(cores), _cpu_quota(), most))


def available_memory() -> int:
    """Return bytes that can be allocated without swapping, container limit respected."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    available = (
        int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    limit = _read(_CGROUP / "memory.max")
    if limit.isdigit():
        available = min(available, int(limit) - int(_read(_CGROUP / "memory.current") or 0))
    return max(0, available)


def has_native_bf16() -> bool:
    """Return whether the CPU multiplies bfloat16; where it does not, torch is faster in float32."""
    return not _NATIVE_BF16.isdisjoint(cpu_flags())


def keep_freed_memory() -> None:
    """Let malloc keep up to 512 MiB that was freed, for the whole process; needs glibc.

    Every layer allocates and frees tensors of megabytes. By default each of them is mapped anew
    and faulted in page by page: up to half of a decode step and a fifth of a long prompt's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value it takes
        mallopt(_M_TRIM_THRESHOLD, 512 << 20)


def give_back_freed_memory() -> None:
    """Give back to the system what was freed so far and kept; needs glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cpu_quota() -> int:
    """Whole CPUs of the container's quota."""
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return max(1, int(quota) // int(period)) if quota.isdigit() else 1 << 30


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# How many threads compute steps: fewer while other processes want the cores. Reads from Linux how
# long threads that could run waited for a core, and how long cores were idle. Knows when steps
# begin and end; knows nothing about what they compute. Free of torch.


logger = logging.getLogger(__name__)

# Divided by n threads: the share of a step in which one of them may wait. At 1 / n, n - 1 threads
# are as fast (see below). Bursts of clients on two cores were seen at 0.38, neighbours from 0.42.
TOLERATED = 0.9
ENOUGH = 0.5  # seconds of steps to look at before a decision
# Seconds, for each thread: to look at one takes 4 us of a step, and 10 once weights have passed
# through the caches. Of long steps that follow each other, every other one is looked at.
SAMPLE_EVERY = 0.001
IDLE = 0.25  # cores that idle while steps compute: with less, no other process has left
MIN_PAUSE, MAX_PAUSE = 4.0, 32.0  # seconds before all threads are tried although no core is idle


class Look(NamedTuple):
    """A moment, in seconds, and how long the compute threads had waited until then."""

    time: float
    waited: float


class ComputeThreads:
    """Decides between steps, on the thread that runs them, how many threads compute the next.

    The threads of a step wait for each other many times, so while one of n waits for a core, all
    do. If that takes the share w of a step, one thread fewer, with a core for each, takes at most
    (1 - w) * n / (n - 1) of its time, and less if the step does not divide evenly. They come back
    when there are idle cores for them. Where those do not show, all are tried now and then; each
    time in vain, the pause before the next try doubles.
    """

    def __init__(
        self,
        most: int,
        start: Callable[[int], Sequence[int]],
        *,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`start(n)` lets n threads compute and returns the system's ids of them; where it knows
        none, or `proc` does not tell of them, `most` threads compute for good.
        """
        self.most, self._start, self._proc, self._clock = most, start, proc, clock
        self._files: list[int] = []
        self._pause, self._next_try, self._next_look = MIN_PAUSE, 0.0, 0.0
        self._step_began = 0.0
        self._look_began: Look | None = None  # if the step is one to look at
        self._let_compute(most)
        self._begin_period(clock())

    def begin_step(self) -> None:
        """Note that a step begins. Call it right before the step, on the thread that runs it."""
        self._look_began, self._step_began = None, self._clock()
        if self._files and self._step_began >= self._next_look:
            self._next_look = self._step_began + SAMPLE_EVERY * self.count
            self._look_began = self._look()

    def end_step(self) -> None:
        """Note that the step has ended; with enough measured, decide the number of threads anew."""
        now = self._clock()
        self._computed += now - self._step_began
        if self._look_began is None or (look := self._look()) is None:
            return
        self._looked += look.time - self._look_began.time
        self._waited += look.waited - self._look_began.waited
        self._next_look = max(self._next_look, now + (now - self._step_began) / 2)
        if max(self._looked, self._waited * self.count / TOLERATED) >= ENOUGH:
            self._decide(now)
            self._begin_period(now)

    def close(self) -> None:
        """Close the files that are open. Idempotent."""
        while self._files:
            os.close(self._files.pop())

    def _begin_period(self, now: float) -> None:
        self._period_began, self._computed = now, 0.0  # seconds of all its steps
        self._looked = self._waited = 0.0  # seconds of those that were looked at
        self._idle_before = self._idle_seconds() if self.count < self.most else 0.0

    def _decide(self, now: float) -> None:
        """Choose the number of threads, at the end of a period."""
        waiting = self._waited / self._looked  # threads, on average
        if self.count > 1 and waiting > TOLERATED / self.count:
            self._let_compute(max(1, self.count - max(1, num_neighbours(waiting, self.count))))
            self._next_try = now + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
        elif self.count == self.most:
            self._pause = max(self._pause / 2, MIN_PAUSE)
            return
        else:
            seconds = now - self._period_began
            idle = self._idle_seconds() - self._idle_before
            # between steps, the compute threads idle as well
            idle = (idle - self.count * (seconds - self._computed)) / seconds
            if idle >= IDLE:
                self._let_compute(min(self.count + max(1, round(idle)), self.most))
            elif now >= self._next_try:
                self._let_compute(self.most)
            else:
                return
        logger.debug("%.2f threads wait, %d of %d compute", waiting, self.count, self.most)

    def _let_compute(self, count: int) -> None:
        self.close()
        self.count = count
        thread_ids = self._start(count)
        try:
            for thread_id in thread_ids:
                path = self._proc / "self" / "task" / str(thread_id) / "schedstat"
                self._files.append(os.open(path, os.O_RDONLY))
        except OSError as error:
            logger.debug("the number of compute threads stays at %d: %s", self.most, error)
            self.close()
            if count != self.most:
                self.count = self.most
                self._start(self.most)

    def _look(self) -> Look | None:
        """Return the time, and how long threads have waited; None if OpenMP has started another."""
        try:
            waited = sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files)
        except OSError:
            self._let_compute(self.count)
            return None
        return Look(self._clock(), waited / 1e9)  # the second number: nanoseconds

    def _idle_seconds(self) -> float:
        """Idle seconds of all cores that this process may use; 0 where /proc/stat is missing."""
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        try:
            lines = (self._proc / "stat").read_text(encoding="ascii").splitlines()
        except OSError:
            return 0.0
        cpus = (line.split() for line in lines if line.startswith("cpu"))
        ticks = sum(int(cpu[4]) + int(cpu[5]) for cpu in cpus if cpu[0] in names)  # idle, iowait
        return ticks / os.sysconf("SC_CLK_TCK")


def num_neighbours(waiting: float, count: int) -> int:
    """Return how many others want a core each, if `waiting` of `count` threads wait, on as many
    cores.

    Each of `count + num_neighbours` then runs for the same part of the time.
    """
    return round(waiting * count / (count - waiting)) if waiting < count else count
