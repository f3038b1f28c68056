"""docs/chat-templates.md: written from the outcomes of round trips."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aioserve.features.formats import MARKS, Choice
from tests.formats.round_trip import ALIKE, BUT_SPACE, LEFT_OUT, OTHERWISE, REFUSED, Trip

PAGE = Path(__file__).parents[2] / "docs" / "chat-templates.md"

_BEGIN = """\
# Chat templates that are read

{num} public chat templates, all those in the source package llama-cpp-python {version}, and the
format that parses their models' replies if `--tool-call-parser` and `--reasoning-parser` are
`auto` ([tools.md](tools.md)): calls of {num_read} of the {num_calling} templates with calls are
parsed.

Each template rendered nine kinds of turns: content, reasoning, a call, a call without arguments,
parallel calls, all of these together, and a reply after results of tools. Arguments are nested,
with Unicode, numbers, booleans, null and a program of several lines. "Yes" under "read back"
means that reasoning, content, and names and typed arguments of all calls were parsed exactly as
they were rendered. "Written" says whether the format's own `write`, which defines the form of
forced calls, writes these turns as the template does.

`make test-formats` fetches the templates, repeats the test and writes this page.
`python -m tests.formats QwQ` shows the result of each turn for the templates with this name.

| template | format | reasoning | read back | written | remark |
|---|---|---|---|---|---|
"""

#: Templates that write a turn as no model would say it: what they do.
KNOWN = {
    "Bielik-11B-v3.0-Instruct": "behind a system message the template does not end results",
    "LFM2.5-8B-A1B": "the template writes quotes in texts without escaping them",
    "NVIDIA-Nemotron-Nano-v2": "the template writes a last turn of content inside of reasoning",
    "openai-gpt-oss-120b": "the template writes content beside calls as reasoning",
}


class Row(NamedTuple):
    """What is said about one template."""

    template: str
    format: str  # empty: none
    reasoning: str  # empty: none
    writes_calls: bool
    problem: str  # the first that was not read back
    written: str
    remark: str

    @classmethod
    def of(cls, template: str, choice: Choice, trips: Sequence[Trip]) -> "Row":
        """From the outcomes of all replies."""
        seen = [trip for trip in trips if trip.turn is not None]
        problems = [f"{trip.name}: {trip.problem}" for trip in seen if trip.problem]
        written = {trip.written for trip in seen}
        return cls(
            template,
            choice.name or "",
            _reasoning(choice),
            any("call" in trip.name and "calls" not in trip.note for trip in seen),
            problems[0] if problems else "",
            next(each for each in (OTHERWISE, BUT_SPACE, ALIKE) if each in written or not written),
            "; ".join(_remarks({trip.note for trip in trips if trip.note})),
        )

    @property
    def is_read(self) -> bool:
        """Whether a format reads its calls as they were said."""
        return bool(self.format) and not self.problem

    @property
    def is_wrong(self) -> bool:
        """Whether a format was chosen that reads it otherwise, and the template is not to blame; or
        it is read though it was to blame.
        """
        return bool(self.format) and bool(self.problem) != (self.template in KNOWN)


def _reasoning(choice: Choice) -> str:
    if choice.format is not None and choice.format.reads_reasoning:
        return "the format"
    if choice.marks is None:
        return ""
    return next((name for name, each in MARKS.items() if each == choice.marks), choice.name or "")


def _remarks(notes: set[str]) -> list[str]:
    """What a template leaves out of any turn in one remark; the other notes as they are."""
    left_out = {
        each
        for note in notes
        if note.startswith(LEFT_OUT)
        for each in note[len(LEFT_OUT) :].split(" and ")
    }
    others = sorted(note for note in notes if not note.startswith(LEFT_OUT))
    return [f"{LEFT_OUT}{' and '.join(sorted(left_out))}", *others] if left_out else others


def render(rows: Sequence[Row], version: str) -> str:
    """The page."""
    calling = [row for row in rows if row.writes_calls]
    num_read = sum(row.is_read for row in calling)
    begin = _BEGIN.format(
        num=len(rows), version=version, num_read=num_read, num_calling=len(calling)
    )
    return begin + "".join(map(_line, rows))


def _line(row: Row) -> str:
    remark = row.remark
    if row.problem and row.format:
        remark = "; ".join(filter(None, [KNOWN.get(row.template) or row.problem, remark]))
    read = "-" if not row.format else "no" if row.problem else "yes"
    if not row.writes_calls:
        refusal = [each for each in row.remark.split("; ") if each.startswith(REFUSED)][:1]
        remark, read = "; ".join(["writes no calls", *refusal]), "-"
    cells = (
        row.template,
        f"`{row.format}`" if row.format else "-",
        f"`{row.reasoning}`" if row.reasoning else "-",
        read,
        row.written if row.format and row.writes_calls else "-",
        remark.replace("|", r"\|"),
    )
    return f"| {' | '.join(cells)} |\n".replace("  |", " |")
