"""Arguments that several commands of the lab have: declared once, so that they mean the same.

Knows argparse and what the arguments are for. Knows no command.
"""

import argparse
import gc
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aioserve.errors import ConfigError
from aioserve.lab.simulation.parallel import choose_num_jobs
from aioserve.lab.simulation.run import Progress
from aioserve.lab.slo import StatedSlo
from aioserve.lab.terminal import progress
from aioserve.lab.workloads.synthetic import WorkloadSource, parse_prediction
from aioserve.lab.workloads.workload import (
    COLUMNS,
    DEFAULT_MAX_TOKENS,
    Reading,
    ReplyLimit,
    Workload,
)
from aioserve.support.arguments import TakesArguments, assignment, count, output_file, positive


def add_settings(
    parser: argparse.ArgumentParser, help: str = "set any setting of serve; repeatable"
) -> None:
    """Add the argument `--set`, a list of (dotted name, value), and `--like`, which adds to it."""
    parser.add_argument(
        "--set",
        metavar="SECTION.NAME=VALUE",
        action="append",
        default=[],
        type=assignment,
        help=help,
    )
    parser.add_argument(
        "--like",
        action="extend",
        dest="set",
        type=_preset,
        metavar="ENGINE",
        help="have requests admitted and preempted as by another engine's scheduler, vllm; a --set "
        "behind it wins (docs/vllm.md)",
    )


def _preset(engine: str) -> list[tuple[str, str]]:
    from aioserve.config.load import preset

    return [(name, str(value)) for name, value in preset(engine, "--like")]


def add_card(parser: argparse.ArgumentParser, *, is_one: bool = True) -> None:
    """Add `--card` and what it needs, which `read_cards` reads; `is_one` if a run has one card."""
    group = parser.add_argument_group("measured card (docs/cards.md)")
    group.add_argument(
        "--card",
        action="append",
        default=[],
        metavar="NAME",
        help="steps take what they take on this card: a ready profile such as h100-llama-3.1-8b, "
        "or with --card-model a card such as h100_sxm; `cards` lists both"
        + ("" if is_one else "; repeatable: every configuration on each"),
    )
    group.add_argument(
        "--card-model",
        metavar="MODEL",
        help="model that the card computes: its name on a hub, or its config.json",
    )
    group.add_argument(
        "--card-tp", type=int, metavar="N", help="cards that share each layer (default: 1)"
    )


def read_cards(arguments: argparse.Namespace) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return the name of each card that is asked for, and the settings that it stands for; one
    without a name and settings if there is none. Raises `ConfigError`.
    """
    cards: list[str] = arguments.card
    beside = {"model": arguments.card_model, "tp": arguments.card_tp}
    given = {name: value for name, value in beside.items() if value is not None}
    if not cards:
        if given:
            raise ConfigError(f"--card-{next(iter(given))} is for a card: give --card NAME")
        return [("", [])]
    if given.keys() == {"tp"}:
        raise ConfigError(f"--card-tp needs a model: give --card-model beside --card {cards[0]}")
    if getattr(arguments, "live", False):
        raise ConfigError("--card is simulated: give it without --live")
    found = []
    for card in cards:
        profile = ("runner.profile", "card" if given else card)
        options = [("runner.profile_options", {"card": card, **given})] if given else []
        found.append((card, [profile, *options]))
    return found


def read_card(arguments: argparse.Namespace) -> list[tuple[str, Any]]:
    """Return the settings of the one card that is asked for. Raises `ConfigError` for several."""
    cards = read_cards(arguments)
    if len(cards) > 1:
        raise ConfigError("one --card at a time: compare takes several")
    return cards[0][1]


def refuse_card(argv: Sequence[str], why: str) -> None:
    """Refuse `--card` where, for the reason `why`, a card means nothing. Raises `ConfigError`."""
    for word in argv:
        if word.partition("=")[0] in ("--card", "--card-model", "--card-tp"):
            raise ConfigError(f"{word.partition('=')[0]} plays no part here: {why}")


def add_slo(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--slo`, a list of `StatedSlo`."""
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        type=StatedSlo.parse,
        metavar="[CLASS:]LIMITS",
        help="limits that goodput counts against, for all requests or one class of the workload; "
        "repeatable: chat:ttft=0.5,gap=200ms batch:e2e=60. Seconds, or ms, of ttft, tpot, "
        "e2e, gap (the largest between two tokens of a request); deadline: the "
        "request's own timeout is kept",
    )


