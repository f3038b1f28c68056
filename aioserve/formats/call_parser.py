"""What parsers of tool calls have in common: text in, content and calls out, however it is cut.

Knows how to hold back what may be the beginning of a marker, and to give back as content what turns
out to be no call. Knows no format.
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from aioserve.formats.call_object import CallObject
from aioserve.formats.events import Arguments, Call, Content, Event
from aioserve.formats.json_value import JsonValue
from aioserve.formats.text import SPACE, overlap, skip_space


class Function(msgspec.Struct, frozen=True):
    """What may be called: a name, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = True  # its schema holds for unforced calls, too


class Beginning(NamedTuple):
    """How the text of a reply shows that a call begins, and what comes then; both in a grammar."""

    sign: str  # what the model writes, or a pattern
    rest: str  # in terms of the rules of `CallParser.grammar`
    has_text: bool = True  # there may be other text before it


#: How a text is written in a grammar: in quotes, or as the special token that it is.
Literal = Callable[[str], str]


class CallParser(ABC):
    """Reads one reply. Each character is looked at once; what is held back is told by `flush`.

    A state is a method that reads on from `_at` and says whether the next one can go on; if not,
    more text is needed.
    """

    #: What must stay in the text, though the vocabulary may call it special.
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tools that may be called."""
        self.names = names
        self._text = ""
        self._at = 0
        self._is_last = False
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._begin
        self._marker = ""  # the last that was read
        self._held: list[str] | None = None  # content if it turns out to be no call
        self._space: list[str] = []  # of content: told if more content follows
        self._is_after_call = False  # where content begins without space
        self._object = CallObject()
        self._value = JsonValue()

    @staticmethod
    def make_id() -> str:
        """An id for a call that was read."""
        return f"call_{secrets.token_hex(12)}"

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Whether a model with this chat template writes calls like that."""

    @classmethod
    @abstractmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        """Lark rules of which `calls` is one call of one of `functions`, or several."""

    @classmethod
    @abstractmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        """What calls of `functions` begin with, where that is no text, whatever follows."""

    def append(self, text: str) -> list[Event]:
        """Read more of a reply; the events that this text completes."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """What was held back, now that nothing more comes."""
        self._is_last = True
        events = self.append("")
        self._say(self._text[self._at :])
        self._give_back()
        events += self._events
        if self._space and not self._is_after_call:
            events.append(Content("".join(self._space)))
        return events

    # States

    @abstractmethod
    def _begin(self) -> bool:
        """The state before anything was read."""

    def _read_content(self, markers: re.Pattern[str], on_marker: Callable[[], bool]) -> bool:
        """Content up to a marker, after which `on_marker` goes on."""
        found = markers.search(self._text, self._at)
        if found is None:
            held = 0 if self._is_last else overlap(self._text, self.markers, self._at)
            self._say(self._take(len(self._text) - held))
            return False
        self._say(self._take(found.start()))
        self._hold()
        self._marker = self._take(found.end())
        self._state = on_marker
        return True

    def _read_object(self, then: Callable[[], bool], otherwise: Callable[[], bool]) -> bool:
        """The call of `_object`, after which `then` goes on; `otherwise` if it is not a call."""
        events: list[Event] = []
        self._take(self._object.feed(self._text, self._at, events))
        self._tell(events)
        if not (self._object.is_done or self._object.is_broken):
            return False
        if not self._object.is_named:
            self._give_back()
        self._state = then if self._object.is_named else otherwise
        return True

    def _read_arguments(self, then: Callable[[], bool]) -> bool:
        """The value of `_value`, after which `then` goes on."""
        piece = self._take(self._value.feed(self._text, self._at))
        if piece:
            self._events.append(Arguments(piece))
        if not self._value.is_done:
            return False
        self._state = then
        return True

    # What states are made of

    def _take(self, end: int) -> str:
        """Read the text up to the position `end`, and return it."""
        taken, self._at = self._text[self._at : end], end
        if self._held is not None:
            self._held.append(taken)
        return taken

    def _skip_space(self) -> bool:
        """Read space; False if the text ends with it."""
        self._take(skip_space(self._text, self._at))
        return self._at < len(self._text)

    def _skip(self, text: str) -> bool | None:
        """Read `text` if it is there; None if what is there may become it."""
        if self._text.startswith(text, self._at):
            self._take(self._at + len(text))
            return True
        rest = self._text[self._at : self._at + len(text)]
        return None if text.startswith(rest) and not self._is_last else False

    def _skip_end(self, text: str) -> bool | None:
        """As `_skip`, for what ends a call: a beginning of it is enough at the end of a reply."""
        found = self._skip(text)
        if found is False and self._is_last and text.startswith(self._text[self._at :]):
            self._take(len(self._text))
            return True
        return found

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Call):
                self._held, self._space, self._is_after_call = None, [], True
            self._events.append(event)

    def _say(self, text: str) -> None:
        """Content; the space at its end waits for more."""
        said = text.rstrip(SPACE)
        if said:
            begun = "".join(self._space) + said
            if self._is_after_call:
                begun, self._is_after_call = begun.lstrip(SPACE), False
            self._events.append(Content(begun))
            self._space = []
        if len(said) < len(text):
            self._space.append(text[len(said) :])

    def _hold(self) -> None:
        """From here on, remember what is read until it is known to be a call."""
        self._held = []

    def _give_back(self) -> None:
        """What was held is content."""
        held, self._held = self._held, None
        if held:
            self._say("".join(held))


def any_of(markers: Sequence[str]) -> re.Pattern[str]:
    """A pattern that finds the first of them."""
    return re.compile("|".join(map(re.escape, markers)))


# Of a forced reply: without a limit, a model that is unsure goes on until its text is cut.
MAX_FORCED_CALLS = 16


def repeated(call: str, separator: str, is_parallel: bool) -> str:
    """One, or several, in a grammar."""
    return f"{call} ({separator} {call}){{0,{MAX_FORCED_CALLS - 1}}}" if is_parallel else call


def alternatives(functions: Sequence[Function], keys: tuple[str, str], literal: Literal) -> str:
    """Grammar rules of which `call` is the JSON object of a call, by the names of its two keys."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        before = f'{{"{keys[0]}": "{function.name}", "{keys[1]}": '
        rules.append(f"call_{i}: {literal(before)} arguments_{i} {literal('}')}")
        rules.append(f"arguments_{i}: {json_rule(function.parameters)}")
    return "\n".join(rules)


def json_rule(schema: Mapping[str, Any]) -> str:
    """A schema inside of a grammar; JSON is written as templates write it."""
    options = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    text = msgspec.json.encode({**schema, "x-guidance": options}).decode()
    # What looks like the sign of another notation can only stand in a text.
    return f"%json {text.replace('::=', ':' + chr(92) + 'u003a=')}"
