"""What a replica learns of its step times is a line over the batch."""

import pytest

from aioserve.fleet.routing import ReplicaView, StepTimes


def test_a_line_is_found_and_follows_what_changes() -> None:
    times = StepTimes()
    assert times.line() == (0.0, 0.0)
    for batch in (1, 8, 3, 20):
        times.learn(batch, 0.010 + 0.002 * batch, count=3)
    assert times.line() == pytest.approx((0.010, 0.002))
    for batch in (1, 8, 3, 20) * 200:
        times.learn(batch, 0.005 + 0.001 * batch)
    assert times.line() == pytest.approx((0.005, 0.001), rel=0.05)


def test_equal_batches_give_a_flat_line_and_no_time_is_negative() -> None:
    flat, steep = StepTimes(), StepTimes()
    flat.learn(4, 0.02)
    assert flat.line() == pytest.approx((0.02, 0.0))
    for batch, seconds in ((10, 0.001), (20, 0.1)):
        steep.learn(batch, seconds)
    base, each = steep.line()
    assert base == 0.0
    assert each > 0.0


def test_a_view_without_a_line_has_the_mean_of_its_steps() -> None:
    assert ReplicaView("r0", step_seconds=0.03).step_seconds_with(9) == 0.03
    assert ReplicaView("r0").age(5.0) == float("inf")
