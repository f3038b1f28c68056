"""The knee: the highest rate of requests at which a configuration still meets its SLO.

Bisection over the time scale of a workload, in virtual time. Prints nothing.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from aioserve.errors import ConfigError
from aioserve.lab.comparison.candidates import Candidate, prepare
from aioserve.lab.comparison.measures import RunMeasures, tidy
from aioserve.lab.simulation.clients import Progress
from aioserve.lab.simulation.run import simulate
from aioserve.lab.slo import Slo
from aioserve.lab.workloads.workload import Workload

MAX_DOUBLINGS = 12  # away from the workload's own rate, before giving up


class Probe(msgspec.Struct, frozen=True):
    """One rate that was tried."""

    rate: float  # requests or conversations that begin, per second
    time_scale: float  # of the workload
    good_share: float  # of the requests, over all seeds
    is_met: bool


class Knee(msgspec.Struct, frozen=True):
    """Between `rate`, which met the target, and `rate_above`, which did not. None: see `note`."""

    rate: float | None
    rate_above: float | None
    target: float
    probes: list[Probe]
    note: str = ""


def search(
    candidate: Candidate,
    workloads: Sequence[Workload],
    slo: Slo,
    *,
    target: float = 0.99,
    tolerance: float = 0.02,
    clip: bool = False,
    progress: Progress = lambda count: None,
    on_probe: Callable[[Probe], None] = lambda probe: None,
) -> Knee:
    """The knee to within `tolerance` (as a share of the rate); `target` is the share of requests
    that must meet `slo`. Raises `ConfigError` for a workload without arrivals over time.
    """
    (candidate,), fitting, _ = prepare([candidate], list(workloads), is_live=False, clip=clip)
    base_rate = float(np.mean([_rate(workload) for workload in fitting]))
    probes: list[Probe] = []

    def is_met(rate: float) -> bool:
        scale = base_rate / rate
        good = [_good(candidate, workload.scaled(scale), slo, progress) for workload in fitting]
        share = float(np.mean(np.concatenate(good)))
        probe = Probe(tidy(rate), tidy(scale), tidy(share), share >= target)
        probes.append(probe)
        on_probe(probe)
        return probe.is_met

    low, high = _bracket(is_met, base_rate)
    if low is not None and high is not None:
        while high > low * (1 + tolerance):
            middle = (low * high) ** 0.5
            if is_met(middle):
                low = middle
            else:
                high = middle
    note = ""
    if low is None:
        note = "not even the lowest rate that was tried meets the SLO"
    elif high is None:
        note = "even the highest rate that was tried meets the SLO: the workload is too short"
    return Knee(
        None if low is None else tidy(low),
        None if high is None else tidy(high),
        target,
        probes,
        note,
    )


def _bracket(is_met: Callable[[float], bool], rate: float) -> tuple[float | None, float | None]:
    """A rate that meets the target and twice that, which does not; None where there is none."""
    if is_met(rate):
        for _ in range(MAX_DOUBLINGS):
            if not is_met(2 * rate):
                return rate, 2 * rate
            rate *= 2
        return rate, None
    for _ in range(MAX_DOUBLINGS):
        rate /= 2
        if is_met(rate):
            return rate, 2 * rate
    return None, rate


def _rate(workload: Workload) -> float:
    if workload.duration <= 0:
        raise ConfigError(f"{workload.name}: all requests arrive at once, so there is no rate")
    return sum(r.follows < 0 for r in workload.requests) / workload.duration


def _good(
    candidate: Candidate, workload: Workload, slo: Slo, progress: Progress
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    outcome = simulate(candidate.config, workload, progress)
    return RunMeasures(outcome, workload, slo).is_good
