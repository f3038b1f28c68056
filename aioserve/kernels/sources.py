"""Whether a compiled library is of the sources beside it: after a `git pull` it may be older.

An older one would compute wrong numbers where the calls have changed. Knows files and digests.
"""

import ctypes
import hashlib
from pathlib import Path

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
    """Of all sources, in hexadecimal: setup.py compiles the same into each library."""
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _digest_in(library: ctypes.CDLL) -> str:
    """Empty for a library from before there was one."""
    try:
        return (ctypes.c_char * 64).in_dll(library, "sources_digest").value.decode()
    except ValueError:
        return ""
