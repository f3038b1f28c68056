"""The cost of a policy is measured where there is something to decide: seats taken, a long line."""

import pytest

from aioserve.lab.zoo.cost import RUNNING, measure_costs
from aioserve.lab.zoo.standing import load_policies, policy_names
from tests.slow import mostly_slow


@pytest.mark.parametrize("name", mostly_slow(policy_names(), but=["zoo.orca", "zoo.lars"]))
def test_requests_end_and_come_while_seats_are_taken_and_many_wait(name: str) -> None:
    [candidate] = load_policies([name])
    [cost] = measure_costs([candidate.config], waiting=300)
    # Some seats are free in each step; a policy that spreads prompts out has more of them free.
    assert 0.7 * RUNNING <= cost.running < RUNNING
    assert 300 <= cost.waiting <= 300 + 0.3 * RUNNING
    assert cost.us > 0
    assert cost.ratio == cost.us / cost.reference_us
    assert cost.machine
