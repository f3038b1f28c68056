"""The lab's commands: arguments, files, and what is printed.

Tables go to stdout, progress to stderr if that is a terminal. Knows nothing about numbers.
"""

import argparse
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from aioserve.arguments import Parser, TakesArguments, count, positive
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_output, add_settings, add_slo, add_time_scale
from aioserve.lab.comparison.candidates import Candidate, in_fleet, load_candidates
from aioserve.lab.comparison.document import Document, classes_of, compare, encode
from aioserve.lab.comparison.knee import Bound, Knee, Probe, search
from aioserve.lab.comparison.quality import Reader
from aioserve.lab.comparison.report import render_html
from aioserve.lab.comparison.words import render_sweep, render_table
from aioserve.lab.simulation.clients import Progress
from aioserve.lab.simulation.fleet_plan import FleetSpec
from aioserve.lab.simulation.parallel import choose_num_jobs
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.terminal import paint, progress
from aioserve.lab.workloads.predictions import parse_prediction
from aioserve.lab.workloads.reply_limit import DEFAULT_MAX_TOKENS, ReplyLimit
from aioserve.lab.workloads.source import WorkloadSource
from aioserve.lab.workloads.workload import Workload
from aioserve.output_file import write
from aioserve.routing import ROUTERS

CONFIG_HELP = "YAML file of settings, the name of a shipped one, or a policy: its name or file.py"
DEFAULT_SEEDS = 5


def run_compare(words: Sequence[str]) -> int:
    """`aioserve compare`; returns the exit code. Raises `AioserveError`."""
    parser = Parser("compare", description="Run several configurations on the same requests.")
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help=CONFIG_HELP)
    _add_workload(parser).add_argument(
        "--replay",
        metavar="LOG",
        help="decision log: repeat its requests with the step times and memory of its server",
    )
    _add_common(parser)
    _add_quality_and_jobs(parser)
    add_output(parser, "--html", help="write a report with plots to this HTML file")
    parser.add_argument(
        "--live", action="store_true", help="run the real engine in real time, in rounds"
    )
    _add_fleet(parser)
    arguments = parser.parse_args(words)
    spec = _fleet(arguments)
    settings: list[tuple[str, Any]] = []
    limits: list[tuple[str, Any]] = []
    recorded: dict[str, Any] | None = None
    if arguments.replay is not None:
        workloads, settings, limits, recorded = _replayed(arguments)
    else:
        workloads = _workloads(arguments)
    candidates = load_candidates(arguments.configs, [*settings, *arguments.set], limits)
    if spec is not None:
        candidates = in_fleet(candidates, spec)
    document = _compare(arguments, candidates, workloads)
    document["recorded"] = recorded
    print(paint(render_table(document)))
    _write_reports(arguments, document)
    return 0


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet")
    group.add_argument(
        "--fleet",
        metavar="N",
        help="replicas behind a router, simulated: their number, a YAML file or a shipped name",
    )
    group.add_argument(
        "--routers",
        nargs="+",
        metavar="NAME",
        help=f"routers to try with each configuration: {', '.join(ROUTERS)} (default: the fleet "
        "file's, else least_work)",
    )
    group.add_argument(
        "--price-per-hour",
        type=float,
        metavar="X",
        help="price of a replica per hour in any currency, to report prices per million tokens",
    )


