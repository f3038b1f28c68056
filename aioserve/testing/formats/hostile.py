"""Texts that no model should write: marks of a format in any order, broken JSON, halves of all.

Strategies of hypothesis. Knows a format by its marks and by what it writes.
"""

import re
from collections.abc import Iterator

from hypothesis import strategies as st

from aioserve.formats import Function, ReplyFormat
from aioserve.testing.formats.replies import all_marks, fixed_examples

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
    """The parts in their order, with a word behind every second one."""
    words = iter(WORDS)
    return "".join(part + (next(words, "") if i % 2 else "") for i, part in enumerate(parts))


def cuts() -> st.SearchStrategy[list[int]]:
    """Positions at which a text is cut."""
    return st.lists(st.integers(0, 300), max_size=8)
