"""How much each client was served: differences while clients waited, and shares of what is due.

Knows outcomes of one run, and the weights that were stated. Judges nothing: what a client is due
is its weight's share of what the clients that waited with it got. The difference of service is that
of "Fairness in Serving Large Language Models" (Sheng et al., OSDI'24, theorem 4.4).
"""

from collections import Counter
from collections.abc import Mapping
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.workloads.workload import Workload

Floats = npt.NDArray[np.float64]

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # service of a token, as the paper has it
MAX_CLIENTS = 16  # that are compared two by two: those that waited longest


class Service(NamedTuple):
    """The service of one client, in tokens of prompts and replies. A client competes from the first
    step that leaves out a waiting request of its until that one is admitted: one that is served as
    soon as it asks is due no more than it asks for.
    """

    tokens: int
    seconds: float  # that its requests were in the system; two at once count twice
    competing: float  # seconds in which it competed, and so did another client
    got: float  # in these
    due: float  # its weight's share of what all clients got that competed then
    behind: float = 0.0  # service by which it fell behind another, at the most: `Difference`

    @property
    def rate(self) -> float:
        """Tokens per second of a request in the system."""
        return self.tokens / max(self.seconds, 1e-9)


class Difference(NamedTuple):
    """The difference between what clients were served while they waited together, over all pairs of
    them.

    Service is 1 for a token of a prompt, counted when it is admitted, and 2 for a token of a reply,
    divided by the client's weight. Between two moments of a stretch of time in which both clients
    have a request waiting, each is served so much; that the two are served alike is what fairness
    promises. Clients of which one never waits while the other does are not compared.
    """

    largest: float = 0.0  # of any pair, between any two moments of a stretch
    mean: float = 0.0  # since the beginning of the stretch, over its time and over the pairs


def service_by_client(
    outcome: RunOutcome, workload: Workload, weights: Mapping[str, float]
) -> tuple[dict[str, Service], Difference]:
    """Return the service by `user` of the requests, in alphabetical order; a client without a
    weight has 1.
    """
    tokens: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    waits: dict[str, list[tuple[float, float]]] = {}
    prompts: dict[str, list[tuple[Floats, Floats]]] = {}  # when, and how many tokens
    replies: dict[str, list[tuple[Floats, Floats]]] = {}
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
        replies.setdefault(user, []).append((times, np.ones(len(times))))
        if result.admitted is not None:
            whole = np.array([float(request.num_prompt_tokens)])
            prompts.setdefault(user, []).append((np.array([result.admitted]), whole))
    users = sorted(seconds)
    unions = [_union(waits[user]) for user in users]
    due = np.array([weights.get(user, 1.0) for user in users])
    competing, got, share = _compete(
        unions, [_joined(prompts.get(user, []) + replies[user]) for user in users], due
    )
    weighted = [
        _joined(
            [(when, INPUT_WEIGHT / own * n) for when, n in prompts.get(user, [])]
            + [(when, OUTPUT_WEIGHT / own * n) for when, n in replies[user]]
        )
        for user, own in zip(users, due, strict=True)
    ]
    difference, behind = _differ(unions, weighted)
    services = {
        user: Service(
            tokens[user],
            seconds[user],
            float(competing[i]),
            float(got[i]),
            float(share[i]),
            float(behind[i]),
        )
        for i, user in enumerate(users)
    }
    return services, difference


def fairness_totals(services: Mapping[str, Service]) -> dict[str, float]:
    """Return Jain's index of what clients got of what was due to them while they competed, from 1
    over their number to 1 (fair), and the least such share; nothing where fewer than two competed.
    (Jain, Chiu and Hawe, "A Quantitative Measure of Fairness and Discrimination for Resource
    Allocation in Shared Computer Systems", DEC-TR-301, 1984.) Only time in which a client has a
    waiting request that steps leave out counts, so one that asks for less than its share is no
    worse off for that.
    """
    shares = np.array([service.got / service.due for service in services.values() if service.due])
    if len(shares) < 2:
        return {}
    squares = len(shares) * float(np.sum(shares**2))
    return {
        "jains_index": float(np.sum(shares)) ** 2 / squares if squares else 1.0,
        "worst_client_due": float(np.min(shares)),
    }


def service_bound(longest_prompt: int, kv_tokens: int) -> float:
    """Return the difference of service that VTC promises not to exceed, with all weights 1: twice
    the larger of the longest prompt and of a batch that fills the KV cache with tokens of replies.
    """
    return 2 * max(INPUT_WEIGHT * longest_prompt, OUTPUT_WEIGHT * kv_tokens)


def _differ(waits: list[Floats], served: list[tuple[Floats, Floats]]) -> tuple[Difference, Floats]:
    """Over all pairs; and for each client, by how much it fell behind another at the most."""
    behind = np.zeros(len(waits))
    order = np.argsort([-float(np.sum(w[:, 1] - w[:, 0])) for w in waits], kind="stable")
    total = seconds = 0.0
    for i, j in combinations(order[:MAX_CLIENTS].tolist(), 2):
        stretches = _intersection(waits[i], waits[j])
        if not len(stretches):
            continue
        times = np.concatenate([served[i][0], served[j][0]])
        amounts = np.concatenate([served[i][1], -served[j][1]])
        by_time = np.argsort(times, kind="stable")
        times = times[by_time]
        ahead = np.concatenate([[0.0], np.cumsum(amounts[by_time])])  # i's, after so many of them
        places = np.searchsorted(times, stretches, side="right")
        for (begin, end), (first, last) in zip(stretches, places, strict=True):
            curve = ahead[first : last + 1] - ahead[first]
            behind[i] = max(behind[i], np.max(np.maximum.accumulate(curve) - curve))
            behind[j] = max(behind[j], np.max(curve - np.minimum.accumulate(curve)))
            edges = np.concatenate([[begin], times[first:last], [end]])
            total += float(np.abs(curve) @ np.diff(edges))
            seconds += end - begin
    return Difference(float(np.max(behind, initial=0.0)), total / max(seconds, 1e-9)), behind


def _intersection(a: Floats, b: Floats) -> Floats:
    """Return the stretches of time that lie in one of `a` and in one of `b`, both in order."""
    # Of b, those that end after the begin of one of a, up to those that begin before its end.
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    last = np.searchsorted(b[:, 0], a[:, 1], side="left")
    found = [
        (max(begin, other_begin), min(end, other_end))
        for (begin, end), i, j in zip(a, first, last, strict=True)
        for other_begin, other_end in b[i:j]
    ]
    return np.array([stretch for stretch in found if stretch[0] < stretch[1]]).reshape(-1, 2)


def _compete(
    waits: list[Floats], served: list[tuple[Floats, Floats]], weights: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the competition of each client: how long it waited while another did, what it got
    then, and was due. `waits` are [n, 2] stretches of time, apart from each other; what comes at
    the end of one comes in it.
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
    """Return the fewest stretches that cover the same time, in order."""
    stretches.sort()
    begins, ends = np.array(stretches).T
    ends = np.maximum.accumulate(ends)
    is_first = np.concatenate([[True], begins[1:] > ends[:-1]])
    firsts = [*np.flatnonzero(is_first), len(begins)]
    return np.array([(begins[a], ends[b - 1]) for a, b in pairwise(firsts)])


def _joined(parts: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    if not parts:
        return np.empty(0), np.empty(0)
    return np.concatenate([t for t, _ in parts]), np.concatenate([n for _, n in parts])
