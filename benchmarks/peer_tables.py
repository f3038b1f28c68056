"""Tables of what `bench_peers.py` has measured, printed, and written into README.md and docs/.

A cell is the median of the rounds with the least and the most of them; `*` says that other
processes used the machine meanwhile. What is written stands between two comments of the page, with
the processor, the date and the command. Knows results; measures nothing.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from peer_results import Range, Results
from peer_servers import BFLOAT16, FILES, ROOT, Server
from peers import COLUMNS

RATE, FIRST, _, GAP, _ = (label for label, _ in COLUMNS)
TITLES = {
    RATE: "Output tokens per second:",
    FIRST: "Median TTFT in milliseconds:",
    GAP: "Median gap between two tokens of a stream in milliseconds:",
}
HEADS = {
    "W1": "1 stream",
    "W2": "16 streams",
    "W3": "4 long prompts",
    "W4": "8 that share a prefix",
    "W5": "64 streams",
}
README_LOADS = ("W1", "W2", "W3", "W5")
COSTS = {
    "start_seconds": "start, s",
    "resident_at_start": "resident at the start, MiB",
    "resident_at_end": "after the loads, MiB",
}
FENCE = "```bash\nmake bench-peers ARGS=--write\n```"

Column = Callable[[str], Range | None]  # by the key of a server


def show(results: Results, asked: Sequence[Server]) -> None:
    """Print everything that was measured, and what failed."""
    print("\n\n".join([_sentences(results), *_full_tables(results, asked)]))
    for server in asked:
        for load in HEADS:
            for error in results.errors(server.key, load):
                print(f"{server.key}, {load}: {error}")


def write(results: Results, asked: Sequence[Server]) -> None:
    """Put the tables into the pages."""
    words = _sentences(results)
    short = _table(asked, _loads(results, README_LOADS, RATE))
    _insert(ROOT / "README.md", [words, FENCE, TITLES[RATE], short])
    _insert(ROOT / "docs" / "benchmarks.md", [words, FENCE, *_full_tables(results, asked)])


def _full_tables(results: Results, asked: Sequence[Server]) -> list[str]:
    found = []
    for label, title in TITLES.items():
        found += [title, _table(asked, _loads(results, HEADS, label))]
    costs = {head: partial(results.range_of_visits, field=field) for field, head in COSTS.items()}
    return [*found, "Start and resident memory:", _table(asked, costs)]


def _loads(results: Results, loads: Iterable[str], label: str) -> dict[str, Column]:
    """A column of `peers.py`, load by load."""
    return {
        f"{load}: {HEADS[load]}": partial(results.range, load=load, label=label) for load in loads
    }


def _table(asked: Sequence[Server], columns: Mapping[str, Column]) -> str:
    """A row for each server that has a value, grouped by the weights that it serves."""
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
    return f"{median} ({least} to {most})" + ("" if found.is_quiet else " *")


def _sentences(results: Results) -> str:
    """On what and when it was measured, and how quiet it was."""
    settings = results.settings
    quiet, cells = results.quiet_cells()
    text = (
        f"SmolLM2-135M on {settings.threads} cores of an {settings.cpu}, "
        f"{' and '.join(results.dates)}, revision {settings.revision}: the median of "
        f"{results.num_rounds} rounds, with the least and the most of them in brackets. "
    )
    if quiet == cells:
        text += f"Nothing else used the machine during the {cells} runs."
    else:
        text += f"Other processes used the machine during {cells - quiet} of {cells} runs (`*`)."
    return textwrap.fill(text, 100)


def _insert(page: Path, parts: Sequence[str]) -> None:
    """Between the page's two comments."""
    old, text = page.read_text(encoding="utf-8"), "\n\n".join(parts)
    pattern = r"(?<=<!-- bench-peers -->\n).*?(?=\n<!-- /bench-peers -->)"
    new, count = re.subn(pattern, lambda _: text, old, flags=re.DOTALL)
    assert count == 1, f"{page} has {count} places for the tables"
    page.write_text(new, encoding="utf-8")
    print(f"written: {page}")
