"""What a terminal gets and a pipe does not: colour, and a bar for long work, or lines instead.

Knows the look of tables: which words they end with. Knows no numbers.
"""

import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

BOLD, DIM, RED, GREEN = "1", "2", "31", "32"

# Of a line, what is coloured, and how. The first line of a table is its title.
STYLES = [
    (re.compile(r"\bbetter$"), GREEN),
    (re.compile(r"\bworse$"), RED),
    (re.compile(r"(not distinguishable from noise|less than 1% apart|no interval .*)$"), DIM),
    (re.compile(r"\btoo few$"), RED),
    (re.compile(r"^\d+ x .*"), RED),  # errors of a server, counted
]


def is_terminal(stream: TextIO) -> bool:
    """Return whether output goes to a terminal that can do more than plain text."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str) -> str:
    """Return a table for stdout: in colour if that is a terminal and `NO_COLOR` is not set."""
    if not is_terminal(sys.stdout) or os.environ.get("NO_COLOR"):
        return text
    title, *lines = text.split("\n")
    return "\n".join([_styled(title, BOLD) if lines else _painted(title), *map(_painted, lines)])


def _painted(line: str) -> str:
    for pattern, style in STYLES:
        line = pattern.sub(_styled(r"\g<0>", style), line)
    return line


def _styled(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m"


@contextmanager
def progress(
    total: int | None, unit: str = "requests", title: str = ""
) -> Iterator[Callable[[int], Any]]:
    """A bar on stderr, if that is a terminal, or lines, if there is a title; the function is told
    how many more are done.
    """
    if title and not is_terminal(sys.stderr):
        from aioserve.support.progress import Lines

        lines: Lines[None] = Lines(desc=title, total=total, say=say)
        try:
            yield lines.update
        finally:
            lines.close()
        return
    from tqdm import tqdm

    bar: Any = tqdm(
        total=total,
        unit=f" {unit}",
        disable=not is_terminal(sys.stderr),
        leave=False,
        smoothing=0,
    )
    try:
        yield bar.update
    finally:
        bar.close()


def say(line: str) -> None:
    """Print a line beside the results, on stderr."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def in_columns(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Return a line of text for each row of cells: the columns `left` begin at the left of their
    place, the others end at its right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'<' if i in left else '>'}{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# What the latencies in tables are, in the same words below each of them.


#: By label, a sentence each for a reader who has not met them.
DURATIONS = {
    "TTFT": "Time to first token: from the arrival of a request to its first token.",
    "TPOT": "Time per output token: the mean time from one token to the next within a request.",
    "gap": "From one token to the next, over all tokens of all requests: a long one is a stall.",
    "end to end": "From the arrival of a request to its last token, of those that got there.",
}


def legend(labels: list[str]) -> str:
    """Return a line for each latency that one of `labels` begins with."""
    width = max(map(len, DURATIONS))
    return "\n".join(
        f"{word:{width}}  {meaning}"
        for word, meaning in DURATIONS.items()
        if any(label.startswith(word) for label in labels)
    )
