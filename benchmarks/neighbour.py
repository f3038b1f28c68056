"""What the number of compute threads is worth, alone and beside busy processes.

    python benchmarks/neighbour.py                     # the embedded model, one neighbour
    python benchmarks/neighbour.py --model ../135m --streams 16 --neighbours 2

Starts a server for each fixed number of threads and one that chooses. They take turns with the same
texts, alone and beside the neighbours, round after round; what is compared was measured in the same
round. The last line is JSON.
"""

import argparse
import contextlib
import itertools
import json
import math
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from peers import COLUMNS, Shape, run

from aioserve.lab.bench.commands import Document
from aioserve.runner.cpu.machine import default_num_threads

CHOOSES = "chooses"
ALONE, BESIDE = "alone", "beside neighbours"
BUSY = "while True: pass"


@contextlib.contextmanager
def server(model: str, threads: str) -> Iterator[str]:
    """The URL of one that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "aioserve", "--model", model, "--port", str(port)]
    words += ["--log-level", "debug" if threads == CHOOSES else "warning"]
    words += [] if threads == CHOOSES else ["--threads", threads]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(words) as process:
        try:
            while not is_ready(url):
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(rounds: list[dict[str, float]], chosen: str, others: list[str]) -> dict[str, float]:
    """`chosen` against the best of `others`, within each round: median, worst and best round."""
    ratios = [rates[chosen] / max(rates[name] for name in others) for rates in rounds]
    return {
        "median": round(statistics.median(ratios), 3),
        "worst": round(min(ratios), 3),
        "best": round(max(ratios), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--input-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument(
        "--threads",
        nargs="+",
        default=sorted({"1", str(default_num_threads())}, key=int),
        help="fixed numbers to compare with; the last is what a server had without a choice",
    )
    args = parser.parse_args()
    most = math.ceil(args.seconds * 40)  # requests of a stream: more than it can have
    shape = Shape(args.streams, args.input_tokens, args.output_tokens, per_stream=most)
    names = [*args.threads, CHOOSES]
    found: dict[str, list[dict[str, Document]]] = {ALONE: [], BESIDE: []}
    seed = random.randrange(1 << 40)
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(server(args.model, name)) for name in names}
        for round_, where in itertools.product(range(args.rounds), (ALONE, BESIDE)):
            order = names[round_ % len(names) :] + names[: round_ % len(names)]
            with neighbours(args.neighbours if where == BESIDE else 0):
                found[where].append(
                    {name: run(urls[name], shape, seed, args.seconds, True) for name in order}
                )
            seed += 2
    return show(found, names)


def show(found: dict[str, list[dict[str, Document]]], names: list[str]) -> int:
    """Print what was found."""
    summary: dict[str, Any] = {}
    errors = 0
    for where, rounds in found.items():
        print(f"{where}\n  {'threads':10}" + "".join(f"{label:>13}" for label, _ in COLUMNS))
        for name in names:
            values = [
                statistics.median(value(documents[name]) for documents in rounds)
                for _, value in COLUMNS
            ]
            print(f"  {name:10}" + "".join(f"{value:13.1f}" for value in values))
            errors += sum(len(documents[name]["errors"]) for documents in rounds)
        rates = [{name: COLUMNS[0][1](documents[name]) for name in names} for documents in rounds]
        summary[where] = {
            "tokens_per_second": rates,
            "to_best_fixed": compare(rates, CHOOSES, names[:-1]),
            "to_most_threads": compare(rates, CHOOSES, names[-2:-1]),
        }
        for key in ("to_best_fixed", "to_most_threads"):
            print(f"  {CHOOSES} {key.replace('_', ' ')}: {summary[where][key]}")
    print(json.dumps({"errors": errors} | summary))
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
