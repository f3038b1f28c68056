"""The rules of the contract of formats: any reply is read, and a grammar allows what is read.

Replies and texts at random; how a format reads them in pieces; what that costs, in lines run and
text made anew; and texts that its grammar allows.
"""

import random
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import BuiltinMethodType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from aioserve.features.formats import (
    SPACE,
    Arguments,
    Call,
    Content,
    Event,
    Function,
    Literal,
    Reasoning,
    ReasoningParser,
    Reply,
    ReplyFormat,
    ReplyParser,
    SaidCall,
    dumps,
    free_reply,
    joined,
    json_rule,
    literal_with,
)
from aioserve.testing.cost import Lines, count_lines, most_often
from aioserve.testing.violation import (
    CALL_SECONDS,
    FormatViolation,
    OutOfTime,
    begin_call,
    end_call,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher


# Replies at random that a format may write, and texts that no model should write.


NAMES = ("add", "get_weather", "get-time", "a", "search_the_files_2", "ns.tool", "Sell_It")
KEYS = ("a", "city", "is_it", "n_items", "x-y", "Data", "arguments", "name")
#: Texts that look like what they are not.
TRICKY = (
    *("5", "-0", "true", "null", "None", '"5"', "[1]", '{"a": 1}', "", " ", "\n", " a ", "a\n\nb"),
    *("<", ">", "</", "<b>&amp;</b>", "a < b > c", "{", "}", '"', "\\", "\\n", "'", "`", "```"),
    *("ä", "日本", "😀", "\u2028", "\x7f", "\t", "\r\n", "a=b", "key: value", "f(x)"),
)
#: Sentences of content.
SENTENCES = ("Let me see.", "I'll ask: 1 < 2?", "Es ist schön 😀", "{x}", "a\n\nb", "`f(x)`.")


class Example(NamedTuple):
    """A reply, with the tools that it was made for."""

    functions: list[Function]
    reply: Reply
    after: str = ""  # content behind the calls


def texts() -> st.SearchStrategy[str]:
    """Any text, among them those that look like other things."""
    wild = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    return st.one_of(st.sampled_from(TRICKY), wild, st.lists(st.sampled_from(TRICKY)).map("".join))


def values(kind: str) -> st.SearchStrategy[Any]:
    """Return values of a JSON type."""
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
    simple = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), numbers, texts())
    nested = st.recursive(
        simple,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(texts(), inner, max_size=3)
        ),
        max_leaves=6,
    )
    return {
        "string": texts(),
        "integer": st.integers(-(2**53), 2**53),
        "number": st.one_of(numbers, st.integers(-99, 99)),
        "boolean": st.booleans(),
        "null": st.none(),
        "array": st.lists(nested, max_size=3),
        "object": st.dictionaries(texts(), nested, max_size=3),
    }[kind]


