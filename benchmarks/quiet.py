"""Whether others use this machine: processor time that is not ours, and time that was stolen.

Reads /proc, so it needs Linux. Shares are in cores: 0.1 is a tenth of one core. What other virtual
machines take from shared caches and memory cannot be seen; that of cores is *steal*.
"""

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

_TICK = os.sysconf("SC_CLK_TCK")
LIMIT = 0.1  # cores; from here on a machine is not called quiet. A guess.


class Use(NamedTuple):
    """What others took of the processor over some time, in cores."""

    others: float  # processes of this machine that are not ours
    steal: float  # the host gave to other virtual machines

    @property
    def is_quiet(self) -> bool:
        """Both are below the limit."""
        return max(self) < LIMIT

    def __str__(self) -> str:
        return f"others used {self.others:.2f} cores, {self.steal:.2f} were stolen"


def tree(pid: int) -> set[int]:
    """The process and all that it and they have started and that still run."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        if fields := _stat(path):
            children[int(fields[1])].append(int(path.parent.name))
    found, new = set(), [pid]
    while new:
        found.add(pid := new.pop())
        new += children[pid]
    return found


def resident_mib(pids: set[int]) -> float:
    """Resident memory of the processes in MiB; shared pages count once, by their shares (PSS)."""
    total = 0
    for pid in pids:
        for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


class Watch:
    """Counts from its making on what others use, beside this process and the one of `pid`."""

    def __init__(self, pid: int | None = None) -> None:
        self._roots = [os.getpid()] if pid is None else [os.getpid(), pid]
        self._began, self._own = time.perf_counter(), self._own_seconds()
        self._busy, self._steal = _machine_seconds()

    def use(self) -> Use:
        """What others have used since."""
        busy, steal = _machine_seconds()
        own = self._own_seconds()
        seconds = time.perf_counter() - self._began
        mine = sum(now - self._own.get(pid, 0.0) for pid, now in own.items())
        return Use(max(0.0, (busy - self._busy - mine) / seconds), (steal - self._steal) / seconds)

    def _own_seconds(self) -> dict[int, float]:
        found = {}
        for pid in set().union(*map(tree, self._roots)):
            if fields := _stat(Path(f"/proc/{pid}/stat")):
                # Its own time and that of children that have ended.
                found[pid] = sum(map(int, fields[11:15])) / _TICK
        return found


def wait_until_quiet(most: float, window: float = 2.0) -> Use:
    """Return once a window of that many seconds is quiet, or after `most` seconds; the last use."""
    end = time.monotonic() + most
    while True:
        watch = Watch()
        time.sleep(window)
        use = watch.use()
        if use.is_quiet or time.monotonic() >= end:
            return use


def cpu_name() -> str:
    """The processor as the system names it, with its family and model."""
    text = _read(Path("/proc/cpuinfo"))
    fields = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    )
    family, model = fields.get("cpu family", "?"), fields.get("model", "?")
    return f"{fields.get('model name', 'unknown')} (family {family}, model {model})"


def _machine_seconds() -> tuple[float, float]:
    """Seconds that all cores have computed, and that were stolen from them. Interrupts are not
    counted: those of the network are no process's, and mostly ours.
    """
    fields = list(map(int, _read(Path("/proc/stat")).split("\n")[0].split()[1:9]))
    return sum(fields[:3]) / _TICK, fields[7] / _TICK


def _stat(path: Path) -> list[str]:
    """The fields from the state on, behind the name, which may have any sign in it."""
    return _read(path).rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # the process has ended
        return ""
