"""What this CPU can do, as the CPU itself says it.

Not as /proc/cpuinfo says it: where a process is emulated, that is about the machine around it.
Knows names of instruction sets; knows nothing about the kernels that use them.
"""

import ctypes
import functools
import itertools
import re
from pathlib import Path


def extension(name: str) -> Path:
    """The path of a compiled file of this package, if it was built."""
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
