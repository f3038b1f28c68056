"""What parsers of tool calls have in common: text in, content and calls out, however it is cut.

One `{"name": ..., "arguments": ...}` is read as it comes; so is a reply that is the JSON of calls
and nothing else, where a format would have marks around them.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import msgspec

from aioserve.engine.chat.reply_format import (
    SPACE,
    Arguments,
    Beginning,
    Call,
    Content,
    Event,
    Function,
    ReplyFormat,
    overlap,
)
from aioserve.errors import UNREADABLE
from aioserve.features.formats.text import JsonValue, skip_space

ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = {"name", "type", "id", "description", *ARGUMENT_KEYS}


class CallObject:
    """`feed` it text until it `is_done` or `is_broken`; `is_named` once its call was told.

    The arguments are told as they come, if the name has come before them. Arguments that are JSON
    in a string are told when the string has ended. With `names` only calls of those are calls, and
    no object with a key that calls do not have.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.is_done = False
        self.is_broken = False
        self.is_named = False
        self._names = names
        self._expected = "{"
        self._key: str | None = None  # None: what is being read is a key
        self._value: JsonValue | None = None
        self._pieces: list[str] = []  # of what is only understood as a whole
        self._early: list[str] | None = None  # arguments that came before the name
        self._has_arguments = False
        self._is_passed_on = False  # what is being read is told as it comes

    def feed(self, text: str, start: int, events: list[Event]) -> int:
        """Read on from `text[start]`, telling `events`. Returns where the next character stands."""
        i = start
        while not (self.is_done or self.is_broken):
            if self._value is not None:
                end = self._value.feed(text, i)
                self._on_piece(text[i:end], events)
                i = end
                if not self._value.is_done:
                    break
                self._on_value(self._value.is_broken, events)
            else:
                i = skip_space(text, i)
                if i == len(text):
                    break
                i = self._on_punctuation(text, i, events)
        return i

    def _on_punctuation(self, text: str, i: int, events: list[Event]) -> int:
        char = text[i]
        match self._expected, char:
            case ("{", "{"):
                self._expected = "first key"
            case ("first key" | "key", '"'):
                self._key, self._value = None, JsonValue()
                return i
            case (":", ":"):
                self._expected = "value"
            case ("value", _):
                self._begin_value(char)
                return i
            case (",", ","):
                self._expected = "key"
            case ("first key" | ",", "}"):
                self._end(events)
            case _:
                self.is_broken = True
                return i
        return i + 1

    def _begin_value(self, char: str) -> None:
        self._value = JsonValue()
        is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
        self._is_passed_on = is_arguments and char == "{"
        if is_arguments:
            self._has_arguments = True
        elif self._key in ARGUMENT_KEYS:
            self._key = ""  # a second time: of no interest

    def _on_piece(self, piece: str, events: list[Event]) -> None:
        if not self._is_passed_on:
            self._pieces.append(piece)
        elif self.is_named:
            if piece:
                events.append(Arguments(piece))
        else:
            self._early = self._early or []
            self._early.append(piece)

    def _on_value(self, is_broken: bool, events: list[Event]) -> None:
        raw, self._pieces, self._value = "".join(self._pieces), [], None
        is_passed_on, self._is_passed_on = self._is_passed_on, False
        if is_broken:
            self.is_broken = True
        elif self._key is None:
            self._key, self._expected = _decode_text(raw), ":"
            self.is_broken = self._key is None or (
                self._names is not None and self._key not in _KEYS
            )
        else:
            self._expected = ","
            if self._key == "name" and not self.is_named:
                self._on_name(_decode_text(raw), events)
            elif self._key in ARGUMENT_KEYS and not is_passed_on:
                self._on_arguments(raw, events)

    def _on_name(self, name: str | None, events: list[Event]) -> None:
        if not name or (self._names is not None and name not in self._names):
            self.is_broken = True
            return
        self.is_named = True
        events.append(Call(name))
        if self._early:
            events.append(Arguments("".join(self._early)))

    def _on_arguments(self, raw: str, events: list[Event]) -> None:
        """Arguments that are no object: JSON in a string, or null."""
        text = "{}" if raw == "null" else _decode_text(raw) or raw
        if self.is_named:
            events.append(Arguments(text))
        else:
            self._early = [text]

    def _end(self, events: list[Event]) -> None:
        if not self.is_named:
            self.is_broken = True
            return
        self.is_done = True
        if not self._has_arguments:
            events.append(Arguments("{}"))


