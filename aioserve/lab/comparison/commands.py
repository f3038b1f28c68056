"""The command `compare`: arguments, files, and what is printed.

Tables go to stdout, progress to stderr if that is a terminal. Knows nothing about numbers.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioserve.errors import ConfigError
from aioserve.fleet import available_routers
from aioserve.lab.arguments import (
    CONFIG_HELP,
    add_common,
    add_jobs,
    add_output,
    add_price,
    add_workload,
    read_cards,
    read_jobs,
    read_num_seeds,
    read_source,
    read_workloads,
    running,
)
from aioserve.lab.comparison.candidates import (
    Candidate,
    in_fleet,
    load_candidates,
    settings_of,
    with_whole_prompts,
)
from aioserve.lab.comparison.document import Document, compare, encode
from aioserve.lab.comparison.measures import Reader
from aioserve.lab.comparison.words import on_these_requests, render_table
from aioserve.lab.terminal import paint
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload
from aioserve.support.arguments import Parser
from aioserve.support.files import write

if TYPE_CHECKING:
    from aioserve.lab.simulation.fleet_plan import FleetSpec


def run_compare(words: Sequence[str]) -> int:
    """`aioserve compare`; returns the exit code. Raises `AioserveError`."""
    parser = Parser("compare", description="Run several configurations on the same requests.")
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help=CONFIG_HELP)
    add_workload(parser).add_argument(
        "--replay",
        metavar="LOG",
        help="decision log: repeat its requests with the step times and memory of its server",
    )
    add_common(parser, has_one_card=False)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings of the machine, laid over those of every configuration and under --set: "
        "zoo-1 is the machine of the zoo. A policy that runs whole prompts has no budget for steps",
    )
    add_quality_and_jobs(parser)
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
        workloads = read_workloads(arguments)
    candidates = _on_cards(arguments, settings, limits)
    if spec is not None:
        candidates = in_fleet(candidates, spec)
    document = compare_all(arguments, candidates, workloads)
    document["recorded"] = recorded
    document["on_these_requests"] = on_these_requests(document)
    print(paint(render_table(document)))
    write_reports(arguments, document)
    return 0


def _on_cards(
    arguments: argparse.Namespace, settings: list[tuple[str, Any]], limits: list[tuple[str, Any]]
) -> list[Candidate]:
    """Return each configuration on each card. A card has times and memory of its own, in place of
    those of a server whose log is repeated.
    """
    cards = read_cards(arguments)
    machine = [] if arguments.config is None else settings_of(arguments.config)
    if arguments.card:
        of_server = ("runner.step_", "cache.num_kv_blocks")
        settings = [(name, value) for name, value in settings if not name.startswith(of_server)]
    found = []
    for card, own in cards:
        overrides = [*settings, *machine, *own, *arguments.set]
        for candidate in load_candidates(arguments.configs, overrides, limits):
            if arguments.config is not None:
                candidate = with_whole_prompts(candidate)
            name = candidate.name if len(cards) == 1 else f"{candidate.name} {card}"
            found.append(Candidate(name, candidate.config))
    return found


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
        help="routers to try with each configuration, a name, package.module:Class or file.py: "
        f"{', '.join(available_routers())} (default: the fleet file's, else least_work)",
    )
    add_price(group)


def _fleet(arguments: argparse.Namespace) -> "FleetSpec | None":
    if arguments.fleet is None:
        if arguments.routers is not None:
            raise ConfigError("--routers is for a fleet: give --fleet N")
        return None
    if arguments.live:
        raise ConfigError("--fleet is simulated: give it without --live")
    from aioserve.lab.simulation.fleet_plan import FleetSpec

    routers = None if arguments.routers is None else tuple(arguments.routers)
    return FleetSpec.load(arguments.fleet, routers, arguments.price_per_hour)


def compare_all(
    arguments: argparse.Namespace, candidates: list[Candidate], workloads: list[Workload]
) -> Document:
    """Return the document of the candidates on the workloads, by the arguments of a command."""
    if arguments.requests and arguments.json is None:
        raise ConfigError("--requests adds a row for each request to the JSON: give --json FILE")
    jobs = read_jobs(arguments, workloads, len(candidates))
    total = len(candidates) * sum(len(workload.requests) for workload in workloads)
    with running(total) as report:
        return compare(
            candidates,
            workloads,
            slo=arguments.slo,
            reader=arguments.reading_speed,
            is_live=arguments.live,
            clip=arguments.clip,
            num_jobs=jobs,
            progress=report,
            price_per_hour=arguments.price_per_hour,
            has_requests=arguments.requests,
        )


def add_quality_and_jobs(parser: argparse.ArgumentParser) -> None:
    """Add `--reading-speed`, `--requests` and `--jobs`, which `compare_all` reads."""
    parser.add_argument(
        "--reading-speed",
        type=Reader.parse,
        metavar="TOKENS",
        help="measure the quality of experience (Andes) of users who read TOKENS per second and "
        "expect the first after 1 second: 5, or 5,ttft=2",
    )
    parser.add_argument(
        "--requests",
        action="store_true",
        help="add a row for each request of each run to the file of --json (docs/compare-json.md)",
    )
    add_jobs(parser)


def _replayed(
    arguments: argparse.Namespace,
) -> tuple[list[Workload], list[tuple[str, Any]], list[tuple[str, Any]], dict[str, Any] | None]:
    """Return the requests of a decision log, the machine of its server as settings, the limits of
    its scheduler, which a configuration may state otherwise, and what that server measured; None
    where the requests are not those of the log, one for one.
    """
    from aioserve.lab.comparison.document import measure_recorded
    from aioserve.lab.decision_log.reader import DecisionLog
    from aioserve.lab.what_if import (
        make_limits,
        make_settings,
        make_workload,
        read_traffic,
    )

    traffic = read_traffic(DecisionLog(arguments.replay))
    print(f"step times {traffic.step_time.source}: {traffic.step_time.error}")
    seeds = range(arguments.seed, arguments.seed + read_num_seeds(arguments, is_trace=True))
    workloads = [make_workload(traffic, arguments.replay, seed) for seed in seeds]
    source = read_source(arguments)
    is_whole = source == WorkloadSource(path=source.path) and not arguments.live
    recorded = measure_recorded(traffic) if is_whole else None
    cut = [source.cut(workload) for workload in workloads]
    return cut, make_settings(traffic), make_limits(traffic), recorded


def write_reports(arguments: argparse.Namespace, document: Document) -> None:
    """Write the files of `--json` and `--html`, if they are wanted."""
    write(arguments.json, encode(document))
    if arguments.html:
        from aioserve.lab.comparison.report import render_html

        write(arguments.html, render_html(document).encode())