@st.composite
def functions_with_calls(draw: st.DrawFn) -> tuple[list[Function], list[SaidCall]]:
    """Draw tools, and calls of them."""
    functions, calls = [], []
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)):
        keys = draw(st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
        kinds = ("string", "string", "integer", "number", "boolean", "null", "array", "object")
        types = {key: draw(st.sampled_from(kinds)) for key in keys}
        properties = {key: {"type": kind} for key, kind in types.items()}
        functions.append(Function(name, {"type": "object", "properties": properties}))
        for _ in range(draw(st.integers(0, 2))):
            given = [key for key in keys if draw(st.integers(0, 3))]
            arguments = {key: draw(values(types[key])) for key in given}
            calls.append(SaidCall(name, arguments))
    return functions, draw(st.permutations(calls))


@st.composite
def examples(draw: st.DrawFn, kind: type[ReplyFormat]) -> Example:
    """Replies that a format can write, as far as its class says."""
    functions, calls = draw(functions_with_calls())
    has_content = kind.has_text_before or not calls
    content = draw(sentences(kind)) if has_content else ""
    thinks = kind.reads_reasoning or kind.marks is not None
    reasoning = draw(sentences(kind)) if thinks else ""
    may_follow = calls and kind.has_text_after and not kind.reads_reasoning
    after = draw(st.sampled_from(["", "So be it.", "\nDone: 1 < 2\n\nä"])) if may_follow else ""
    return Example(functions, Reply(content, calls, reasoning), after)


def sentences(kind: type[ReplyFormat]) -> st.SearchStrategy[str]:
    """Content that has no mark of the format, and no space around it."""
    parts = [*SENTENCES, *(mark[: len(mark) // 2] + " " for mark in all_marks(kind))]
    texts = st.lists(st.sampled_from(parts), max_size=3).map(lambda some: " ".join(some))
    return texts.map(lambda text: text.strip(SPACE)).filter(
        lambda text: not any(mark in text for mark in all_marks(kind))
    )


def all_marks(kind: type[ReplyFormat]) -> list[str]:
    """Return all that a format says to begin or to end anything."""
    return [*kind.markers, *(() if kind.marks is None else kind.marks[:2])]


def written(kind: type[ReplyFormat], example: Example) -> str | None:
    """Return the text of a reply; None if the format cannot say it."""
    reply = example.reply
    try:
        text = kind.write(reply)
    except ValueError:
        return None
    if kind.marks is not None and not kind.reads_reasoning and reply.reasoning:
        text = f"{kind.marks.start}\n{reply.reasoning}\n{kind.marks.end}\n\n{text}"
    return text + example.after


def fixed_examples(kind: type[ReplyFormat]) -> Sequence[tuple[list[Function], str]]:
    """Return some replies that are the same in every run, with their tools."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "n": {"type": "integer"},
            "is_it": {"type": "boolean"},
            "list": {"type": "array"},
        },
    }
    functions = [Function("add", schema), Function("get_weather", schema)]
    rich = SaidCall("add", {"city": 'P"<ä 😀\nb', "n": -5, "is_it": True, "list": [1, {"a": None}]})
    plain = SaidCall("get_weather", {"city": "Rom"})
    calls: list[list[SaidCall]] = [[], [rich], [plain, rich], [SaidCall("add", {}), plain]]
    found = []
    for said in calls:
        for content in ("", "Let me see: 1 < 2."):
            reasoning = "Hm.\nSo." if kind.reads_reasoning or kind.marks is not None else ""
            after = "Done." if said and kind.has_text_after and not kind.reads_reasoning else ""
            text = written(kind, Example(functions, Reply(content, said, reasoning), after))
            if text is not None:
                found.append((functions, text))
    return found


# Texts that no model should write: marks of a format in any order, broken JSON, halves of all.
# Strategies of hypothesis. Knows a format by its marks and by what it writes.


FUNCTIONS = [
    Function("add", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    Function("sell", {"type": "object", "properties": {"b": {"type": "string"}}}),
]
DEBRIS = (
    *('{"name": "add", "arguments": ', '{"a": 1}', '{"a": "', '"name"', "add", "sell", "a", "b"),
    *("{", "}", "[", "]", "(", ")", "<", ">", "=", '"', "'", "\\", ",", ";", ":", "/", "|", "`"),
    *(" ", "\n", "\t", "null", "true", "1", "-", "1e999", "\\ud83d", "\\u12", "ä", "😀", "\ufffd"),
    *("\x00", "\u2028", "function", "arguments", "</", "[" * 200, '{"a":' * 200),
)
#: What is content or an argument, wherever it stands, and stands once.
WORDS = tuple(f"kept{i}kept" for i in range(9))


def spoiled_texts(kind: type[ReplyFormat]) -> Iterator[str]:
    """Texts that are the same in every run: marks at the end, in part and alone, and replies of the
    format with one mark or one character missing.
    """
    word, other = WORDS[:2]
    for mark in all_marks(kind):
        yield from (f"Hm. {word}{mark[:end]}" for end in range(1, len(mark) + 1))
        yield from (
            f"{mark}{word}",
            f"{mark}{mark}{word}{mark}",
            f"{word} {mark}\n{other} {mark}\n",
        )
        yield from (f"{mark}{debris}{word}" for debris in DEBRIS)
    for _, text in fixed_examples(kind):
        for mark in all_marks(kind):
            yield text.replace(mark, "", 1)
    for _, text in list(fixed_examples(kind))[-2:]:
        yield from (text[:place] + text[place + 1 :] for place in range(len(text)))


def hostile_texts(kind: type[ReplyFormat]) -> st.SearchStrategy[str]:
    """Texts at random; each of `WORDS` stands in them at most once."""
    marks = all_marks(kind)
    halves = [part for mark in marks for part in (mark[: len(mark) // 2], mark[len(mark) // 2 :])]
    written = [text for _, text in fixed_examples(kind)]
    pieces = {piece for text in written for piece in re.split(r"(\s+|[<>{}\[\]|])", text) if piece}
    parts = [list(DEBRIS), sorted(pieces), written, *([marks, halves] if marks else [])]
    part = st.one_of(*map(st.sampled_from, filter(None, parts)))
    return st.lists(part, max_size=14).map(_with_words)


def _with_words(parts: list[str]) -> str:
    """Return the parts in their order, with a word behind every second one."""
    words = iter(WORDS)
    return "".join(part + (next(words, "") if i % 2 else "") for i, part in enumerate(parts))


def cuts() -> st.SearchStrategy[list[int]]:
    """Positions at which a text is cut."""
    return st.lists(st.integers(0, 300), max_size=8)


# Reads a text by a format, in pieces, checks what is true of any reply, counts what it costs.


MAX_SHOWN = 400  # characters of a text in a message


class Read(NamedTuple):
    """The events that a format has read in a text."""

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
    """Return what reads one reply: the format, behind the marks of its reasoning if it has any."""
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
    """Return an error about a text that was read as a whole."""
    return _violation(kind, what, [text])


def shown(events: Sequence[Event]) -> str:
    """Return the events in words, in a line."""
    return _cut(", ".join(map(repr, events)) or "nothing")


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    """Return the text, cut at these positions."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def words(text: str) -> str:
    """Return the characters of a text that are no space."""
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
    """Return where in the format's own code; an error of the kit is none of its."""
    own = traceback.extract_tb(error.__traceback__)[-1]
    return f" at {own.filename.rpartition('/')[2]}:{own.lineno}"


# What a format costs for a text that comes a character at a time: lines run, and text made anew.
# Counts are the same on every machine. Knows lines, and the texts that an object holds. Knows
# nothing about what they are for.


SIZES = 100, 400  # characters, about
#: Of the second size, in those of the first: 4 in proportion, 16 for every pair.
MOST_TIMES = 8
FREE = 2000  # of lines or characters, for what is done once
FUNCTION = Function(
    "add", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}}
)


def check_cost(kind: type[ReplyFormat]) -> None:
    """Raise `FormatViolation` if a long text costs more than in proportion to its length."""
    few, many = (_long_texts(kind, size) for size in SIZES)
    for what, text in many.items():
        if what in few:
            _check_lines(kind, what, few[what], text)
            _check_made(kind, what, few[what], text)


def _long_texts(kind: type[ReplyFormat], size: int) -> dict[str, str]:
    """Texts of about that many characters, by what they are."""
    long = {"content": "word " * (size // 5)}
    for mark in all_marks(kind):
        long[f"content with beginnings of {mark!r}"] = mark[:-1] * (size // max(1, len(mark) - 1))
        long[f"text behind {mark!r}"] = mark + "so x " * (size // 5)
        long[f"{mark!r} again and again"] = mark * (size // len(mark))
    arguments: dict[str, dict[str, Any]] = {
        "a call with a long text": {"a": "so x " * (size // 5)},
        "a call with quotes": {"a": '"' * size},
        "a call with brackets": {"a": "<" * size},
        "a call with a long list": {"b": [*range(size // 4)]},
    }
    replies = {name: Reply(calls=[SaidCall("add", given)]) for name, given in arguments.items()}
    replies["many calls"] = Reply(calls=[SaidCall("add", {"a": "x"})] * (size // 20))
    if kind.reads_reasoning or kind.marks is not None:
        replies["reasoning"] = Reply(reasoning="Hm. " * (size // 4))
    for name, reply in replies.items():
        text = written(kind, Example([FUNCTION], reply))
        if text is not None:
            long[name] = text
            long[f"{name}, cut off"] = text[: 3 * len(text) // 4]
    return long


def _check_lines(kind: type[ReplyFormat], what: str, few: str, many: str) -> None:
    first, second = (_count_lines(kind, text) for text in (few, many))
    if second.total() <= MOST_TIMES * first.total() + FREE:
        return
    raise FormatViolation(
        f"{kind.__name__} runs {second.total():,} lines for {len(many)} characters of {what}, and "
        f"{first.total():,} for {len(few)}: {second.total() / first.total():.0f} times as many for "
        f"{len(many) / len(few):.0f} times the text; {most_often(second)}"
    )


def _check_made(kind: type[ReplyFormat], what: str, few: str, many: str) -> None:
    first, second = (_count_made(kind, text) for text in (few, many))
    if second > MOST_TIMES * first + FREE:
        raise FormatViolation(
            f"{kind.__name__} makes {second:,} characters of text anew for {len(many)} characters "
            f"of {what}, a character at a time, and {first:,} for {len(few)}: it copies what it "
            "holds for every piece; hold pieces in a list, and look at each once"
        )


def _count_lines(kind: type[ReplyFormat], text: str) -> Lines:
    lines, parser = Lines(), parser_of(kind, [FUNCTION])
    count_lines(partial(_feed, parser, text), lines)
    return lines


def _count_made(kind: type[ReplyFormat], text: str) -> int:
    """Characters of the texts that the parser holds after a piece and did not hold before it."""
    parser = parser_of(kind, [FUNCTION])
    held: dict[int, str] = {}
    made = 0
    for char in text:
        parser.append(char)
        now = {id(each): each for each in _texts(parser, set())}
        made += sum(len(each) for key, each in now.items() if key not in held)
        held = now
    return made


def _feed(parser: ReplyParser, pieces: Sequence[str]) -> None:
    for piece in pieces:
        parser.append(piece)
    parser.flush()


def _texts(thing: Any, seen: set[int]) -> Iterator[str]:
    """Yield all texts that an object holds, itself or in what it holds."""
    if isinstance(thing, str):
        yield thing
        return
    if isinstance(thing, type | MethodType | FunctionType | BuiltinMethodType) or id(thing) in seen:
        return
    seen.add(id(thing))
    inner: Sequence[Any] = ()
    if isinstance(thing, list | tuple | set | frozenset):
        inner = list(thing)
    elif isinstance(thing, dict):
        inner = list(thing.values())
    elif hasattr(thing, "__dict__"):
        inner = list(vars(thing).values())
    for each in inner:
        yield from _texts(each, seen)


# A text that a grammar allows, drawn at random, byte by byte.


MAX_BYTES = 3000  # of a text


def draw_text(matcher: "LLMatcher", marks: Sequence[str], rng: random.Random) -> str | None:
    """Return a text that the grammar allows; None if it has not ended in time."""
    text = b""
    while len(text) < MAX_BYTES:
        if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.5):
            return text.decode()
        forced = matcher.compute_ff_bytes()
        piece = forced or _piece(matcher, marks, rng)
        if not piece:
            return text.decode() if matcher.is_accepting() else None
        if forced and not matcher.consume_tokens(list(forced)):
            return None
        text += piece
    return None


def _piece(matcher: "LLMatcher", marks: Sequence[str], rng: random.Random) -> bytes:
    """More text, which the matcher has taken: a mark of the format, or a byte."""
    for mark in rng.sample(marks, len(marks)) if rng.random() < 0.3 else ():
        tokens = list(mark.encode())
        num_taken = matcher.try_consume_tokens(tokens)
        if num_taken == len(tokens):
            return bytes(tokens)
        if num_taken:
            matcher.rollback(num_taken)
    mask = matcher.compute_bitmask()
    allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
    likely = [byte for byte in allowed if byte in b'"}])>,'] if rng.random() < 0.4 else []
    if not allowed:
        return b""
    byte = rng.choice(likely or allowed)
    matcher.consume_tokens([byte])
    return bytes([byte])


# The grammar of a format against its parser: what it allows is read as the calls that it allows.
# Knows llguidance, with a token for each byte, and marks as text or as special tokens.


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "is_it": {"type": "boolean"},
        "colour": {"enum": ["red", "blue"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["is_it", "colour", "n", "note"],
    "additionalProperties": False,
}
BOUND_FUNCTIONS = [Function("paint", SCHEMA), Function("sell_it", SCHEMA)]
GOOD = {"is_it": True, "colour": "red", "n": 5, "note": "ä"}
WRONG = ({**GOOD, "is_it": 5}, {**GOOD, "colour": "green"}, {"is_it": True})
NUM_SAMPLES = 12
SPECIAL_IDS = range(256, 261)  # that the tokenizer of bytes has


@dataclass(frozen=True)
class Bound:
    """A format whose marks are special tokens, or texts."""

    kind: type[ReplyFormat]
    special: Mapping[str, int]

    @property
    def literal(self) -> Literal:
        """The form in which the format's grammars write a text."""
        return literal_with(self.special)

    def check(self, lark: str, reply: Reply, *, is_allowed: bool) -> None:
        """Raise `FormatViolation` unless the grammar allows the text of a reply, or does not."""
        self.check_text(lark, self.kind.write(reply), is_allowed=is_allowed)

    def check_text(self, lark: str, text: str, *, is_allowed: bool) -> None:
        """Raise `FormatViolation` unless the grammar allows the text, or does not."""
        matcher, tokens = self.matcher(lark), self._tokens(text)
        num_taken = matcher.try_consume_tokens(tokens)
        if (num_taken == len(tokens) and matcher.is_accepting()) == is_allowed:
            return
        if is_allowed:
            taken = self._text(tokens[:num_taken])
            what = f"writes what its grammar does not allow behind {taken[-60:]!r}"
        else:
            what = "has a grammar that allows what it must not: no call, several, or wrong ones"
        raise self._violation(what, lark, text)

    def matcher(self, lark: str) -> "LLMatcher":
        """Return what follows a text by the grammar. Raises `FormatViolation` if it is none."""
        from llguidance import LLMatcher, LLTokenizer, grammar_from

        made = LLMatcher(LLTokenizer("byte"), grammar_from("grammar", lark), log_level=0)
        if made.is_error():
            what = f"has a grammar that does not compile: {made.get_error():.300}"
            raise self._violation(what, lark, "")
        return made

    def _tokens(self, text: str) -> list[int]:
        pattern = "(" + ("|".join(map(re.escape, self.special)) or "(?!)") + ")"
        tokens: list[int] = []
        for i, piece in enumerate(re.split(pattern, text)):
            tokens += [self.special[piece]] if i % 2 else [*piece.encode()]
        return tokens

    def _text(self, tokens: list[int]) -> str:
        marks = {token: mark.encode() for mark, token in self.special.items()}
        return b"".join(marks.get(t) or bytes([t]) for t in tokens).decode(errors="replace")

    def _violation(self, what: str, lark: str, text: str) -> FormatViolation:
        error = violation(self.kind, what, text)
        if self.special:
            error.add_note(f"Special tokens: {dict(self.special)}")
        error.add_note(f"The grammar:\n{lark}")
        return error


def bounds_of(kind: type[ReplyFormat]) -> Iterator[Bound]:
    """Yield the format with its marks as texts, and with some of those that look like tokens as
    such.
    """
    yield Bound(kind, {})
    marks = [mark for mark in kind.markers if mark[0] in "<[" and mark[-1] in ">]"]
    for start in range(0, len(marks), len(SPECIAL_IDS)):
        some = marks[start : start + len(SPECIAL_IDS)]
        yield Bound(kind, dict(zip(some, SPECIAL_IDS, strict=False)))


def check_forced(kind: type[ReplyFormat]) -> None:
    """A reply that has to call: what `write` says of calls fits `grammar`, wrong arguments do not,
    and what `grammar` allows at random is read as calls that fit. Raises `FormatViolation`.
    """
    good = [SaidCall(each.name, GOOD) for each in BOUND_FUNCTIONS]
    for bound in bounds_of(kind):
        for is_parallel in (True, False):
            lark = f"start: calls\n{kind.grammar(BOUND_FUNCTIONS, is_parallel, bound.literal)}"
            for call in good:
                bound.check(lark, Reply(calls=[call]), is_allowed=True)
            bound.check(lark, Reply(calls=good), is_allowed=is_parallel)
            for given in WRONG:
                bound.check(lark, Reply(calls=[SaidCall("paint", given)]), is_allowed=False)
            bound.check_text(lark, "Let me see.", is_allowed=False)
            if not bound.special:
                _check_samples(bound, lark, is_parallel=is_parallel)


def check_strict(kind: type[ReplyFormat]) -> None:
    """A reply that may call: any text is allowed, and calls that fit, and no others. Raises
    `FormatViolation`.
    """
    content = "Hm." if kind.has_text_before else ""
    both = [SaidCall(each.name, GOOD) for each in BOUND_FUNCTIONS]
    for bound in bounds_of(kind):
        beginnings = kind.beginnings(BOUND_FUNCTIONS, bound.literal)
        if not beginnings:
            return
        grammar = kind.grammar(BOUND_FUNCTIONS, True, bound.literal)
        lark = "\n".join(["start: reply", *free_reply(beginnings), grammar])
        for text in ("", "Let me see.", '{"a": 1} < [b] > c'):
            bound.check(lark, Reply(text), is_allowed=True)
        for calls in (both[:1], both):
            bound.check(lark, Reply(content, calls), is_allowed=True)
        for given in WRONG:
            bound.check(lark, Reply(content, [SaidCall("paint", given)]), is_allowed=False)


def check_whole(kind: type[ReplyFormat]) -> None:
    """For a format that reads reasoning: it may stand before a forced call, and an answer may be
    bound. Raises `FormatViolation`.
    """
    calls, text = [SaidCall("paint", GOOD)], dumps(GOOD)
    for bound in bounds_of(kind):
        rules = kind.reasoning_rules(bound.literal)
        before = "reasoning " if rules else ""
        grammar = kind.grammar(BOUND_FUNCTIONS, True, bound.literal)
        lark = "\n".join([f"start: {before}calls", rules, grammar])
        bound.check(lark, Reply(calls=calls), is_allowed=True)
        if rules:
            bound.check(lark, Reply(calls=calls, reasoning="Hm."), is_allowed=True)
        answer = kind.answer_rules(bound.literal)
        rules = "\n".join([rules, answer, f"content: {json_rule(SCHEMA)}"])
        lark = f"start: {before}answer\n{rules}"
        bound.check(lark, Reply(text), is_allowed=True)
        bound.check(lark, Reply("Let me see."), is_allowed=False)


def _check_samples(bound: Bound, lark: str, *, is_parallel: bool) -> None:
    kind, rng, num_read = bound.kind, random.Random(0), 0
    for _ in range(NUM_SAMPLES):
        text = draw_text(bound.matcher(lark), all_marks(kind), rng)
        if text is None:
            continue
        num_read += 1
        found = read(kind, [text], BOUND_FUNCTIONS)
        if words := found.said.strip():
            raise violation(
                kind, f"reads {words!r:.100} as content, where its grammar has calls alone", text
            )
        if not found.calls or (len(found.calls) > 1 and not is_parallel):
            raise violation(kind, f"reads {len(found.calls)} calls, where one was forced", text)
        for event in found.events:
            _check_event(kind, event, text)
    if not num_read:
        error = FormatViolation(
            f"{kind.__name__} has a grammar of which no text of {MAX_BYTES} bytes was found that "
            "ends: name in `markers` what ends a value"
        )
        error.add_note(f"The grammar:\n{lark}")
        raise error


def _check_event(kind: type[ReplyFormat], event: Any, text: str) -> None:
    if isinstance(event, Call) and event.name not in {each.name for each in BOUND_FUNCTIONS}:
        raise violation(kind, f"reads a call of {event.name!r}, which is no tool", text)
    if isinstance(event, Arguments) and not _fits(event.text):
        raise violation(kind, f"reads arguments that do not fit the schema: {shown([event])}", text)


def _fits(arguments: str) -> bool:
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return False
    return (
        given.keys() == GOOD.keys()
        and isinstance(given["is_it"], bool)
        and given["colour"] in ("red", "blue")
        and isinstance(given["n"], int)
        and isinstance(given["note"], str)
    )
