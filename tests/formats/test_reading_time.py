"""The time to read a reply grows with the reply alone, whatever the model writes."""

import time
from collections.abc import Iterator

import pytest

from aioserve.engine.chat.reply_format import (
    Marks,
    ReasoningParser,
    Reply,
    ReplyFormat,
    SaidCall,
    load_format,
)
from aioserve.engine.chat.reply_reader import HeldCalls
from aioserve.features.formats import SHIPPED, Arguments, Call, Content, Function
from tests.slow import examples, mostly_slow

TEXT, LIST, OBJECT = ({"type": name} for name in ("string", "array", "object"))
FUNCTION = Function("f", {"type": "object", "properties": {"a": TEXT, "b": LIST, "c": OBJECT}})
CALL = SaidCall("f", {"a": "x y", "b": [1], "c": {"k": "v"}})
#: What a reply goes on with: text, and beginnings of marks and values whose ends do not come.
TAILS = ["x", " ", "<", "[", '"', "\\", '{"a":', "f("]
FEW, MANY = 800, 6400  # characters


def beginnings(kind: type[ReplyFormat]) -> Iterator[str]:
    """Replies that are cut before a call, within it, and behind it; in `make test-all` at two more
    places within it.
    """
    text = kind.write(Reply("", [CALL]))
    return (text[: len(text) * part // 4] for part in range(0, 5, examples(2, slow=1)))


def seconds(kind: type[ReplyFormat], text: str) -> float:
    """Processor time in which a reply is read that comes a few characters at a time."""
    parser = kind([FUNCTION])
    began = time.process_time()
    for at in range(0, len(text), 3):
        parser.append(text[at : at + 3])
    parser.flush()
    return time.process_time() - began


#: In `make test`: of calls as JSON, as tags and as text of their own, two each.
FEW_FORMATS = (*("deepseek_v32", "gemma4", "harmony", "hermes", "lfm2", "qwen3_coder"),)


@pytest.mark.parametrize("name", mostly_slow(SHIPPED, but=FEW_FORMATS))
def test_the_time_to_read_a_reply_grows_with_the_reply_alone(name: str) -> None:
    kind = load_format(name)
    for begun in beginnings(kind):
        for tail in TAILS:
            many = seconds(kind, begun + tail * (MANY // len(tail)))
            if many > 0.03:  # else it is too little to compare
                few = min(seconds(kind, begun + tail * (FEW // len(tail))) for _ in range(3))
                again = seconds(kind, begun + tail * (MANY // len(tail)))
                # 8 times as many characters; the square would be 64 times
                assert min(many, again) < 24 * few + 0.02, (begun, tail)


@pytest.mark.parametrize("begun", ["", "<think>", "<think> x </think>"])
def test_the_time_to_read_blanks_around_reasoning_grows_with_them_alone(begun: str) -> None:
    """A client's bias may have the model write nothing else."""

    def seconds(count: int) -> float:
        parser = ReasoningParser(Marks("<think>", "</think>"), "")
        parser.append(begun)
        began = time.process_time()
        for _ in range(count):
            parser.append(100 * " ")
        parser.flush()
        return time.process_time() - began

    few, many = (min(seconds(count) for _ in range(3)) for count in (1000, 8000))
    assert many < 24 * few + 0.05  # 8 times as many; the square would be 64 times


def test_blanks_before_a_reply_without_reasoning_are_told() -> None:
    for pieces in (["  ", "\n", "x"], ["  \nx"], [" ", " \n", "<thi", "x"]):
        parser = ReasoningParser(Marks("<think>", "</think>"), "")
        events = [event for piece in pieces for event in parser.append(piece)] + parser.flush()
        assert events == [Content("".join(pieces))]
    parser = ReasoningParser(Marks("<think>", "</think>"), "")
    assert parser.append(" ") + parser.append(" <th") + parser.flush() == [Content("  <th")]


def test_the_time_to_hold_a_call_back_grows_with_its_arguments_alone() -> None:
    def seconds(count: int) -> float:
        held = HeldCalls(until_whole=True)
        held.read([Call("f", "id")], has_ended=False, is_cut=False)
        began = time.process_time()
        for _ in range(count):
            assert held.read([Arguments("12345678")], has_ended=False, is_cut=False) == []
        (told,) = held.read([], has_ended=True, is_cut=False)
        assert isinstance(told, Content)
        assert told.text.count("12345678") == count
        return time.process_time() - began

    few, many = (min(seconds(count) for _ in range(3)) for count in (5000, 40_000))
    assert many < 24 * few + 0.05  # 8 times as many; the square would be 64 times
