"""`python -m tests.golden`: records all loads anew, and says which decisions are others now.

Files whose decisions are the same stay as they are. A log that this version cannot read, or that
tells something else, is replaced as well.
"""

import shutil
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from aioserve.errors import ConfigError
from aioserve.lab.decision_log.reader import DecisionLog
from tests.golden.files import CASES, FOLDER, LOGGED, log_path, read_lines, write_lines
from tests.golden.lines import difference, lines_of
from tests.golden.workloads import record


def main() -> int:
    ArgumentParser(prog="python -m tests.golden", description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    num_changed = 0
    with tempfile.TemporaryDirectory() as made:
        new = Path(made, "log")
        for load, policy in CASES:
            record(load, policy, new, Path(made))
            lines = lines_of(DecisionLog(new))
            what = difference(read_lines(load, policy), lines)
            if what is not None:
                num_changed += 1
                print(f"{load}, {policy}: {what}")
                write_lines(load, policy, lines)
            if (load, policy) in LOGGED and not _tells(log_path(load, policy), lines):
                print(f"{load}, {policy}: a new log")
                shutil.copyfile(new, log_path(load, policy))
    print(f"{num_changed} of {len(CASES)} have changed")
    return 0


def _tells(path: Path, lines: list[str]) -> bool:
    try:
        return lines_of(DecisionLog(path)) == lines
    except ConfigError:
        return False


if __name__ == "__main__":
    sys.exit(main())
