"""The command `evolve`: a policy in; a population in a folder, and the best of it judged, out."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from aioserve.errors import ConfigError
from aioserve.lab.comparison.bootstrap import Difference
from aioserve.lab.evaluate import Evaluator
from aioserve.lab.evaluate.commands import add_trials, read_trials
from aioserve.lab.evaluate.enclosure import Failed
from aioserve.lab.evaluate.evaluator import read_policy
from aioserve.lab.evolve.mutation import Model, changes
from aioserve.lab.evolve.population import (
    Member,
    Population,
    Search,
    Settings,
    count_failures,
    digest,
)
from aioserve.support.arguments import Parser, count, natural

BEST = "best.py"
MODEL_SHARE = 0.5  # of the candidates, if there is a model


def run_evolve(words: Sequence[str]) -> int:
    """`aioserve evolve`; returns the exit code. Raises `AioserveError`."""
    arguments = _parser().parse_args(words)
    share = MODEL_SHARE if arguments.model_share is None else arguments.model_share
    if not 0 <= share <= 1:
        raise ConfigError(f"--model-share must be from 0 to 1, got {share:g}")
    of_models = (arguments.model_name, arguments.max_tokens, arguments.model_share)
    if arguments.model is None and any(value is not None for value in of_models):
        raise ConfigError(
            "--model-name, --model-share and --max-tokens are for a model: give --model URL"
        )
    source, trials = read_policy(arguments.seed_policy), read_trials(arguments)
    model = None
    if arguments.model is not None:
        model = Model(arguments.model, arguments.model_name, max_tokens=arguments.max_tokens)
    folder = Path(arguments.folder)
    settings = Settings(arguments.random_seed, digest(source), trials)
    with Evaluator(trials, arguments.jobs) as evaluator:
        population = Population(folder, settings)
        search = Search(
            population,
            evaluator,
            seed=arguments.random_seed,
            model=model,
            model_share=share,
            jobs=arguments.jobs,
        )
        search.begin(source, Path(arguments.seed_policy).name)
        if len(population.members) > 1:
            print(f"{folder} has {len(population.members) - 1} candidates already.")
        print(f"The seed has {_share(population.members[0])} of the requests in time.")
        search.go_on(arguments.budget, lambda member: _tell(member, population))
        best = population.best
        (folder / BEST).write_text(population.source(best.number), encoding="utf-8")
        print(_summary(population))
        if best.number:
            print(_judged(evaluator, population.source(best.number), source, len(trials.held_out)))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "evolve",
        description="Search for a policy that has more requests in time: change the options, the "
        "numbers and the order of the best so far, or have a language model write them, and judge "
        "each as `evaluate` does. The population is kept in a folder; the same command goes on "
        "with it. The best one is judged against the first on workloads by which nothing was "
        "chosen.",
    )
    parser.add_argument(
        "--seed",
        dest="seed_policy",
        required=True,
        metavar="FILE",
        help="policy to begin with: a file, or the name of one that ships",
    )
    parser.add_argument(
        "--budget", type=count, default=200, metavar="N", help="candidates in all, without the seed"
    )
    parser.add_argument(
        "--folder", default="evolved", metavar="DIR", help="folder of the population"
    )
    parser.add_argument(
        "--random-seed", type=natural, default=0, metavar="N", help="seed of the changes"
    )
    _add_model(parser)
    add_trials(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("language model")
    group.add_argument(
        "--model",
        metavar="URL",
        help="server of OpenAI's API, such as aioserve itself, whose model writes candidates; its "
        "key is taken from OPENAI_API_KEY",
    )
    group.add_argument(
        "--model-name", metavar="NAME", help="model to ask (default: the first that is listed)"
    )
    group.add_argument(
        "--model-share",
        type=float,
        metavar="X",
        help="share of the candidates that the model writes; the others are changed without it "
        f"(default: {MODEL_SHARE:g})",
    )
    group.add_argument(
        "--max-tokens", type=count, metavar="N", help="tokens of an answer (default: the server's)"
    )


def _share(member: Member) -> str:
    return f"{100 * member.score:.2f}%"


def _tell(member: Member, population: Population) -> None:
    """Print a line for a candidate that is the best so far."""
    if member is population.best:
        print(f"{member.number:5}  {_share(member)}  {member.how}", flush=True)


def _summary(population: Population) -> str:
    best, members = population.best, population.members[1:]
    failures = count_failures(members)
    told = ", ".join(f"{number} {kind}" for kind, number in failures.items()) or "none"
    lines = [f"{len(members)} candidates; failed: {told}."]
    if not best.number:
        return "\n".join([*lines, "None of them is better than the seed."])
    lines.append(f"The best is number {best.number}, with {_share(best)} in time; it was made by:")
    lines += [f"  {m.number:5}  {_share(m)}  {m.how}" for m in population.lineage(best)[1:]]
    lines += ["", changes(population.source(0), population.source(best.number)), ""]
    lines.append(f"It is in {population.folder / BEST}.")
    return "\n".join(lines)


def _judged(evaluator: Evaluator, source: str, seed: str, num_workloads: int) -> str:
    """Return what is left of the gain on workloads by which nothing was chosen."""
    try:
        found = evaluator.gain(source, seed)
    except Failed as error:
        return f"On the held-out workloads it fails: {error.failure}: {error}"
    return f"Held out ({num_workloads} workloads): {_in_words(found)}"


def _in_words(found: Difference) -> str:
    words = f"{100 * found.value:+.2f} points of the requests in time against the seed"
    if found.low is None or found.high is None:
        return f"{words}; give several --held-out-seeds for an interval"
    interval = f"95% interval {100 * found.low:+.2f} to {100 * found.high:+.2f}"
    if not found.is_distinguishable:
        return f"{words} ({interval}): not distinguishable from noise"
    return f"{words} ({interval}): {'better' if found.value > 0 else 'worse'}"
