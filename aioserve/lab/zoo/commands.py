"""The command `zoo`: standard workloads for a policy, and where it stands among all that ship.

Arguments in, words and files out.
"""

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_card, add_output, add_price, read_card
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.document import encode
from aioserve.lab.terminal import paint, progress
from aioserve.lab.zoo.cost import Cost, measure_costs
from aioserve.lab.zoo.page import (
    as_document,
    render_board,
    render_page,
    render_policy,
)
from aioserve.lab.zoo.standing import (
    FILE,
    FIRST_SEEDS,
    MEASURED,
    SEEDS,
    VERSION,
    WORKLOADS,
    Entry,
    Results,
    Scores,
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

BATCH = 4  # policies after which what `--only` measures is kept

# The command.


def run_zoo(words: Sequence[str]) -> int:
    """`aioserve zoo`; returns the exit code. Raises `AioserveError`."""
    arguments = _parser().parse_args(words)
    shipping, machine = policy_names(), read_card(arguments)
    candidates = load_policies(arguments.policies or shipping, machine)
    others = {c.name for c in candidates} - set(shipping)
    if arguments.quick and arguments.seeds is not None:
        raise ConfigError("--quick is one seed: give it without --seeds")
    if arguments.store and others:
        raise ConfigError("--store keeps results of policies that ship")
    file = measured_file(_card_name(arguments)) if machine else FILE
    if arguments.only:
        shows = arguments.html or arguments.json or arguments.price_per_hour is not None
        if not arguments.store or machine or arguments.quick or shows:
            raise ConfigError(
                "--only adds to the stored results of the standard's machine, and prints no board: "
                "give it with --store alone, and with --seeds or --jobs"
            )
        return _add_to_stored(candidates, arguments)
    before = read_results(file) if file.exists() else None
    kept = before.num_seeds if before else len(FIRST_SEEDS)
    seeds = SEEDS[: 1 if arguments.quick else arguments.seeds or kept]
    if arguments.store and before and kept > len(seeds):
        raise ConfigError(f"--store keeps no fewer seeds than are stored, which are {kept}")
    if arguments.policies and before and kept < len(seeds):
        raise ConfigError(
            f"--seeds {len(seeds)}: a policy stands among stored results, which have {kept} seeds"
        )
    is_first = not arguments.policies or ((arguments.store or machine) and before is None)
    if not is_first and before:
        results = before.only(len(seeds))
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
    price, card = arguments.price_per_hour, _card_flags(arguments)
    print(paint(render_board(results, price)))
    for name, policy in zip(names, arguments.policies, strict=True):
        print("\n" + paint(render_policy(results, name)))
        again = reproducing(policy, len(seeds), card, scales)
        print(f"\na cell of this row again: {again}")
    if not names:
        print(f"\na cell again: {reproducing('POLICY', len(seeds), card, scales)}")
    if arguments.store:
        # Policies that were not run keep all of their seeds.
        write_results(results if is_first or not before else before.with_entries(measured), file)
    write(arguments.json, encode(msgspec.to_builtins(as_document(results, names, price))))
    if arguments.html:
        write(arguments.html, render_page(results, names, price).encode())
    return 0


def _add_to_stored(candidates: list[Candidate], arguments: argparse.Namespace) -> int:
    """Measure what `--only` names of policies whose other results are stored, and keep it: after
    every few policies, so that the command can be ended and given again. Returns the exit code.
    """
    results = read_results(FILE)
    names = [candidate.name for candidate in candidates]
    if old := stale(results, names):
        raise ConfigError(
            f"--only adds to stored results of today's code, and those of {', '.join(old)} are "
            f"none: python -m aioserve zoo {' '.join(old)} --store"
        )
    last = arguments.seeds or len(SEEDS)
    if arguments.only == "seeds":
        candidates = [c for c in candidates if results.policies[c.name].num_seeds < last]
    for first in range(0, len(candidates), BATCH):
        batch = candidates[first : first + BATCH]
        stored = [results.policies[candidate.name] for candidate in batch]
        if arguments.only == "costs":
            costs = _cost(batch)
            changed = [
                msgspec.structs.replace(e, cost=c) for e, c in zip(stored, costs, strict=True)
            ]
        else:
            seeds = SEEDS[min(entry.num_seeds for entry in stored) : last]
            scores = _score(batch, seeds, arguments.jobs, {})
            kept = [entry.only(SEEDS.index(seeds[0])) for entry in stored]
            changed = [e.with_seeds(of) for e, of in zip(kept, scores, strict=True)]
        results = results.with_entries(dict(zip([c.name for c in batch], changed, strict=True)))
        write_results(results, FILE)
        print(f"stored: {arguments.only} of {', '.join(c.name for c in batch)}", flush=True)
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


def _card_flags(arguments: argparse.Namespace) -> str:
    """Return the flags that name the card; "" if there is none."""
    given = [
        ("--card", next(iter(arguments.card), None)),
        ("--card-model", arguments.card_model),
        ("--card-tp", arguments.card_tp),
    ]
    return shlex.join(str(w) for pair in given if pair[1] is not None for w in pair)


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
        help="one seed alone: a first look, without ranges of ranks",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        choices=range(1, len(SEEDS) + 1),
        metavar="N",
        help=f"run the first N of the {len(SEEDS)} seeds (default: as many as are stored)",
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
    parser.add_argument(
        "--only",
        choices=("costs", "seeds"),
        help="with --store: measure the costs of stored policies alone, or run those seeds of "
        "theirs alone that are not stored",
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
    scores = _score(candidates, seeds, num_jobs, scales)
    costs = _cost(candidates) if has_costs else [None] * len(candidates)
    return {
        candidate.name: Entry(code_digest(candidate.name), of_policy, cost)
        for candidate, of_policy, cost in zip(candidates, scores, costs, strict=True)
    }


def _score(
    candidates: list[Candidate], seeds: Sequence[int], num_jobs: int, scales: Mapping[str, float]
) -> list[Scores]:
    """Return the scores of each policy, and show how far they are."""
    jobs = min(num_jobs, len(candidates) * len(seeds))
    sizes = (len(load_workload(w, seed).requests) for w in WORKLOADS for seed in seeds)
    with _collecting_seldom(), progress(len(candidates) * sum(sizes)) as report:
        return run_standard(candidates, seeds, jobs, report, scales=scales)


def _cost(candidates: list[Candidate]) -> list[Cost]:
    with _collecting_seldom():
        return measure_costs([candidate.config for candidate in candidates])


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Have Python look for garbage less often: there are many objects, and few circles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _num_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
