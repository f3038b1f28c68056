"""Gauges of a policy's own: on `/metrics`, on the page's stream, and gone after a switch."""

import logging
from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.errors import PolicyError
from aioserve.scheduler.stats import checked_gauges
from aioserve.testing import SchedulerHarness
from policies.chunked_prefill import ChunkedPrefillScheduler
from policies.fair import FairScheduler

RAISING = '''
from aioserve.scheduler import BaseScheduler, SchedulerOutput


class Raising(BaseScheduler):
    """Has no gauges after all."""

    def gauges(self):
        return {"share": 1 / 0}

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            step.admit(request)
        return step.output()
'''


def config(policy: str, **sections: Any) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(policy=policy),
        **sections,
    )


def of_policy(engine: AsyncEngine) -> list[str]:
    lines = engine.internals.render_metrics([]).decode().splitlines()
    return [line for line in lines if "policy_gauge{" in line]


async def test_metrics_show_the_gauges_of_the_policy_in_charge_and_of_no_other() -> None:
    async with AsyncEngine(config("fair")) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        async for _ in engine.generate([1, 2, 3], params, user="ann"):
            pass
        shown = of_policy(engine)
        assert 'aioserve_policy_gauge{gauge="clients",policy="fair"} 1.0' in shown
        assert len(shown) == 3
        assert "ann" not in "".join(shown)
        stats = engine.get_stats()
        assert stats is not None
        assert (stats.policy, stats.policy_gauges["clients"]) == ("fair", 1.0)
        engine.switch_policy("latency_budget")
        assert of_policy(engine) == [
            'aioserve_policy_gauge{gauge="trial_budget",policy="latency_budget"} 256.0',
            'aioserve_policy_gauge{gauge="is_fitted",policy="latency_budget"} 0.0',
        ]
        engine.switch_policy("chunked_prefill")
        assert of_policy(engine) == []


async def test_gauges_that_raise_are_logged_once_and_the_other_metrics_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "raising.py"
    file.write_text(RAISING)
    async with AsyncEngine(config(f"{file}:Raising")) as engine:
        with caplog.at_level(logging.WARNING):
            assert of_policy(engine) == []
            assert b"aioserve_num_requests_running 0.0" in engine.internals.render_metrics([])
    told = [record.getMessage() for record in caplog.records if "gauges" in record.getMessage()]
    assert len(told) == 1
    assert "raised ZeroDivisionError" in told[0]
    assert "(raising.py:9)" in told[0]


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ({f"g{i}": 1 for i in range(33)}, "up to 32 numbers, got 33 of them"),
        ([1.0], r"up to 32 numbers, got \[1.0\]"),
        ({"Share": 1.0}, "names a gauge 'Share'"),
        ({"a" * 49: 1.0}, "names a gauge 'aaa"),
        ({7: 1.0}, "names a gauge 7"),
        ({"share": float("inf")}, "gauge 'share' must be a finite number, got inf"),
        ({"share": float("nan")}, "gauge 'share' must be a finite number, got nan"),
        ({"share": 10**400}, "gauge 'share' must be a finite number, got 1000"),
        ({"share": "much"}, "gauge 'share' must be a finite number, got 'much'"),
    ],
)
def test_what_is_no_gauge_is_refused_by_name(shown: Any, message: str) -> None:
    class Showing(ChunkedPrefillScheduler):
        def gauges(self) -> Any:
            return shown

    scheduler = SchedulerHarness(ChunkedPrefillScheduler).scheduler
    assert isinstance(scheduler, ChunkedPrefillScheduler)
    scheduler.__class__ = Showing
    with pytest.raises(PolicyError, match=message):
        checked_gauges(scheduler)


def test_looking_at_the_gauges_of_fair_gives_no_client_a_counter() -> None:
    harness = SchedulerHarness(FairScheduler)
    harness.add_request("a", [1, 2, 3], max_tokens=3, user="ann")
    scheduler = harness.scheduler
    assert isinstance(scheduler, FairScheduler)
    assert scheduler.read_gauges() == {"floor": 0.0, "clients": 0.0, "clients_waiting": 0.0}
    assert not scheduler.clients.counters
    harness.run_until_idle()
