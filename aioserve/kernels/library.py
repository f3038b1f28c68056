"""Finds and loads the compiled kernels: one shared library per instruction set.

What this CPU can do is asked of the CPU itself, not of /proc/cpuinfo: where a process is emulated,
that is about the machine around it. After a `git pull` a library may be older than the sources
beside it, which is told.
"""

import ctypes
import functools
import hashlib
import itertools
import os
import re
from pathlib import Path
from threading import get_native_id

from aioserve.errors import ConfigError


def extension(name: str) -> Path:
    """Return the path of a compiled file of this package, if it was built."""
    return Path(__file__).with_name(f"_{name}.so")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets that this CPU and its operating system offer, of those that matter here.

    Spelled as in /proc/cpuinfo, which is asked where nothing was compiled.
    """
    try:
        library = ctypes.CDLL(str(extension("cpu")))
    except OSError:
        return _flags_of_the_machine()
    feature = library.cpu_feature
    feature.argtypes, feature.restype = (ctypes.c_int64,), ctypes.c_char_p
    names = itertools.takewhile(lambda name: name is not None, map(feature, itertools.count()))
    return frozenset(name.decode() for name in names if name)


def _flags_of_the_machine() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


# Whether a compiled library is of the sources beside it: after a `git pull` it may be older. An
# older one would compute wrong numbers where the calls have changed. Knows files and digests.


#: What the kernels are compiled from; there in a checkout, and not where a wheel is installed.
SOURCES = Path(__file__).with_name("src")


class StaleLibraryError(Exception):
    """The library was compiled from other sources than those beside it."""


def open_compiled(path: Path) -> ctypes.CDLL:
    """Load a library. Raises `OSError`, or `StaleLibraryError`: it says how to compile it again."""
    library = ctypes.CDLL(str(path))
    if SOURCES.is_dir() and _digest_in(library) != _digest():
        raise StaleLibraryError(
            f"{path.name} was compiled from other sources than those in {SOURCES}: "
            "compile them again (make, or pip install -e .)"
        )
    return library


def _digest() -> str:
    """Return the hash of all sources, in hexadecimal, which setup.py compiles into each library."""
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _digest_in(library: ctypes.CDLL) -> str:
    """Empty for a library from before there was one."""
    try:
        return (ctypes.c_char * 64).in_dll(library, "sources_digest").value.decode()
    except ValueError:
        return ""


# Finds and loads the compiled kernels: one shared library per instruction set. Knows files, what
# they need and OpenMP runtimes; knows nothing about what the kernels compute.


ENVIRONMENT_VARIABLE = "AIOSERVE_KERNELS"  # off, or a variant: for tests and reports of bugs

# Best first, with the CPU flags of what setup.py compiles each for: keep the two in step.
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = {*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_BF16 = {*_AVX512, "avx512_bf16", "avx512_vnni"}
VARIANTS = {
    "amx_bf16": {*_AVX512_BF16, "amx_bf16", "amx_int8"},
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": {*_AVX512, "avx512_vnni"},
    "avx512": _AVX512,
    "avx2_vnni": {*_AVX2, "avx_vnni"},
    "avx2": _AVX2,
    "baseline": set[str](),  # SSE2, or NEON
}


class KernelsUnavailableError(Exception):
    """Raised where there are no kernels to call; the message says why. Plain torch goes on."""


def usable_variants() -> list[str]:
    """Variants that were built and that this CPU runs, best first."""
    flags = cpu_flags()
    return [name for name, needs in VARIANTS.items() if needs <= flags and extension(name).exists()]


def choose_variant() -> str:
    """Return the best variant, or the one that the environment asks for.

    Raises `KernelsUnavailableError`, and `ConfigError` if the environment asks for nonsense.
    """
    asked, usable = os.environ.get(ENVIRONMENT_VARIABLE), usable_variants()
    if asked == "off":
        raise KernelsUnavailableError(f"{ENVIRONMENT_VARIABLE}=off")
    if asked and asked not in usable:
        choices = ", ".join(["off", *usable])
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} must be one of {choices} here, not {asked!r}")
    if not usable:
        raise KernelsUnavailableError("they were not built: Linux and a C compiler are needed")
    return asked or usable[0]


def open_library(variant: str) -> ctypes.CDLL:
    """Load one variant on the OpenMP runtime of torch. Raises `KernelsUnavailableError`."""
    # A second runtime would have threads of its own, which fight those of torch for the cores.
    # So ours is linked to none, and finds its symbols in the one that is already there.
    import torch  # noqa: F401

    runtime = _openmp_runtime()
    if runtime is None:
        raise KernelsUnavailableError("torch came without an OpenMP runtime")
    try:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        return open_compiled(extension(variant))
    except (OSError, StaleLibraryError) as error:
        raise KernelsUnavailableError(str(error)) from error


def compute_thread_ids(num_threads: int) -> list[int]:
    """Return the system's ids of the `num_threads` that compute for the calling thread, itself
    included.

    Empty where there is no OpenMP runtime that can be asked.
    """
    runtime = _openmp_runtime()
    # what compilers call for a parallel region; those of Intel and LLVM have it, too
    parallel = runtime and getattr(ctypes.CDLL(runtime), "GOMP_parallel", None)
    if not parallel:
        return []
    found: list[int] = []
    each = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(get_native_id()))
    parallel(each, None, ctypes.c_uint(num_threads), ctypes.c_uint(0))
    return found


def _openmp_runtime() -> str | None:
    """Return the shared library that torch has loaded."""
    maps = Path("/proc/self/maps")  # of Linux
    loaded = maps.read_text(encoding="utf-8") if maps.exists() else ""
    match = re.search(r"/\S*/lib(?:gomp|iomp5|omp)\b\S*", loaded)
    return match and match[0]
