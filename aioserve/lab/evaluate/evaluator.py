"""Stages of a judgement: contract, workloads to choose by, held-out ones, cost of a step.

A candidate that fails a stage goes no further and comes back with its story. What is chosen by is
`combined_score`, of the first workloads alone: a search that chose by the held-out ones would train
on them. Knows scores and stages; what a candidate does, it does in an `Enclosure`.
"""

import atexit
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_output
from aioserve.lab.comparison.bootstrap import Difference, Sampling, compare_seeds
from aioserve.lab.comparison.document import encode
from aioserve.lab.evaluate.enclosure import Enclosure, Failed, Task, Verdict, look
from aioserve.lab.zoo.standing import WORKLOADS
from aioserve.scheduler import available_policies
from aioserve.support.arguments import EXIT_FAILED, Parser, count, positive
from aioserve.support.files import write

#: The share of a run's requests in time, from 0 to 1: by it policies are ranked and chosen.
SCORE = "in_time"
STAGES = ("first rules", "workloads", "other rules", "held out", "cost")


class Trials(msgspec.Struct, frozen=True, kw_only=True):
    """The workloads that candidates are tried on, and the limits of their processes."""

    workloads: tuple[str, ...] = ("documents", "code")  # of the zoo; by these is chosen
    seeds: tuple[int, ...] = (101,)
    held_out: tuple[str, ...] = ("agents", "chat", "tenants")
    held_out_seeds: tuple[int, ...] = (201, 202, 203, 204, 205)
    requests: int | None = 300  # of each run, the first ones; None: all
    reference: str = "chunked_prefill"  # a policy that ships, or a file
    random_days: int = 3  # of random traffic in the contract, at each pipeline depth
    waiting: int = 2000  # requests that wait while the cost of a step is measured
    seconds: float = 60.0  # for each trial of a candidate
    megabytes: int = 2048  # of memory for its process

    def __post_init__(self) -> None:
        """Raises `ConfigError` for workloads that there are not, or that train and are held out."""
        for name in (*self.workloads, *self.held_out):
            if name not in WORKLOADS:
                raise ConfigError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}")
        if not (self.workloads and self.seeds and self.held_out and self.held_out_seeds):
            raise ConfigError("each part needs a workload and a seed")
        both = set(self.workloads) & set(self.held_out)
        if both and set(self.seeds) & set(self.held_out_seeds):
            raise ConfigError(f"{min(both)} trains and is held out with the same seed")


class Evaluation(msgspec.Struct, frozen=True):
    """A judgement of a candidate, in the shape that OpenEvolve takes.

    `metrics` are numbers, `combined_score` among them: the mean share of requests in time on the
    workloads by which is chosen, 0 for a candidate that fails. `artifacts` are texts: `failure`,
    the kind of it, `failure_stage` and `story`.
    """

    metrics: dict[str, float]
    artifacts: dict[str, str] = {}

    @property
    def score(self) -> float:
        """The number by which candidates are ranked: larger is better."""
        return self.metrics["combined_score"]

    @property
    def failure(self) -> str:
        """The kind of failure; "" if there was none."""
        return self.artifacts.get("failure", "")


