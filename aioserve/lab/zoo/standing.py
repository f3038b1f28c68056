"""The standard of the zoo, what is measured on it, what is stored, and where a policy stands.

The standard is frozen under a version and a digest, so that numbers of two papers can be compared:
what changes one of them is a new version.
"""

import ast
import functools
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.comparison.bootstrap import LEVEL, MIN_SEEDS, student_share
from aioserve.lab.comparison.candidates import (
    Candidate,
    load_candidates,
    prepare,
    watts_of,
    with_whole_prompts,
)
from aioserve.lab.comparison.document import classes_of
from aioserve.lab.comparison.measures import (
    IN_TIME,
    MEANINGS,
    ROWS,
    Row,
    RunMeasures,
    energy_totals,
    fleet_totals,
    quantile,
    statistics_of,
    tidy,
)
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.fleet_replicas import FleetOutcome
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.simulation.run import Progress
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload
from aioserve.lab.zoo.cost import Cost
from aioserve.runner.step_times import load_profile
from aioserve.scheduler import available_policies
from aioserve.support import __version__
from aioserve.support.files import config_names

# The standard: six workloads, their seeds, and the machine that they are simulated on.


VERSION = "zoo-1"
#: What `standard_digest` says of this version and its first five seeds; a test holds them together.
DIGEST = "35367d32700d7b73"
WORKLOADS = ("chat", "code", "documents", "agents", "offline", "tenants")
FIRST_SEEDS = (1, 2, 3, 4, 5)
#: Five seeds leave most pairs of policies open. Further ones have a digest of their own, so that
#: numbers of the first five, which were published alone, can still be compared.
FURTHER_SEEDS = (6, 7, 8, 9, 10)
FURTHER_DIGEST = "870a5a3309a0aeb9"
SEEDS = FIRST_SEEDS + FURTHER_SEEDS
BUDGET = "scheduler.max_num_batched_tokens"
#: How a run is scored; a part of the standard, as all that follows.
SCORING = "share in time: mean over classes of the requests and programs within their limits"
#: Laid over the settings of every policy: the machine, its memory, its seats, and the tokens of a
#: step, which may be more for a policy that runs whole prompts: as many as the longest request has.
Settings = Sequence[tuple[str, Any]]
SETTINGS: tuple[tuple[str, Any], ...] = (
    ("runner.profile", VERSION),
    ("cache.block_size", "16"),
    ("cache.num_kv_blocks", "3000"),
    ("scheduler.max_num_seqs", "128"),
    (BUDGET, "512"),
)

# zoo-2: the same requests on a measured machine. A card is several times faster than the standard's
# machine, so arrivals come faster as well: by as much as leaves the reference as many in time.

MEASURED = "zoo-2"
OF_MACHINE = ("runner.profile", "cache.num_kv_blocks", "scheduler.max_num_seqs")
MEASURED_SEATS = "256"
#: Steps are planned one at a time, as on the standard's machine, whatever the card's engine does.
MEASURED_DEPTH = ("scheduler.pipeline_depth", "1")
#: The policy whose share in time says how hard a workload is, and the factors on the times between
#: arrivals among which the one of a machine is found by halving.
REFERENCE, LEAST_SCALE, MOST_SCALE, NUM_HALVINGS = "chunked_prefill", 1 / 32, 2.0, 7


def load_workload(name: str, seed: int, time_scale: float = 1.0) -> Workload:
    """Return a standard workload for one of the `SEEDS`; on another machine than the standard's,
    with this factor on the times between arrivals.
    """
    return WorkloadSource(path=f"{VERSION}-{name}", time_scale=time_scale).load(seed)


def policy_names() -> list[str]:
    """Return the policies that come with aioserve and have a configuration of their name, sorted;
    without `composed`, which is what its parts are.
    """
    return sorted((available_policies().keys() & config_names()) - {"composed"})


def load_policies(names: list[str], machine: Settings = ()) -> list[Candidate]:
    """Return the configurations of these policies, files or names: on the standard machine, or on
    the `machine` that these settings describe, with its own memory. Raises `ConfigError`.
    """
    settings = [*SETTINGS]
    if machine:
        settings = [(name, value) for name, value in SETTINGS if name not in OF_MACHINE]
        settings += [*machine, ("scheduler.max_num_seqs", MEASURED_SEATS), MEASURED_DEPTH]
    return [with_whole_prompts(candidate) for candidate in load_candidates(names, settings)]


