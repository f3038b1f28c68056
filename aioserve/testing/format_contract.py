"""The contract of `ReplyFormat` as tests that run on any format.

In a suite of your own:

    class TestMine(FormatContract):
        format = MyFormat

From a command line, without a file: `pytest --aioserve-format mine.py:Mine`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

try:
    import pytest
    from hypothesis import HealthCheck, assume, given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the contract of reply formats needs {error.name}: pip install pytest hypothesis"
    ) from error

from aioserve.features.formats import (
    SPACE,
    Arguments,
    Call,
    Content,
    Event,
    Reasoning,
    ReplyFormat,
    joined,
)
from aioserve.testing.format_rules import (
    FUNCTIONS,
    WORDS,
    Example,
    Read,
    all_marks,
    check_alike,
    check_cost,
    check_forced,
    check_strict,
    check_whole,
    cuts,
    examples,
    fixed_examples,
    hostile_texts,
    parser_of,
    pieces_of,
    read,
    shown,
    spoiled_texts,
    texts,
    violation,
    words,
    written,
)
from aioserve.testing.violation import FormatViolation

__all__ = ["FormatContract", "FormatSubject"]

DEFAULT_EXAMPLES = 150


@dataclass(frozen=True)
class FormatSubject:
    """A format under test, and how many random texts each rule of the contract tries on it."""

    format: type[ReplyFormat]
    max_examples: int = DEFAULT_EXAMPLES  # of each kind of random text

    @property
    def kind(self) -> type:
        """The class that a violation blames."""
        return self.format

    def for_all(
        self, strategy: st.SearchStrategy[Any], check: Callable[[Any, list[int]], None]
    ) -> None:
        """Try `check` on texts at random and on places to cut them; the same in every run."""

        @settings(
            max_examples=self.max_examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy, cuts())
        def run(drawn: Any, places: list[int]) -> None:
            check(drawn, places)

        run()


class FormatContract:
    """Derive a class `Test...` that sets `format`."""

    format: ClassVar[type[ReplyFormat]]
    max_examples: ClassVar[int] = DEFAULT_EXAMPLES

    @pytest.fixture
    def subject(self) -> FormatSubject:
        """What is tested; the pytest plugin puts the formats of the command line here."""
        return FormatSubject(self.format, self.max_examples)

    def test_a_reply_is_read_alike_wherever_it_is_cut(self, subject: FormatSubject) -> None:
        """At every single place, and between all characters; some replies that `write` gives."""
        for functions, text in fixed_examples(subject.format):
            whole = read(subject.format, [text], functions)
            check_alike(subject.format, whole, list(text), functions)
            for place in range(1, len(text)):
                check_alike(subject.format, whole, [text[:place], text[place:]], functions)

    def test_what_is_written_is_read_back(self, subject: FormatSubject) -> None:
        """Content, reasoning, calls with arguments of every type, and content behind them."""

        def check(example: Example, places: list[int]) -> None:
            text = written(subject.format, example)
            assume(text is not None)
            assert text is not None
            whole = read(subject.format, [text], example.functions)
            _check_same(subject.format, example, whole, text)
            check_alike(subject.format, whole, pieces_of(text, places), example.functions)

        subject.for_all(examples(subject.format), check)

    def test_the_format_can_write_most_replies(self, subject: FormatSubject) -> None:
        """Check that `write` covers most replies: else the other tests would show little."""
        written_ones = [len(text) for _, text in fixed_examples(subject.format)]
        if len(written_ones) < 4:
            raise FormatViolation(
                f"{subject.format.__name__}.write says {len(written_ones)} of the 8 standard "
                "replies; expected at least 4"
            )

    def test_text_without_marks_is_content(self, subject: FormatSubject) -> None:
        def check(text: str, places: list[int]) -> None:
            marks = all_marks(subject.format)
            assume(not any(mark in text for mark in marks))
            whole = read(subject.format, [text], FUNCTIONS)
            if whole.events != ([Content(text)] if text else []) and not whole.calls:
                raise violation(subject.format, f"reads a text as {shown(whole.events)}", text)
            check_alike(subject.format, whole, pieces_of(text, places), FUNCTIONS)

        if not subject.format.reads_reasoning:
            subject.for_all(texts(), check)

    def test_no_text_raises_or_is_lost_or_said_twice(self, subject: FormatSubject) -> None:
        """Marks in any order, broken JSON, halves of all; cut anywhere it is read alike."""
        for text in spoiled_texts(subject.format):
            whole = read(subject.format, [text], FUNCTIONS)
            check_alike(subject.format, whole, list(text), FUNCTIONS)
            _check_words(subject.format, whole, text)

        def check(text: str, places: list[int]) -> None:
            whole = read(subject.format, [text], FUNCTIONS)
            check_alike(subject.format, whole, list(text), FUNCTIONS)
            check_alike(subject.format, whole, pieces_of(text, places), FUNCTIONS)
            _check_words(subject.format, whole, text)

        subject.for_all(hostile_texts(subject.format), check)

    def test_a_reply_may_be_cut_off_anywhere(self, subject: FormatSubject) -> None:
        """Its calls are the first of the whole's, the last as far as it goes."""
        for functions, text in fixed_examples(subject.format):
            whole = read(subject.format, [text], functions)
            for place in range(len(text)):
                cut = read(subject.format, [text[:place]], functions)
                _check_cut(subject.format, cut, whole, text[:place])

    def test_replies_at_the_same_time_do_not_mix(self, subject: FormatSubject) -> None:
        replies = fixed_examples(subject.format)
        alone = [read(subject.format, list(text), functions) for functions, text in replies]
        parsers = [parser_of(subject.format, functions) for functions, _ in replies]
        longest = max((len(text) for _, text in replies), default=0)
        told: list[list[Event]] = [[] for _ in replies]
        for place in range(longest):
            for parser, own, (_, text) in zip(parsers, told, replies, strict=True):
                own += parser.append(text[place : place + 1])
        for parser, own, before, (_, text) in zip(parsers, told, alone, replies, strict=True):
            own += parser.flush()
            if joined(own) != before.events:
                raise violation(
                    subject.format,
                    f"reads a reply as {shown(joined(own))} while it reads others, and alone as "
                    f"{shown(before.events)}",
                    text,
                )
        for (functions, text), before in zip(replies, alone, strict=True):
            check_alike(subject.format, before, list(text), functions)
        ids: set[str] = set()
        for _ in range(9):
            made = subject.format.make_id()
            if not isinstance(made, str) or not made or made in ids:
                raise FormatViolation(
                    f"{subject.format.__name__}.make_id gives {made!r}; expected a new text"
                )
            ids.add(made)

    def test_without_tools_nothing_is_called(self, subject: FormatSubject) -> None:
        """A format that reads whole replies reads those without tools, too."""
        if not subject.format.reads_reasoning:
            return
        for _, text in fixed_examples(subject.format):
            found = read(subject.format, [text], ())
            if found.calls:
                raise violation(subject.format, "calls a tool though there is none", text)

    def test_the_evidence_is_a_part_of_the_template(self, subject: FormatSubject) -> None:
        for template in ("", "{{ messages }}", " ".join(all_marks(subject.format))):
            evidence = subject.format.evidence(template)
            if evidence is not None and (not evidence or evidence not in template):
                raise FormatViolation(
                    f"{subject.format.__name__}.evidence gives {evidence!r:.100} for the template "
                    f"{template!r:.200}; expected a part of it, or None"
                )

    def test_a_long_reply_costs_in_proportion_to_its_length(self, subject: FormatSubject) -> None:
        """By lines that run and text that is copied, not by seconds."""
        check_cost(subject.format)

    def test_the_grammar_forces_calls_that_are_read_back(self, subject: FormatSubject) -> None:
        check_forced(subject.format)
        if subject.format.reads_reasoning:
            check_whole(subject.format)

    def test_the_grammar_binds_calls_that_begin_by_themselves(self, subject: FormatSubject) -> None:
        check_strict(subject.format)


