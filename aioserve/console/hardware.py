"""This machine as aioserve sees it: CPU, kernels, memory, cards, limits of the system.

Asks what the server asks when it starts. Knows no package but torch.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from aioserve.console.finding import Finding, ok
from aioserve.errors import ConfigError
from aioserve.kernels.cpu import cpu_flags
from aioserve.kernels.library import (
    ENVIRONMENT_VARIABLE,
    VARIANTS,
    KernelsUnavailableError,
    choose_variant,
    open_library,
    usable_variants,
)
from aioserve.runner.cpu import machine
from aioserve.runner.devices import num_cuda_devices

GIB = 2**30
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
FEW_FILES, ENOUGH_FILES = 4096, 65536  # some thousand streams need more than the first

INSTALL_TORCH = "pip install --force-reinstall torch"

_COMPILERS = ("cc", "gcc", "clang")


def look_at_system() -> Finding:
    """The operating system, and what is not to be had on it."""
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() == "Windows":
        return Finding(
            name="system",
            state="missing",
            text=f"{text}: the server needs Unix signals",
            remedy="wsl --install",
        )
    if platform.system() != "Linux":
        text += ": no compiled kernels, which need Linux"
        return Finding(name="system", state="note", text=text)
    return ok("system", f"{text}, {' '.join(platform.libc_ver())}")


def look_at_cpu() -> Finding:
    """Its name, the instruction sets that kernels ask for, and how many threads compute."""
    useful = frozenset[str]().union(*VARIANTS.values()) & cpu_flags()
    num_threads = machine.default_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"{num_threads} compute thread{'' if num_threads == 1 else 's'}"
    if asked := os.environ.get("OMP_NUM_THREADS"):
        threads += f" (OMP_NUM_THREADS is {asked})"
    return ok(
        "cpu",
        f"{_cpu_name()}; {usable} of {os.cpu_count()} CPUs, {threads}; "
        f"{' '.join(sorted(useful)) or 'none of the instruction sets that kernels ask for'}",
    )


def look_at_kernels() -> Finding:
    """Which of the compiled kernels serve here, and why those."""
    try:
        variant = choose_variant()
        open_library(variant)
    except ConfigError as error:
        return Finding(
            name="kernels",
            state="missing",
            text=str(error),
            remedy=f"unset {ENVIRONMENT_VARIABLE}",
        )
    except KernelsUnavailableError as error:
        return _no_kernels(str(error))
    except (ImportError, OSError) as error:  # of torch, whose threads they share
        text = f"torch cannot be imported: {error}"
        return Finding(name="kernels", state="missing", text=text, remedy=INSTALL_TORCH)
    if asked := os.environ.get(ENVIRONMENT_VARIABLE):
        return Finding(
            name="kernels",
            state="note",
            text=f"{variant}, as {ENVIRONMENT_VARIABLE}={asked} wants; "
            f"the best here would be {usable_variants()[0]}",
            remedy=f"unset {ENVIRONMENT_VARIABLE}",
        )
    return ok("kernels", f"{variant}, the best here{''.join(map(_why_not, _better(variant)))}")


def look_at_compiler() -> Finding:
    """A C compiler: kernels are built with it at install, Triton on a card uses it at run time."""
    for name in _COMPILERS:
        if shutil.which(name):
            printed = _printed(name, "--version")
            return ok("compiler", printed.partition("\n")[0] or name)
    return Finding(
        name="compiler",
        state="note",
        text="no C compiler: a wheel brings the kernels, but a clone, and Triton on a CUDA card, "
        "need one",
        remedy="apt-get install gcc",
    )


def look_at_memory() -> Finding:
    """What is free for weights and KV blocks."""
    total, free = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        machine.available_memory(),
    )
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        total = min(total, int(_CONTAINER_LIMIT.read_text(encoding="utf-8")))
    return ok("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB available")


def look_at_files() -> Finding:
    """How many files and connections may be open."""
    try:
        import resource
    except ImportError:  # not Unix
        return ok("open files", "no limit is known")
    limit, hardest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= FEW_FILES:
        return ok("open files", f"at most {limit}" if limit >= 0 else "no limit")
    can_be_raised = hardest == resource.RLIM_INFINITY or hardest > limit
    return Finding(
        name="open files",
        state="note",
        text=f"at most {limit}: each connection of a client is one",
        remedy=f"ulimit -n {min(hardest, ENOUGH_FILES) if hardest > 0 else ENOUGH_FILES}"
        if can_be_raised
        else f"LimitNOFILE={ENOUGH_FILES} for systemd; docker run --ulimit nofile={ENOUGH_FILES}",
    )


def look_at_cards() -> Finding:
    """CUDA cards: those of the driver, and whether torch can use them."""
    count = num_cuda_devices()
    if not count:
        if listed := _printed("nvidia-smi", "-L").strip():
            return Finding(
                name="cards",
                state="missing",
                text=f"nvidia-smi lists {listed.splitlines()[0]!r}, but libcuda.so.1 finds none",
                remedy="in a container: docker run --gpus all",
            )
        return ok("cards", "no CUDA card; the model runs on the CPU")
    try:
        import torch
    except (ImportError, OSError) as error:
        text = f"{count} found, but torch cannot be imported: {error}"
        return Finding(name="cards", state="missing", text=text, remedy=INSTALL_TORCH)
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU alone"
        return Finding(
            name="cards",
            state="missing",
            text=f"{count} CUDA cards, but torch {torch.__version__} is built {built}",
            remedy=INSTALL_TORCH,
        )
    cards = []
    for index in range(count):
        card = torch.cuda.get_device_properties(index)
        size = card.total_memory / GIB
        cards.append(f"{card.name} ({size:.0f} GiB, compute {card.major}.{card.minor})")
    return ok("cards", f"{', '.join(cards)}; torch for CUDA {torch.version.cuda}")


def _better(variant: str) -> list[str]:
    """Those that would be chosen before it, the nearest first."""
    return list(VARIANTS)[: list(VARIANTS).index(variant)][::-1]


def _why_not(variant: str) -> str:
    lacking = " ".join(sorted(VARIANTS[variant] - cpu_flags()))
    return f"; {variant} needs a CPU with {lacking}" if lacking else f"; {variant} was not built"


def _no_kernels(why: str) -> Finding:
    if os.environ.get(ENVIRONMENT_VARIABLE) == "off":
        return Finding(
            name="kernels",
            state="note",
            text=f"none, as {ENVIRONMENT_VARIABLE}=off wants: plain torch, slower",
            remedy=f"unset {ENVIRONMENT_VARIABLE}",
        )
    if platform.system() != "Linux":
        return Finding(name="kernels", state="note", text=f"none: {why}; plain torch, slower")
    build = "make -B install in a clone, else pip install --force-reinstall --no-deps aioserve"
    has_compiler = any(map(shutil.which, _COMPILERS))
    return Finding(
        name="kernels",
        state="missing",
        text=f"none: {why}; plain torch does their work, slower",
        remedy=build if has_compiler else f"apt-get install gcc; then {build}",
    )


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _printed(*command: str) -> str:
    """What a program prints; nothing if it is not there, or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""
