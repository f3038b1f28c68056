"""What a model thinks aloud between marks at the beginning of a reply, told apart from the rest.

Knows the marks, and that the prompt may have opened them. Knows nothing about tool calls.
"""

from typing import NamedTuple

from aioserve.formats.events import Content, Event, Reasoning
from aioserve.formats.text import SPACE, overlap


class Marks(NamedTuple):
    """How reasoning begins and ends."""

    start: str
    end: str
    is_implied: bool = False  # a reply begins with it, even if neither prompt nor reply say so
    is_repeated: bool = False  # it may begin again, and anywhere


#: By the names of the setting.
MARKS = {
    "deepseek_r1": Marks("<think>", "</think>", is_implied=True),
    "qwen3": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


def choose_reasoning(template: str) -> str | None:
    """The name of what a model with this chat template writes; None: no reasoning."""
    for name, marks in MARKS.items():
        if not marks.is_implied and marks.start in template:
            return name
    # Of the past it only cuts off what stands before the end: such a model writes it first.
    implied = (name for name, marks in MARKS.items() if marks.is_implied and marks.end in template)
    return next(implied, None)


class ReasoningParser:
    """Reads one reply. Space around the marks is neither reasoning nor content."""

    def __init__(self, marks: Marks, prompt_end: str) -> None:
        """`prompt_end`: the last characters of the prompt, in which reasoning may be open."""
        self._marks = marks
        prompt_end = prompt_end.rstrip(SPACE)
        is_open = prompt_end.endswith(marks.start)
        is_closed = prompt_end.endswith(marks.end)
        self._is_thinking = is_open or (marks.is_implied and not is_closed)
        self._is_begun = False  # what comes is after the first mark, or there was none
        self._is_after_mark = True  # nothing but space since
        self._before: list[str] = []  # space that the reply begins with
        self._rest = ""  # it may be the beginning of a mark
        self._space: list[str] = []  # told if more reasoning follows

    @property
    def is_open(self) -> bool:
        """Whether what comes is reasoning."""
        return self._is_thinking

    def append(self, text: str) -> list[Event]:
        """Read more of a reply; the events that this text completes."""
        events: list[Event] = []
        text = self._rest + text
        self._rest = ""
        if not self._is_begun:
            text = self._begin(text)
        if self._is_thinking and self._is_begun:
            text = self._think(text, events)
        if self._is_begun and not self._is_thinking:
            if self._is_after_mark:
                text = text.lstrip(SPACE)
            if text:
                self._is_after_mark = False
                events.append(Content(text))
        return events

    def flush(self) -> list[Event]:
        """What was held back, now that nothing more comes."""
        rest, self._rest = "".join((*self._before, self._rest)), ""
        if not rest.strip(SPACE) and (self._is_begun or self._is_thinking):
            return []
        if self._is_thinking:
            return [Reasoning("".join(self._space) + rest)]
        return [Content(rest)] if rest else []

    def _begin(self, text: str) -> str:
        """Past the mark that a reply may begin with; nothing is told before that is known."""
        start = self._marks.start
        stripped = text.lstrip(SPACE)
        if start.startswith(stripped) and stripped != start:
            self._before.append(text[: len(text) - len(stripped)])
            self._rest = stripped
            return ""
        self._is_begun = True
        before, self._before = "".join(self._before), []
        if stripped.startswith(start):
            self._is_thinking = True
            return stripped[len(start) :]
        # A reply that does not think begins as it likes.
        self._is_after_mark = self._is_thinking
        return before + text

    def _think(self, text: str, events: list[Event]) -> str:
        """Tell reasoning; return what stands after its end."""
        end = self._marks.end
        found = text.find(end)
        if found >= 0:
            thought, after = text[:found], text[found + len(end) :]
        else:
            num_held = overlap(text, (end,))
            thought, after = text[: len(text) - num_held], ""
            self._rest = text[len(text) - num_held :]
        if self._is_after_mark:
            thought = thought.lstrip(SPACE)
        said = thought.rstrip(SPACE)
        if said:
            events.append(Reasoning("".join(self._space) + said))
            self._space, self._is_after_mark = [], False
        if len(said) < len(thought):
            self._space.append(thought[len(said) :])
        if found >= 0:
            self._is_thinking, self._is_after_mark = False, True
        return after
