"""Servers of one model side by side, in one run: rounds, in turns, on a machine that is quiet.

    make bench-peers                                   # builds the peers, then runs this
    python benchmarks/peers.py --rounds 1 --loads W1 W5 --servers ours-Q4_0 llama.cpp-Q4_0
    python benchmarks/peers.py --write                 # the tables of README.md and docs/
    python benchmarks/peers.py --loads P2 P4 P8 --servers ours-bfloat16 vllm openvino-bfloat16
    python benchmarks/peers.py --held avx2             # on a CPU that has more than AVX2
    python benchmarks/peers.py ours=http://127.0.0.1:8000 llama.cpp=http://127.0.0.1:8080

In each round every server is started, warmed up, sent all loads and stopped, one after the other;
the order turns from round to round. One generator sends all loads; in a round all servers get the
same texts, new to each. Before each server this waits until the machine is quiet, and notes what
others used of it meanwhile. Results are kept after each server, in `build/bench-peers`: an
interrupted run of the same revision goes on where it was, and `--fresh` begins anew. Long prompts
(P2 to P8) run alone, and have their floor measured in each round, as if it were a server.

A cell of a table is the median of the rounds with the least and the most of them; `*` says that
other processes used the machine meanwhile. What is written into README.md and docs/ stands between
two comments of the page; the medians of each run that was written are a line of `history.jsonl`,
from which the table of all runs is made.

Servers that run already are given as NAME=URL. They take turns within each round; values are
medians of the rounds, a ratio is the median of those to the first server of the same round. The
last line is JSON.
"""