def add_time_scale(group: TakesArguments) -> None:
    """Add the argument `--time-scale`, a number above 0."""
    group.add_argument(
        "--time-scale",
        type=positive,
        default=1.0,
        metavar="X",
        help="factor on the times between arrivals; 0.5: twice the request rate",
    )


def add_cut(group: TakesArguments, of: str = "") -> None:
    """Add `--start`, `--duration` and `--limit`, which cut a workload; `of` says of which."""
    group.add_argument(
        "--start", type=float, default=0.0, metavar="S", help=f"seconds of arrivals to skip{of}"
    )
    group.add_argument(
        "--duration",
        type=positive,
        metavar="S",
        help=f"seconds of arrivals to keep{of} (default: all)",
    )
    group.add_argument(
        "--limit", type=count, metavar="N", help=f"requests to keep{of} (default: all)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--json`, which `wants_json` reads."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the numbers as JSON too, in the last line (the default without a terminal)",
    )


def wants_json(arguments: argparse.Namespace) -> bool:
    """Return whether the last line of stdout is JSON: asked for, or read by a program."""
    return bool(arguments.json) or not sys.stdout.isatty()


def add_output(parser: TakesArguments, *flags: str, help: str, metavar: str = "FILE") -> None:
    """Add an argument that names a file, written when the work is done."""
    parser.add_argument(*flags, metavar=metavar, type=output_file, help=help)


# Of commands on a workload: which requests, how many seeds, which settings.


CONFIG_HELP = "YAML file of settings, the name of a shipped one, or a policy: its name or file.py"
DEFAULT_SEEDS = 5


def add_workload(parser: argparse.ArgumentParser, *, predict: bool = True) -> TakesArguments:
    """Add `--workload` and what cuts and changes it. Returns the group in which exactly one says
    where requests come from. Without `predict` the command states predictions itself.
    """
    group = parser.add_argument_group("workload")
    sources = group.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--workload",
        metavar="FILE",
        help="requests to send; .yaml or a shipped name: a description; .csv, .jsonl or .json: a "
        "trace, a request log, chats of ShareGPT, a result of vLLM's benchmark, answers of an API, "
        "or a table of --columns (docs/traffic.md)",
    )
    add_reading(group)
    group.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="arrivals per second, Poisson, of traffic without arrivals: a list of lengths, chats, "
        "sessions of agents",
    )
    add_time_scale(group)
    add_cut(group)
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the first repetition"
    )
    group.add_argument(
        "--copies",
        type=count,
        default=1,
        metavar="N",
        help="number of copies of the workload to run at once",
    )
    group.add_argument(
        "--min-turns",
        type=count,
        default=1,
        metavar="N",
        help="keep only conversations of at least N turns",
    )
    group.add_argument(
        "--max-tokens",
        type=ReplyLimit.parse,
        default=ReplyLimit(),
        metavar="LIMIT",
        help="tokens that each client allows for a reply, which ends earlier where the model ends "
        "it: a number, or x2 for twice the reply's own length (default: what the workload states, "
        f"else {DEFAULT_MAX_TOKENS} or the next power of two above the longest reply)",
    )
    if predict:
        _add_predict(group)
    group.add_argument(
        "--clip", action="store_true", help="shorten requests that exceed max_model_len"
    )
    return sources


def add_reading(group: TakesArguments) -> None:
    """Add `--columns`, `--tokenizer` and `--think`, which `read_reading` reads."""
    group.add_argument(
        "--columns",
        type=Reading.parse_columns,
        default=(),
        metavar="NAME=COLUMN,...",
        help="read --workload as a table (CSV, or records of JSON) whose columns are named so: "
        "arrival=time,prompt=in_tokens,output=out_tokens; also " + ", ".join(COLUMNS[6:]) + ", "
        "arrival_ms, and prompt_text and output_text, whose tokens are counted",
    )
    group.add_argument(
        "--tokenizer",
        default="",
        metavar="MODEL",
        help="count the tokens of texts in --workload with the tokenizer of this model; a number "
        "is the characters that count as a token",
    )
    group.add_argument(
        "--think",
        type=positive,
        metavar="S",
        help="send all turns of a chat of ShareGPT, each S seconds after the reply before it "
        "(default: the first turn alone)",
    )


