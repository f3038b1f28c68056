"""One reply from text to events: reasoning first, then what a format reads in the rest.

Knows that both may be absent. Knows nothing about which are chosen.
"""

from aioserve.errors import place_of
from aioserve.formats.events import Content, Event
from aioserve.formats.reasoning import ReasoningParser
from aioserve.formats.reply_format import ReplyFormat


class ReplyParser:
    """The pieces of a reply, as they come; cut in any way, the joined events are the same."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ReplyFormat | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_malformed(self) -> int:
        """Pieces of the text so far that began as a call and were none."""
        return 0 if self._calls is None else self._calls.num_malformed

    def append(self, text: str) -> list[Event]:
        """Read more of a reply; the events that this text completes."""
        if self._reasoning is None:
            return self._read_content(text)
        return self._read_each(self._reasoning.append(text))

    def flush(self) -> list[Event]:
        """What was held back, now that nothing more comes."""
        events = [] if self._reasoning is None else self._read_each(self._reasoning.flush())
        return events if self._calls is None else events + self._told(self._calls.flush(), "flush")

    def _read_each(self, events: list[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            told += self._read_content(event.text) if isinstance(event, Content) else [event]
        return told

    def _read_content(self, text: str) -> list[Event]:
        if self._calls is None:
            return [Content(text)] if text else []
        return self._told(self._calls.append(text), "append")

    def _told(self, events: object, method: str) -> list[Event]:
        """What the format returned. Raises `TypeError` where that is no list."""
        if not isinstance(events, list):
            kind = type(self._calls)
            raise TypeError(
                f"format {kind.__name__}: {method}() must return a list of events, got "
                f"{events!r:.100}{place_of(kind, method)}"
            )
        return events