class Evaluator:
    """Judges candidates, each trial in a process that can be ended. Use it in a `with`.

    It may be asked by several threads: as many trials run at once as it has `jobs`.
    """

    def __init__(self, trials: Trials | None = None, jobs: int = 1) -> None:
        """Raises `ConfigError` for a reference that there is not."""
        self.trials = trials or Trials()
        self.reference = read_policy(self.trials.reference)
        self._jobs = jobs
        self._started: list[Enclosure] = []
        # None: a place for one that is still to be started, taken when no other is free.
        self._free: queue.LifoQueue[Enclosure | None] = queue.LifoQueue()
        for _ in range(jobs):
            self._free.put(None)
        self._runs: dict[tuple[str, str, int], Verdict] = {}  # by text, workload and seed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes in which candidates run."""
        for enclosure in self._started:
            enclosure.close()

    @property
    def has_network(self) -> bool:
        """Whether candidates could reach a network if they got past the hook."""
        return any(enclosure.has_network for enclosure in self._started)

    def evaluate(self, source: str, name: str, stages: int = len(STAGES)) -> Evaluation:
        """Judge the text of a policy file in the first `stages` stages; `name` is for messages."""
        metrics: dict[str, float] = {"combined_score": 0.0, "stages_passed": 0.0}
        steps = (
            self._first_rules,
            self._training,
            self._other_rules,
            self._held_out,
            self._cost,
        )
        for number, step in enumerate(steps[:stages]):
            try:
                metrics |= step(source, name)
            except Failed as error:
                metrics["combined_score"] = 0.0
                return Evaluation(
                    metrics,
                    {
                        "failure": error.failure,
                        "failure_stage": STAGES[number],
                        "story": str(error),
                    },
                )
            metrics["stages_passed"] = number + 1.0
        return Evaluation(metrics)

    def gain(self, source: str, other: str) -> Difference:
        """Return how much more of the held-out requests is in time under `source` than under
        `other`, the texts of two policy files, as a share, with its 95% interval over the seeds.
        Raises `Failed` if one of them fails there.
        """
        return compare_seeds(self._held_out_of(other), self._held_out_of(source), Sampling())

    def _first_rules(self, source: str, name: str) -> dict[str, float]:
        look(source, name)
        return {"first_rules": float(self._try("first_rules", source, name))}

    def _training(self, source: str, name: str) -> dict[str, float]:
        trials = self.trials
        found = {
            workload: fmean(self._run(source, name, workload, seed)[SCORE] for seed in trials.seeds)
            for workload in trials.workloads
        }
        score = fmean(found.values())
        return {"combined_score": score, **{f"{SCORE}_{w}": value for w, value in found.items()}}

    def _other_rules(self, source: str, name: str) -> dict[str, float]:
        """Run each workload with two futures, then try the rules that take longer."""
        trials = self.trials
        for workload in trials.workloads:
            for seed in trials.seeds:
                self._try("foresight", source, name, **self._place(workload, seed))
        found = self._try("other_rules", source, name)
        self._try("random_traffic", source, name, days=trials.random_days)
        return {"other_rules": float(found)}

    def _held_out(self, source: str, name: str) -> dict[str, float]:
        found = self._held_out_of(source, name)
        gain = compare_seeds(self._held_out_of(self.reference), found, Sampling())
        metrics = {"held_out": fmean(found), "held_out_gain": gain.value}
        if gain.low is not None and gain.high is not None:
            metrics |= {"held_out_gain_low": gain.low, "held_out_gain_high": gain.high}
        return metrics

    def _held_out_of(self, source: str, name: str = "policy.py") -> list[float]:
        """Return the mean score over the held-out workloads, by seed."""
        trials = self.trials
        places = [(w, seed) for seed in trials.held_out_seeds for w in trials.held_out]
        with ThreadPoolExecutor(self._jobs) as pool:
            asked = pool.map(lambda place: self._run(source, name, *place)[SCORE], places)
            values = list(asked)
        size = len(trials.held_out)
        return [fmean(values[i : i + size]) for i in range(0, len(values), size)]

    def _cost(self, source: str, name: str) -> dict[str, float]:
        found = self._try("cost", source, name, waiting=self.trials.waiting)
        return {"cost_us": found["us"], "cost_ratio": found["ratio"]}

    def _run(self, source: str, name: str, workload: str, seed: int) -> dict[str, float]:
        """Return the measures of a run. A run that was made is not made again."""
        key = sha256(source.encode()).hexdigest(), workload, seed
        if key not in self._runs:
            self._runs[key] = self._ask("run", source, name, self._place(workload, seed))
        found: dict[str, float] = _value(self._runs[key])
        return found

    def _place(self, workload: str, seed: int) -> dict[str, Any]:
        return {"workload": workload, "seed": seed, "requests": self.trials.requests}

    def _try(self, trial: str, source: str, name: str, **arguments: Any) -> Any:
        return _value(self._ask(trial, source, name, arguments))

    def _ask(self, trial: str, source: str, name: str, arguments: dict[str, Any]) -> Verdict:
        trials = self.trials
        task = Task(source, name, trial, arguments, trials.seconds, trials.megabytes)
        with self._enclosure() as enclosure:
            return enclosure.run(task)

    @contextmanager
    def _enclosure(self) -> Iterator[Enclosure]:
        """Yield a process that is free, or a new one in the place of one that is over."""
        found = self._free.get()
        try:
            if found is None:
                found = Enclosure()
                self._started.append(found)
            yield found
        finally:
            self._free.put(None if found is None or found.is_over else found)


