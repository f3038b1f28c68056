"""Whoever watches passes everything on, and says who decides."""

import pytest
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.policies.priority import PriorityScheduler

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError
from aioserve.scheduler import SchedulerInterface
from aioserve.scheduler.delegate import DelegatingScheduler, innermost, without
from aioserve.testing import SchedulerHarness


def test_every_call_of_the_interface_is_passed_on() -> None:
    """One that is not would be answered by the default of the interface, and nobody would know."""
    calls = {name for name in vars(SchedulerInterface) if not name.startswith("_")}
    assert calls <= set(vars(DelegatingScheduler))


def test_a_switch_reaches_whoever_decides_and_a_refused_one_changes_nothing() -> None:
    harness = SchedulerHarness(FCFSScheduler)
    inner = DelegatingScheduler(harness.scheduler)
    outer = DelegatingScheduler(inner)
    harness.add_request("a", [1] * 5)
    with pytest.raises(ConfigError, match="unknown policy"):
        outer.switch(SchedulerConfig(policy="fcsf"))
    assert (outer.live, inner.live) == (inner, harness.scheduler)
    assert outer.policy is FCFSScheduler
    assert outer.switch(SchedulerConfig(policy="priority")) is outer
    assert outer.policy is type(inner.live) is PriorityScheduler
    harness.scheduler = inner.live
    harness.run_until_idle()
    assert harness.finished == {"a": "length"}


def test_a_recorder_leaves_the_chain_wherever_it_stands_in_it() -> None:
    inner = DelegatingScheduler(live := object())  # type: ignore[arg-type]
    middle = DelegatingScheduler(inner)
    outer = DelegatingScheduler(middle)
    assert innermost(outer) is live
    assert without(outer, middle) is outer
    assert outer.live is inner
    assert without(outer, outer) is inner
    assert without(inner, middle) is inner
