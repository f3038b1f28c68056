"""Servers of one model side by side, in one run: rounds, in turns, on a machine that is quiet.

    make bench-peers                                   # builds the peers, then runs this
    python benchmarks/peers.py --rounds 1 --loads W1 W5 --servers ours-Q4_0 llama.cpp-Q4_0
    python benchmarks/peers.py --write                 # the tables of README.md and docs/
    python benchmarks/peers.py ours=http://127.0.0.1:8000 llama.cpp=http://127.0.0.1:8080

In each round every server is started, warmed up, sent all loads and stopped, one after the other;
the order turns from round to round. One generator sends all loads; in a round all servers get the
same texts, new to each. Before each server this waits until the machine is quiet, and notes what
others used of it meanwhile. Results are kept after each server, in `build/bench-peers`: an
interrupted run of the same revision goes on where it was, and `--fresh` begins anew.

Servers that run already are given as NAME=URL. They take turns within each round; values are
medians of the rounds, a ratio is the median of those to the first server of the same round. The
last line is JSON.
"""

import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from build_peers import Peer, servers
from harness import (
    LOADS,
    ROOT,
    Args,
    LoadShape,
    Opt,
    Program,
    Server,
    Table,
    Watch,
    cpu_name,
    ratio,
    resident_mib,
    revision,
    serving,
    tree,
    turns,
    wait_until_quiet,
)
from peer_results import Cell, Results, Settings, Visit, begin, show, write

from aioserve.errors import AioserveError
from aioserve.lab.bench import Document, Load, Target, summarize
from aioserve.lab.workloads.synthetic import (
    ClientClass,
    ClosedLoop,
    Constant,
    Prefixes,
    WorkloadSpec,
    generate,
)
from aioserve.runner.cpu.machine import default_num_threads

FOLDER = ROOT / "build" / "bench-peers"
#: Requests of a stream: fewer than of servers that run, so that a round of all takes minutes.
PER_STREAM = {"W1": 3, "W2": 1, "W3": 1, "W4": 2, "W5": 1}
ON_DEMAND = {"ik_llama-Q8_0", "ik_llama-Q4_0", "openvino-Q8_0"}  # measured if they are named
WARM_UP_SEED = 1
WARM_UP = LoadShape(64, 32, 8, per_stream=1)
COLUMNS: dict[str, Callable[[Document], float]] = {
    "tokens/s": lambda d: d["totals"]["output_tokens_per_second"],
    "TTFT p50 ms": lambda d: 1e3 * d["durations"]["ttft"]["p50"],
    "TTFT p99 ms": lambda d: 1e3 * d["durations"]["ttft"]["p99"],
    "gap p50 ms": lambda d: 1e3 * d["durations"]["gap"]["p50"],
    "gap p99 ms": lambda d: 1e3 * d["durations"]["gap"]["p99"],
}
RATE = COLUMNS["tokens/s"]


def run(url: str, shape: LoadShape, seed: int, max_seconds: float, warm_up: bool) -> Document:
    """One load on one server."""
    kind = ClientClass(
        name="bench",
        prompt=Constant(value=shape.input_tokens),
        output=Constant(value=shape.output_tokens),
        prefixes=Prefixes(count=1, length=Constant(value=shape.prefix_tokens))
        if shape.prefix_tokens
        else None,
    )
    spec = WorkloadSpec(
        classes=[kind],
        arrivals=ClosedLoop(clients=shape.streams),
        num_requests=shape.streams * shape.per_stream,
    )
    # Other texts: what is measured must not be in a prefix cache. As many as there are streams,
    # for servers that compile or allocate for a size of batch when they first meet it.
    first = generate(spec, seed + 1).requests[: shape.streams] if warm_up else ()
    load = Load(Target(url=url), generate(spec, seed))
    asyncio.run(load.run(warmup=first, max_seconds=max_seconds))
    return summarize(load)


def compare_running(args: Args) -> tuple[dict[str, Any], int]:
    """Servers that run already, by turns."""
    peers = dict(peer.partition("=")[::2] for peer in args.peers)
    if bad := [name for name, url in peers.items() if not url.startswith("http")]:
        sys.exit(f"expected NAME=URL, got {bad[0]!r}")
    seed = random.randrange(1 << 40)  # a server that is asked again must not know the texts
    results: dict[str, Any] = {}
    for load in args.loads:
        shape = LOADS[load]
        documents: dict[str, list[Document]] = {name: [] for name in peers}
        for number, name in turns(list(peers), args.rounds):
            is_first = not documents[name]
            found = run(peers[name], shape, seed + 2 * number, args.max_seconds, warm_up=is_first)
            documents[name].append(found)
            rate = RATE(found)  # a load may take minutes: say that it goes on
            print(f"{load}, round {number + 1}: {name} {rate:.1f}", file=sys.stderr, flush=True)
        columns = {"server": "<26", **dict.fromkeys(COLUMNS, "13.1f")}
        table = Table({**columns, "ratio": "9.2f", "spread": "9.2f"}, f"{load}: {shape.words}")
        for name in peers:
            table.add({"server": name, **_medians(documents[name], documents[next(iter(peers))])})
            for error in table.rows[-1]["errors"]:
                print(f"    {error['count']} x {error['kind']}: {error['example'][:150]}")
            for note in table.rows[-1]["notes"]:
                print(f"    {note}")
        results[load] = {row["server"]: row for row in table.rows}
    failed = any(row["errors"] for rows in results.values() for row in rows.values())
    return results, int(failed)


