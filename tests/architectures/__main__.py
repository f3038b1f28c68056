"""Tries every architecture and writes docs/architectures.md: some minutes.

`python -m tests.architectures NAME...` tries these alone, and says what became of them; with
`--varied SEED` before the names, or without any, their configurations are varied at random.
"""

import sys
import tempfile
import traceback
from pathlib import Path

from tests.architectures.page import PAGE, render
from tests.architectures.tiny import cases
from tests.architectures.trial import Outcome, try_case
from tests.architectures.varied import try_varied, vary


def main(names: list[str]) -> int:
    """Returns how many trials neither served all tokens nor refused in a line."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    outcomes: dict[str, Outcome] = {}
    failed = []
    for case in cases():
        if names and case.name not in names and case.model_type not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcomes[case.name] = try_case(case, Path(folder))
            except Exception as error:
                failed.append(case.name)
                traceback.print_exc(limit=-3)
                print(f"{case.name}: FAILED: {error}", flush=True)
            else:
                print(f"{case.name}: {': '.join(filter(None, outcomes[case.name]))}", flush=True)
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}")
    elif not names:
        PAGE.write_text(render(outcomes, transformers.__version__))
        print(f"wrote {PAGE}")
    return len(failed)


def main_varied(seed: int, names: list[str]) -> int:
    """Returns how many were neither served with all tokens nor refused in a line."""
    failed = 0
    for case in cases():
        if names and case.name not in names and case.model_type not in names:
            continue
        varied = vary(case, seed)
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"{varied.name}: {try_varied(varied, Path(folder))}", flush=True)
            except Exception as error:
                failed += 1
                print(f"{varied.name}: FAILED: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--varied"]:
        sys.exit(main_varied(int(sys.argv[2]), sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
