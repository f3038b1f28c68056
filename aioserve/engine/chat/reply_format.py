"""What a format of replies is, the events it tells, and which format reads a model's replies.

The one interface between a family of models and the server. Texts go in as they come, in any
pieces; joined, the events say what a reply turned out to be.
"""

import json
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, NamedTuple

import msgspec

from aioserve.errors import ConfigError, did_you_mean, place_of
from aioserve.support.parts import brought
from aioserve.support.plugins import Kind, installed, installed_entry_points

logger = logging.getLogger(__name__)

# What formats are made of in the grammar of a bound reply, whose rules `reply_grammar` has.


class Function(msgspec.Struct, frozen=True):
    """A function that may be called: a name, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = True  # its schema holds for unforced calls, too


class Beginning(NamedTuple):
    """The beginning of a call in the text of a reply, and what comes then; both in a grammar."""

    sign: str  # what the model writes, or a pattern
    rest: str  # in terms of the rules of `ReplyFormat.grammar`
    has_text: bool = True  # there may be other text before it


#: How a text is written in a grammar: in quotes, or as the special token that it is.
Literal = Callable[[str], str]


def literal_with(special: Mapping[str, int]) -> Literal:
    """Writes texts for a model with these special tokens: each by its id, wherever it stands in the
    text, since its text is not its own; all else in quotes.
    """
    signs = sorted(special, key=len, reverse=True)
    pattern = re.compile("(" + ("|".join(map(re.escape, signs)) or "(?!)") + ")")

    def literal(text: str) -> str:
        written = [
            f"<[{special[piece]}]>" if i % 2 else msgspec.json.encode(piece).decode()
            for i, piece in enumerate(pattern.split(text))
            if piece
        ]
        return f"({' '.join(written)})" if len(written) > 1 else "".join(written) or '""'

    return literal


# What a format reads, and the events that it tells.

SPACE = " \t\r\n"


def overlap(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Return how many characters at the end of `text[start:]` begin a marker, but are not all of
    it.
    """
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest


class Content(msgspec.Struct, frozen=True):
    """A piece of the text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of the reasoning that the model writes."""

    text: str


class Call(msgspec.Struct, frozen=True):
    """The beginning of a tool call; its arguments follow."""

    name: str
    id: str | None = None  # where the model wrote one; else the server makes one


class Arguments(msgspec.Struct, frozen=True):
    """More of the arguments of the last call, as JSON text."""

    text: str


Event = Content | Reasoning | Call | Arguments


