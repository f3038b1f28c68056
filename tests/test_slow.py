"""`make test` leaves out what is slow, and tries few random examples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.slow import examples

FEW, ALL = 3, 7


def test_few_examples_are_tried_only_where_slow_tests_are_left_out(
    pytestconfig: pytest.Config,
) -> None:
    tried: list[int] = []

    @settings(max_examples=examples(FEW, slow=ALL), database=None)
    @given(st.integers())
    def try_one(number: int) -> None:
        tried.append(number)

    try_one()
    assert len(tried) == (FEW if "not slow" in pytestconfig.option.markexpr else ALL)
