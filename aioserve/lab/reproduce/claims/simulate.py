"""What the claims share: a simulated configuration in a few words, a workload, its measures.

Knows the lab's runs. Knows no claim.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from aioserve.config import EngineConfig
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.measures import RunMeasures
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.run import Progress, simulate, simulated
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.workloads.synthetic import WorkloadSpec, generate
from aioserve.lab.workloads.workload import Workload

#: Coefficients of a step's time, by the settings that have them.
Steps = Mapping[str, float]
STEP_TIMES = (
    "step_base_ms",
    "step_prefill_token_us",
    "step_decode_us",
    "step_context_token_us",
    "step_query_context_ns",
    "step_prefill_us",
    "step_idle_ms",
)


def configure(policy: str, steps: Steps, **settings: Any) -> EngineConfig:
    """Return a simulated engine under `policy`, whose steps take what `steps` says and nothing
    else. A setting is named `section__field`.
    """
    free = dict.fromkeys(STEP_TIMES, 0.0)
    overrides: list[tuple[str, Any]] = [(f"runner.{n}", v) for n, v in {**free, **steps}.items()]
    overrides += [(name.replace("__", "."), value) for name, value in settings.items()]
    fixed = [
        ("scheduler.policy", policy),
        ("scheduler.max_waiting_requests", 10**6),
        ("cache.watermark", 0.0),
    ]
    return simulated(EngineConfig.load(None, [*fixed, *overrides]))


def candidate(policy: str, steps: Steps, **settings: Any) -> Candidate:
    """`configure`, for a search of the knee."""
    return Candidate(policy, configure(policy, steps, **settings))


def make_workload(spec: Mapping[str, Any], seed: int, name: str) -> Workload:
    """Return the requests of a description, as workload files have it."""
    return generate(msgspec.convert(spec, WorkloadSpec), seed, name)


def measure(
    config: EngineConfig,
    workload: Workload,
    progress: Progress = lambda count: None,
    slo: ServiceLevels | None = None,
) -> RunMeasures:
    """Run the configuration on the workload, in virtual time."""
    return RunMeasures(simulate(config, workload, progress), workload, slo)


def measure_fleet(
    config: EngineConfig,
    workload: Workload,
    fleet: Fleet,
    progress: Progress = lambda count: None,
) -> RunMeasures:
    """Run a fleet of such engines on the workload, in virtual time."""
    return RunMeasures(simulate_fleet(config, workload, fleet, progress), workload, None)
