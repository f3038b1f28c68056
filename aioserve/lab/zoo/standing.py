"""Where a policy stands among others: ranks with what chance leaves open, by measure and workload.

A rank counts the policies that are better on average over the seeds. Its range counts those that
are better or worse beyond the 95% interval of the difference, seed by seed (Student), each by
itself; of one seed there is no range. Knows results; knows nothing about how they are shown.
"""

import math
from statistics import fmean

import msgspec

from aioserve.lab.comparison.bootstrap import MIN_SEEDS, Sampling, compare_seeds
from aioserve.lab.comparison.rows import Row
from aioserve.lab.zoo.measures import IN_TIME, Values, key
from aioserve.lab.zoo.standard import WORKLOADS
from aioserve.lab.zoo.stored import Entry, Results

OVERALL = "overall"  # the mean over the workloads
TINY = 1e-9


class Rank(msgspec.Struct, frozen=True):
    """A place among `of` policies, with its range; ties share the better place."""

    value: float  # mean over the seeds, in the unit of the lab's document
    rank: int
    best: int
    worst: int
    of: int

    def __str__(self) -> str:
        """`3` or `3 (2 to 6)`."""
        if self.best == self.worst:
            return str(self.rank)
        return f"{self.rank} ({self.best} to {self.worst})"


class Standing(msgspec.Struct, frozen=True):
    """One policy by its share in time: where it stands on each workload, and `overall`."""

    name: str
    ranks: dict[str, Rank]

    @property
    def overall(self) -> Rank:
        """The rank of the policy over all workloads together."""
        return self.ranks[OVERALL]


def leaderboard(results: Results) -> list[Standing]:
    """All policies, the best one overall first; equal ones by name."""
    made = []
    for name in results.policies:
        ranks = {w: rank_of(results, name, w, IN_TIME) for w in (*WORKLOADS, OVERALL)}
        made.append(Standing(name, {w: rank for w, rank in ranks.items() if rank is not None}))
    return sorted(made, key=lambda standing: (standing.overall.rank, standing.name))


def rank_of(results: Results, name: str, workload: str, row: Row) -> Rank | None:
    """Where a policy stands by one measure on one workload; None: the measure is undefined there,
    or more of it is neither better nor worse.
    """
    own = values_of(results.policies[name], workload, row)
    others = [values_of(e, workload, row) for n, e in results.policies.items() if n != name]
    others = [values for values in others if not math.isnan(_mean(values))]
    if math.isnan(mean := _mean(own)) or not row.good:
        return None
    better = ahead = behind = 0
    if len(own) < MIN_SEEDS:
        better = sum(row.good * (_mean(values) - mean) > TINY for values in others)
        return Rank(mean, better + 1, better + 1, better + 1, 1 + len(others))
    for values in others:
        better += row.good * (_mean(values) - mean) > TINY
        difference = compare_seeds(own, values, Sampling())
        if difference.is_distinguishable:
            ahead += row.good * difference.value > 0
            behind += row.good * difference.value < 0
    return Rank(mean, better + 1, ahead + 1, 1 + len(others) - behind, 1 + len(others))


def values_of(entry: Entry, workload: str, row: Row) -> Values:
    """Of each seed; of `overall`, the mean over the workloads."""
    if workload != OVERALL:
        return entry.scores[workload][key(row)]
    of_workloads = [entry.scores[name][key(row)] for name in WORKLOADS]
    return [fmean(values) for values in zip(*of_workloads, strict=True)]


def mean_of(entry: Entry, workload: str, row: Row) -> float:
    """The mean over the seeds, in the unit of the lab's document; NaN: undefined."""
    return _mean(values_of(entry, workload, row))


def _mean(values: Values) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan
