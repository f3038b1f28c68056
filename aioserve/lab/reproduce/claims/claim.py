"""A published result, what running it again gave, the verdict, and how a claim is run.

Knows numbers and how near they are, and the lab's runs. Knows no claim.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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

#: How far a value may be from the published one, as a share of it, to count as reproduced.
CLOSE = 0.10

#: A published range is wide if its ends are further apart than by this factor, or if it has one
#: end ("at most"): a value within it says less than one near a number.
WIDE = 1.5

Verdict = Literal[
    "reproduced", "within the published range, which is wide", "direction only", "not reproduced"
]
WORST_FIRST: tuple[Verdict, ...] = (
    "not reproduced",
    "direction only",
    "within the published range, which is wide",
    "reproduced",
)


class Finding(msgspec.Struct, frozen=True):
    """One quantity, as it was published and as it comes out here.

    A ratio is of the new policy to the baseline, so that 1 is no effect. What the source gives as a
    range, such as "1.12 to 3.66 times", has a published value that is a range too.
    """

    quantity: str
    published: tuple[float, float]  # from, to; the same twice for a number
    runs: list[float]  # here, a value for each seed
    is_ratio: bool = True

    @property
    def ours(self) -> float:
        """The mean of the runs, in the unit of the quantity."""
        return sum(self.runs) / len(self.runs)

    @property
    def verdict(self) -> Verdict:
        """Whether the value is in the published range, give or take `CLOSE`, a ratio on the same
        side of 1, and whether that range is wide; if not, whether a ratio is on that side in every
        run.
        """
        low, high = self.published
        is_close = low * (1 - CLOSE) <= self.ours <= high * (1 + CLOSE)
        if is_close and (not self.is_ratio or self._has_direction(self.ours)):
            is_wide = high > WIDE * low
            return "within the published range, which is wide" if is_wide else "reproduced"
        same_side = self.is_ratio and all(self._has_direction(run) for run in self.runs)
        return "direction only" if same_side else "not reproduced"

    def _has_direction(self, ratio: float) -> bool:
        """Return whether a ratio is on the side of 1 on which the published one is."""
        return ratio != 1 and (ratio < 1) == (self.published[1] < 1)


class Claim(msgspec.Struct, frozen=True):
    """A published result: where it stands, its setting, and how it is run again."""

    name: str
    title: str
    source: str
    setting: str  # as published
    here: str  # what is otherwise in the run here, and what the source leaves open
    run: Callable[[Sequence[int], Progress], list[Finding]]  # for seeds


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the worst of the verdicts of the findings."""
    return min((finding.verdict for finding in findings), key=WORST_FIRST.index)


# What the claims share: a simulated configuration in a few words, a workload, its measures.


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


def configure(policy: str, steps: Steps | str, **settings: Any) -> EngineConfig:
    """Return a simulated engine under `policy`, whose steps take what `steps` says and nothing
    else: coefficients, or the name of a profile. A setting is named `section__field`.
    """
    overrides: list[tuple[str, Any]] = [("runner.profile", steps)]
    if not isinstance(steps, str):
        free = dict.fromkeys(STEP_TIMES, 0.0)
        overrides = [(f"runner.{n}", v) for n, v in {**free, **steps}.items()]
    overrides += [(name.replace("__", "."), value) for name, value in settings.items()]
    fixed = [
        ("scheduler.policy", policy),
        ("scheduler.max_waiting_requests", 10**6),
        ("cache.watermark", 0.0),
    ]
    return simulated(EngineConfig.load(None, [*fixed, *overrides]))


#: Llama-3.1-8B on one card of the H100 class, computed.
LLAMA_8B = {
    "step_base_ms": 8.0,
    "step_prefill_token_us": 40.0,
    "step_decode_us": 20.0,
    "step_context_token_us": 0.04,
    "step_query_context_ns": 1.5,
}


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


def ratios(own: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return, for each quantity of a run, its ratios to the baseline's run on the same seed."""
    return [
        [a / b for a, b in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(zip(*own, strict=True), zip(*base, strict=True), strict=True)
    ]
