"""Features are added and taken away at random, and each engine serves what its features promise.

Hypothesis shrinks what fails to the fewest features and the fewest turns.
"""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.matrix.built import Builds
from tests.matrix.features import FEATURES, in_order
from tests.matrix.outcomes import REFUSED, WORKS, applies, find_outcome, stored
from tests.matrix.runs import Matrix, without_chance
from tests.matrix.settings import PLACES

pytest.importorskip("PIL")

FOUND = stored()
MOST = 4  # features at once


class Together(RuleBasedStateMachine):
    """A set of features that work by twos, which grows, shrinks and is served."""

    matrix: Matrix

    def __init__(self) -> None:
        super().__init__()
        self.features: frozenset[str] = frozenset()
        self.place = PLACES[0]

    @rule(place=st.sampled_from(PLACES))
    def move(self, place: str) -> None:
        self.place = place
        self.features = frozenset(
            name for name in self.features if FOUND[place][name,].kind == WORKS
        )

    @precondition(lambda self: len(self.features) < MOST)
    @rule(name=st.sampled_from(list(FEATURES)))
    def add(self, name: str) -> None:
        more = self.features | {name}
        by_twos = all(FOUND[self.place][in_order({name, one})].kind == WORKS for one in more)
        if by_twos and applies(more) is None:
            self.features = more

    @precondition(lambda self: self.features)
    @rule(number=st.integers(0, MOST - 1))
    def take_away(self, number: int) -> None:
        names = in_order(self.features)
        self.features -= {names[number % len(names)]}

    @precondition(lambda self: len(self.features) > 2)
    @rule(seed=st.integers(0, 99))
    def serve(self, seed: int) -> None:
        one = find_outcome(self.matrix, in_order(self.features), self.place, seed)
        outcome = asyncio.run(one)
        assert outcome.kind == WORKS, f"{self.place}: {in_order(self.features)}: {outcome}"

    @invariant()
    def can_be(self) -> None:
        assert applies(self.features) is None
        assert all(FOUND[self.place][name,].kind != REFUSED for name in self.features)


def test_three_that_no_model_has_do_not_apply() -> None:
    assert applies({"MTP", "states"}) is None
    assert applies({"MTP", "states", "windows"}) is not None


@pytest.mark.slow
def test_features_that_work_by_twos_work_by_threes_and_fours() -> None:
    """`AIOSERVE_MATRIX_EXAMPLES` says how many series are tried."""
    from hypothesis.stateful import run_state_machine_as_test

    with tempfile.TemporaryDirectory() as folder, without_chance():
        Together.matrix = Matrix(Builds(Path(folder)))
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            Together,
            settings=settings(
                max_examples=int(os.environ.get("AIOSERVE_MATRIX_EXAMPLES", "40")),
                stateful_step_count=24,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
