"""Says which package a Python lacks, and the line that brings it.

Imports the standard library alone: it speaks where nothing else can be imported.
"""

import sys
from pathlib import Path

CLONE = Path(__file__).parents[1]


def way_out(error: ModuleNotFoundError) -> str:
    """One line for an import that failed: the package, the Python that lacks it, what to type.

    Raises `error` itself if a module of aioserve is missing: that is no package to install.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "aioserve"):
        raise error
    lacks = f"{sys.executable} lacks the package {package!r}"
    if not (CLONE / "Makefile").is_file():
        return f"{lacks}: {sys.executable} -m pip install aioserve brings it"
    python = CLONE / ".venv" / "bin" / "python"
    if Path(sys.prefix) == CLONE / ".venv":
        return f"{lacks}: make install, in {CLONE}, brings it"
    make = "" if python.exists() else f"make install, in {CLONE}, then "
    return f"{lacks}: {make}{python} -m aioserve has all that it needs"
