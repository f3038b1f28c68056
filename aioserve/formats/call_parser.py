"""What parsers of tool calls have in common: text in, content and calls out, however it is cut.

Knows how to hold back what may be the beginning of a marker, and to give back as content what turns
out to be no call. Knows no format.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from aioserve.formats.bare_calls import BareCalls
from aioserve.formats.call_object import CallObject
from aioserve.formats.events import Arguments, Call, Content, Event
from aioserve.formats.grammar import Function
from aioserve.formats.json_value import JsonValue
from aioserve.formats.reply_format import ReplyFormat
from aioserve.formats.text import SPACE, overlap, skip_space


class CallParser(ReplyFormat):
    """A format of calls alone: reasoning is read before it, by its marks.

    Each character is looked at once; what is held back is told by `flush`.

    With `reads_bare`, a reply that is nothing but the JSON of calls of known tools is these calls,
    though their marks are missing; it is held back for as long as it can still be such.

    A state is a method that reads on from `text[at]` and says whether the next one can go on; if
    not, more text is needed.
    """

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
        """What was held back, now that nothing more comes."""
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
        """The state before anything was read."""

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
        """As `skip`, for what ends a call: a beginning of it is enough at the end of a reply."""
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
        """What was held is content."""
        held, self.held = self.held, None
        if held:
            self.num_malformed += bool(self.marker)  # without one, nothing said that it is a call
            self.say("".join(held))