def reproducing(
    policy: str, num_seeds: int, card: str = "", scales: Mapping[str, float] | None = None
) -> str:
    """Return the command that prints what a policy reaches in a cell of the board, by every measure
    of `compare`; WORKLOAD stands for a name of `WORKLOADS`. On a measured machine, `card` are the
    flags that name it, and SCALE stands for the factor of the workload among `scales`.
    """
    command = (
        f"python -m aioserve compare {policy} --config {VERSION} --workload {VERSION}-WORKLOAD "
        f"--seed {SEEDS[0]} --seeds {num_seeds}"
    )
    if not card:
        return command
    settings = {
        "cache.num_kv_blocks": "null",
        "scheduler.max_num_seqs": MEASURED_SEATS,
        **dict([MEASURED_DEPTH]),
    }
    laid_over = " ".join(f"--set {name}={value}" for name, value in settings.items())
    factors = ", ".join(f"{scale:g} for {name}" for name, scale in (scales or {}).items())
    return f"{command} {card} {laid_over} --time-scale SCALE\n(SCALE is {factors})"


def prepared(candidate: Candidate, workload: Workload) -> Candidate:
    """Return the candidate with limits that fit the longest request of the workload."""
    [ready], _, _ = prepare([candidate], [workload], is_live=False, clip=False)
    return ready


def standard_digest(seeds: Sequence[int] = FIRST_SEEDS) -> str:
    """Return a digest of what the workloads of these seeds are measured with: the requests and
    their service levels, the profile of step times, and the settings.
    """
    model = msgspec.structs.replace(load_profile(VERSION), source="", error="")
    found = sha256(repr((SCORING, SETTINGS, _stated(model))).encode())
    for name in WORKLOADS:
        for seed in seeds:
            for part in _parts_of(name, seed):
                found.update(part)
    return found.hexdigest()[:16]


def workload_digest(name: str, seeds: Sequence[int]) -> str:
    """Return the SHA-256 of all requests of a workload with these seeds, and of their service
    levels, in hexadecimal.
    """
    found = sha256()
    for seed in seeds:
        for part in _parts_of(name, seed):
            found.update(part)
    return found.hexdigest()


def _parts_of(name: str, seed: int) -> Iterator[bytes]:
    workload = load_workload(name, seed)
    classes = {kind: _stated(slo) for kind, slo in workload.classes.items() if slo}
    yield repr((name, seed, classes, workload.weights)).encode()
    for request in workload.requests:
        yield repr(_stated(request)).encode()


def _stated(struct: msgspec.Struct) -> list[tuple[str, Any]]:
    """Fields that are not at their defaults, so that a new field changes nothing; times to the
    microsecond, because libraries of mathematics differ in last digits.
    """
    return [
        (field.name, round(value, 6) if isinstance(value, float) else msgspec.to_builtins(value))
        for field in _fields(type(struct))
        if (value := getattr(struct, field.name)) != field.default
    ]


#: The fields of a kind, for which msgspec reads its annotations: once, not for every request.
_fields = functools.cache(msgspec.structs.fields)


# What is measured of a policy: one number a measure, workload and seed.


#: By policy, workload and measure: a value for each seed, in the units of the lab's document; NaN
#: where nothing is defined.
Values = list[float]
Scores = dict[str, dict[str, Values]]

_LABELS = (
    *("TTFT mean, ms", "TTFT p99, ms", "TPOT p99, ms", "gap p99, ms", "end to end mean, ms"),
    *("end to end p99, ms", "program mean, s", "goodput, requests/s", "output tokens/s"),
    *("service apart max", "prefix hits, %", "wasted tokens, %", "preemptions", "busy, %"),
    *("J per output token", "unfinished requests"),
)
MEASURES = (IN_TIME, *(next(row for row in ROWS if row.label == label) for label in _LABELS))
JOULES, UNFINISHED = MEASURES[-2:]
IN_TIME_MEANING = (
    "The share of the requests, and of the programs of agents, that kept to all limits of their "
    "class; classes count alike, however many requests they have. A request that is rejected or "
    "not finished counts as late. By it policies are ranked."
)
ONE_ENGINE = Fleet(1, "round_robin")  # simulated as the engine is, and quicker


def meaning(row: Row) -> str:
    """Return what a measure is, in a sentence."""
    if row is IN_TIME:
        return IN_TIME_MEANING
    return next((text for word, text in MEANINGS.items() if row.label.startswith(word)), "")


def key(row: Row) -> str:
    """Return the name of a measure in files: `ttft.p99`, `in_time`."""
    return row.statistic if row.measure == "totals" else f"{row.measure}.{row.statistic}"


