"""Options that suit a workload, chosen on one part of it and judged on another.

The best of several scores is biased: part of what made it the best is chance, which does not come
again (the winner's curse; Cawley and Talbot, "On Over-fitting in Model Selection", JMLR, 2010). So
the score that counts is that on requests which no choice has seen. A trace is cut in time: the
first part trains, the later one is held out. A description of traffic makes other requests with
each seed: some seeds train, as many others are held out. Or another workload is held out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean
from typing import Any

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import is_list
from aioserve.lab.comparison.bootstrap import Sampling, compare_seeds
from aioserve.lab.comparison.candidates import Candidate, load_candidates, options_of, prepare
from aioserve.lab.comparison.document import (
    Apart,
    apart,
    apart_in,
    classes_of,
    mean_of,
    measure_groups,
)
from aioserve.lab.comparison.knee import Knee
from aioserve.lab.comparison.measures import Row, RunMeasures, key
from aioserve.lab.simulation.run import Progress
from aioserve.lab.slo import ServiceLevels, StatedSlo
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload


class Split(msgspec.Struct, frozen=True):
    """The two parts, a workload for each seed, and what they are in words."""

    training: Sequence[Workload]
    held_out: Sequence[Workload]
    words: str


def split(source: WorkloadSource, seeds: Sequence[int], share: float) -> Split:
    """Return two parts of one workload. `share` is the part of a trace's time that trains. Raises
    `ConfigError` where a part has no request.
    """
    training = [source.load(seed) for seed in seeds]
    if source.is_trace:
        return _cut(training, share)
    others = range(max(seeds) + 1, max(seeds) + 1 + len(seeds))
    held_out = [source.load(seed) for seed in others]
    words = f"trained on {_named(training)}, held out: {_seeds(held_out)} of it"
    return Split(training, held_out, words)


def two_workloads(
    source: WorkloadSource, seeds: Sequence[int], other: WorkloadSource, other_seeds: Sequence[int]
) -> Split:
    """Return all of one workload to train on, all of another one held out. Raises `ConfigError` if
    they are the same.
    """
    if other.path == source.path:
        raise ConfigError(f"--held-out {other.path} is the workload that trains; name another one")
    training = [source.load(seed) for seed in seeds]
    held_out = [other.load(seed) for seed in other_seeds]
    return Split(training, held_out, f"trained on {_named(training)}, held out: {_named(held_out)}")


def _cut(whole: Sequence[Workload], share: float) -> Split:
    first = whole[0]
    begin = min((r.arrival for r in first.requests if r.follows < 0), default=0.0)
    at = begin + share * (first.duration - begin)
    if not begin < at < first.duration:
        raise ConfigError(
            f"{first.name}: all requests arrive at once, so that no later part can be held out; "
            "give another workload with --held-out"
        )
    training = [workload.cut(duration=at) for workload in whole]
    held_out = [workload.cut(start=at) for workload in whole]
    sizes = len(training[0].requests), len(held_out[0].requests)
    return Split(
        training,
        held_out,
        f"{first.name}: trained on the {sizes[0]} requests of the first {at:.0f} s, held out: the "
        f"{sizes[1]} after them",
    )


def _named(workloads: Sequence[Workload]) -> str:
    return f"{workloads[0].name} with {_seeds(workloads)}"


def _seeds(workloads: Sequence[Workload]) -> str:
    first, last = workloads[0].seed, workloads[-1].seed
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


# By what options are chosen: a measure at the workload's rate, or the highest rate within an SLO.


#: The highest rate at which the SLO is met; not a row of comparisons.
RATE = Row("requests/s within the SLO", "totals", "rate", "requests/s", 1, 3, 1)
FindKnee = Callable[[Candidate, Sequence[Workload]], Knee]


class Scores(ABC):
    """Candidates measured on one part: a score each, and how two of them are apart."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.values: list[float] = []  # of each candidate, in the unit of the row

    @abstractmethod
    def apart(self, first: int, second: int) -> Apart:
        """Return the score of the second candidate less that of the first."""


class MeasureScores(Scores):
    """Scores by a measure of `compare`."""

    def __init__(self, row: Row, runs: Sequence[Sequence[RunMeasures]]) -> None:
        super().__init__(row)
        self._runs = runs
        self.values = [mean_of(of_candidate, row) for of_candidate in runs]

    def apart(self, first: int, second: int) -> Apart:
        return apart_in(self._runs[first], self._runs[second], self.row)