def _fleet(arguments: argparse.Namespace) -> FleetSpec | None:
    price: float | None = arguments.price_per_hour
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError(f"--price-per-hour must be a number of at least 0, got {price:g}")
    if arguments.fleet is None:
        for name in ("routers", "price_per_hour"):
            if getattr(arguments, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is for a fleet: give --fleet N")
        return None
    if arguments.live:
        raise ConfigError("--fleet is simulated: give it without --live")
    routers = None if arguments.routers is None else tuple(arguments.routers)
    return FleetSpec.load(arguments.fleet, routers, price)


def run_search(words: Sequence[str]) -> int:
    """`aioserve search`; returns the exit code. Raises `AioserveError`."""
    parser = Parser(
        "search", description="Find the highest rate at which a configuration meets its SLO."
    )
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    _add_workload(parser)
    _add_common(parser, seeds=1)
    parser.add_argument(
        "--goodput",
        type=float,
        default=0.99,
        metavar="SHARE",
        help="share of requests that must be within the SLO",
    )
    parser.add_argument(
        "--bound",
        action="append",
        default=[],
        type=Bound.parse,
        metavar="MEASURE:STATISTIC=S",
        help="what a statistic over all requests, or gaps, may be at most, in seconds, such as "
        "gap:p99=0.2 and ttft:p50=2; repeatable, and instead of --slo or beside it",
    )
    parser.add_argument(
        "--each-class",
        action="store_true",
        help="each class with an SLO must reach that share alone, not only all requests together",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="relative precision of the rate found",
    )
    arguments = parser.parse_args(words)
    for name in ("goodput", "tolerance"):
        if not 0 < getattr(arguments, name) <= 1:
            raise ConfigError(f"--{name} must be above 0 and at most 1")
    (candidate,) = load_candidates([arguments.config], arguments.set)
    workloads = _workloads(arguments, 1)
    levels = ServiceLevels.of(arguments.slo, classes_of(workloads))
    if levels is None and not arguments.bound:
        raise ConfigError(
            "search needs --slo, for example --slo ttft=0.5,tpot=0.05, or --bound gap:p99=0.2"
        )
    heads = [f"{b.measure} {b.statistic}, ms" for b in arguments.bound]
    heads = [*(["within the SLO"] if levels is not None else []), *heads]
    print(f"{'requests/s':>12}  {'time scale':>12}" + "".join(f"  {head:>14}" for head in heads))
    with _running(None) as report:
        knee = search(
            candidate,
            workloads,
            levels,
            bounds=arguments.bound,
            target=arguments.goodput,
            each_class=arguments.each_class,
            tolerance=arguments.tolerance,
            clip=arguments.clip,
            progress=report,
            on_probe=_print_probe,
        )
    print(_knee_in_words(candidate, knee, arguments.bound, has_slo=levels is not None))
    write(arguments.json, encode(msgspec.to_builtins(knee)))
    return 0


def _print_probe(probe: Probe) -> None:
    mark = "" if probe.is_met else "  too fast"
    shown = [] if probe.good_share is None else [f"{100 * probe.good_share:.2f}%"]
    shown += [f"{1e3 * value:.1f}" for value in probe.bounded.values()]
    if probe.worst_class is not None:
        mark = f"  {probe.worst_class} {100 * (probe.worst_class_share or 0):.2f}%{mark}"
    values = "".join(f"  {value:>14}" for value in shown)
    row = f"{probe.rate:12.3f}  {probe.time_scale:12.4f}{values}{mark}"
    print(paint(row), flush=True)


def _knee_in_words(
    candidate: Candidate, knee: Knee, bounds: Sequence[Bound], *, has_slo: bool
) -> str:
    if knee.rate is None or knee.rate_above is None:
        return f"{candidate.name}: no knee found: {knee.note}"
    whom = "each class" if knee.each_class else "the requests"
    does = [f"meets the SLO for {100 * knee.target:g}% of {whom}"] if has_slo else []
    does += [f"keeps {b.measure} {b.statistic} within {b.limit:g} s" for b in bounds]
    return (
        f"{candidate.name} {' and '.join(does)} up to {knee.rate:.3g} requests/s, and not at "
        f"{knee.rate_above:.3g}"
    )


def run_sweep(words: Sequence[str]) -> int:
    """`aioserve sweep`; returns the exit code. Raises `AioserveError`."""
    parser = Parser("sweep", description="Run a configuration with several values of one setting.")
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    _add_workload(parser)
    _add_common(
        parser,
        set_help="setting to sweep, with several values separated by commas, such as "
        "scheduler.options.chunk_size=64,128,256; a --set with one value holds for all runs",
    )
    _add_quality_and_jobs(parser)
    add_output(parser, "--html", help="write a report with plots to this HTML file")
    arguments = parser.parse_args(words)
    swept = [(name, value) for name, value in arguments.set if _is_list(value)]
    if len(swept) != 1:
        written = " ".join(f"--set {name}={value}" for name, value in swept or arguments.set)
        raise ConfigError(
            "sweep needs one --set with several values, such as "
            f"--set scheduler.options.chunk_size=64,128,256; got {written or 'none'}"
        )
    setting, values = swept[0][0], [value.strip() for value in swept[0][1].split(",")]
    others = [(name, value) for name, value in arguments.set if not _is_list(value)]
    candidates = [
        Candidate(value, EngineConfig.load(arguments.config, [*others, (setting, value)]))
        for value in values
    ]
    document = _compare(arguments, candidates, _workloads(arguments))
    document["sweep"] = {"setting": setting, "values": values}
    print(paint(render_sweep(document)))
    _write_reports(arguments, document)
    return 0


def _compare(
    arguments: argparse.Namespace, candidates: list[Candidate], workloads: list[Workload]
) -> Document:
    jobs: int | None = arguments.jobs
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    total = len(candidates) * sum(len(workload.requests) for workload in workloads)
    with _running(total) as report:
        return compare(
            candidates,
            workloads,
            slo=arguments.slo,
            reader=arguments.reading_speed,
            is_live=arguments.live,
            clip=arguments.clip,
            num_jobs=jobs or choose_num_jobs(workloads, len(candidates)),
            progress=report,
        )


def _is_list(value: str) -> bool:
    return "," in value and value[0] not in "[{"


def _add_workload(parser: argparse.ArgumentParser) -> TakesArguments:
    """Returns the group in which exactly one says where requests come from."""
    group = parser.add_argument_group("workload")
    sources = group.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--workload",
        metavar="FILE",
        help="requests to send; .yaml or a shipped name: a description; .csv: a trace of Azure or "
        "BurstGPT, or a list of lengths; .jsonl: a trace of Mooncake, Qwen-Bailian or agents, or a "
        "request log",
    )
    group.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="arrivals per second, Poisson, of a trace without arrivals: a list of lengths, or "
        "sessions of agents",
    )
    add_time_scale(group)
    group.add_argument(
        "--start", type=float, default=0.0, metavar="S", help="seconds of arrivals to skip"
    )
    group.add_argument(
        "--duration", type=positive, metavar="S", help="seconds of arrivals to keep (default: all)"
    )
    group.add_argument("--limit", type=count, metavar="N", help="requests to keep (default: all)")
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
    group.add_argument(
        "--predict",
        type=parse_prediction,
        metavar="KIND",
        help="give each request the hint predicted_output_tokens: exact; lognormal:SIGMA, off by "
        "a factor with that spread; classes:BOUND,...:ACCURACY, the class of lengths that it falls "
        "into, right with that chance (default: no hint, unless the workload states one)",
    )
    group.add_argument(
        "--clip", action="store_true", help="shorten requests that exceed max_model_len"
    )
    return sources