import asyncio
import datetime
import math
import multiprocessing
import os
import random
import re
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from build_peers import BFLOAT16, DIRECTORY, FILES, HELD, INT8_CACHE, Peer, servers
from harness import (
    LOADS,
    ROOT,
    Args,
    LoadShape,
    Opt,
    Program,
    Server,
    Table,
    Use,
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
from aioserve.support import __version__

#: Requests of a stream: fewer than of servers that run, so that a round of all takes minutes.
PER_STREAM = {"W1": 3, "W2": 1, "W3": 1, "W4": 2, "W5": 1, "P2": 6, "P4": 4, "P8": 2}
PROMPTS = ("P2", "P4", "P8")
FLOOR = Peer("floor", "floor: products and attention", BFLOAT16, ())
ON_DEMAND = {"openvino-Q8_0"}  # measured if it is named
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
FIRST = "TTFT p50 ms"


# What is kept on the disk, and made into tables.


TITLES = {
    "tokens/s": "Output tokens per second:",
    "TTFT p50 ms": "Median TTFT in milliseconds:",
    "TTFT p99 ms": "99th percentile of TTFT in milliseconds:",
    "gap p50 ms": "Median gap between two tokens of a stream in milliseconds:",
}
HEADS = {
    "W1": "1 stream",
    "W2": "16 streams",
    "W3": "4 long prompts",
    "W4": "8 that share a prefix",
    "W5": "64 streams",
}
PROMPT_HEADS = {load: f"{LOADS[load].input_tokens:,} tokens in" for load in PROMPTS}
README_LOADS = ("W1", "W2", "W3", "W5")
COSTS = {
    "start_seconds": "start, s",
    "resident_at_start": "resident at the start, MiB",
    "resident_at_end": "after the loads, MiB",
}
HISTORY = Path(__file__).with_name("history.jsonl")
OURS = "aioserve"


class Settings(msgspec.Struct, frozen=True):
    """What must be equal for two results to be of one run."""

    cpu: str
    threads: int
    revision: str
    requests_per_stream: dict[str, int]
    held: str = ""  # to what instruction set


class Cell(msgspec.Struct, frozen=True):
    """One load on one server in one round; `values` by the labels of `COLUMNS`."""

    values: dict[str, float | None]
    others: float  # cores that other processes used meanwhile
    steal: float  # cores that the host took meanwhile
    errors: list[str]
    notes: list[str]

    @classmethod
    def failed(cls, words: str) -> "Cell":
        """Nothing was measured, for the reason given."""
        return cls({}, 0.0, 0.0, [words], [])

    @property
    def is_quiet(self) -> bool:
        """Others have left the machine alone."""
        return Use(self.others, self.steal).is_quiet


class Visit(msgspec.Struct, frozen=True):
    """A server in a round: seconds until it answered, resident MiB, and its loads."""

    round: int
    server: str
    start_seconds: float
    resident_at_start: float
    resident_at_end: float
    cells: dict[str, Cell]
    finished: str = ""  # day and time


class Range(NamedTuple):
    """Median, least and most of the rounds."""

    median: float
    least: float
    most: float
    is_quiet: bool


class Run(msgspec.Struct, frozen=True):
    """Medians of one run: a line of `history.jsonl`."""

    version: str  # of aioserve
    revision: str
    date: str  # the last day on which something was measured
    cpu: str
    threads: int
    rounds: int
    # Output tokens per second, by weights, label of the server, load.
    rates: dict[str, dict[str, dict[str, float]]]

    def ratio(self, weights: str, load: str) -> float | None:
        """Rate of aioserve, with the faster activations and K and V of the compute type, to that of
        the best peer.
        """
        servers = self.rates.get(weights, {})
        found = {label: rates[load] for label, rates in servers.items() if load in rates}
        found.pop(INT8_CACHE, None)
        ours = [rate for label, rate in found.items() if label.startswith(OURS)]
        peers = [rate for label, rate in found.items() if not label.startswith(OURS)]
        return max(ours) / max(peers) if ours and peers else None


class _File(msgspec.Struct):
    settings: Settings
    visits: list[Visit] = []


class Results:
    """All visits so far. Each one that is added is on the disk when `add` returns."""

    def __init__(self, path: Path, found: _File) -> None:
        self._path, self._found = path, found

    @property
    def settings(self) -> Settings:
        """The settings that this run measures with."""
        return self._found.settings

    @property
    def folder(self) -> Path:
        """Where they are kept; its name is that of the comments of the page."""
        return self._path.parent

    @property
    def dates(self) -> list[str]:
        """The days on which something was measured."""
        return sorted({visit.finished[:10] for visit in self._found.visits})

    @property
    def num_rounds(self) -> int:
        """Rounds of which something is there."""
        return len({visit.round for visit in self._found.visits})

    def add(self, visit: Visit) -> None:
        """Keep it, with the time."""
        now = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
        self._found.visits.append(msgspec.structs.replace(visit, finished=now))
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self._found)))
        os.replace(part, self._path)

    def has(self, round_: int, server: str, load: str) -> bool:
        """Whether the load was sent to the server in that round, and was answered."""
        return any(
            visit.round == round_ and visit.server == server and bool(cell.values)
            for visit in self._found.visits
            for name, cell in visit.cells.items()
            if name == load
        )

    def cells(self, server: str, load: str) -> list[Cell]:
        """All results that were measured with these settings."""
        found = [visit.cells.get(load) for visit in self._found.visits if visit.server == server]
        return [cell for cell in found if cell is not None and cell.values]

    def range(self, server: str, load: str, label: str) -> Range | None:
        """A column over the rounds, or None where nothing was measured."""
        cells = self.cells(server, load)
        values = [value for cell in cells if (value := cell.values.get(label)) is not None]
        return _range(values, all(cell.is_quiet for cell in cells))

    def range_of_visits(self, server: str, field: str) -> Range | None:
        """A number of the visits over the rounds."""
        visits = [v for v in self._found.visits if v.server == server and v.start_seconds]
        return _range([getattr(visit, field) for visit in visits], is_quiet=True)

    def quiet_cells(self) -> tuple[int, int]:
        """How many loads ran while others left the machine alone, and how many there are."""
        cells = [c for visit in self._found.visits for c in visit.cells.values() if c.values]
        return sum(cell.is_quiet for cell in cells), len(cells)

    def errors(self, server: str, load: str) -> list[str]:
        """What failed, of all rounds."""
        visits = [visit for visit in self._found.visits if visit.server == server]
        return [word for visit in visits for c in [visit.cells.get(load)] if c for word in c.errors]


def _range(values: list[float], is_quiet: bool) -> Range | None:
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return None
    return Range(statistics.median(values), min(values), max(values), is_quiet)