def joined(events: list[Event]) -> list[Event]:
    """Return the same with neighbours of one kind as one, whatever pieces they came in."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            result[-1] = Arguments(last.text + event.text)
        else:
            result.append(event)
    return result


# What a model thinks aloud between marks at the beginning of a reply, told apart from the rest.
# Knows the marks, and that the prompt may have opened them. Knows nothing about tool calls.


class Marks(NamedTuple):
    """The marks with which reasoning begins and ends."""

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
    """Return the name of what a model with this chat template writes; None: no reasoning."""
    for name, marks in MARKS.items():
        if not marks.is_implied and marks.start in template:
            return name
    # Of the past it only cuts off what stands before the end: such a model writes it first.
    implied = (name for name, marks in MARKS.items() if marks.is_implied and marks.end in template)
    return next(implied, None)


class ReasoningParser:
    """A parser of the reasoning of one reply. Space around the marks is neither reasoning nor
    content.
    """

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
        """Whether the text that comes next is reasoning."""
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
        """Return what was held back, now that nothing more comes."""
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


# What a format of replies is: the one interface between a family of models and the server. Knows
# what is asked of a format. Knows no format, and not where formats come from.


class SaidCall(NamedTuple):
    """A call that a reply makes, with its arguments as objects."""

    name: str
    arguments: Mapping[str, Any]


class Reply(NamedTuple):
    """A whole reply: reasoning, then content, then calls."""

    content: str = ""
    calls: Sequence[SaidCall] = ()
    reasoning: str = ""  # only for a format that reads it itself


def dumps(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def object_of(call: SaidCall, key: str = "arguments") -> str:
    """Return a call as a JSON object with a name and arguments, which stand under `key`."""
    return dumps({"name": call.name, key: call.arguments})


class ReplyFormat(ABC):
    """The format in which a family of models writes replies. An instance reads one reply: text goes
    into `append` in any pieces, and `flush` ends it; both return events.

    The joined events are the same however the text was cut. No text raises: what is no call is
    content. Each character is looked at a bounded number of times.
    """

    #: Special tokens that must stay in the text of a reply; all that begins or ends anything.
    markers: ClassVar[tuple[str, ...]] = ()
    #: How this family marks its reasoning. None: the chat template shows it, if there is any.
    marks: ClassVar[Marks | None] = None
    #: Whether the format tells reasoning by itself, and so reads replies without tools, too.
    reads_reasoning: ClassVar[bool] = False
    #: If it does: the marks of reasoning, by which reasoning tokens are counted and bound; and what
    #: has to follow where the end mark is forced.
    thinking: ClassVar[Marks | None] = None
    after_thinking: ClassVar[str] = ""
    #: Whether content may stand before the calls of a reply, and behind them.
    has_text_before: ClassVar[bool] = True
    has_text_after: ClassVar[bool] = True

    def __init__(self, functions: Sequence[Function], prompt_end: str = "") -> None:
        """`functions`: those that may be called, with the schemas of their arguments. `prompt_end`:
        the last characters of the prompt, which may have begun the reply.
        """
        self.functions: Mapping[str, Function] = {each.name: each for each in functions}
        self.prompt_end = prompt_end
        #: Pieces of text so far that began as a call, were none, and so are content.
        self.num_malformed = 0

    @abstractmethod
    def append(self, text: str) -> list[Event]:
        """Read more of a reply; the events that this text completes."""

    @abstractmethod
    def flush(self) -> list[Event]:
        """Return what was held back, now that nothing more comes. Called once."""

    @staticmethod
    def make_id() -> str:
        """Return an id for a call in whose text the model wrote none."""
        return f"call_{secrets.token_hex(12)}"

    @classmethod
    @abstractmethod
    def evidence(cls, template: str) -> str | None:
        """Return the part of a chat template that shows that its model writes replies in this
        format; None if the template does not show it.
        """

    @classmethod
    @abstractmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        """Lark rules of which `calls` is one call of one of `functions`, or several. It binds a
        reply that must call, behind its reasoning. Raises `ValueError` for functions whose schemas
        make more rules than can be compiled.
        """

    @classmethod
    @abstractmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        """Return what calls of `functions` begin with, where that is no text, whatever follows:
        from there on the grammar binds calls that the model makes by itself. Empty if nothing shows
        it.
        """

    @classmethod
    @abstractmethod
    def write(cls, reply: Reply) -> str:
        """Return the text in which a model of this family says `reply`, without the token that ends
        its turn; the contract reads it back.

        Raises `ValueError` for what cannot be said in this format.
        """

    # For formats that read reasoning themselves.

    @classmethod
    def reasoning_rules(cls, literal: Literal) -> str:
        """Lark rules of which `reasoning` is all that may stand before a reply that is bound, or
        nothing. Empty if there is nothing.
        """
        return ""

    @classmethod
    def answer_rules(cls, literal: Literal) -> str:
        """Lark rules of which `answer` is a reply whose content is the rule `content`."""
        return "answer: content"


# One reply from text to events: reasoning first, then what a format reads in the rest. Knows that
# both may be absent. Knows nothing about which are chosen.


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
        """Return what was held back, now that nothing more comes."""
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
        """Return what the format returned. Raises `TypeError` where that is no list."""
        if not isinstance(events, list):
            kind = type(self._calls)
            raise TypeError(
                f"format {kind.__name__}: {method}() must return a list of events, got "
                f"{events!r:.100}{place_of(kind, method)}"
            )
        return events


# Which formats there are, and which one reads the replies of a model. Formats that ship are brought
# by parts. A format is imported when it is asked for by name, or when a chat template has its sign.


GROUP = "aioserve.formats"  # of entry points, by which other packages register formats

#: By name, where the class is that ships: in the order in which a chat template is asked for each.
SHIPPED = {name: where for (name, *_), where in brought("reply formats").items()}
#: By name, texts of which a chat template has one where its model writes the format: others are not
#: imported to be asked.
_SIGNS = {name: signs for name, *signs in brought("reply formats")}


def available_formats() -> dict[str, EntryPoint]:
    """Formats by name, sorted by it; `ConfigError` if two packages claim one name."""
    return installed(GROUP, "format", [EntryPoint(*each, GROUP) for each in SHIPPED.items()])


_FORMAT = Kind(
    word="format",
    words="formats",
    interface=ReplyFormat,  # type: ignore[type-abstract]
    base="CallParser or ReplyFormat",
    available=available_formats,
)


def load_format(spec: str) -> type[ReplyFormat]:
    """Return the format that `spec` names: a name, `package.module`, `file.py`, either with
    `:Class`.

    Raises `ConfigError` that lists what there is, or says by file and line why it cannot be
    imported.
    """
    return _FORMAT.load(spec)


def asked_formats(template: str) -> Iterator[tuple[str, type[ReplyFormat]]]:
    """Yield names and formats in the order in which a chat template is asked for each: those of
    other packages first, since they were installed for a reason. Of those that ship, the ones of
    which the template has a sign.
    """
    for entry_point in sorted(installed_entry_points(GROUP), key=lambda e: e.name):
        name = entry_point.name
        try:
            yield name, load_format(entry_point.value)
        except ConfigError as error:
            logger.warning("the format %s of another package is passed over: %s", name, error)
    for name, value in SHIPPED.items():
        if any(sign in template for sign in _SIGNS[name]):
            yield name, load_format(value)


AUTO, NONE = "auto", "none"


class Choice(NamedTuple):
    """The choice of what reads replies, and the reason for it."""

    name: str | None  # of the format; None: there is none
    format: type[ReplyFormat] | None
    takes_tools: bool  # whether requests may have tools
    marks: Marks | None  # of reasoning that is read before the format reads
    why: str  # a sentence for the log, without its period


def choose(tool_call_parser: str, reasoning_parser: str, template: str) -> Choice:
    """Return the format for a model with this chat template. Both names may be `auto`, as the
    template shows it, or `none`. Raises `ConfigError` for a name that is none, or two that
    contradict.
    """
    name, chosen, by = _choose_format(tool_call_parser, template)
    takes_tools = tool_call_parser != NONE and chosen is not None
    if tool_call_parser == NONE:
        whole = _whole_format(reasoning_parser, template)
        if whole is not None:
            name, chosen, by = whole
    if chosen is not None and chosen.reads_reasoning:
        _check_whole(name, reasoning_parser)
        calls = "" if takes_tools else "; tools are refused (server.tool_call_parser is none)"
        return Choice(name, chosen, takes_tools, None, f"{name} reads whole replies{by}{calls}")
    marks_name, marks, marks_by = _choose_marks(reasoning_parser, chosen, name, template)
    read = f"{name} reads tool calls{by}" if chosen else f"no tool calls are read{by}"
    thought = f"{marks_name} reads reasoning" if marks else "no reasoning is read"
    return Choice(name, chosen, takes_tools, marks, f"{read}, {thought}{marks_by}")


def check_names(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise `ConfigError` if a format that is named cannot be loaded; no template is needed."""
    if tool_call_parser not in (AUTO, NONE):
        load_format(tool_call_parser)
    if reasoning_parser not in (AUTO, NONE, *MARKS):
        _load_reasoning(reasoning_parser)


