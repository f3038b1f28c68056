"""The cost of a policy is measured where there is something to decide: seats taken, a long line."""

from collections.abc import Callable

import pytest

from aioserve.config import EngineConfig
from aioserve.lab.zoo.cost import NUM_STEPS, RUNNING, CostLoad, measure_costs, measure_in_turns
from aioserve.lab.zoo.standing import load_policies, policy_names
from tests.slow import mostly_slow


@pytest.mark.parametrize("name", mostly_slow(policy_names(), but=["zoo.lars"]))
def test_requests_end_and_come_while_seats_are_taken_and_many_wait(name: str) -> None:
    [candidate] = load_policies([name])
    [cost] = measure_costs([candidate.config], waiting=300)
    # Some seats are free in each step; a policy that spreads prompts out has more of them free.
    assert 0.7 * RUNNING <= cost.running < RUNNING
    assert 300 <= cost.waiting <= 300 + 0.3 * RUNNING
    assert cost.us > 0
    assert cost.ratio == cost.us / cost.reference_us
    assert cost.machine


def test_loads_are_measured_step_by_step_in_turns() -> None:
    asked: list[str] = []

    def clock_of(name: str) -> Callable[[], float]:
        def clock() -> float:
            asked.append(name)
            return len(asked) * 1e-3

        return clock

    config = EngineConfig.load("chunked_prefill")
    loads = [CostLoad(config, 20, clock=clock_of(name)) for name in ("mine", "its")]
    asked.clear()
    measure_in_turns(loads)
    there, back = ["mine", "mine", "its", "its"], ["its", "its", "mine", "mine"]
    assert asked == (there + back) * (NUM_STEPS // 2)
    assert [load.us for load in loads] == [1000.0, 1000.0]
    assert all(0.7 * RUNNING <= load.running <= RUNNING for load in loads)
