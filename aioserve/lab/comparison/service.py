"""How much each client was served: rates, Jain's index, and shares while clients competed.

Knows outcomes of one run, and the weights that were stated. Judges nothing: what a client is due
is its weight's share of what the clients that waited with it got.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.workloads.workload import Workload

Floats = npt.NDArray[np.float64]


class Service(NamedTuple):
    """Of one client, in tokens of prompts and replies.

    A client competes from the first step that leaves out a waiting request of its until that one is
    admitted: one that is served as soon as it asks is due no more than it asks for.
    """

    tokens: int
    seconds: float  # that its requests were in the system; two at once count twice
    competing: float  # seconds in which it competed, and so did another client
    got: float  # in these
    due: float  # its weight's share of what all clients got that competed then

    @property
    def rate(self) -> float:
        """Tokens per second of a request in the system."""
        return self.tokens / max(self.seconds, 1e-9)


def service_by_client(
    outcome: RunOutcome, workload: Workload, weights: Mapping[str, float]
) -> dict[str, Service]:
    """By the `user` of the requests, in alphabetical order; a client without a weight has 1."""
    tokens: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    waits: dict[str, list[tuple[float, float]]] = {}
    served: dict[str, list[tuple[Floats, Floats]]] = {}  # when, and how many tokens
    planned = np.frombuffer(outcome.steps.planned)
    for request, result in zip(workload.requests, outcome.requests, strict=True):
        user, times = request.user, np.frombuffer(result.token_times)
        if len(times):
            tokens[user] += request.num_prompt_tokens + len(times)
        seconds[user] = seconds.get(user, 0.0) + result.end - result.arrival
        until = result.end if result.admitted is None else result.admitted
        step = np.searchsorted(planned, result.arrival)
        since = min(planned[step], until) if step < len(planned) else until
        waits.setdefault(user, []).append((since, until))
        served.setdefault(user, []).append((times, np.ones(len(times))))
        if result.admitted is not None:
            whole = np.array([request.num_prompt_tokens])
            served[user].append((np.array([result.admitted]), whole))
    users = sorted(seconds)
    competing, got, due = _compete(
        [_union(waits[user]) for user in users],
        [_joined(served[user]) for user in users],
        np.array([weights.get(user, 1.0) for user in users]),
    )
    return {
        user: Service(
            tokens[user], seconds[user], float(competing[i]), float(got[i]), float(due[i])
        )
        for i, user in enumerate(users)
    }


def jain_index(values: Floats) -> float:
    """(sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has everything (Jain, 1984)."""
    squares = float(np.sum(values**2))
    return float(np.sum(values)) ** 2 / (len(values) * squares) if squares else 1.0


def _compete(
    waits: list[Floats], served: list[tuple[Floats, Floats]], weights: Floats
) -> tuple[Floats, Floats, Floats]:
    """For each client: how long it waited while another did, what it got then, and was due.

    `waits` are [n, 2] stretches of time, apart from each other; what comes at the end of one comes
    in it.
    """
    # Between two edges the same clients wait.
    edges = np.unique(np.concatenate([stretch.ravel() for stretch in waits]))
    num_waiting, weight = np.zeros(len(edges)), np.zeros(len(edges))
    for stretch, own in zip(waits, weights, strict=True):
        for column, sign in ((0, 1.0), (1, -1.0)):
            places = np.searchsorted(edges, stretch[:, column])
            num_waiting[places] += sign
            weight[places] += sign * own
    is_contested = np.cumsum(num_waiting) > 1
    weight = np.where(is_contested, np.cumsum(weight), 1.0)
    by_client = np.zeros(len(waits))
    total = np.zeros(len(edges))
    for i, (stretch, (times, counts)) in enumerate(zip(waits, served, strict=True)):
        own = np.searchsorted(stretch[:, 0], times) - 1
        is_inside = (own >= 0) & (times <= stretch[np.maximum(own, 0), 1])
        place = np.searchsorted(edges, times[is_inside]) - 1
        counts = counts[is_inside] * is_contested[place]
        by_client[i] = counts.sum()
        total += np.bincount(place, weights=counts, minlength=len(edges))

    def within(per_edge: Floats) -> Floats:
        """Summed up over the waits of each client."""
        sums = np.concatenate([[0.0], np.cumsum(per_edge)])
        parts = [np.diff(sums[np.searchsorted(edges, stretch)], axis=1) for stretch in waits]
        return np.array([part.sum() for part in parts])

    seconds = within(np.diff(edges, append=edges[-1:]) * is_contested)
    return seconds, by_client, weights * within(total / weight)


def _union(stretches: list[tuple[float, float]]) -> Floats:
    """As few as cover the same time, in order."""
    stretches.sort()
    begins, ends = np.array(stretches).T
    ends = np.maximum.accumulate(ends)
    is_first = np.concatenate([[True], begins[1:] > ends[:-1]])
    firsts = [*np.flatnonzero(is_first), len(begins)]
    return np.array([(begins[a], ends[b - 1]) for a, b in pairwise(firsts)])


def _joined(parts: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    return np.concatenate([t for t, _ in parts]), np.concatenate([n for _, n in parts])