def _value(verdict: Verdict) -> Any:
    if verdict.failure:
        raise Failed(verdict.failure, verdict.story)
    return verdict.value


def read_policy(spec: str) -> str:
    """Return the text of a policy that ships, by name, or of a file. Raises `ConfigError`."""
    path = Path(spec)
    if not spec.endswith(".py"):
        known = available_policies()
        if spec not in known:
            raise ConfigError(f"unknown policy {spec!r}: give a file, or one of {', '.join(known)}")
        found = find_spec(known[spec].value.partition(":")[0])
        assert found is not None
        assert found.origin is not None
        path = Path(found.origin)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the policy {path}: {error}") from error


def evaluate(program_path: str, **trials: Any) -> Any:
    """Judge a policy file: what OpenEvolve and its kin ask of an evaluation file.

    Returns an `Evaluation`, or an `EvaluationResult` of the same fields where `openevolve` is
    loaded. `trials` are fields of `Trials`, which `evaluator_args` of OpenEvolve's settings may
    state. Raises `ConfigError` if there is no such file; what the candidate does wrong is told by
    the metrics and artifacts.
    """
    source = read_policy(program_path)
    settings = msgspec.convert(trials, Trials)
    found = _evaluator(settings).evaluate(source, Path(program_path).name)
    theirs = sys.modules.get("openevolve.evaluation_result")
    if theirs is None:
        return found
    return theirs.EvaluationResult(metrics=found.metrics, artifacts=found.artifacts)


@cache
def _evaluator(trials: Trials) -> Evaluator:
    made = Evaluator(trials)
    atexit.register(made.close)
    return made


# The command `evaluate`: a policy file in; stages, score and the story of a failure out.


def run_evaluate(words: Sequence[str]) -> int:
    """`aioserve evaluate`; returns the exit code, 1 if the policy fails. Raises `AioserveError`."""
    parser = Parser(
        "evaluate",
        description="Judge a policy file as a search does: by rules of the contract, by two "
        "workloads of the zoo, by the other rules, by held-out workloads and seeds against a "
        "reference, and by the cost of a step. The file runs in a process of its own, which can be "
        "ended and may read the files of Python and aioserve alone. The first failure ends the "
        "judgement, and its story is printed.",
    )
    parser.add_argument("policy", metavar="FILE", help="policy file, or the name of one that ships")
    add_trials(parser)
    parser.add_argument(
        "--stages",
        type=int,
        choices=range(1, len(STAGES) + 1),
        default=len(STAGES),
        help=f"number of stages: {', '.join(STAGES)}",
    )
    add_output(parser, "--json", help="write metrics and artifacts to this JSON file")
    arguments = parser.parse_args(words)
    source, trials = read_policy(arguments.policy), read_trials(arguments)
    with Evaluator(trials, arguments.jobs) as evaluator:
        found = evaluator.evaluate(source, Path(arguments.policy).name, arguments.stages)
        print(describe(found, trials))
        if evaluator.has_network:
            print("The kernel gave no network namespace: only the hook keeps candidates off it.")
    write(arguments.json, encode(msgspec.to_builtins(found)))
    return EXIT_FAILED if found.failure else 0


