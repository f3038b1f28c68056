"""Every pair of features that works comes together in a run; what is refused is refused in a line.

`found.json` says which pairs these are: `python -m tests.matrix` runs every one and writes it anew.
"""

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.matrix.built import Builds
from tests.matrix.covering import covering
from tests.matrix.features import FEATURES, in_order
from tests.matrix.outcomes import REFUSED, WORKS, WRONG, Outcome, applies, find_outcome, stored
from tests.matrix.page import PAGE, render
from tests.matrix.reasons import reason_of
from tests.matrix.runs import Matrix, without_chance
from tests.matrix.settings import PLACES

pytest.importorskip("PIL")

# The loop is the subject of other tests; a run loads a model.
on_uvloop = pytest.mark.asyncio(loop_factories=["uvloop"])

FOUND = stored()


@cache
def sets_of(place: str) -> list[tuple[str, ...]]:
    """Sets of features in which every pair is that works in this place."""
    pairs = [frozenset(cell) for cell, o in FOUND[place].items() if o.kind == WORKS and cell[1:]]
    return [in_order(one) for one in covering(FEATURES, pairs, lambda one: applies(one) is None)]


def refusals_of(place: str) -> list[tuple[tuple[str, ...], str]]:
    """Of each line with which a cell is refused, one cell."""
    lines: dict[str, tuple[str, ...]] = {}
    for cell, outcome in FOUND[place].items():
        if outcome.kind == REFUSED:
            lines.setdefault(outcome.why, cell)
    return [(cell, why) for why, cell in lines.items()]


def name_of(value: object) -> str:
    return "+".join(value) if isinstance(value, tuple) else ""


ONE = PLACES[0]
#: In `make test`: the first three sets, in which six of seven pairs are.
SETS = [(ONE, one) for one in sets_of(ONE)[:3]]
#: In `make test-all`: the others, and each pair again where it is computed otherwise.
SLOW = [(place, one) for place in PLACES for one in sets_of(place) if (place, one) not in SETS]


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with tempfile.TemporaryDirectory() as folder, without_chance():
        yield Matrix(Builds(Path(folder)))


@on_uvloop
@pytest.mark.parametrize(
    ("place", "features"),
    SETS + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW],
    ids=name_of,
)
async def test_features_come_together(
    matrix: Matrix, place: str, features: tuple[str, ...]
) -> None:
    assert await find_outcome(matrix, features, place) == Outcome(WORKS)


@on_uvloop
@pytest.mark.parametrize(
    ("place", "cell", "line"),
    [
        pytest.param(place, cell, line, marks=() if place == ONE else pytest.mark.slow)
        for place in PLACES
        for cell, line in refusals_of(place)
    ],
    ids=name_of,
)
async def test_what_does_not_go_together_is_refused_in_the_line_of_the_page(
    matrix: Matrix, place: str, cell: tuple[str, ...], line: str
) -> None:
    assert await find_outcome(matrix, cell, place) == Outcome(REFUSED, line)


def test_every_pair_that_works_is_in_a_run() -> None:
    for place in PLACES:
        pairs = {frozenset(cell) for cell, o in FOUND[place].items() if o.kind == WORKS}
        runs = [frozenset(one) for one in sets_of(place)]
        assert not [pair for pair in pairs if not any(pair <= one for one in runs)]


def test_most_pairs_that_work_are_in_a_run_of_make_test() -> None:
    pairs = {frozenset(cell) for cell, o in FOUND[ONE].items() if o.kind == WORKS}
    runs = [frozenset(one) for _, one in SETS]
    left = [pair for pair in pairs if not any(pair <= one for one in runs)]
    assert len(left) < 0.15 * len(pairs), left


def test_no_cell_is_wrong_and_the_page_says_what_was_found() -> None:
    assert not [cell for own in FOUND.values() for cell, o in own.items() if o.kind == WRONG]
    lines = {line for place in PLACES for _, line in refusals_of(place)}
    assert not [line for line in lines if reason_of(line) is None], "tests/matrix/reasons.py"
    assert PAGE.read_text() == render(FOUND), "python -m tests.matrix writes it anew"
