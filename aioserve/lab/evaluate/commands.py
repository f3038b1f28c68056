"""The command `evaluate`: a policy file in; stages, score and the story of a failure out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aioserve.lab.arguments import add_output
from aioserve.lab.comparison.document import encode
from aioserve.lab.evaluate.evaluator import (
    SCORE,
    STAGES,
    Evaluation,
    Evaluator,
    Trials,
    read_policy,
)
from aioserve.lab.zoo.standing import WORKLOADS
from aioserve.support.arguments import EXIT_FAILED, Parser, count, positive
from aioserve.support.files import write


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
