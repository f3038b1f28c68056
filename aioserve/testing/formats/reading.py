"""Reads a text by a format, in pieces, and checks what is true of any reply that was read.

Knows the events. Knows nothing about which texts are tried.
"""

import traceback
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from aioserve.formats import (
    SPACE,
    Arguments,
    Call,
    Content,
    Event,
    Function,
    Reasoning,
    ReasoningParser,
    ReplyFormat,
    ReplyParser,
    joined,
)
from aioserve.testing.time_limit import CALL_SECONDS, OutOfTime, begin_call, end_call
from aioserve.testing.violation import FormatViolation

MAX_SHOWN = 400  # characters of a text in a message


class Read(NamedTuple):
    """What a text was read as."""

    events: list[Event]  # neighbours of one kind as one
    num_malformed: int

    @property
    def calls(self) -> list[Call]:
        """The calls, without their arguments."""
        return [event for event in self.events if isinstance(event, Call)]

    @property
    def said(self) -> str:
        """All content and reasoning."""
        return "".join(e.text for e in self.events if isinstance(e, Content | Reasoning))

    @property
    def content(self) -> str:
        """All content."""
        return "".join(e.text for e in self.events if isinstance(e, Content))


def parser_of(kind: type[ReplyFormat], functions: Sequence[Function]) -> ReplyParser:
    """What reads one reply: the format, behind the marks of its reasoning if it has any."""
    reasoning = None if kind.marks is None else ReasoningParser(kind.marks, "")
    return ReplyParser(reasoning, kind(functions))


def read(kind: type[ReplyFormat], pieces: Sequence[str], functions: Sequence[Function]) -> Read:
    """Read a text that comes in these pieces. Raises `FormatViolation` if the format raises, does
    not come back, or gives events that are none.
    """
    events: list[Event] = []
    call = begin_call(CALL_SECONDS)
    parser = None
    try:
        parser = parser_of(kind, functions)
        for piece in pieces:
            events += parser.append(piece)
        events += parser.flush()
    except (OutOfTime, KeyboardInterrupt):
        if not call.was_ended:
            raise
    except FormatViolation:
        raise
    except Exception as error:
        raise _violation(
            kind, f"raised {type(error).__name__}: {error}{_place(error)}", pieces
        ) from error
    finally:
        end_call(call)
    if call.was_ended:
        raise _violation(kind, f"did not come back in {CALL_SECONDS:g} s", pieces)
    assert parser is not None
    read = Read(joined(events), parser.num_malformed)
    _check_events(kind, events, read, pieces)
    return read


def check_alike(
    kind: type[ReplyFormat],
    whole: Read,
    pieces: Sequence[str],
    functions: Sequence[Function],
) -> None:
    """Raise `FormatViolation` if the pieces are not read as `whole`, their joined text, was."""
    streamed = read(kind, pieces, functions)
    if streamed.events != whole.events:
        raise _violation(
            kind,
            f"reads a text otherwise in pieces: {shown(streamed.events)}; whole, it is read as "
            f"{shown(whole.events)}",
            pieces,
        )
    if streamed.num_malformed != whole.num_malformed:
        raise _violation(
            kind,
            f"counts {streamed.num_malformed} malformed calls in pieces, and "
            f"{whole.num_malformed} in the whole",
            pieces,
        )


def violation(kind: type[ReplyFormat], what: str, text: str) -> FormatViolation:
    """An error about a text that was read as a whole."""
    return _violation(kind, what, [text])


def shown(events: Sequence[Event]) -> str:
    """Events in a line."""
    return _cut(", ".join(map(repr, events)) or "nothing")


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    """The text, cut at these positions."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def words(text: str) -> str:
    """The characters of a text that are no space."""
    return "".join(char for char in text if char not in SPACE)


def _check_events(
    kind: type[ReplyFormat], events: Sequence[Event], read: Read, pieces: Sequence[str]
) -> None:
    last: Event | None = None
    for event in events:
        if not isinstance(event, Content | Reasoning | Call | Arguments):
            raise _violation(kind, f"gives {event!r:.100}, which is no event", pieces)
        if not isinstance(event.name if isinstance(event, Call) else event.text, str):
            raise _violation(kind, f"gives {event!r:.100}, without a text", pieces)
        if isinstance(event, Call) and not event.name:
            raise _violation(kind, "gives a call without a name", pieces)
        if isinstance(event, Arguments) and not isinstance(last, Call | Arguments):
            raise _violation(
                kind, f"gives arguments {event.text!r:.60} that are not right behind a call", pieces
            )
        last = event
    ids = Counter(call.id for call in read.calls if call.id is not None)
    if any(not isinstance(each, str) or not each for each in ids):
        raise _violation(kind, f"gives an id that is no text: {[*ids]!r:.100}", pieces)


def _violation(kind: type[ReplyFormat], what: str, pieces: Sequence[str]) -> FormatViolation:
    error = FormatViolation(f"{kind.__name__} {what}")
    error.add_note(f"The text, in {len(pieces)} pieces: {_cut(repr(list(pieces)))}")
    return error


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def _place(error: Exception) -> str:
    """Where in the format's own code; an error of the kit is none of its."""
    own = traceback.extract_tb(error.__traceback__)[-1]
    return f" at {own.filename.rpartition('/')[2]}:{own.lineno}"