def _medians(documents: list[Document], first: list[Document]) -> dict[str, Any]:
    rates = [RATE(document) for document in documents]
    return {
        **{
            label: statistics.median(value(document) for document in documents)
            for label, value in COLUMNS.items()
        },
        "ratio": ratio(rates, list(map(RATE, first))),
        "spread": max(rates) / min(rates) if min(rates) else math.nan,
        "notes": sorted({note for document in documents for note in document["notes"]}),
        "errors": [error for document in documents for error in document["errors"]],
    }


def compare_built(args: Args) -> tuple[None, int]:
    """Servers that are started here, each alone."""
    known = {server.key: server for server in servers()}
    if unknown := set(args.servers) - set(known):
        sys.exit(f"no server {unknown}; there are {', '.join(known)}")
    asked = [known[key] for key in args.servers or known if args.servers or key not in ON_DEMAND]
    for peer in asked:
        if peer.missing:
            print(f"{peer.key} is left out: {peer.missing}", file=sys.stderr)
    asked = [peer for peer in asked if not peer.missing]
    loads = [load for load in args.loads if load in PER_STREAM]
    settings = Settings(cpu_name(), default_num_threads(), revision(), PER_STREAM)
    results = begin(FOLDER, settings, args.fresh)
    end = time.monotonic() + 60 * args.minutes
    for number in range(args.rounds):
        for peer in asked if number % 2 == 0 else reversed(asked):
            left = [load for load in loads if not results.has(number, peer.key, load)]
            if left and time.monotonic() < end:
                results.add(_visit(peer, number, left, args.wait, args.max_seconds))
    show(results, asked)
    if args.write:
        write(results, asked)
    is_complete = _is_complete(results, args.rounds, asked, loads)
    if not is_complete:
        print("Not all was measured: the same command goes on.", file=sys.stderr)
    return None, int(not is_complete)


def _is_complete(results: Results, rounds: int, asked: list[Peer], loads: list[str]) -> bool:
    return all(
        results.has(number, peer.key, load)
        for number in range(rounds)
        for peer in asked
        for load in loads
    )


def _visit(peer: Peer, number: int, loads: list[str], wait: float, most: float) -> Visit:
    """One server in one round."""
    before = wait_until_quiet(wait)
    if not before.is_quiet:
        print(f"Not quiet before {peer.key}: {before}", file=sys.stderr, flush=True)
    cells: dict[str, Cell] = {}
    seconds = at_start = at_end = 0.0
    try:
        with serving(**peer.options, log=FOLDER / f"{peer.key}.log") as started:
            run(started.url, WARM_UP, WARM_UP_SEED, most, warm_up=False)
            at_start = resident_mib(tree(started.pid))
            for load in loads:
                cells[load] = _measure(peer, started, number, load, most)
            seconds, at_end = started.start_seconds, resident_mib(tree(started.pid))
    except (RuntimeError, AioserveError) as error:
        print(f"{peer.key}: {error}", file=sys.stderr, flush=True)
        cells = {load: cells.get(load) or Cell.failed(str(error)) for load in loads}
    return Visit(number, peer.key, seconds, at_start, at_end, cells)


def _measure(peer: Peer, started: Server, number: int, load: str, most: float) -> Cell:
    """One load. In a round all servers get the same texts, and no two loads begin alike."""
    shape = LOADS[load]._replace(per_stream=PER_STREAM[load])
    seed = 1000 * (number + 1) + list(LOADS).index(load)
    watch = Watch(started.pid)
    found = run(started.url, shape, seed, most, warm_up=False)
    use = watch.use()
    values: dict[str, float | None] = {label: value(found) for label, value in COLUMNS.items()}
    errors = [f"{error['count']} x {error['kind']}" for error in found["errors"]]
    if unfinished := found["requests"]["unfinished"]:
        errors.append(f"cut short with {unfinished} requests unfinished")
    rate = values["tokens/s"]
    noise = "" if use.is_quiet else f"  ({use})"
    print(
        f"round {number + 1}  {peer.key:20}{load}{rate:9.1f} tokens/s{noise}",
        *errors,
        file=sys.stderr,
        flush=True,
    )
    return Cell(values, use.others, use.steal, errors, list(found["notes"]))


program = Program(__doc__)


@program.command(
    words={"peers": Opt([], "NAME=URL of servers that run; else those that are built")},
    servers=Opt([], "keys of servers that are started"),
    loads=Opt(["W1", "W2", "W3", "W4", "W5"], choices=LOADS),
    rounds=3,
    minutes=Opt(60.0, "begin no server after them"),
    wait=Opt(60.0, "seconds for the machine to rest"),
    max_seconds=Opt(300.0, "of one load"),
    fresh=Opt(False, "put what is kept aside"),
    write=Opt(False, "tables into README.md and docs/"),
)
def main(args: Args) -> tuple[dict[str, Any] | None, int]:
    """Measure servers that run, or start them."""
    try:
        return compare_running(args) if args.peers else compare_built(args)
    except AioserveError as error:  # nobody is there
        sys.exit(f"peers.py: {error}")


if __name__ == "__main__":
    program.main()