def begin(folder: Path, settings: Settings, fresh: bool) -> Results:
    """Read the results that earlier runs kept with the same settings; those of other settings are
    put aside.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    if path.exists():
        found = msgspec.json.decode(path.read_bytes(), type=_File)
        if found.settings == settings and not fresh:
            return Results(path, found)
        aside = folder / f"results-until-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
        os.replace(path, aside)
        print(f"what was kept is of other settings, and now in {aside}", file=sys.stderr)
    return Results(path, _File(settings))


# Tables.


Column = Callable[[str], Range | None]  # by the key of a server


def show(results: Results, asked: Sequence[Peer]) -> None:
    """Print everything that was measured, and what failed."""
    print("\n\n".join([_sentences(results), *_full_tables(results, asked)]))
    for server in asked:
        for load in PER_STREAM:
            for error in results.errors(server.key, load):
                print(f"{server.key}, {load}: {error}")


def write(results: Results, asked: Sequence[Peer]) -> None:
    """Put the tables into the pages."""
    name, page = results.folder.name, ROOT / "docs" / "benchmarks.md"
    about = [_sentences(results), f"```bash\n{command(sys.argv[1:])}\n```"]
    _insert(page, [*about, *_full_tables(results, asked)], name)
    if name == "bench-peers":
        plain = [server for server in asked if server.weights == BFLOAT16]
        heads = {load: HEADS[load] for load in README_LOADS}
        short = _table(plain, _loads(results, heads, "tokens/s"))
        _insert(ROOT / "README.md", [*about, TITLES["tokens/s"], short], name)
        _insert(page, [history_table(remember(_as_run(results, asked)))], "bench-history")


def command(words: Sequence[str]) -> str:
    """What to type to run this with these words."""
    given = shlex.join(words)
    return "make bench-peers" + (f' ARGS="{given}"' if " " in given else f" ARGS={given}")


# All runs that were written.


def _as_run(results: Results, asked: Sequence[Peer]) -> Run:
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for server in asked:
        found = {load: results.range(server.key, load, "tokens/s") for load in HEADS}
        medians = {load: round(r.median, 1) for load, r in found.items() if r is not None}
        if medians:
            rates.setdefault(server.weights, {})[server.label] = medians
    settings = results.settings
    return Run(
        version=__version__,
        revision=settings.revision,
        date=results.dates[-1],
        cpu=settings.cpu,
        threads=settings.threads,
        rounds=results.num_rounds,
        rates=rates,
    )


def remember(run: Run, path: Path = HISTORY) -> list[Run]:
    """Add a run to the file, in the place of one of the same revision and processor. Returns all,
    the oldest first.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    runs = [msgspec.json.decode(line, type=Run) for line in lines]
    runs = [r for r in runs if (r.revision, r.cpu) != (run.revision, run.cpu)] + [run]
    runs.sort(key=lambda r: r.date)
    path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in runs))
    return runs


def history_table(runs: Sequence[Run]) -> str:
    """Return the ratios to the best peer of all runs: those alone are comparable between days."""
    rows = [
        f"| version | date | processor | weights | {' | '.join(HEADS)} |",
        "|---" * (4 + len(HEADS)) + "|",
    ]
    for run in reversed(runs):
        for weights in FILES:
            ratios = [run.ratio(weights, load) for load in HEADS]
            if any(ratios):
                cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
                name = f"{run.version} ({run.revision})"
                rows.append(f"| {' | '.join([name, run.date, run.cpu, weights, *cells])} |")
    return "\n".join(rows)


def _full_tables(results: Results, asked: Sequence[Peer]) -> list[str]:
    is_prompts, found = FLOOR in asked, []
    for label, title in TITLES.items():
        if label.startswith("TTFT") or not is_prompts:
            heads = PROMPT_HEADS if is_prompts else HEADS
            found += [title, _table(asked, _loads(results, heads, label))]
    if is_prompts:
        return [*found, "Ratios of the medians:", prompt_ratios(results, asked)]
    if results.settings.held:
        ratios = history_table([_as_run(results, asked)])
        return [*found[:4], "Output tokens per second to those of the best peer:", ratios]
    costs = {head: partial(results.range_of_visits, field=field) for field, head in COSTS.items()}
    return [*found, "Start and resident memory:", _table(asked, costs)]


