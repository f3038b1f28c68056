"""Lets calls through when they are whole: one whose arguments are no JSON object becomes text.

An agent runs a tool as soon as it is told to, and would run it with nothing. Knows events.
"""

from collections.abc import Sequence

import msgspec

from aioserve.errors import UNREADABLE
from aioserve.formats import Arguments, Call, Content, Event
from aioserve.outputs import FinishReason


class WholeCalls:
    """Holds back the call of one reply that is being read, until its arguments have ended."""

    def __init__(self) -> None:
        self.count = 0  # of calls that were let through
        self._call: Call | None = None  # that is held back
        self._arguments: list[str] = []  # of that, in pieces

    def read(self, events: Sequence[Event], end: FinishReason | None) -> list[Event]:
        """The events that can be told now; all that are left, if the reply has ended."""
        told: list[Event] = []
        for event in events:
            if isinstance(event, Arguments):
                self._arguments.append(event.text)
                continue
            told += self._release()
            if isinstance(event, Call):
                self._call = event
            else:
                told.append(event)
        if end is None:
            return told
        return told + self._release(is_cut=end is not FinishReason.STOP)

    def _release(self, *, is_cut: bool = False) -> list[Event]:
        call, self._call = self._call, None
        text, self._arguments = "".join(self._arguments), []
        if call is None:
            return []
        is_empty = not text.strip()
        is_broken = is_cut if is_empty else not _is_object(text)
        if is_broken:
            name = msgspec.json.encode(call.name).decode()
            return [Content(f'{{"name": {name}, "arguments": {text}')]
        self.count += 1
        return [call] if is_empty else [call, Arguments(text)]


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except UNREADABLE:
        return False
    return True