def _add_common(
    parser: argparse.ArgumentParser,
    seeds: int = DEFAULT_SEEDS,
    set_help: str = "set a setting of all configurations, overriding their files; repeatable",
) -> None:
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"repetitions with other requests (default: {seeds}; 1 for a trace)",
    )
    add_slo(parser)
    add_settings(parser, set_help)
    add_output(parser, "--json", help="write all numbers to this JSON file")
    parser.set_defaults(live=False)


def _add_quality_and_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reading-speed",
        type=Reader.parse,
        metavar="TOKENS",
        help="measure the quality of experience (Andes) of readers of so many tokens per second "
        "who expect the first after 1 second: 5, or 5,ttft=2",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes for simulated runs (default: one per core, fewer for little work)",
    )


def _workloads(arguments: argparse.Namespace, default_seeds: int = DEFAULT_SEEDS) -> list[Workload]:
    """The workloads of a run, one per seed."""
    source = _source(arguments)
    seeds = _num_seeds(arguments, default_seeds, is_trace=source.is_trace)
    return [source.load(arguments.seed + i) for i in range(seeds)]


def _source(arguments: argparse.Namespace) -> WorkloadSource:
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
        prediction=arguments.predict,
    )


def _num_seeds(
    arguments: argparse.Namespace, default: int = DEFAULT_SEEDS, *, is_trace: bool
) -> int:
    seeds: int | None = arguments.seeds
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")
    return seeds or (1 if is_trace and not arguments.live else default)


def _replayed(
    arguments: argparse.Namespace,
) -> tuple[list[Workload], list[tuple[str, Any]], list[tuple[str, Any]], dict[str, Any] | None]:
    """The requests of a decision log, the machine of its server as settings, the limits of its
    scheduler, which a configuration may state otherwise, and what that server measured; None where
    the requests are not those of the log, one for one.
    """
    from aioserve.decision_log.reader import DecisionLog
    from aioserve.lab.comparison.recorded import measure_recorded
    from aioserve.lab.logs.traffic import (
        make_limits,
        make_settings,
        make_workload,
        read_traffic,
    )

    traffic = read_traffic(DecisionLog(arguments.replay))
    print(f"step times {traffic.step_time.source}: {traffic.step_time.error}")
    seeds = range(arguments.seed, arguments.seed + _num_seeds(arguments, is_trace=True))
    workloads = [make_workload(traffic, arguments.replay, seed) for seed in seeds]
    source = _source(arguments)
    is_whole = source == WorkloadSource(path=source.path) and not arguments.live
    recorded = measure_recorded(traffic) if is_whole else None
    cut = [source.cut(workload) for workload in workloads]
    return cut, make_settings(traffic), make_limits(traffic), recorded


@contextmanager
def _running(total: int | None) -> Iterator[Progress]:
    """A bar of requests, and a lazier garbage collector."""
    # Runs make many small objects and hardly any cycles: looking for those costs a tenth.
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        with progress(total) as report:
            yield report
    finally:
        gc.set_threshold(*thresholds)


def _write_reports(arguments: argparse.Namespace, document: Document) -> None:
    write(arguments.json, encode(document))
    if arguments.html:
        write(arguments.html, render_html(document).encode())