def prompt_ratios(results: Results, asked: Sequence[Peer]) -> str:
    """Return the median TTFT of each server to the floor, and that of the best peer to ours."""
    plain = [server for server in asked if server.weights == BFLOAT16]
    rows = {f"{server.label} to the floor": list[str]() for server in plain if server != FLOOR}
    best = rows.setdefault("best peer to aioserve", [])
    for load in PROMPTS:
        found = {server.label: results.range(server.key, load, FIRST) for server in plain}
        medians = {label: one.median if one else math.nan for label, one in found.items()}
        floor, ours = medians.pop(FLOOR.label, math.nan), medians.get(OURS, math.nan)
        for label, median in medians.items():
            rows[f"{label} to the floor"].append(_ratio(median / floor))
        peers = [m for label, m in medians.items() if label != OURS and not math.isnan(m)]
        best.append(_ratio(min(peers, default=math.nan) / ours))
    heads = [f"{load}: {head}" for load, head in PROMPT_HEADS.items()]
    lines = [["median TTFT", *heads], ["---"] * (1 + len(heads))]
    lines += [[label, *cells] for label, cells in rows.items() if any(cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _loads(results: Results, heads: Mapping[str, str], label: str) -> dict[str, Column]:
    """A column, load by load."""
    return {
        f"{load}: {head}": partial(results.range, load=load, label=label)
        for load, head in heads.items()
    }


def _table(asked: Sequence[Peer], columns: Mapping[str, Column]) -> str:
    """A row for each server that has a value, grouped by the weights that it serves; a column for
    each that some server has.
    """
    measured = {
        head: column
        for head, column in columns.items()
        if any(column(server.key) for server in asked)
    }
    columns = measured or columns
    rows = [f"| weights | server | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for weights in FILES:
        for server in asked:
            ranges = [column(server.key) for column in columns.values()]
            if server.weights == weights and any(ranges):
                name = weights if weights == BFLOAT16 else f"GGUF {weights}"
                rows.append(f"| {name} | {server.label} | {' | '.join(map(_cell, ranges))} |")
    return "\n".join(rows)


def _cell(found: Range | None) -> str:
    if found is None:
        return ""
    digits = 1 if found.median < 50 else 0
    median, least, most = (f"{value:,.{digits}f}" for value in found[:3])
    rounds = f" ({least} to {most})" if found.least < found.most else ""
    return median + rounds + ("" if found.is_quiet else " *")


def _sentences(results: Results) -> str:
    """On what and when it was measured, and how quiet it was."""
    settings = results.settings
    quiet, cells = results.quiet_cells()
    rounds = f"the median of {results.num_rounds} rounds, with the least and the most in brackets"
    text = (
        f"SmolLM2-135M on {settings.threads} cores of an {settings.cpu}"
        f"{', held to AVX2' if settings.held else ''}, {' and '.join(results.dates)}, "
        f"revision {settings.revision}: {rounds if results.num_rounds > 1 else 'one round'}. "
    )
    if quiet == cells:
        text += f"Nothing else used the machine during the {cells} runs."
    else:
        text += f"Other processes used the machine during {cells - quiet} of {cells} runs (`*`)."
    return textwrap.fill(text, 100)


def _insert(page: Path, parts: Sequence[str], name: str) -> None:
    """Put the parts between the page's two comments of that name."""
    old, text = page.read_text(encoding="utf-8"), "\n\n".join(parts)
    pattern = rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- /{name} -->)"
    new, count = re.subn(pattern, lambda _: text, old, flags=re.DOTALL)
    assert count == 1, f"{page} has {count} places for the tables"
    page.write_text(new, encoding="utf-8")
    print(f"written: {page}")


# Measuring.


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
    if args.held:
        os.environ.update(HELD)
    known = {server.key: server for server in servers(is_held=bool(args.held))}
    if unknown := set(args.servers) - set(known):
        sys.exit(f"no server {unknown}; there are {', '.join(known)}")
    asked = [known[key] for key in args.servers or known if args.servers or key not in ON_DEMAND]
    for peer in asked:
        if peer.missing:
            print(f"{peer.key} is left out: {peer.missing}", file=sys.stderr)
    asked = [peer for peer in asked if not peer.missing]
    if not asked:
        sys.exit("peers.py: no server can be started; what each one lacks stands above")
    loads = [load for load in args.loads if load in PER_STREAM]
    name = "bench-prompts" if set(loads) & set(PROMPTS) else "bench-peers"
    if name == "bench-prompts":
        if not set(loads) <= set(PROMPTS):
            sys.exit(f"{', '.join(PROMPTS)} are measured without other loads")
        asked.append(FLOOR)
    settings = Settings(cpu_name(), default_num_threads(), revision(), PER_STREAM, args.held)
    folder = ROOT / "build" / (f"{name}-{args.held}" if args.held else name)
    results = begin(folder, settings, args.fresh)
    end = time.monotonic() + 60 * args.minutes
    for number in range(args.rounds):
        for peer in asked if number % 2 == 0 else reversed(asked):
            fitting = peer_loads(peer, loads)
            left = [load for load in fitting if not results.has(number, peer.key, load)]
            if left and time.monotonic() < end:
                results.add(_visit(peer, number, left, folder, args.wait, args.max_seconds))
    show(results, asked)
    if args.write:
        write(results, asked)
    is_complete = _is_complete(results, args.rounds, asked, loads)
    if not is_complete:
        print("Not all was measured: the same command goes on.", file=sys.stderr)
    return None, int(not is_complete)


def peer_loads(peer: Peer, loads: Sequence[str]) -> list[str]:
    """Those loads whose requests fit into the server."""
    return [load for load in loads if LOADS[load].request_tokens <= peer.tokens]


def _is_complete(results: Results, rounds: int, asked: list[Peer], loads: list[str]) -> bool:
    return all(
        results.has(number, peer.key, load)
        for number in range(rounds)
        for peer in asked
        for load in peer_loads(peer, loads)
    )


def _visit(
    peer: Peer, number: int, loads: list[str], folder: Path, wait: float, most: float
) -> Visit:
    """One server, or the floor, in one round."""
    before = wait_until_quiet(wait)
    if not before.is_quiet:
        print(f"Not quiet before {peer.key}: {before}", file=sys.stderr, flush=True)
    cells: dict[str, Cell] = {}
    seconds = at_start = at_end = 0.0
    prompts = [LOADS[load]._replace(per_stream=1) for load in loads if load in PROMPTS]
    longest = sorted(prompts, key=lambda shape: shape.input_tokens)[-1:]
    try:
        if peer is FLOOR:
            return Visit(number, peer.key, 0.0, 0.0, 0.0, _floors(number, loads))
        with serving(**peer.options, log=folder / f"{peer.key}.log") as started:
            for seed, shape in enumerate([WARM_UP, *longest], WARM_UP_SEED):
                run(started.url, shape, seed, most, warm_up=False)
            at_start = resident_mib(tree(started.pid))
            for load in loads:
                cells[load] = _measure(peer, started, number, load, most)
            seconds, at_end = started.start_seconds, resident_mib(tree(started.pid))
    except (OSError, RuntimeError, AioserveError) as error:
        print(f"{peer.key}: {error}", file=sys.stderr, flush=True)
        cells = {load: cells.get(load) or Cell.failed(str(error)) for load in loads}
    return Visit(number, peer.key, seconds, at_start, at_end, cells)


def prompt_floors(model: Path, lengths: Sequence[int]) -> list[float]:
    """Return the shortest time, in seconds, that this machine allows for a prompt of each length.
    This is called in a process of its own, as it imports torch, which would take part of the
    measuring process's memory and time.
    """
    from steps import prompt_floors

    return prompt_floors(model, lengths)


def _floors(number: int, loads: Sequence[str]) -> dict[str, Cell]:
    """Measure the floors of the loads' prompts now."""
    watch, lengths = Watch(), [LOADS[load].input_tokens for load in loads]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        seconds = pool.submit(prompt_floors, DIRECTORY, lengths).result()
    use, cells = watch.use(), {}
    for load, one in zip(loads, seconds, strict=True):
        print(f"round {number + 1}  {'floor':20}{load}{1e3 * one:9.1f} ms", file=sys.stderr)
        cells[load] = Cell({FIRST: 1e3 * one}, use.others, use.steal, [], [])
    return cells


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
    held=Opt("", "of a CPU that has more", choices=["", "avx2"]),
    fresh=Opt(False, "put what is kept aside"),
    write=Opt(False, "tables into README.md and docs/"),
)
def main(args: Args) -> tuple[dict[str, Any] | None, int]:
    """Measure servers that run, or start them."""
    if args.held and (args.peers or any(load in PROMPTS for load in args.loads)):
        sys.exit(
            "peers.py: --held is for servers that are started here, and for the loads W1 to W5"
        )
    try:
        return compare_running(args) if args.peers else compare_built(args)
    except AioserveError as error:  # nobody is there
        sys.exit(f"peers.py: {error}")


if __name__ == "__main__":
    program.main()
