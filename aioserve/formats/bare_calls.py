"""A reply that is the JSON of calls and nothing else, where a format would have marks around them.

Small models leave the marks out, Qwen2.5-Coder always. Only the whole of a reply shows that it is
such: `{"name": ..., "arguments": {...}}` of known tools, one or several, alone or in a fence of
Markdown. Knows no format.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from aioserve.errors import UNREADABLE
from aioserve.formats.call_object import ARGUMENT_KEYS, CallObject
from aioserve.formats.events import Event
from aioserve.formats.grammar import Beginning, Function
from aioserve.formats.text import skip_space

_FENCES, _FENCE_END = ("```json", "```"), "```"
_SPACE = r"[ \t\r\n]{0,20}"
_HEAD = r'\{_"name"_:_"NAME"_,_"(KEYS)"_:'.replace("_", _SPACE).replace(
    "KEYS", "|".join(ARGUMENT_KEYS)
)
_BEGINNING = r"/[ \t\r\n]*(```(json)?[ \t\r\n]*)?HEAD/".replace("HEAD", _HEAD)
# What a strict schema binds by `bare_beginnings` and what is read as a call have to be the same.
_READ = re.compile(_HEAD.replace("NAME", r"[\w.:/\-]{1,128}"), re.ASCII)


def bare_beginnings(functions: Sequence[Function]) -> list[Beginning]:
    """How such calls of strict functions begin, in a grammar; `arguments_N` are the rules of their
    arguments.
    """
    return [
        Beginning(
            _BEGINNING.replace("NAME", re.escape(function.name).replace("/", r"\/")),
            rf"/{_SPACE}/ arguments_{i} /{_SPACE}\}}/",
            has_text=False,
        )
        for i, function in enumerate(functions)
        if function.is_strict
    ]


class BareCalls:
    """Reads a reply for as long as it can be calls and nothing else."""

    def __init__(self, names: Collection[str]) -> None:
        self.is_broken = False  # it is something else
        self._names = names
        self._pieces: list[str] = []  # of all that was read
        self._rest = ""  # the beginning of a fence
        self._raw: list[str] = []  # of the object that is being read
        self._object: CallObject | None = None
        self._events: list[Event] = []
        self._is_fenced = self._has_call = self._is_over = False

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._pieces)

    def feed(self, text: str) -> None:
        """Read more of the reply; `is_broken` if it can be no call any more."""
        self._pieces.append(text)
        text, at = self._rest + text, 0
        while not self.is_broken:
            if self._object is not None:
                at, is_over = self._read_object(self._object, text, at)
                if not is_over:
                    break
                continue
            at = skip_space(text, at)
            if at == len(text):
                break
            taken = self._read_around(text[at : at + len(_FENCES[0])])
            if taken is None:
                break  # more of it is needed
            at += taken
        self._rest = text[at:]

    def finish(self) -> list[Event] | None:
        """The calls, now that nothing more comes; None if it is none."""
        is_call = self._has_call and self._object is None and not self.is_broken
        return self._events if is_call else None

    def _read_object(self, call: CallObject, text: str, start: int) -> tuple[int, bool]:
        """Where the text goes on, and whether the object is over."""
        at = call.feed(text, start, self._events)
        self._raw.append(text[start:at])
        is_over = call.is_done or call.is_broken
        if is_over:
            self._object, self._has_call = None, True
            self.is_broken = call.is_broken or not _is_call("".join(self._raw))
        return at, is_over

    def _read_around(self, text: str) -> int | None:
        """How many characters are read of what stands before or behind objects, or begins one."""
        if text[0] == "{" and not self._is_over:
            self._object, self._raw = CallObject(self._names), []
            return 0
        fences = (_FENCE_END,) if self._has_call else _FENCES
        is_due = not self._is_over and self._is_fenced == self._has_call
        if is_due and any(fence.startswith(text) and fence != text for fence in fences):
            return None
        fence = next((fence for fence in fences if text.startswith(fence)), None)
        if not is_due or fence is None:
            self.is_broken = True
            return 0
        self._is_fenced, self._is_over = True, self._has_call
        return len(fence)


def _is_call(raw: str) -> bool:
    """Whether an object is a call whose name comes first and whose arguments are an object."""
    if _READ.match(raw) is None:
        return False
    try:
        call = msgspec.json.decode(raw, type=dict[str, Any])
    except UNREADABLE:
        return False
    return any(isinstance(call.get(key), dict) for key in ARGUMENT_KEYS)