def _choose_format(name: str, template: str) -> tuple[str | None, type[ReplyFormat] | None, str]:
    """Name, format, and by what, in words."""
    if name == NONE:
        return None, None, " (server.tool_call_parser is none)"
    if name != AUTO:
        return name, load_format(name), " (server.tool_call_parser)"
    for known, each in asked_formats(template):
        evidence = each.evidence(template)
        if evidence is not None:
            return known, each, f" ({_shown(evidence)} in the chat template)"
    return None, None, " (the chat template shows no format that is known here)"


def _whole_format(
    reasoning_parser: str, template: str
) -> tuple[str | None, type[ReplyFormat] | None, str] | None:
    """Return the format that tells reasoning from content by itself, though tools are refused."""
    if reasoning_parser == AUTO:
        found = _choose_format(AUTO, template)
    elif reasoning_parser in (NONE, *MARKS):
        return None
    else:
        found = reasoning_parser, _load_reasoning(reasoning_parser), " (server.reasoning_parser)"
    return found if found[1] is not None and found[1].reads_reasoning else None


def _check_whole(name: str | None, reasoning_parser: str) -> None:
    if reasoning_parser in (AUTO, name):
        return
    raise ConfigError(
        f"server.reasoning_parser is {reasoning_parser}, but the format {name} reads reasoning by "
        "itself: leave server.reasoning_parser at auto, or set server.tool_call_parser to none too"
    )


def _choose_marks(
    name: str, chosen: type[ReplyFormat] | None, format_name: str | None, template: str
) -> tuple[str, Marks | None, str]:
    """Return the name of the marks, the marks, and by what, in words."""
    if name == NONE:
        return name, None, " (server.reasoning_parser is none)"
    if name in MARKS:
        return name, MARKS[name], " (server.reasoning_parser)"
    if name != AUTO:
        found = _load_reasoning(name)
        if found.reads_reasoning:
            raise ConfigError(
                f"server.reasoning_parser is {name}, a format that reads whole replies, but "
                f"server.tool_call_parser is {format_name}: set both to {name}"
            )
        return name, found.marks, " (server.reasoning_parser)"
    own = None if chosen is None else chosen.marks
    if own is not None and (own.start in template or own.end in template):
        return f"{format_name}", own, _by(own, template)
    by_template = choose_reasoning(template)
    if by_template is None:
        return name, None, " (the chat template shows no marks that are known here)"
    return by_template, MARKS[by_template], _by(MARKS[by_template], template)


def _load_reasoning(name: str) -> type[ReplyFormat]:
    """Return the format of that name, which must tell reasoning or have marks of it."""
    if "." not in name and name not in (formats := available_formats()):
        known = [AUTO, NONE, *MARKS, *formats]
        raise ConfigError(
            f"server.reasoning_parser is {name!r}, which names no marks and no format"
            f"{did_you_mean(name, known)}; available: {', '.join(known)}; or give "
            "package.module:Class or path/to/file.py"
        )
    found = load_format(name)
    if found.marks is None and not found.reads_reasoning:
        raise ConfigError(
            f"server.reasoning_parser is {name}, a format with no marks of reasoning; expected one "
            f"of {', '.join((AUTO, NONE, *MARKS))}, or a format that has marks"
        )
    return found


def _by(marks: Marks, template: str) -> str:
    sign = marks.start if marks.start in template else marks.end
    return f" ({_shown(sign)} in the chat template)"


def _shown(evidence: str) -> str:
    return repr(evidence) if len(evidence) <= 60 else f"{evidence[:60]!r}..."
