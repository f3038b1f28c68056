"""The grammar of a format against its parser: what it allows is read as the calls it allows.

Texts that the grammar allows are drawn at random, byte by byte.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from aioserve.features.formats import (
    Arguments,
    Call,
    Function,
    Literal,
    Reply,
    ReplyFormat,
    SaidCall,
    dumps,
    free_reply,
    json_rule,
    literal_with,
)
from aioserve.testing.formats.reading import read, shown, violation
from aioserve.testing.formats.replies import all_marks
from aioserve.testing.violation import FormatViolation

if TYPE_CHECKING:
    from llguidance import LLMatcher


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
FUNCTIONS = [Function("paint", SCHEMA), Function("sell_it", SCHEMA)]
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
        """How its grammars write a text."""
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
    good = [SaidCall(each.name, GOOD) for each in FUNCTIONS]
    for bound in bounds_of(kind):
        for is_parallel in (True, False):
            lark = f"start: calls\n{kind.grammar(FUNCTIONS, is_parallel, bound.literal)}"
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
    both = [SaidCall(each.name, GOOD) for each in FUNCTIONS]
    for bound in bounds_of(kind):
        beginnings = kind.beginnings(FUNCTIONS, bound.literal)
        if not beginnings:
            return
        grammar = kind.grammar(FUNCTIONS, True, bound.literal)
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
        grammar = kind.grammar(FUNCTIONS, True, bound.literal)
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