def run_standard(
    candidates: Sequence[Candidate],
    seeds: Sequence[int],
    num_jobs: int = 1,
    progress: Progress = lambda count: None,
    workloads: Sequence[str] = WORKLOADS,
    scales: Mapping[str, float] | None = None,
) -> list[Scores]:
    """Run each candidate on the workloads with each seed; its scores, in the same order. `scales`
    are factors on the times between arrivals, by workload.

    Raises `PolicyError` when a policy fails, `ConfigError` if a request can never run under it.
    """
    scales = scales or {}
    loaded = {
        (name, seed): load_workload(name, seed, scales.get(name, 1.0))
        for name in workloads
        for seed in seeds
    }
    watts = [_watts(candidate) for candidate in candidates]
    places = [(i, name, seed) for i in range(len(candidates)) for name, seed in loaded]
    runs = [
        (prepared(candidates[i], loaded[name, seed]).config, loaded[name, seed], ONE_ENGINE)
        for i, name, seed in places
    ]
    found: list[Scores] = [{name: {} for name in workloads} for _ in candidates]
    outcomes = simulate_all(runs, num_jobs, progress)
    for (i, name, seed), outcome in zip(places, outcomes, strict=True):
        for measure, value in measure_run(outcome, loaded[name, seed], watts[i]).items():
            found[i][name].setdefault(measure, []).append(value)
    return found


def match_load(machine: Settings, wanted: "Results", num_jobs: int) -> dict[str, float]:
    """Return, by workload, the factor on the times between arrivals with which the reference serves
    as many in time on this machine as in the results `wanted`, by the first seed of the standard.
    """
    least, most = dict.fromkeys(WORKLOADS, LEAST_SCALE), dict.fromkeys(WORKLOADS, MOST_SCALE)
    targets = {w: wanted.policies[REFERENCE].scores[w][key(IN_TIME)][0] for w in WORKLOADS}
    [candidate] = load_policies([REFERENCE], machine)
    for _ in range(NUM_HALVINGS):
        middle = {w: math.sqrt(least[w] * most[w]) for w in WORKLOADS}
        [found] = run_standard([candidate], SEEDS[:1], num_jobs, scales=middle)
        for w in WORKLOADS:
            side = least if found[w][key(IN_TIME)][0] < targets[w] else most
            side[w] = middle[w]
    return {w: round(math.sqrt(least[w] * most[w]), 4) for w in WORKLOADS}


def _watts(candidate: Candidate) -> tuple[float, float] | None:
    drawn = watts_of(candidate)
    return drawn[0] if drawn else None


def measure_run(
    outcome: RunOutcome, workload: Workload, watts: tuple[float, float] | None = None
) -> dict[str, float]:
    """The measures of one run by their `key`; energy where it is known how many `watts` the machine
    draws while a step runs, and between steps.
    """
    levels = ServiceLevels.of((), classes_of([workload]))
    run = RunMeasures(outcome, workload, levels, workload.weights)
    if isinstance(outcome, FleetOutcome):
        run.totals |= fleet_totals(outcome, ONE_ENGINE, run.totals)
    if watts is not None:
        busy = [sum(outcome.steps.seconds)]
        run.totals |= energy_totals([watts], busy, [outcome.end], outcome)
    shares = run.shares_in_time([request.kind for request in workload.requests])
    run.totals["in_time"] = float(np.mean(list(shares.values())))
    good = [run.is_good, *([run.program_good] if hasattr(run, "program_good") else [])]
    run.totals["goodput_per_second"] = sum(map(np.nansum, good)) / max(outcome.end, 1e-9)
    return {key(row): tidy(_value(run, row)) for row in MEASURES}


def _value(run: RunMeasures, row: Row) -> float:
    if row.measure == "totals":
        return float(run.totals.get(row.statistic, np.nan))
    if row.measure == "gap":
        return quantile(run.gaps, {"p50": 0.5, "p99": 0.99}[row.statistic])
    values = getattr(run, row.measure, np.empty(0))
    return statistics_of(values)[row.statistic]


# The stored results of the policies that ship, so that one more is ranked in seconds, with the
# digests of the standard and of each policy's code. `python -m aioserve zoo --store` writes them.


FILE = Path(__file__).with_name(f"{VERSION}.json")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
AGAIN = "python -m aioserve zoo --store computes them anew"