class RateScores(Scores):
    """Scores by the highest rate that each seed allows."""

    def __init__(self, rates: Sequence[Sequence[float]]) -> None:
        super().__init__(RATE)
        self._rates = rates
        self.values = [fmean(of_candidate) for of_candidate in rates]

    def apart(self, first: int, second: int) -> Apart:
        found = compare_seeds(self._rates[first], self._rates[second], Sampling())
        return apart(found, self.row, self.values[first])


def score_by_measure(
    row: Row,
    candidates: Sequence[Candidate],
    workloads: Sequence[Workload],
    slo: Sequence[StatedSlo],
    num_jobs: int,
    progress: Progress,
    *,
    clip: bool = False,
) -> Scores:
    """Simulate each candidate on each workload. Raises `ConfigError` for an undefined measure."""
    ready, fitting, _ = prepare(list(candidates), list(workloads), is_live=False, clip=clip)
    groups = [[(candidate.config, workload) for workload in fitting] for candidate in ready]
    levels = ServiceLevels.of(slo, classes_of(fitting))
    return MeasureScores(row, measure_groups(groups, levels, num_jobs, progress))


def score_by_rate(
    find: FindKnee, candidates: Sequence[Candidate], workloads: Sequence[Workload]
) -> Scores:
    """Find the rate of each candidate on each workload alone. Raises `ConfigError` where there is
    no highest rate.
    """
    rates = []
    for candidate in candidates:
        own = []
        for workload in workloads:
            knee = find(candidate, [workload])
            if knee.rate is None:
                name = f"{candidate.name}, seed {workload.seed}"
                raise ConfigError(f"{name}: no highest rate was found: {knee.note}")
            own.append(knee.rate)
        rates.append(own)
    return RateScores(rates)


# The choice.


DEFAULT = "default"  # the configuration without the values that are searched
Score = Callable[[Sequence[Candidate], Sequence[Workload]], Scores]


class Tuning(msgspec.Struct, frozen=True):
    """The choice, and what it is worth; scores are in the unit of the measure's row."""

    parts: str  # what trains and what is held out, in words
    measure: str  # what decided, as `parse_measure` reads it; `rate`: the highest within the SLO
    candidates: list[str]  # the default last
    training: list[float]  # scores, as above
    chosen: str
    held_out: float  # of what was chosen
    held_out_default: float
    gain_in_training: Apart  # over the default
    gain: Apart  # over the default, on the part that is held out


def grid(
    config: str, settings: Sequence[tuple[str, Any]], machine: Sequence[tuple[str, Any]] = ()
) -> list[Candidate]:
    """Return a candidate for each combination of the values that `settings` list, and the default
    last: the configuration without them. The settings of the `machine` are under all of them.
    Raises `ConfigError` where a value is not allowed.
    """
    fixed = [*machine, *((name, value) for name, value in settings if not is_list(value))]
    searched = [(name, value.split(",")) for name, value in settings if is_list(value)]
    found = []
    for values in product(*(values for _, values in searched)):
        own = [(name, v.strip()) for (name, _), v in zip(searched, values, strict=True)]
        [candidate] = load_candidates([config], [*fixed, *own])
        named = " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in own)
        options_of(candidate.config)
        found.append(msgspec.structs.replace(candidate, name=named))
    [default] = load_candidates([config], fixed)
    return [*found, msgspec.structs.replace(default, name=DEFAULT)]


def tune(candidates: Sequence[Candidate], parts: Split, score: Score) -> Tuning:
    """Choose the best candidate on the training part, the default among them, and judge it on the
    part that is held out. Raises `ConfigError` as `score` does.
    """
    in_training = score(candidates, parts.training)
    good, last = in_training.row.good, len(candidates) - 1
    best = max(range(len(candidates)), key=lambda i: (good * in_training.values[i], i == last))
    judged = score([candidates[last], candidates[best]], parts.held_out)
    return Tuning(
        parts.words,
        key(in_training.row),
        [candidate.name for candidate in candidates],
        in_training.values,
        candidates[best].name,
        judged.values[1],
        judged.values[0],
        in_training.apart(last, best),
        judged.apart(0, 1),
    )


def check_values(settings: Sequence[tuple[str, Any]]) -> bool:
    """Return whether options are searched. Raises `ConfigError` for a setting that is given
    twice.
    """
    names = [name for name, _ in settings]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--set {min(twice)} is given twice; give its values as A,B,C")
    return any(is_list(value) for _, value in settings)
