"""How many threads compute steps: fewer while other processes want the cores.

Reads from Linux how long threads that could run waited for a core. Knows when steps begin and end;
knows nothing about what they compute. Free of torch.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")
TOLERATED = 0.7  # divided by threads: the share of a step in which one of them may wait
ENOUGH = 0.25  # seconds of steps to look at before a decision
SAMPLE_EVERY = 0.002  # seconds, for each thread: to look at one takes 4 us of a step
MIN_PAUSE, MAX_PAUSE = 1.0, 16.0  # seconds with fewer threads before all are tried again


class Look(NamedTuple):
    """A moment, in seconds, and how long the compute threads had waited until then."""

    time: float
    waited: float


class ComputeThreads:
    """Decides between steps, on the thread that runs them, how many threads compute the next.

    The threads of a step wait for each other many times, so while one of n waits for a core, all
    do. If that takes the share w of a step, one thread fewer, with a core for each, takes at most
    (1 - w) * n / (n - 1) of its time, and less if the step does not divide evenly. Whether a
    neighbour has gone shows only when all threads try again: each time that was too early, the
    pause before the next try doubles.
    """

    def __init__(
        self,
        most: int,
        start: Callable[[int], Sequence[int]],
        *,
        tasks: Path = TASKS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`start(n)` lets n threads compute and returns the system's ids of them; where it knows
        none, or `tasks` has no `schedstat` of them, `most` threads compute for good.
        """
        self.most, self._start, self._tasks, self._clock = most, start, tasks, clock
        self._files: list[int] = []
        self._pause, self._next_try, self._next_look = MIN_PAUSE, 0.0, 0.0
        self._began: Look | None = None  # the step, if it is one to look at
        self._seconds = self._waited = 0.0  # of the steps looked at since the last decision
        self._let_compute(most)

    def begin_step(self) -> None:
        """Call before a step."""
        self._began = None
        if self._files and (now := self._clock()) >= self._next_look:
            self._next_look = now + SAMPLE_EVERY * self.count
            self._began = self._look()

    def end_step(self) -> None:
        """Call after it."""
        if self._began is None or (ended := self._look()) is None:
            return
        self._seconds += ended.time - self._began.time
        self._waited += ended.waited - self._began.waited
        if self._seconds >= ENOUGH:
            waiting, self._seconds, self._waited = self._waited / self._seconds, 0.0, 0.0
            self._decide(waiting, ended.time)

    def close(self) -> None:
        """Close what is open. Idempotent."""
        while self._files:
            os.close(self._files.pop())

    def _decide(self, waiting: float, now: float) -> None:
        """So many of the compute threads waited for a core, on average."""
        if self.count > 1 and waiting > TOLERATED / self.count:
            self._let_compute(max(1, self.count - max(1, num_neighbours(waiting, self.count))))
            logger.log(
                logging.INFO if self._pause == MIN_PAUSE else logging.DEBUG,
                "%.2f threads of a step wait for a core: %d of %d compute",
                waiting,
                self.count,
                self.most,
            )
            self._next_try = now + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
        elif self.count == self.most:
            self._pause = max(self._pause / 2, MIN_PAUSE)
        elif now >= self._next_try:
            self._let_compute(self.most)
            logger.debug("all %d threads compute again", self.most)

    def _let_compute(self, count: int) -> None:
        self.close()
        self.count = count
        thread_ids = self._start(count)
        try:
            for thread_id in thread_ids:
                path = self._tasks / str(thread_id) / "schedstat"
                self._files.append(os.open(path, os.O_RDONLY))
        except OSError as error:
            logger.debug("the number of compute threads stays at %d: %s", self.most, error)
            self.close()
            if count != self.most:
                self.count = self.most
                self._start(self.most)

    def _look(self) -> Look | None:
        """None if a thread has ended and OpenMP has started another, or will."""
        try:
            waited = sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files)
        except OSError:
            self._let_compute(self.count)
            return None
        return Look(self._clock(), waited / 1e9)  # the second number: nanoseconds


def num_neighbours(waiting: float, count: int) -> int:
    """How many others want a core each, if `waiting` of `count` threads wait, on as many cores.

    Each of `count + num_neighbours` then runs for the same part of the time.
    """
    return round(waiting * count / (count - waiting)) if waiting < count else count
