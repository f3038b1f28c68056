"""What becomes of a cell of the matrix, and all cells as they were found last: `found.json`."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from aioserve.errors import ConfigError, RequestError
from tests.matrix.features import cells, in_order, why_not
from tests.matrix.runs import Matrix
from tests.matrix.settings import fits

FILE = Path(__file__).parent / "found.json"
WORKS, REFUSED, WRONG, NEVER = "works", "refused", "wrong", "does not apply"
NO_MODEL = "no architecture of `transformers` that is served has all of these"


class Outcome(NamedTuple):
    """What became of a cell, and in words why it does not work."""

    kind: str
    why: str = ""


#: By place, then by cell.
Outcomes = Mapping[str, Mapping[tuple[str, ...], Outcome]]


def applies(features: Collection[str]) -> Outcome | None:
    """Why these features never come together, as an outcome; None: they may."""
    if (reason := why_not(features)) is not None:
        return Outcome(NEVER, reason)
    return None if fits(features) else Outcome(NEVER, NO_MODEL)


async def find_outcome(
    matrix: Matrix, features: Collection[str], place: str, seed: int = 0
) -> Outcome:
    """Run a cell."""
    if (never := applies(features)) is not None:
        return never
    try:
        await matrix.run(features, place, seed)
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        line = re.sub(rf"{re.escape(str(matrix.builds.folder))}/\S*", "PATH", str(cause))
        line = " ".join(line.removeprefix("rank 1 of 2: ").split())
        if isinstance(cause, ConfigError | RequestError):
            return Outcome(REFUSED, line)
        return Outcome(WRONG, f"{type(cause).__name__}: {line}")
    return Outcome(WORKS)


def store(outcomes: Outcomes) -> None:
    """Keep what does not work and applies, by place, kind and reason."""
    told: dict[str, dict[str, dict[str, list[str]]]] = {}
    for place, found in outcomes.items():
        told[place] = {REFUSED: {}, WRONG: {}}
        for cell, outcome in found.items():
            if outcome.kind in (REFUSED, WRONG):
                told[place][outcome.kind].setdefault(outcome.why, []).append(" + ".join(cell))
    FILE.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def stored() -> dict[str, dict[tuple[str, ...], Outcome]]:
    """All cells as they were kept."""
    outcomes: dict[str, dict[tuple[str, ...], Outcome]] = {}
    for place, kinds in json.loads(FILE.read_text()).items():
        own = {cell: applies(cell) or Outcome(WORKS) for cell in cells()}
        for kind, reasons in kinds.items():
            for why, names in reasons.items():
                for name in names:
                    own[in_order(name.split(" + "))] = Outcome(kind, why)
        outcomes[place] = own
    return outcomes
