"""Colour and bars are for terminals that can show them, and for nobody else."""

import io

import pytest

from aioserve.lab.terminal import paint, progress

TABLE = "traffic\n\ngap p99  -2  better\ngap p50  +2  worse\n3 x HTTP 429: full"
PAINTED = (
    "\x1b[1mtraffic\x1b[0m\n\ngap p99  -2  \x1b[32mbetter\x1b[0m\n"
    "gap p50  +2  \x1b[31mworse\x1b[0m\n\x1b[31m3 x HTTP 429: full\x1b[0m"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "is_painted"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, True),  # as no-color.org has it
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
)
def test_tables_are_painted_on_a_terminal_unless_it_is_not_wanted(
    stream: io.StringIO,
    environment: dict[str, str],
    is_painted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", stream)
    assert paint(TABLE) == (PAINTED if is_painted else TABLE)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_alone(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream)
    with progress(10) as report:
        report(10)
    assert bool(stream.getvalue()) == is_terminal


def test_with_a_title_there_are_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with progress(10, "loads", "Measuring loads") as report:
        report(10)
    assert stream.getvalue().startswith("Measuring loads: 10 of 10, ")
