"""The command `zoo`: standard workloads for a policy, and where it stands among all that ship.

Arguments in, words and files out.
"""

import argparse
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_card, add_output, read_card
from aioserve.lab.comparison.arguments import add_price
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.document import encode
from aioserve.lab.terminal import paint, progress
from aioserve.lab.zoo.cost import measure_costs
from aioserve.lab.zoo.page import (
    as_document,
    num_seeds,
    render_board,
    render_page,
    render_policy,
)
from aioserve.lab.zoo.standing import (
    FILE,
    MEASURED,
    SEEDS,
    VERSION,
    WORKLOADS,
    Entry,
    Results,
    code_digest,
    load_policies,
    load_workload,
    match_load,
    measured_file,
    policy_names,
    read_results,
    reproducing,
    run_standard,
    stale,
    write_results,
)
from aioserve.runner.step_times import step_times
from aioserve.support.arguments import Parser, count
from aioserve.support.files import write

# The command `zoo`: standard workloads for a policy, and where it stands among all that ship.
# Arguments in, words and files out.


def run_zoo(words: Sequence[str]) -> int:
    """`aioserve zoo`; returns the exit code. Raises `AioserveError`."""
    arguments = _parser().parse_args(words)
    shipping, machine = policy_names(), read_card(arguments)
    candidates = load_policies(arguments.policies or shipping, machine)
    others = {c.name for c in candidates} - set(shipping)
    if arguments.quick and arguments.seeds != len(SEEDS):
        raise ConfigError("--quick is one seed: give it without --seeds")
    seeds = SEEDS[: 1 if arguments.quick else arguments.seeds]
    if arguments.store and (others or (len(seeds) < len(SEEDS) and not machine)):
        raise ConfigError("--store keeps results of policies that ship, with every seed")
    file = measured_file(_card_name(arguments)) if machine else FILE
    if arguments.store and machine and file.exists():
        kept = num_seeds(read_results(file))
        if kept > len(seeds):
            raise ConfigError(f"--store keeps no fewer seeds than are stored, which are {kept}")
    is_first = not arguments.policies or ((arguments.store or machine) and not file.exists())
    if not is_first:
        results = read_results(file).only(len(seeds))
    elif machine:
        results = _on_machine(candidates[0], machine, arguments.jobs)
    else:
        results = Results()
    if not is_first and (old := stale(results, shipping)) and not arguments.store:
        print(f"not stored, or stored of other code: {', '.join(old)}", file=sys.stderr)
    has_costs = not machine and (bool(arguments.policies) or not arguments.quick)
    scales = results.scales
    measured = _measure(candidates, seeds, arguments.jobs, has_costs, scales)
    results = results.with_entries(measured)
    names = [candidate.name for candidate in candidates] if arguments.policies else []
    price = arguments.price_per_hour
    print(paint(render_board(results, price)))
    for name, policy in zip(names, arguments.policies, strict=True):
        print("\n" + paint(render_policy(results, name)))
        print(f"\na cell of this row again: {reproducing(policy, len(seeds))}")
    if not names:
        print(f"\na cell again: {reproducing('POLICY', len(seeds))}")
    if arguments.store:
        write_results(results, file)
    write(arguments.json, encode(msgspec.to_builtins(as_document(results, names, price))))
    if arguments.html:
        write(arguments.html, render_page(results, names, price).encode())
    return 0


def _on_machine(candidate: Candidate, machine: Sequence[tuple[str, Any]], num_jobs: int) -> Results:
    """Return no results yet of a measured machine, with the factors on the times between arrivals
    that make it as busy as the standard's. Raises `ConfigError` for step times of no card.
    """
    times = step_times(candidate.config.runner)
    if not times.machine:
        raise ConfigError("--card must name a measured machine; `cards` lists what there is")
    scales = match_load(machine, read_results(), num_jobs)
    return Results(standard=MEASURED, machine=times.machine, scales=scales)


def _card_name(arguments: argparse.Namespace) -> str:
    """Return the name of the card's file: of a ready profile or a YAML file, its name."""
    words = [arguments.card[0], arguments.card_model, arguments.card_tp]
    return "-".join(str(word).replace("/", "-") for word in words if word is not None)


def _parser() -> Parser:
    parser = Parser(
        "zoo",
        description=f"Run policies on the standard workloads {VERSION} ({', '.join(WORKLOADS)}) in "
        "virtual time, and print where they stand among all that ship, whose results are stored.",
    )
    parser.add_argument(
        "policies",
        nargs="*",
        metavar="POLICY",
        help="policy, file.py:Class, or YAML file of settings (default: all that ship, each run "
        "anew: some minutes)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed in the place of five: a first look, without ranges of ranks",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        choices=range(1, len(SEEDS) + 1),
        default=len(SEEDS),
        metavar="N",
        help=f"run the first N of the {len(SEEDS)} seeds (default: all)",
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=_num_cores(),
        metavar="N",
        help="processes for simulated runs (default: one per core)",
    )
    parser.add_argument(
        "--store",
        action="store_true",
        help="keep the results of policies that ship, in the installed package: for its authors",
    )
    add_card(parser)
    add_price(parser)
    add_output(parser, "--html", help="write a report to this HTML file")
    add_output(parser, "--json", help="write all numbers to this JSON file")
    return parser


def _measure(
    candidates: list[Candidate],
    seeds: Sequence[int],
    num_jobs: int,
    has_costs: bool,
    scales: Mapping[str, float],
) -> dict[str, Entry]:
    """Return the scores of each policy, and what it costs; costs while nothing else runs here."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    jobs = min(num_jobs, len(candidates) * len(seeds))
    try:
        sizes = (len(load_workload(w, seed).requests) for w in WORKLOADS for seed in seeds)
        with progress(len(candidates) * sum(sizes)) as report:
            scores = run_standard(candidates, seeds, jobs, report, scales=scales)
        configs = [candidate.config for candidate in candidates]
        costs = measure_costs(configs) if has_costs else [None] * len(configs)
    finally:
        gc.set_threshold(*thresholds)
    return {
        candidate.name: Entry(code_digest(candidate.name), of_policy, cost)
        for candidate, of_policy, cost in zip(candidates, scores, costs, strict=True)
    }


def _num_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
