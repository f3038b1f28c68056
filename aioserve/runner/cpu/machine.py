"""What this machine offers to compute with: cores, free memory, native bfloat16.

Asks the operating system and the CPU, not torch; where they do not answer (not Linux), the answers
are cautious.
"""

import ctypes
import os
import re
from pathlib import Path

from aioserve.kernels.cpu import cpu_flags

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
    """Bytes that can be allocated without swapping, container limit respected."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    available = (
        int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    limit = _read(_CGROUP / "memory.max")
    if limit.isdigit():
        available = min(available, int(limit) - int(_read(_CGROUP / "memory.current") or 0))
    return max(0, available)


def has_native_bf16() -> bool:
    """Whether the CPU multiplies bfloat16; where it does not, torch is faster in float32."""
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
    """Return to the system what was freed so far and kept; needs glibc."""
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
