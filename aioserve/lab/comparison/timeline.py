"""What a report draws of one run: curves over time and distributions, thinned for a screen.

Knows outcomes and shapes of plots. Decides nothing.
"""

from typing import Any

import numpy as np

from aioserve.lab.comparison.measures import RunMeasures, tidy
from aioserve.lab.comparison.service import Floats
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.workloads.workload import Workload

NUM_POINTS = 240  # of a curve over time
NUM_STEPS = 160  # bars in the step timeline of the first configuration
MAX_STEPS = 600  # and at most in those of the others
MAX_USERS = 8  # with a curve of their own


# Evenly up to 90%, then evenly in nines: tails are what most differences are about.
SHARES = np.concatenate([np.linspace(0, 0.9, 91)[:-1], 1 - 10 ** -np.linspace(1, 3, 61)])


def distributions(runs: list[RunMeasures]) -> dict[str, list[float]]:
    """Quantiles of each measure over all seeds, in seconds: the CDFs, read sideways."""
    curves = {"shares": [tidy(share) for share in SHARES]}
    for name in ("ttft", "gaps", "tpot", "e2e"):
        values = np.concatenate([np.asarray(getattr(run, name), dtype=float) for run in runs])
        values = np.sort(values[~np.isnan(values)])
        places = np.minimum((SHARES * len(values)).astype(int), len(values) - 1)
        curves[name] = [tidy(v) for v in values[places]] if len(values) else []
    return curves


def timelines(
    outcome: RunOutcome, workload: Workload, window: list[float] | None = None
) -> dict[str, Any]:
    """Queue, memory and service over time, and the steps from second to second of `window`; by
    default of one around the moment at which most requests waited.
    """
    states = outcome.states
    time = np.frombuffer(states.time)
    keep = np.unique(np.linspace(0, max(len(time) - 1, 0), NUM_POINTS).astype(int))
    keep = keep[keep < len(time)]
    return {
        "time": [tidy(t) for t in time[keep]],
        "waiting": [states.num_waiting[i] for i in keep],
        "running": [states.num_running[i] for i in keep],
        "kv_usage": [tidy(states.kv_usage[i]) for i in keep],
        "service": _service(outcome, workload),
        "steps": _steps(outcome, window or _busy_window(outcome)),
    }


def _service(outcome: RunOutcome, workload: Workload) -> dict[str, Any]:
    """Tokens served to each user until each time; a prompt counts when its first token is out."""
    by_user: dict[str, list[tuple[Floats, Floats]]] = {}
    for request, result in zip(workload.requests, outcome.requests, strict=True):
        if result.token_times:
            times = np.frombuffer(result.token_times)
            tokens = np.ones(len(times))
            tokens[0] += request.num_prompt_tokens
            by_user.setdefault(request.user, []).append((times, tokens))
    grid = np.linspace(0, outcome.end, NUM_POINTS)
    curves: dict[str, Floats] = {}
    for user, parts in by_user.items():
        times = np.concatenate([t for t, _ in parts])
        order = np.argsort(times, kind="stable")
        served = np.concatenate([[0], np.cumsum(np.concatenate([n for _, n in parts])[order])])
        curves[user or "everybody"] = served[np.searchsorted(times[order], grid, side="right")]
    largest = sorted(curves, key=lambda user: (-curves[user][-1], user))
    shown = {user: curves[user] for user in largest[:MAX_USERS]}
    if len(largest) > MAX_USERS:
        shown[f"{len(largest) - MAX_USERS} others"] = sum(
            (curves[user] for user in largest[MAX_USERS:]), np.zeros(NUM_POINTS)
        )
    return {
        "time": [tidy(t) for t in grid],
        "users": {user: [int(n) for n in curve] for user, curve in shown.items()},
    }


def _busy_window(outcome: RunOutcome) -> list[float]:
    """Begin and end, in seconds, of `NUM_STEPS` steps around the moment of the longest queue."""
    steps, states = outcome.steps, outcome.states
    if not steps.start:
        return [0.0, 1.0]
    fullest = states.time[int(np.argmax(states.num_waiting))] if states.time else 0.0
    middle = int(np.searchsorted(np.frombuffer(steps.start), fullest))
    first = max(0, min(middle - NUM_STEPS // 3, len(steps.start) - NUM_STEPS))
    last = min(first + NUM_STEPS, len(steps.start)) - 1
    return [tidy(steps.start[first]), tidy(steps.start[last] + steps.seconds[last])]


def _steps(outcome: RunOutcome, window: list[float]) -> dict[str, Any]:
    steps = outcome.steps
    first, end = np.searchsorted(np.frombuffer(steps.start), window)
    shown = slice(int(first), min(int(end), int(first) + MAX_STEPS))
    return {
        "window": window,
        "start": [tidy(t) for t in steps.start[shown]],
        "seconds": [tidy(t) for t in steps.seconds[shown]],
        "prefill_tokens": list(steps.num_prefill_tokens[shown]),
        "decodes": list(steps.num_decodes[shown]),
    }
