"""What a format costs for a text that comes a character at a time: lines run, and text made anew.

Counts are the same on every machine. Knows lines, and the texts that an object holds. Knows nothing
about what they are for.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

from aioserve.formats import Function, Reply, ReplyFormat, ReplyParser, SaidCall
from aioserve.testing.formats.reading import parser_of
from aioserve.testing.formats.replies import Example, all_marks, written
from aioserve.testing.violation import FormatViolation

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
    (code, line), count = max(second.items(), key=lambda item: item[1])
    raise FormatViolation(
        f"{kind.__name__} runs {second.total():,} lines for {len(many)} characters of {what}, and "
        f"{first.total():,} for {len(few)}: {second.total() / first.total():.0f} times as many for "
        f"{len(many) / len(few):.0f} times the text; most often {Path(code.co_filename).name}:"
        f"{line} in {code.co_name}(), {count:,} times"
    )


def _check_made(kind: type[ReplyFormat], what: str, few: str, many: str) -> None:
    first, second = (_count_made(kind, text) for text in (few, many))
    if second > MOST_TIMES * first + FREE:
        raise FormatViolation(
            f"{kind.__name__} makes {second:,} characters of text anew for {len(many)} characters "
            f"of {what}, a character at a time, and {first:,} for {len(few)}: it copies what it "
            "holds for every piece; hold pieces in a list, and look at each once"
        )


def _count_lines(kind: type[ReplyFormat], text: str) -> Counter[tuple[CodeType, int]]:
    lines: Counter[tuple[CodeType, int]] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            lines[frame.f_code, frame.f_lineno] += 1
        return trace

    parser = parser_of(kind, [FUNCTION])
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        _feed(parser, text)
    finally:
        sys.settrace(before)
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
    """All texts that an object holds, itself or in what it holds."""
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
