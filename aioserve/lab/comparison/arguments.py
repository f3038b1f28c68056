"""Arguments that commands on a workload share: which requests, how many seeds, which settings.

Knows argparse, and makes workloads of what was given. Runs nothing.
"""

import argparse
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aioserve.errors import ConfigError
from aioserve.lab.arguments import (
    add_card,
    add_cut,
    add_output,
    add_settings,
    add_slo,
    add_time_scale,
)
from aioserve.lab.simulation.parallel import choose_num_jobs
from aioserve.lab.simulation.run import Progress
from aioserve.lab.terminal import progress
from aioserve.lab.workloads.synthetic import WorkloadSource, parse_prediction
from aioserve.lab.workloads.workload import (
    COLUMNS,
    DEFAULT_MAX_TOKENS,
    Reading,
    ReplyLimit,
    Workload,
)
from aioserve.support.arguments import TakesArguments, count, positive

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