def read_reading(arguments: argparse.Namespace) -> Reading:
    """Return what the arguments say of how a file of traffic is to be read."""
    return Reading(columns=arguments.columns, tokenizer=arguments.tokenizer, think=arguments.think)


def _add_predict(group: TakesArguments) -> None:
    group.add_argument(
        "--predict",
        type=parse_prediction,
        metavar="KIND",
        help="give each request the hint predicted_output_tokens: exact; lognormal:SIGMA, off by "
        "a factor with that spread; ranks:TAU, in an order that has Kendall's correlation TAU with "
        "the true one; classes:BOUND,...:ACCURACY, the class of lengths that it falls into, right "
        "with that chance (default: no hint, unless the workload states one)",
    )


def add_common(
    parser: argparse.ArgumentParser,
    seeds: int = DEFAULT_SEEDS,
    set_help: str = "set a setting of all configurations, overriding their files; repeatable",
    *,
    has_one_card: bool = True,
) -> None:
    """Add `--seeds`, `--slo`, `--set`, `--card` and `--json`."""
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"repetitions with other requests (default: {seeds}; 1 for a trace)",
    )
    add_slo(parser)
    add_settings(parser, set_help)
    add_card(parser, is_one=has_one_card)
    add_output(parser, "--json", help="write all numbers to this JSON file")
    parser.set_defaults(live=False)


def add_price(group: TakesArguments, reports: str = "prices per million tokens") -> None:
    """Add the argument `--price-per-hour`, a number of at least 0, or None. `reports` is what is
    reported if it is given.
    """
    group.add_argument(
        "--price-per-hour",
        type=_price,
        metavar="X",
        help=f"price of the engine, or of a replica, per hour in any currency, to report {reports}",
    )


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ConfigError(f"--price-per-hour must be a number of at least 0, got {text}")
    return price


def is_list(value: str) -> bool:
    """Return whether the value of a `--set` is several, separated by commas."""
    return "," in value and value[0] not in "[{"


def add_jobs(parser: TakesArguments) -> None:
    """Add the argument `--jobs`, which `read_jobs` reads."""
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes for simulated runs (default: one per core, fewer for little work)",
    )


def read_jobs(
    arguments: argparse.Namespace, workloads: Sequence[Workload], num_configs: int
) -> int:
    """Return the number of processes that simulate the configurations. Raises `ConfigError` for
    less than one.
    """
    jobs: int | None = arguments.jobs
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    return jobs or choose_num_jobs(workloads, num_configs)


def read_workloads(
    arguments: argparse.Namespace, default_seeds: int = DEFAULT_SEEDS
) -> list[Workload]:
    """The workloads of a run, one per seed."""
    source = read_source(arguments)
    seeds = read_num_seeds(arguments, default_seeds, is_trace=source.is_trace)
    return [source.load(arguments.seed + i) for i in range(seeds)]


def read_source(arguments: argparse.Namespace) -> WorkloadSource:
    """Return the file of `--workload`, and what is to be done with it."""
    return WorkloadSource(
        path=arguments.workload or "",
        time_scale=arguments.time_scale,
        rate=arguments.rate,
        start=arguments.start,
        duration=arguments.duration,
        limit=arguments.limit,
        copies=arguments.copies,
        min_turns=arguments.min_turns,
        reply_limit=arguments.max_tokens,
        prediction=getattr(arguments, "predict", None),
        reading=read_reading(arguments),
    )


def read_num_seeds(
    arguments: argparse.Namespace, default: int = DEFAULT_SEEDS, *, is_trace: bool
) -> int:
    """Return how many seeds are asked for. Raises `ConfigError` for fewer than one."""
    seeds: int | None = arguments.seeds
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")
    return seeds or (1 if is_trace and not arguments.live else default)


@contextmanager
def running(total: int | None) -> Iterator[Progress]:
    """A bar of requests, and a lazier garbage collector."""
    # Runs make many small objects and hardly any cycles: looking for those costs a tenth.
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        with progress(total) as report:
            yield report
    finally:
        gc.set_threshold(*thresholds)
