"""Runs every cell of the matrix, keeps what becomes of it and writes docs/compatibility.md.

`python -m tests.matrix` takes minutes; with names of places after it these alone are run, with
`--feature A` the cells with that feature alone, and with `--cell "A + B"` that cell, of which it is
told.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread would mostly wait

from tests.matrix.built import Builds
from tests.matrix.features import cells, in_order
from tests.matrix.outcomes import (
    FILE,
    REFUSED,
    WRONG,
    Outcome,
    applies,
    find_outcome,
    store,
    stored,
)
from tests.matrix.page import PAGE, render
from tests.matrix.runs import Matrix, without_chance
from tests.matrix.settings import PLACES


async def find_all(
    matrix: Matrix, place: str, known: Mapping[tuple[str, ...], Outcome], features: set[str]
) -> dict[tuple[str, ...], Outcome]:
    """Every cell of a place; where a feature alone is refused, so are all its pairs, unseen. If
    there are `features`, of cells with none of them what is `known`.
    """
    found: dict[tuple[str, ...], Outcome] = {}
    for cell in cells():
        if features and not features & set(cell):
            found[cell] = known[cell]
            continue
        alone = [found[name,] for name in cell if (name,) in found]
        refused = [outcome for outcome in alone if outcome.kind == REFUSED]
        outcome = applies(cell)
        if outcome is None and refused:
            outcome = refused[0]
        found[cell] = outcome = outcome or await find_outcome(matrix, cell, place)
        if outcome.kind == WRONG:
            print(f"{place}: {' + '.join(cell)}: {outcome.why}", flush=True)
    return found


def main() -> int:
    """Returns 1 if a cell is wrong."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("places", nargs="*", default=PLACES, help=", ".join(PLACES))
    parser.add_argument("--cell", help='features, as "images + adapters"')
    parser.add_argument("--feature", action="append", default=[], help="its cells alone")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    outcomes = dict(stored()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder, without_chance():
        matrix = Matrix(Builds(Path(folder)))
        for place in arguments.places:
            started = time.monotonic()
            if arguments.cell is not None:
                cell = in_order(arguments.cell.split(" + "))
                outcome = asyncio.run(find_outcome(matrix, cell, place, arguments.seed))
                print(f"{place}: {outcome.kind} {outcome.why}")
                continue
            known, features = outcomes.get(place, {}), set(in_order(arguments.feature))
            outcomes[place] = asyncio.run(find_all(matrix, place, known, features))
            counts = Counter(outcome.kind for outcome in outcomes[place].values())
            print(f"{place}: {dict(counts)} in {time.monotonic() - started:.0f} s", flush=True)
            store(outcomes)
    if arguments.cell is None:
        PAGE.write_text(render(outcomes))
    return any(outcome.kind == WRONG for own in outcomes.values() for outcome in own.values())


if __name__ == "__main__":
    sys.exit(main())
