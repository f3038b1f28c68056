"""Servers of one model side by side, in one run: rounds, in turns, on a machine that is quiet.

    make bench-peers                                     # builds the peers, then runs this
    python benchmarks/bench_peers.py --rounds 1 --loads W1 W5 --servers ours-Q4_0 llama.cpp-Q4_0
    python benchmarks/bench_peers.py --write             # the tables of README.md and docs/

In each round every server is started, warmed up, sent all loads and stopped, one after the other;
the order turns from round to round. One generator sends all loads; in a round all servers get the
same texts, new to each. Before each server this waits until the machine is quiet, and notes what
others used of it meanwhile. Results are kept after each server, in `build/bench-peers`: an
interrupted run of the same revision goes on where it was, and `--fresh` begins anew.
"""

import argparse
import subprocess
import sys
import time

from peer_results import Cell, Settings, Visit, begin
from peer_servers import ROOT, Running, Server, running, servers
from peer_tables import show, write
from peers import COLUMNS, LOADS, Shape, run
from quiet import Watch, cpu_name, wait_until_quiet

from aioserve.errors import AioserveError
from aioserve.runner.cpu.machine import default_num_threads

FOLDER = ROOT / "build" / "bench-peers"
#: Requests of a stream: fewer than in `peers.py`, so that a round of all servers takes minutes.
PER_STREAM = {"W1": 3, "W2": 1, "W3": 1, "W4": 2, "W5": 1}
ON_DEMAND = {"ik_llama-Q8_0", "ik_llama-Q4_0", "openvino-Q8_0"}  # measured if they are named
WARM_UP = Shape(64, 32, 8, per_stream=1)
WARM_UP_SEED = 1


def main() -> int:
    known = {server.key: server for server in servers()}
    args = _arguments(list(known))
    asked = [known[key] for key in args.servers or known if args.servers or key not in ON_DEMAND]
    for server in asked:
        if server.missing:
            print(f"{server.key} is left out: {server.missing}", file=sys.stderr)
    asked = [server for server in asked if not server.missing]
    settings = Settings(
        cpu=cpu_name(),
        threads=default_num_threads(),
        revision=_revision(),
        requests_per_stream=PER_STREAM,
    )
    results = begin(FOLDER, settings, args.fresh)
    end = time.monotonic() + 60 * args.minutes
    for number in range(args.rounds):
        for server in asked if number % 2 == 0 else reversed(asked):
            loads = [load for load in args.loads if not results.has(number, server.key, load)]
            if loads and time.monotonic() < end:
                results.add(_visit(server, number, loads, args.wait, args.max_seconds))
    show(results, asked)
    if args.write:
        write(results, asked)
    complete = all(
        results.has(number, server.key, load)
        for number in range(args.rounds)
        for server in asked
        for load in args.loads
    )
    if not complete:
        print("Not all was measured: the same command goes on.", file=sys.stderr)
    return int(not complete)


def _arguments(keys: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--servers", nargs="+", choices=keys, metavar="KEY", help=", ".join(keys))
    parser.add_argument("--loads", nargs="+", choices=PER_STREAM, default=list(PER_STREAM))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no server after them")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds for the machine to rest")
    parser.add_argument("--max-seconds", type=float, default=120.0, help="of one load")
    parser.add_argument("--fresh", action="store_true", help="put what is kept aside")
    parser.add_argument("--write", action="store_true", help="tables into README.md and docs/")
    return parser.parse_args()


def _visit(server: Server, number: int, loads: list[str], wait: float, most: float) -> Visit:
    """One server in one round."""
    before = wait_until_quiet(wait)
    if not before.is_quiet:
        print(f"Not quiet before {server.key}: {before}", file=sys.stderr, flush=True)
    cells: dict[str, Cell] = {}
    seconds = at_start = at_end = 0.0
    try:
        with running(server, FOLDER / f"{server.key}.log") as started:
            run(started.url, WARM_UP, WARM_UP_SEED, most, warm_up=False)
            at_start = started.resident_mib()
            for load in loads:
                cells[load] = _measure(server, started, number, load, most)
            seconds, at_end = started.start_seconds, started.resident_mib()
    except (RuntimeError, AioserveError) as error:
        print(f"{server.key}: {error}", file=sys.stderr, flush=True)
        cells = {load: cells.get(load) or Cell.failed(str(error)) for load in loads}
    return Visit(number, server.key, seconds, at_start, at_end, cells)


def _measure(server: Server, started: Running, number: int, load: str, most: float) -> Cell:
    """One load. In a round all servers get the same texts, and no two loads begin alike."""
    shape = LOADS[load]._replace(per_stream=PER_STREAM[load])
    seed = 1000 * (number + 1) + list(LOADS).index(load)
    watch = Watch(started.pid)
    found = run(started.url, shape, seed, most, warm_up=False)
    use = watch.use()
    values: dict[str, float | None] = {label: value(found) for label, value in COLUMNS}
    errors = [f"{error['count']} x {error['kind']}" for error in found["errors"]]
    if unfinished := found["requests"]["unfinished"]:
        errors.append(f"cut short with {unfinished} requests unfinished")
    rate = values["tokens/s"]
    noise = "" if use.is_quiet else f"  ({use})"
    print(
        f"round {number + 1}  {server.key:20}{load}{rate:9.1f} tokens/s{noise}",
        *errors,
        file=sys.stderr,
        flush=True,
    )
    return Cell(values, use.others, use.steal, errors, list(found["notes"]))


def _revision() -> str:
    """The commit of this checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
