"""The grammar of a format against its parser: what it allows is read as the calls that it allows.

Knows llguidance, with a token for each byte: no mark is a special token here.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from aioserve.formats import (
    Arguments,
    Call,
    Function,
    Reply,
    ReplyFormat,
    SaidCall,
    free_reply,
    json_rule,
)
from aioserve.testing.formats.reading import read, shown, violation
from aioserve.testing.formats.replies import all_marks
from aioserve.testing.violation import FormatViolation

if TYPE_CHECKING:
    from llguidance import LLMatcher

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
FUNCTIONS = [Function("paint", SCHEMA), Function("sell_it", SCHEMA)]
GOOD = {"is_it": True, "colour": "red", "n": 5, "note": "ä"}
WRONG = ({**GOOD, "is_it": 5}, {**GOOD, "colour": "green"}, {"is_it": True})
NUM_SAMPLES = 12
MAX_BYTES = 3000  # of a sample


def check_forced(kind: type[ReplyFormat]) -> None:
    """A reply that has to call: what `write` says of calls fits `grammar`, wrong arguments do not,
    and what `grammar` allows at random is read as calls that fit. Raises `FormatViolation`.
    """
    for is_parallel in (True, False):
        lark = f"start: calls\n{kind.grammar(FUNCTIONS, is_parallel, _literal)}"
        for function in FUNCTIONS:
            text = kind.write(Reply(calls=[SaidCall(function.name, GOOD)]))
            _check(kind, lark, text, is_allowed=True)
        two = kind.write(Reply(calls=[SaidCall(each.name, GOOD) for each in FUNCTIONS]))
        _check(kind, lark, two, is_allowed=is_parallel)
        for given in WRONG:
            text = kind.write(Reply(calls=[SaidCall("paint", given)]))
            _check(kind, lark, text, is_allowed=False)
        _check(kind, lark, "Let me see.", is_allowed=False)
        _check_samples(kind, lark, is_parallel=is_parallel)


def check_strict(kind: type[ReplyFormat]) -> None:
    """A reply that may call: any text is allowed, and calls that fit, and no others. Raises
    `FormatViolation`.
    """
    beginnings = kind.beginnings(FUNCTIONS, _literal)
    if not beginnings:
        return
    grammar = kind.grammar(FUNCTIONS, True, _literal)
    lark = "\n".join(["start: reply", *free_reply(beginnings), grammar])
    content = "Hm." if kind.has_text_before else ""
    for text in ("", "Let me see.", '{"a": 1} < [b] > c'):
        _check(kind, lark, kind.write(Reply(text)), is_allowed=True)
    for calls in ([SaidCall("paint", GOOD)], [SaidCall(each.name, GOOD) for each in FUNCTIONS]):
        _check(kind, lark, kind.write(Reply(content, calls)), is_allowed=True)
    for given in WRONG:
        text = kind.write(Reply(content, [SaidCall("paint", given)]))
        _check(kind, lark, text, is_allowed=False)


def check_whole(kind: type[ReplyFormat]) -> None:
    """For a format that reads reasoning: it may stand before a forced call, and an answer may be
    bound. Raises `FormatViolation`.
    """
    rules = kind.reasoning_rules(_literal)
    before = "reasoning " if rules else ""
    grammar = kind.grammar(FUNCTIONS, True, _literal)
    lark = "\n".join([f"start: {before}calls", rules, grammar])
    said = [SaidCall("paint", GOOD)]
    _check(kind, lark, kind.write(Reply(calls=said)), is_allowed=True)
    if rules:
        _check(kind, lark, kind.write(Reply(calls=said, reasoning="Hm.")), is_allowed=True)
    answer = kind.answer_rules(_literal)
    lark = "\n".join([f"start: {before}answer", rules, answer, f"content: {json_rule(SCHEMA)}"])
    text = msgspec.json.encode(GOOD).decode().replace(":", ": ").replace(",", ", ")
    _check(kind, lark, kind.write(Reply(text)), is_allowed=True)
    _check(kind, lark, kind.write(Reply("Let me see.")), is_allowed=False)


def _literal(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _matcher(kind: type[ReplyFormat], lark: str) -> "LLMatcher":
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    made = LLMatcher(LLTokenizer("byte"), grammar_from("grammar", lark), log_level=0)
    if made.is_error():
        error = FormatViolation(
            f"{kind.__name__} has a grammar that does not compile: {made.get_error():.300}"
        )
        error.add_note(f"The grammar:\n{lark}")
        raise error
    return made


def _check(kind: type[ReplyFormat], lark: str, text: str, *, is_allowed: bool) -> None:
    matcher, tokens = _matcher(kind, lark), list(text.encode())
    num_taken = matcher.try_consume_tokens(tokens)
    if (num_taken == len(tokens) and matcher.is_accepting()) == is_allowed:
        return
    if is_allowed:
        taken = text.encode()[:num_taken].decode(errors="replace")
        what = f"writes what its grammar does not allow behind {taken[-60:]!r}"
    else:
        what = "has a grammar that allows what it must not: no call, too many, or wrong arguments"
    error = violation(kind, what, text)
    error.add_note(f"The grammar:\n{lark}")
    raise error


def _check_samples(kind: type[ReplyFormat], lark: str, *, is_parallel: bool) -> None:
    rng, num_read = random.Random(0), 0
    for _ in range(NUM_SAMPLES):
        text = _sample(_matcher(kind, lark), all_marks(kind), rng)
        if text is None:
            continue
        num_read += 1
        found = read(kind, [text], FUNCTIONS)
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
    if isinstance(event, Call) and event.name not in {each.name for each in FUNCTIONS}:
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


def _sample(matcher: "LLMatcher", marks: Sequence[str], rng: random.Random) -> str | None:
    """A text that the grammar allows; None if it has not ended in time."""
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
