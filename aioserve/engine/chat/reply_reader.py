"""One choice of a chat reply: its text read into content, reasoning and calls.

Knows ids of calls, which of them are let through, and which are malformed; counts the tokens of
reasoning. Knows no format and no protocol.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec

from aioserve.engine.chat.chat_format import ChatFormat, MalformedCalls
from aioserve.engine.chat.reply_format import (
    Arguments,
    Call,
    Content,
    Event,
    Reasoning,
    ReplyParser,
    joined,
)
from aioserve.engine.chat.tools import ToolUse
from aioserve.errors import UNREADABLE
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.support.reasoning_tokens import ReasoningTokens
from aioserve.support.tokens import TokenBytes


class ReplyReader:
    """A reader of the outputs of one choice, in their order."""

    def __init__(
        self,
        parser: ReplyParser,
        make_id: Callable[[], str],
        malformed: MalformedCalls,
        *,
        max_calls: int | None,
        with_reasoning: bool,
        holds_calls: bool = False,
        counter: ReasoningTokens | None = None,
    ) -> None:
        """Calls after the first `max_calls` are left out, and reasoning unless it is wanted.
        `malformed` counts the calls that are wrong, `counter` the tokens of reasoning. A call whose
        arguments are no JSON object is content, as far as that is known before it is told;
        `holds_calls`: none is told before it has ended.
        """
        self._counter = counter
        self._parser = parser
        self._make_id = make_id
        self._malformed = malformed
        self._max_calls = max_calls
        self._with_reasoning = with_reasoning
        self._held = HeldCalls(until_whole=holds_calls)
        self._has_ended = False
        self._num_calls = 0  # that were made, left out or not
        self._ids: set[str] = set()
        self._error: Exception | None = None  # of the format
        self._arguments: list[str] = []  # of the last call, in pieces

    @classmethod
    def of(
        cls,
        chat_format: ChatFormat,
        use: ToolUse | None,
        prompt_end: Sequence[int],
        pieces: TokenBytes,
        *,
        separates_reasoning: bool = True,
        includes_reasoning: bool = True,
        holds_calls: bool = False,
    ) -> Self:
        """Return what reads a reply to a prompt with these last tokens, and with these tools.
        `pieces` are the bytes of tokens.
        """
        functions = None if use is None else use.functions
        return cls(
            chat_format.make_parser(functions, prompt_end, with_reasoning=separates_reasoning),
            chat_format.make_id,
            chat_format.malformed,
            max_calls=1 if use is not None and not use.is_parallel else None,
            with_reasoning=includes_reasoning,
            holds_calls=holds_calls,
            counter=reasoning_counter(chat_format, pieces, prompt_end),
        )

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens of what was read, never fewer than before: what may yet be of the end
        mark counts at the end. None for a model whose reasoning is not known.
        """
        if self._counter is None:
            return None
        return self._counter.count if self._has_ended else self._counter.num_certain

    def read(self, output: RequestOutput) -> list[Event]:
        """Return what its text completes; at the end, what was held back. Every call has an id.

        Raises what the format raises, and the same again if it is asked again: what the format had
        read by then is lost.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._read(output)
        except Exception as error:
            self._error = error
            raise

    def _read(self, output: RequestOutput) -> list[Event]:
        self.count(output)
        events = self._parser.append(output.text)
        if output.finish_reason is not None:
            events += self._flush(is_cut=output.finish_reason is not FinishReason.STOP)
        told = [self._follow(event) for event in joined(events)]
        if output.finish_reason is FinishReason.STOP:
            self._check_arguments()
        has_ended = self._has_ended = output.finish_reason is not None
        is_cut = has_ended and output.finish_reason is not FinishReason.STOP
        told = joined(self._held.read(told, has_ended=has_ended, is_cut=is_cut))
        return [event for event in told if self._lets_through(event)]

    def _flush(self, *, is_cut: bool) -> list[Event]:
        """Return what was held back. A call that was cut is not malformed."""
        num_malformed = self._parser.num_malformed
        events = self._parser.flush()
        self._malformed.add("call", num_malformed if is_cut else self._parser.num_malformed)
        return events

    def _follow(self, event: Event) -> Event:
        """Return the event, with an id if it is a call."""
        if isinstance(event, Arguments):
            self._arguments.append(event.text)
        elif isinstance(event, Call):
            self._check_arguments()
            own = event.id if event.id not in self._ids else None
            event = Call(event.name, own or self._make_id())
            self._ids.add(event.id or "")
        return event

    def _check_arguments(self) -> None:
        """Count the arguments of the last call, which has ended, if they are no JSON object."""
        text, self._arguments = "".join(self._arguments), []
        if not text:
            return
        try:
            msgspec.json.decode(text, type=dict[str, Any])
        except UNREADABLE:
            self._malformed.add("arguments")

    def count(self, output: RequestOutput) -> None:
        """Count the tokens of an output that says nothing yet; `read` does it for the others."""
        if self._counter is not None and not self._counter.is_over:
            for token_id in output.token_ids:
                self._counter.append(token_id)

    def _lets_through(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._with_reasoning
        if isinstance(event, Content):
            return True
        self._num_calls += isinstance(event, Call)
        return self._max_calls is None or self._num_calls <= self._max_calls

    def finish_reason(self, output: RequestOutput) -> FinishReason | None:
        """Return why it ended: a reply that stops and has called something waits for the
        answers.
        """
        if output.finish_reason is FinishReason.STOP and self._num_calls:
            return FinishReason.TOOL_CALLS
        return output.finish_reason


def read_events(reader: ReplyReader | None, output: RequestOutput) -> list[Event]:
    """Return the events of an output; without a reader, its text is content."""
    if reader is not None:
        return reader.read(output)
    return [Content(output.text)] if output.text else []


# Holds calls back until they can be one: a call whose arguments are no JSON object becomes text. An
# agent runs a tool as soon as it is told to, and one that cannot read what it is told goes no
# further. Knows events.


# How arguments begin that an object of JSON may be; a longer key is none that is looked at.
_BEGUN = re.compile(r'\s*+\{\s*+(?:\}|"(?:[^"\\]|\\.)*+"\s*+:)')
_MAX_KEY = 256


class HeldCalls:
    """The calls of one reply that is being read: each is held until its arguments have begun as a
    JSON object does, or until they have ended.
    """

    def __init__(self, *, until_whole: bool) -> None:
        """`until_whole`: until they have ended, and a call that is cut becomes text as well. Else
        arguments are told as they come, and what breaks behind their first key has been told.
        """
        self._until_whole = until_whole
        self._call: Call | None = None  # that is held back
        self._pieces: list[str] = []  # of its arguments
        self._head = ""  # the first characters of the arguments

    def read(self, events: Sequence[Event], *, has_ended: bool, is_cut: bool) -> list[Event]:
        """Return the events that can be told now; all that are left, if the reply has ended."""
        told: list[Event] = []
        for i, event in enumerate(events):
            if isinstance(event, Arguments):
                if self._call is None:
                    told.append(event)
                    continue
                self._pieces.append(event.text)
                if len(self._head) < _MAX_KEY:
                    self._head += event.text
                is_last = i == len(events) - 1
                if is_last and not has_ended and not self._until_whole and self._is_begun:
                    told += self._let_go()
                continue
            told += self._release()
            if isinstance(event, Call):
                self._call = event
            else:
                told.append(event)
        return told + self._release(is_cut=is_cut) if has_ended else told

    @property
    def _is_begun(self) -> bool:
        return _BEGUN.match(self._head, 0, _MAX_KEY) is not None

    def _let_go(self) -> list[Event]:
        assert self._call is not None, "a call is held"
        call, text = self._call, self._take()
        return [call, Arguments(text)] if text else [call]

    def _take(self) -> str:
        """Return the arguments of the call, which is held no more."""
        text, self._call, self._pieces, self._head = "".join(self._pieces), None, [], ""
        return text

    def _release(self, *, is_cut: bool = False) -> list[Event]:
        """Return what is held of a call that has ended."""
        if self._call is None:
            return []
        text = "".join(self._pieces)
        is_empty = not text.strip()
        if is_cut and not self._until_whole:
            is_broken = False  # the reply says that it is cut
        else:
            is_broken = is_cut if is_empty else not _is_object(text)
        if not is_broken:
            if is_empty and not is_cut:
                self._pieces = ["{}"]  # which an agent can read
            return self._let_go()
        name = msgspec.json.encode(self._call.name).decode()
        self._take()
        return [Content(f'{{"name": {name}, "arguments": {text}')]


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except UNREADABLE:
        return False
    return True


def reasoning_counter(
    chat_format: ChatFormat, pieces: TokenBytes, prompt_end: Sequence[int]
) -> ReasoningTokens | None:
    """Return what counts the reasoning tokens of one reply to a prompt with these last tokens; None
    for a model whose reasoning is not known.
    """
    marks = chat_format.thinking
    return None if marks is None else ReasoningTokens(marks, pieces, prompt_end)
