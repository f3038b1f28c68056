"""Holds calls back until they can be one: a call whose arguments are no JSON object becomes text.

An agent runs a tool as soon as it is told to, and one that cannot read what it is told goes no
further. Knows events.
"""

import re
from collections.abc import Sequence

import msgspec

from aioserve.errors import UNREADABLE
from aioserve.formats import Arguments, Call, Content, Event

# How arguments begin that an object of JSON may be; a longer key is none that is looked at.
_BEGUN = re.compile(r'\s*+\{\s*+(?:\}|"(?:[^"\\]|\\.)*+"\s*+:)')
_MAX_KEY = 256


class HeldCalls:
    """The calls of one reply that is being read: each is held until its arguments have begun as a
    JSON object does, or until they have ended.
    """

    def __init__(self, *, until_whole: bool) -> None:
        """`until_whole`: until they have ended, and a call that is cut becomes text as well. Else
        arguments are told as they come, and what breaks behind their first key has been told.
        """
        self._until_whole = until_whole
        self._call: Call | None = None  # that is held back
        self._pieces: list[str] = []  # of its arguments
        self._head = ""  # the first characters of these

    def read(self, events: Sequence[Event], *, has_ended: bool, is_cut: bool) -> list[Event]:
        """The events that can be told now; all that are left, if the reply has ended."""
        told: list[Event] = []
        for i, event in enumerate(events):
            if isinstance(event, Arguments):
                if self._call is None:
                    told.append(event)
                    continue
                self._pieces.append(event.text)
                if len(self._head) < _MAX_KEY:
                    self._head += event.text
                is_last = i == len(events) - 1
                if is_last and not has_ended and not self._until_whole and self._is_begun:
                    told += self._let_go()
                continue
            told += self._release()
            if isinstance(event, Call):
                self._call = event
            else:
                told.append(event)
        return told + self._release(is_cut=is_cut) if has_ended else told

    @property
    def _is_begun(self) -> bool:
        return _BEGUN.match(self._head, 0, _MAX_KEY) is not None

    def _let_go(self) -> list[Event]:
        assert self._call is not None, "a call is held"
        call, text = self._call, self._take()
        return [call, Arguments(text)] if text else [call]

    def _take(self) -> str:
        """The arguments of the call, which is held no more."""
        text, self._call, self._pieces, self._head = "".join(self._pieces), None, [], ""
        return text

    def _release(self, *, is_cut: bool = False) -> list[Event]:
        """What is held of a call that has ended."""
        if self._call is None:
            return []
        text = "".join(self._pieces)
        is_empty = not text.strip()
        if is_cut and not self._until_whole:
            is_broken = False  # the reply says that it is cut
        else:
            is_broken = is_cut if is_empty else not _is_object(text)
        if not is_broken:
            if is_empty and not is_cut:
                self._pieces = ["{}"]  # which an agent can read
            return self._let_go()
        name = msgspec.json.encode(self._call.name).decode()
        self._take()
        return [Content(f'{{"name": {name}, "arguments": {text}')]


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except UNREADABLE:
        return False
    return True