def add_trials(parser: Parser) -> None:
    """Add the arguments that say what candidates are tried on, which `read_trials` reads."""
    usual = Trials()
    group = parser.add_argument_group("trials")
    for flag, names, what in (
        ("--workloads", usual.workloads, "workloads of the zoo by which is chosen"),
        ("--held-out", usual.held_out, "workloads of the zoo that are held out"),
    ):
        group.add_argument(
            flag,
            type=lambda text: tuple(text.split(",")),
            default=names,
            metavar="A,B",
            help=f"{what}, of {', '.join(WORKLOADS)} (default: {','.join(names)})",
        )
    for flag, seeds, what in (
        ("--seeds", usual.seeds, "seeds of the workloads by which is chosen"),
        ("--held-out-seeds", usual.held_out_seeds, "seeds of the held-out workloads"),
    ):
        group.add_argument(
            flag,
            type=lambda text: tuple(map(int, text.split(","))),
            default=seeds,
            metavar="N,N",
            help=f"{what} (default: {','.join(map(str, seeds))})",
        )
    group.add_argument(
        "--requests",
        type=count,
        default=usual.requests,
        metavar="N",
        help="requests of each run, the first ones of its workload",
    )
    group.add_argument(
        "--reference",
        default=usual.reference,
        metavar="POLICY",
        help="policy that ships, or a file, against which the held-out gain is taken",
    )
    group.add_argument(
        "--seconds",
        type=positive,
        default=usual.seconds,
        metavar="S",
        help="seconds after which a trial of a candidate is ended",
    )
    group.add_argument(
        "--megabytes",
        type=count,
        default=usual.megabytes,
        metavar="MB",
        help="memory that the process of a candidate may have",
    )
    parser.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="trials that run at the same time"
    )


def read_trials(arguments: Any) -> Trials:
    """Return what `add_trials` was told. Raises `ConfigError` for workloads that there are not."""
    fields = ("workloads", "seeds", "held_out", "held_out_seeds", "requests", "reference")
    return Trials(**{n: getattr(arguments, n) for n in (*fields, "seconds", "megabytes")})


def describe(found: Evaluation, trials: Trials) -> str:
    """Return an evaluation in words, a line for each stage."""
    metrics, lines = found.metrics, list[str]()
    rows: tuple[Callable[[], str], ...] = (
        lambda: f"{metrics['first_rules']:.0f} rules of the contract are kept",
        lambda: (
            "in time: "
            + ", ".join(f"{w} {100 * metrics[f'{SCORE}_{w}']:.1f}%" for w in trials.workloads)
        ),
        lambda: (
            f"{metrics['other_rules']:.0f} more rules are kept, random traffic is served, and "
            "no plan depends on the future"
        ),
        lambda: _gain_in_words(metrics, trials),
        lambda: (
            f"{metrics['cost_us']:.0f} microseconds per schedule(), "
            f"{metrics['cost_ratio']:.1f} times that of chunked_prefill"
        ),
    )
    for number, (stage, words) in enumerate(zip(STAGES, rows, strict=True)):
        if number < metrics["stages_passed"]:
            lines.append(f"{stage:16}{words()}")
        elif number == metrics["stages_passed"] and found.failure:
            lines.append(f"{stage:16}{found.failure}")
    lines.append(f"{'combined_score':16}{found.score:.4f}")
    if found.failure:
        lines += ["", found.artifacts["story"]]
    return "\n".join(lines)


def _gain_in_words(metrics: dict[str, float], trials: Trials) -> str:
    words = (
        f"in time: {100 * metrics['held_out']:.1f}%, {100 * metrics['held_out_gain']:+.2f} points "
        f"against {Path(trials.reference).stem}"
    )
    if "held_out_gain_low" not in metrics:
        return words
    low, high = (100 * metrics[f"held_out_gain_{end}"] for end in ("low", "high"))
    return f"{words} (95% interval {low:+.2f} to {high:+.2f})"