class Entry(msgspec.Struct, frozen=True):
    """One policy: its scores by workload and measure, a value for each seed, and its cost."""

    code: str  # `code_digest` of the policy
    scores: Scores
    cost: Cost | None = None

    @property
    def num_seeds(self) -> int:
        """Number of seeds with which it was measured on every workload."""
        return min(len(values) for of in self.scores.values() for values in of.values())

    def only(self, num_seeds: int, first: int = 0) -> "Entry":
        """Return the entry with `num_seeds` seeds alone, from the place `first` on."""
        last = first + num_seeds
        scores = {
            workload: {measure: values[first:last] for measure, values in of.items()}
            for workload, of in self.scores.items()
        }
        return msgspec.structs.replace(self, scores=scores)

    def with_seeds(self, further: Scores) -> "Entry":
        """Return the entry with the scores of further seeds behind its own."""
        scores = {
            workload: {measure: [*own, *further[workload][measure]] for measure, own in of.items()}
            for workload, of in self.scores.items()
        }
        return msgspec.structs.replace(self, scores=scores)


class Results(msgspec.Struct, frozen=True):
    """The results of all policies on the standard workloads, by policy."""

    standard: str = VERSION
    digest: str = DIGEST
    aioserve: str = __version__
    machine: str = ""  # measured machine, in the place of the standard's
    scales: dict[str, float] = {}  # on it, factors on the times between arrivals, by workload
    policies: dict[str, Entry] = {}

    @property
    def num_seeds(self) -> int:
        """Number of seeds with which every policy was measured: that of the one with the fewest."""
        return min(entry.num_seeds for entry in self.policies.values())

    def only(self, num_seeds: int, first: int = 0) -> "Results":
        """Return the results of `num_seeds` seeds alone, from the place `first` on."""
        policies = {name: entry.only(num_seeds, first) for name, entry in self.policies.items()}
        return msgspec.structs.replace(self, policies=policies)

    def with_entries(self, entries: dict[str, Entry]) -> "Results":
        """Return the results with these entries in the place of those of the same names, sorted."""
        return msgspec.structs.replace(
            self, policies=dict(sorted({**self.policies, **entries}.items()))
        )


def read_results(path: Path = FILE) -> Results:
    """Return the stored results. Raises `ConfigError` if there are none, or those of another
    standard.
    """
    try:
        found = msgspec.convert(_known(msgspec.json.decode(path.read_bytes())), Results)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"no stored results in {path}: {error}; {AGAIN}") from error
    if (found.standard, found.digest) not in ((VERSION, DIGEST), (MEASURED, DIGEST)):
        raise ConfigError(
            f"the stored results in {path} are those of {found.standard} {found.digest}, and the "
            f"standard is {VERSION} {DIGEST}; {AGAIN}"
        )
    return found


def measured_file(card: str) -> Path:
    """Return the file of the results on a measured card."""
    return FILE.with_name(f"{MEASURED}-{card}.json")


def write_results(results: Results, path: Path = FILE) -> None:
    """A line for each policy and workload, so that two changes seldom meet in one."""
    data: dict[str, Any] = msgspec.to_builtins(results)
    lines = []
    for name, entry in data.pop("policies").items():
        scores = entry.pop("scores")
        rows = [f"    {_json(w)}: {_json(of)}" for w, of in scores.items()]
        head = "".join(f"{_json(k)}: {_json(v)}, " for k, v in entry.items())
        lines.append(f'  {_json(name)}: {{{head}"scores": {{\n' + ",\n".join(rows) + "\n  }}")
    head = "".join(f" {_json(k)}: {_json(v)},\n" for k, v in data.items())
    whole = path.with_suffix(".part")  # an interrupt leaves the stored results as they were
    whole.write_text(f'{{\n{head} "policies": {{\n' + ",\n".join(lines) + "\n }\n}\n")
    whole.replace(path)


def code_digest(name: str) -> str:
    """Return a hash of what a shipped policy decides by: its source and its options.
    "": the policy does not ship.
    """
    entry_point = available_policies().get(name)
    module = "" if entry_point is None else entry_point.value.partition(":")[0]
    if not module.startswith("aioserve.policies."):
        return ""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    options = EngineConfig.load(name).scheduler.options
    return sha256(f"{bare_code(source)}\n{options}".encode()).hexdigest()[:12]


