"""The files in `recorded/`: lines of every load under every policy, and some of the logs.

Knows where they lie and how they are packed; knows nothing of what is in a line.
"""

import gzip
from pathlib import Path

from tests.golden.workloads import LOADS

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "recorded"
COMMAND = "python -m tests.golden"

POLICIES = sorted(path.stem for path in (ROOT / "policies").glob("[a-z]*.py"))
CASES = [(load, policy) for load in LOADS for policy in POLICIES]
# Logs are ten times as large as lines: one of each policy, three of each load.
LOGGED = [(list(LOADS)[i % len(LOADS)], policy) for i, policy in enumerate(POLICIES)]


def log_path(load: str, policy: str) -> Path:
    """Where the log of one of `LOGGED` is."""
    return FOLDER / f"{load}-{policy}.log"


def read_lines(load: str, policy: str) -> list[str]:
    """What was decided; nothing if it was never recorded."""
    path = _lines_path(load, policy)
    return gzip.decompress(path.read_bytes()).decode().splitlines() if path.exists() else []


def write_lines(load: str, policy: str, lines: list[str]) -> None:
    """Keep them, without a time in the file."""
    text = "".join(f"{line}\n" for line in lines)
    _lines_path(load, policy).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _lines_path(load: str, policy: str) -> Path:
    return FOLDER / f"{load}-{policy}.txt.gz"
