"""The same loads on several servers, one after the other: who is faster at what?

    python benchmarks/peers.py ours=http://127.0.0.1:8000 llama.cpp=http://127.0.0.1:8080

All serve the same model; docs/benchmarks.md says how to start them. Servers take turns within each
round, with the same new texts. Values are medians of the rounds; ratios are to the first server.
Each run's tokens per second go to standard error as they come. The last line is JSON.
"""

import argparse
import asyncio
import math
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from aioserve.errors import AioserveError
from aioserve.lab.bench.commands import Document, summarize
from aioserve.lab.bench.exchange import Load, Target
from aioserve.lab.workloads.synthetic import (
    ClientClass,
    ClosedLoop,
    Constant,
    Prefixes,
    WorkloadSpec,
    generate,
)


class Shape(NamedTuple):
    """A closed loop: so many streams, each with so many tokens in and out."""

    streams: int
    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0  # before the input, the same for all
    per_stream: int = 2  # requests, one after the other

    @property
    def words(self) -> str:
        """For people."""
        prefix = f"{self.prefix_tokens} shared + " if self.prefix_tokens else ""
        return f"{self.streams} streams, {prefix}{self.input_tokens} in / {self.output_tokens} out"


LOADS = {
    "W1": Shape(1, 128, 128, per_stream=4),
    "W2": Shape(16, 256, 128),
    "W3": Shape(4, 2048, 16),
    "W4": Shape(8, 64, 32, prefix_tokens=1024),
    "W5": Shape(64, 128, 64),
    "W6": Shape(256, 16, 128),  # meant for a model of 2 million parameters
}
COLUMNS: tuple[tuple[str, Callable[[Document], float]], ...] = (
    ("tokens/s", lambda d: d["totals"]["output_tokens_per_second"]),
    ("TTFT p50 ms", lambda d: 1e3 * d["durations"]["ttft"]["p50"]),
    ("TTFT p99 ms", lambda d: 1e3 * d["durations"]["ttft"]["p99"]),
    ("gap p50 ms", lambda d: 1e3 * d["durations"]["gap"]["p50"]),
    ("gap p99 ms", lambda d: 1e3 * d["durations"]["gap"]["p99"]),
)


def run(url: str, shape: Shape, seed: int, max_seconds: float, warm_up: bool) -> Document:
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


def show(name: str, documents: list[Document], first: float | None) -> dict[str, Any]:
    """Print a server's line and return its numbers."""
    row: dict[str, Any] = {
        label: statistics.median(value(document) for document in documents)
        for label, value in COLUMNS
    }
    rates = [COLUMNS[0][1](document) for document in documents]
    row["spread"] = max(rates) / min(rates) if min(rates) else math.nan
    row["ratio"] = row["tokens/s"] / (first or row["tokens/s"] or math.nan)
    row["notes"] = sorted({note for document in documents for note in document["notes"]})
    row["errors"] = [error for document in documents for error in document["errors"]]
    values = "".join(f"{row[label]:13.1f}" for label, _ in COLUMNS)
    print(f"  {name:24}{values}{row['ratio']:9.2f}{row['spread']:9.2f}", flush=True)
    for error in row["errors"]:
        print(f"    {error['count']} x {error['kind']}: {error['example'][:150]}")
    for note in row["notes"]:
        print(f"    {note}")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("peers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["W1", "W2", "W3", "W4", "W5"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-seconds", type=float, default=300.0, help="of one load")
    args = parser.parse_args()
    peers = dict(peer.partition("=")[::2] for peer in args.peers)
    if bad := [name for name, url in peers.items() if not url.startswith("http")]:
        parser.error(f"expected NAME=URL, got {bad[0]!r}")
    seed = random.randrange(1 << 40)  # a server that is asked again must not know the texts
    results: dict[str, Any] = {}
    for load in args.loads:
        shape = LOADS[load]
        documents: dict[str, list[Document]] = {name: [] for name in peers}
        for round_ in range(args.rounds):
            for name, url in peers.items():
                found = run(url, shape, seed + 2 * round_, args.max_seconds, warm_up=not round_)
                documents[name].append(found)
                rate = COLUMNS[0][1](found)  # a load may take minutes: say that it goes on
                print(f"{load}, round {round_ + 1}: {name} {rate:.1f}", file=sys.stderr, flush=True)
        heads = "".join(f"{label:>13}" for label, _ in COLUMNS)
        print(f"{load}: {shape.words}\n  {'':24}{heads}{'ratio':>9}{'spread':>9}")
        first = None
        results[load] = {}
        for name in peers:
            row = results[load][name] = show(name, documents[name], first)
            first = first or row["tokens/s"]
    print(msgspec.json.encode(results).decode())  # NaN becomes null
    return int(any(row["errors"] for rows in results.values() for row in rows.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AioserveError as error:  # nobody is there
        sys.exit(f"peers.py: {error}")