def _decode_text(raw: str) -> str | None:
    """Return the text of a JSON string; None if `raw` is not a JSON string."""
    try:
        return msgspec.json.decode(raw, type=str, strict=True)
    except UNREADABLE:
        return None


# A reply that is the JSON of calls and nothing else, where a format would have marks around them.
# Small models leave the marks out, Qwen2.5-Coder always. Only the whole of a reply shows that it is
# such: `{"name": ..., "arguments": {...}}` of known tools, one or several, alone or in a fence of
# Markdown. Knows no format.


_FENCES, _FENCE_END = ("```json", "```"), "```"
_SPACE = r"[ \t\r\n]{0,20}"
_HEAD = r'\{_"name"_:_"NAME"_,_"(KEYS)"_:'.replace("_", _SPACE).replace(
    "KEYS", "|".join(ARGUMENT_KEYS)
)
_BEGINNING = r"/[ \t\r\n]*(```(json)?[ \t\r\n]*)?HEAD/".replace("HEAD", _HEAD)
# What a strict schema binds by `bare_beginnings` and what is read as a call have to be the same.
_READ = re.compile(_HEAD.replace("NAME", r"[\w.:/\-]{1,128}"), re.ASCII)


def bare_beginnings(functions: Sequence[Function]) -> list[Beginning]:
    """Return how such calls of strict functions begin, in a grammar; `arguments_N` are the rules of
    their arguments.
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
    """A reader of a reply for as long as it can be calls and nothing else."""

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
        """The reply so far: all that `feed` has been given."""
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
        """Return the calls, now that nothing more comes; None if it is none."""
        is_call = self._has_call and self._object is None and not self.is_broken
        return self._events if is_call else None

    def _read_object(self, call: CallObject, text: str, start: int) -> tuple[int, bool]:
        """Return where the text goes on, and whether the object is over."""
        at = call.feed(text, start, self._events)
        self._raw.append(text[start:at])
        is_over = call.is_done or call.is_broken
        if is_over:
            self._object, self._has_call = None, True
            self.is_broken = call.is_broken or not _is_call("".join(self._raw))
        return at, is_over

    def _read_around(self, text: str) -> int | None:
        """Return how many characters are read of what stands before or behind objects, or begins
        one.
        """
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
    """Return whether an object is a call whose name comes first and whose arguments are an
    object.
    """
    if _READ.match(raw) is None:
        return False
    try:
        call = msgspec.json.decode(raw, type=dict[str, Any])
    except UNREADABLE:
        return False
    return any(isinstance(call.get(key), dict) for key in ARGUMENT_KEYS)


# What parsers of tool calls have in common: text in, content and calls out, however it is cut.
# Knows how to hold back what may be the beginning of a marker, and to give back as content what
# turns out to be no call. Knows no format.


class _UnstatedSigns:
    def __init__(self, default: Callable[[Any], tuple[str, ...]] | None) -> None:
        self._default = default
        self.__isabstractmethod__ = default is None

    def __get__(self, instance: object, kind: Any) -> Any:
        if self._default is not None:
            return self._default(kind)
        by_signs: Any = CallParser.evidence
        return self if kind.evidence.__func__ is by_signs.__func__ else ()


def unstated_signs(default: Callable[[Any], tuple[str, ...]] | None = None) -> Any:
    """Return what stands for the `signs` of classes that state none: the default of each class.
    Without a default, a class is abstract that has no method `evidence` either.
    """
    return _UnstatedSigns(default)


class CallParser(ReplyFormat):
    """A format of calls alone: reasoning is read before it, by its marks.

    Each character is looked at once; what is held back is told by `flush`.

    With `reads_bare`, a reply that is nothing but the JSON of calls of known tools is these calls,
    though their marks are missing; it is held back for as long as it can still be such.

    A state is a method that reads on from `text[at]` and says whether the next one can go on; if
    not, more text is needed.
    """

    #: Texts of which a chat template of the family has one, unless `evidence` says otherwise.
    signs: ClassVar[tuple[str, ...]] = unstated_signs()
    #: Whether calls without marks are read where they are all of a reply.
    reads_bare: ClassVar[bool] = False

    def __init__(self, functions: Sequence[Function], prompt_end: str = "") -> None:
        super().__init__(functions, prompt_end)
        is_bare = self.reads_bare and bool(self.functions)
        self._bare = BareCalls(self.functions) if is_bare else None  # until it is something else
        self.text = ""
        self.at = 0
        self.is_last = False
        self.events: list[Event] = []
        self.state: Callable[[], bool] = self.begin
        self.marker = ""  # the last that was read
        self.held: list[str] | None = None  # content if it turns out to be no call
        self._space: list[str] = []  # of content: told if more content follows
        self._is_after_call = False  # where content begins without space
        self.object = CallObject()
        self.value = JsonValue()

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return next((sign for sign in cls.signs if sign in template), None)

    def append(self, text: str) -> list[Event]:
        """Read more of a reply; the events that this text completes."""
        if self._bare is not None:
            self._bare.feed(text)
            if not self._bare.is_broken:
                return []
            text, self._bare = self._bare.text, None
        self.text = self.text[self.at :] + text
        self.at = 0
        while self.state():
            pass
        events, self.events = self.events, []
        return events

    def flush(self) -> list[Event]:
        """Return what was held back, now that nothing more comes."""
        rest = ""
        if self._bare is not None:
            if (calls := self._bare.finish()) is not None:
                return calls
            rest, self._bare = self._bare.text, None
        self.is_last = True
        events = self.append(rest)
        self.say(self.text[self.at :])
        self.give_back()
        events += self.events
        if self._space and not self._is_after_call:
            events.append(Content("".join(self._space)))
        return events

    # States

    @abstractmethod
    def begin(self) -> bool:
        """Read the start of a reply, before anything was read; return whether to go on at once."""

    def read_content(self, markers: re.Pattern[str], on_marker: Callable[[], bool]) -> bool:
        """Content up to a marker, after which `on_marker` goes on."""
        found = markers.search(self.text, self.at)
        if found is None:
            held = 0 if self.is_last else overlap(self.text, self.markers, self.at)
            self.say(self.take(len(self.text) - held))
            return False
        self.say(self.take(found.start()))
        self.hold()
        self.marker = self.take(found.end())
        self.state = on_marker
        return True

    def read_object(self, then: Callable[[], bool], otherwise: Callable[[], bool]) -> bool:
        """Read the call of `object`, behind which `then` goes on; `otherwise` if it is none."""
        events: list[Event] = []
        self.take(self.object.feed(self.text, self.at, events))
        self.tell(events)
        if not (self.object.is_done or self.object.is_broken):
            return False
        if not self.object.is_named:
            self.give_back()
        self.state = then if self.object.is_named else otherwise
        return True

    def read_arguments(self, then: Callable[[], bool]) -> bool:
        """Read the arguments of `value`, after which `then` goes on."""
        piece = self.take(self.value.feed(self.text, self.at))
        if piece:
            self.events.append(Arguments(piece))
        if not self.value.is_done:
            return False
        self.state = then
        return True

    # What states are made of

    def take(self, end: int) -> str:
        """Read the text up to the position `end`, and return it."""
        taken, self.at = self.text[self.at : end], end
        if self.held is not None:
            self.held.append(taken)
        return taken

    def skip_space(self) -> bool:
        """Read space; False if the text ends with it."""
        self.take(skip_space(self.text, self.at))
        return self.at < len(self.text)

    def skip(self, text: str) -> bool | None:
        """Read `text` if it is there; None if what is there may become it."""
        if self.text.startswith(text, self.at):
            self.take(self.at + len(text))
            return True
        rest = self.text[self.at : self.at + len(text)]
        return None if text.startswith(rest) and not self.is_last else False

    def skip_end(self, text: str) -> bool | None:
        """Skip what ends a call, as `skip`; at the end of a reply its beginning is enough."""
        found = self.skip(text)
        if found is False and self.is_last and text.startswith(self.text[self.at :]):
            self.take(len(self.text))
            return True
        return found

    def tell(self, events: list[Event]) -> None:
        """Add events of which the first may be a call: what is held belongs to that."""
        for event in events:
            if isinstance(event, Call):
                self.held, self._space, self._is_after_call = None, [], True
            self.events.append(event)

    def say(self, text: str) -> None:
        """Content; the space at its end waits for more."""
        said = text.rstrip(SPACE)
        if said:
            begun = "".join(self._space) + said
            if self._is_after_call:
                begun, self._is_after_call = begun.lstrip(SPACE), False
            self.events.append(Content(begun))
            self._space = []
        if len(said) < len(text):
            self._space.append(text[len(said) :])

    def hold(self) -> None:
        """From here on, remember what is read until it is known to be a call."""
        self.held = []

    def give_back(self) -> None:
        """Emit the held text as content: it is no tool call."""
        held, self.held = self.held, None
        if held:
            self.num_malformed += bool(self.marker)  # without one, nothing said that it is a call
            self.say("".join(held))
