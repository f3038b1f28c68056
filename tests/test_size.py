"""What is loaded to serve stays within its limits, which are only ever lowered."""

import pytest

from tests.size import LIMITS, measure


@pytest.mark.parametrize("scenario", LIMITS)
def test_a_scenario_loads_no_more_than_its_limit(scenario: str) -> None:
    found, limit = measure(scenario), LIMITS[scenario]
    assert found.modules <= limit.modules
    assert found.lines <= limit.lines