def bare_code(source: str) -> str:
    """Return the source without docstrings, comments and empty lines."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    code = [line.partition("  # ")[0].rstrip() for line in lines]
    return "\n".join(line for line in code if line and not line.lstrip().startswith("#"))


def stale(results: Results, names: list[str]) -> list[str]:
    """Return those of the policies that have no results, or whose code has changed."""
    found = []
    for name in names:
        entry = results.policies.get(name)
        if entry is None or entry.code != code_digest(name):
            found.append(name)
    return found


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _known(data: Any) -> Any:
    """Return the data of a file with NaN for each null in a list: undefined numbers are null there,
    and lists hold numbers alone.
    """
    if isinstance(data, dict):
        return {name: _known(value) for name, value in data.items()}
    if isinstance(data, list):
        return [math.nan if value is None else value for value in data]
    return data


# Ranks, by measure and workload. A rank counts the policies that are better on average over the
# seeds. Its range counts those that are surely better or worse, where all pairs of policies are
# judged at once (Holm), so that all ranges of a column hold together with a probability of 95%, as
# in Mogstad, Romano, Shaikh and Wilhelm, "Inference for Ranks", Review of Economic Studies, 2024.
# Of one seed there is no range.


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
    """Return all policies, the best one overall first; equal ones by name."""
    columns = {w: ranks_of(results, w, IN_TIME) for w in (*WORKLOADS, OVERALL)}
    made = [
        Standing(name, {w: ranks[name] for w, ranks in columns.items() if name in ranks})
        for name in results.policies
    ]
    return sorted(made, key=lambda standing: (standing.overall.rank, standing.name))


def ranks_of(results: Results, workload: str, row: Row) -> dict[str, Rank]:
    """Return where each policy stands by one measure on one workload, by its name; without those
    for which the measure is undefined there. Empty where more of it is neither better nor worse.
    """
    if not row.good:
        return {}
    values = columns_of(results, workload, row)
    means = {name: _mean(own) for name, own in values.items()}
    less = surely_less(values)
    found = {}
    for name, mean in means.items():
        more = {other for other, of in less.items() if name in of}
        ahead, behind = (more, less[name]) if row.good > 0 else (less[name], more)
        rank = 1 + sum(row.good * (other - mean) > TINY for other in means.values())
        ends = (1 + len(ahead), len(means) - len(behind))
        if all(len(own) < MIN_SEEDS for own in values.values()):
            ends = rank, rank
        found[name] = Rank(mean, rank, *ends, len(means))
    return found


def columns_of(results: Results, workload: str, row: Row) -> dict[str, Values]:
    """Return the values of each policy of which some is known, by its name, for the seeds that all
    policies were measured with.
    """
    found = {name: values_of(entry, workload, row) for name, entry in results.policies.items()}
    size = min(map(len, found.values()))
    found = {name: values[:size] for name, values in found.items()}
    return {name: values for name, values in found.items() if not math.isnan(_mean(values))}


def surely_less(values: Mapping[str, Sequence[float]]) -> dict[str, set[str]]:
    """Return for each name the names whose mean over the seeds is surely less. `values` has one of
    each seed, by name; seeds are paired. All pairs are judged at once: with a probability of 95%
    none of equal ones is called different, by Holm's procedure ("A Simple Sequentially Rejective
    Multiple Test Procedure", Scandinavian Journal of Statistics, 1979) over the p-values of
    Student's test of the differences, seed by seed. It holds however the pairs depend on each
    other.
    """
    found: dict[str, set[str]] = {name: set() for name in values}
    pairs = [
        (p_value, a, b)
        for a, b in combinations(values, 2)
        if not math.isnan(p_value := pair_p_value(values[a], values[b]))
    ]
    for number, (p_value, a, b) in enumerate(sorted(pairs)):
        if p_value > (1 - LEVEL) / (len(pairs) - number):
            break
        less, more = (a, b) if np.nanmean(np.subtract(values[b], values[a])) > 0 else (b, a)
        found[more].add(less)
    return found


def pair_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the probability of a mean difference at least as large between equal ones, by
    Student's test of the differences, seed by seed; NaN of fewer than two seeds in which both are
    known.
    """
    differences = np.subtract(second, first)
    differences = differences[~np.isnan(differences)]
    if len(differences) < MIN_SEEDS:
        return math.nan
    mean, error = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if not error:
        return 0.0 if mean else 1.0
    return 1 - student_share(abs(mean) / error * len(differences) ** 0.5, len(differences) - 1)


def values_of(entry: Entry, workload: str, row: Row) -> Values:
    """Return the values by seed; those of `overall` are means over the workloads."""
    if workload != OVERALL:
        return entry.scores[workload].get(key(row), [math.nan])
    of_workloads = [values_of(entry, name, row) for name in WORKLOADS]
    return [fmean(values) for values in zip(*of_workloads, strict=True)]


def mean_of(entry: Entry, workload: str, row: Row) -> float:
    """Return the mean over the seeds, in the unit of the lab's document; NaN: undefined."""
    return _mean(values_of(entry, workload, row))


def _mean(values: Values) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan
