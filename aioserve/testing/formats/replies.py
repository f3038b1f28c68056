"""Replies at random that a format may write, and texts that no model should write."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from aioserve.features.formats import SPACE, Function, Reply, ReplyFormat, SaidCall

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
