"""What a server measured while a decision log was written, beside what is simulated of it.

The difference between the two is how far the simulation is off. Runs nothing.
"""

from typing import Any

import numpy as np

from aioserve.lab.comparison.measures import over_seeds
from aioserve.lab.logs.traffic import Traffic


def measure_recorded(traffic: Traffic) -> dict[str, Any]:
    """The durations of a log's requests, in the shape of a result of `compare`: in seconds, with
    the policies that decided, in words.
    """
    lives = traffic.lives
    times = [np.frombuffer(life.token_times) for life in lives]
    pairs = list(zip(lives, times, strict=True))
    finished = [pair for pair in pairs if pair[0].finish_reason in ("stop", "length")]
    return {
        "policies": traffic.chronicle.policies,
        "requests": len(lives),
        "finished": len(finished),
        "durations": {
            "ttft": _statistics([t[0] - life.arrival for life, t in pairs if len(t)]),
            "tpot": _statistics([(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1]),
            "gap": over_seeds([np.concatenate([np.empty(0), *map(np.diff, times)])]),
            "e2e": _statistics([(life.end or 0.0) - life.arrival for life, _ in finished]),
        },
        "totals": {},
    }


def _statistics(values: list[float]) -> dict[str, float]:
    return over_seeds([np.array(values, dtype=float)])