class TestGivenFormats(FormatContract):
    """The tests that `--aioserve-format` adds to a pytest run: the plugin fills in `subject`."""


def _check_same(kind: type[ReplyFormat], example: Example, found: Read, text: str) -> None:
    """That a reply was read as it was written; space around its parts does not count."""
    reply = example.reply
    due: list[Event] = [Reasoning(reply.reasoning)] if reply.reasoning else []
    due += [Content(reply.content)] if reply.content else []
    for call in reply.calls:
        due += [Call(call.name), Arguments(json.dumps(call.arguments))]
    due += [Content(example.after)] if example.after else []
    if [*map(_plain, found.events)] != [*map(_plain, due)]:
        raise violation(kind, f"wrote {shown(due)}, and reads it as {shown(found.events)}", text)
    if found.num_malformed:
        raise violation(kind, f"counts {found.num_malformed} malformed calls in its own", text)
    ids = [call.id for call in found.calls if call.id is not None]
    if len({*ids}) < len(ids):
        raise violation(kind, f"gives one id to several calls: {ids}", text)


def _plain(event: Event) -> tuple[str, str]:
    """Return what counts of an event."""
    match event:
        case Call():
            return "call", event.name
        case Arguments():
            try:
                return "arguments", json.dumps(json.loads(event.text), sort_keys=True)
            except ValueError:
                return "text for arguments", event.text
    return type(event).__name__, event.text.strip(SPACE)


def _check_words(kind: type[ReplyFormat], found: Read, text: str) -> None:
    """That what is no call is content, all of it, and that nothing is said twice."""
    told = [e.name if isinstance(e, Call) else e.text for e in found.events]
    for word in WORDS:
        if (count := "".join(told).count(word)) > max(1, text.count(word)):
            raise violation(kind, f"says {word!r} {count} times: {shown(found.events)}", text)
    if found.calls or kind.reads_reasoning:
        return
    lost, kept = words(text), words(found.said)
    for mark in all_marks(kind):
        lost, kept = (each.replace(words(mark), "") for each in (lost, kept))
    if lost != kept:
        raise violation(
            kind, f"loses or changes text that is no call: it reads {shown(found.events)}", text
        )


def _check_cut(kind: type[ReplyFormat], cut: Read, whole: Read, text: str) -> None:
    due, found = _calls(whole.events), _calls(cut.events)
    is_prefix = [name for name, _ in found] == [name for name, _ in due[: len(found)]]
    is_prefix = is_prefix and [*found[:-1]] == [*due[: max(0, len(found) - 1)]]
    if found and is_prefix:
        is_prefix = due[len(found) - 1][1].startswith(found[-1][1])
    if not is_prefix:
        raise violation(
            kind,
            f"reads a reply that was cut off as {shown(cut.events)}; its calls are not the first "
            f"of the whole's: {shown(whole.events)}",
            text,
        )


def _calls(events: Sequence[Event]) -> list[tuple[tuple[str, str | None], str]]:
    """Return the calls among the events, each as its name, id and arguments."""
    calls: list[tuple[tuple[str, str | None], str]] = []
    for event in events:
        if isinstance(event, Call):
            calls.append(((event.name, event.id), ""))
        elif isinstance(event, Arguments):
            calls[-1] = calls[-1][0], calls[-1][1] + event.text
    return calls
