"""Harmony, gpt-oss's format: a reply is messages, each in a channel and some to a recipient.

`<|channel|>analysis<|message|>` is reasoning, `<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>` a call; `final`, and commentary to no recipient, are content. Prompts
end with `<|start|>assistant`, so that a reply begins with the rest of a header.
Source: https://github.com/openai/harmony/blob/main/docs/format.md
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from aioserve.features.formats import (
    Arguments,
    Beginning,
    Call,
    CallParser,
    Function,
    JsonValue,
    Literal,
    Marks,
    Reasoning,
    Reply,
    any_of,
    dumps,
    json_rule,
    match_end,
    overlap,
    repeated,
    text_until,
)

START, CHANNEL, TYPE, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
CHANNELS = ("analysis", "commentary", "final")
ASSISTANT, FUNCTIONS = "assistant", "functions."


class HarmonyGrammar(CallParser):
    """The grammar by which replies are bound and written in harmony."""

    markers = (START, CHANNEL, TYPE, MESSAGE, *ENDS)
    reads_reasoning = True
    thinking = Marks(f"{CHANNEL}analysis{MESSAGE}", END, is_repeated=True)
    after_thinking = f"{START}{ASSISTANT}"

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return CHANNEL if CHANNEL in template and MESSAGE in template else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        each = " | ".join(f"call_{i}" for i in range(len(functions)))
        between = f"({literal(CALL)} | {literal(END)}) {literal(START + ASSISTANT)}"
        kind = f'(" "? {literal(TYPE)} "json" | " json")?'
        rules = [
            f"calls: {repeated(f'({each})', between, is_parallel)} {literal(CALL)}?",
            f"kind: {kind} {literal(MESSAGE)}",
            f"other: ({' | '.join(map(literal, CHANNELS))}) kind (body | REST)",
            text_until("body", END, literal),
            r"REST: /(.|\n)+/",  # the last one, which has not ended
        ]
        for i, function in enumerate(functions):
            to, commentary = literal(f" to={FUNCTIONS}{function.name}"), literal("commentary")
            rules += [
                f"call_{i}: {to} {literal(CHANNEL)} {commentary} bound_{i} "
                f"| {literal(CHANNEL)} {commentary} {to} bound_{i}",
                f"bound_{i}: kind arguments_{i}",
                f"arguments_{i}: {json_rule(function.parameters)}",
            ]
        return "\n".join(rules)

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        """Return a channel, which may be another; and a recipient that stands before one."""
        channel, commentary = literal(CHANNEL), literal("commentary")
        names = [literal(function.name) for function in functions]
        end = f"({' | '.join(map(literal, ENDS))})?"
        first = " | ".join(
            f"{name} {channel} {commentary} bound_{i}" for i, name in enumerate(names)
        )
        to = f" to={FUNCTIONS}"
        then = " | ".join(f"{literal(to)} {name} bound_{i}" for i, name in enumerate(names))
        opened = f"({commentary} ({then}) | other) {end}"
        # Where marks are tokens, text before a channel may be a recipient: there is none.
        is_text = not channel.startswith("<")
        role = literal(ASSISTANT)
        return [
            Beginning(channel, opened, has_text=is_text),
            Beginning(literal(to), f"({first}) {end}", has_text=is_text),
            Beginning(
                literal(START),
                f"{role} ({channel} {opened} | {literal(to)} ({first}) {end})",
            ),
        ]

    @classmethod
    def reasoning_rules(cls, literal: Literal) -> str:
        opening, next_one = literal(f"{CHANNEL}analysis{MESSAGE}"), literal(START + ASSISTANT)
        thought = text_until("thought", END, literal)
        return f"reasoning: ({opening} thought {next_one})*\n{thought}"

    @classmethod
    def answer_rules(cls, literal: Literal) -> str:
        final = f'{literal(f"{CHANNEL}final")} ({literal(TYPE)} "json")?'
        return f"answer: {final} {literal(MESSAGE)} content"

    @classmethod
    def write(cls, reply: Reply) -> str:
        said = []
        if reply.reasoning:
            said.append((f"{CHANNEL}analysis{MESSAGE}{reply.reasoning}", END))
        if reply.content:
            channel = "commentary" if reply.calls else "final"
            said.append((f"{CHANNEL}{channel}{MESSAGE}{reply.content}", END))
        for call in reply.calls:
            header = f" to={FUNCTIONS}{call.name}{CHANNEL}commentary json{MESSAGE}"
            said.append((f"{header}{dumps(call.arguments)}", CALL))
        text = "".join(f"{message}{end}{START}{ASSISTANT}" for message, end in said[:-1])
        return text + said[-1][0] if said else ""


_TYPES = ("json", "code", "text")
_ENDING, _OPENING = any_of(ENDS), any_of([START, CHANNEL, *ENDS])
_WORDS = re.compile(r"[^<\n]*")
_PARTS = re.compile(f"{re.escape(CHANNEL)}|{re.escape(TYPE)}|[^\\s<]+")


class _Header(NamedTuple):
    """The header before a message, beside the role of an assistant."""

    channel: str = ""
    recipient: str = ""


class HarmonyParser(HarmonyGrammar):
    """Reads whole replies. A header that says anything else is content, with what follows it."""

    def __init__(self, functions: Sequence[Function], prompt_end: str = "") -> None:
        super().__init__(functions, prompt_end)
        self._said: set[str] = set()  # kinds of messages so far
        self._separator = ""
        # The prompt has begun a message, and may have begun its text.
        begun = prompt_end.rpartition(START)[2] if START in prompt_end else ""
        header, is_open, text = begun.partition(MESSAGE)
        self._header = [] if is_open else re.split(f"({re.escape(CHANNEL)})", begun)
        if is_open and not _ENDING.search(text):
            self._open(header)

    def begin(self) -> bool:
        """Read what may be the rest of a header, or text without any."""
        self.hold()
        self.state = self._read_header if CHANNEL in self._header else self._first_word
        return True

    # Headers

    def _first_word(self) -> bool:
        if not self.skip_space():
            return False
        for word in ("<", "to=", ASSISTANT):
            found = self.text.startswith(word, self.at)
            rest = self.text[self.at : self.at + len(word)]
            if not found and not self.is_last and word.startswith(rest):
                return False
            if found:
                self._header.append(" ")
                self.state = self._read_header
                return True
        self._close()
        return True

    def _read_header(self) -> bool:
        self._header.append(self.take(match_end(_WORDS, self.text, self.at)))
        if self.at == len(self.text):
            self._is_cut()
            return False
        for mark in (CHANNEL, TYPE, MESSAGE):
            found = self.skip(mark)
            if found is None:
                return False
            if found and mark == MESSAGE:
                self._open("".join(self._header))
                return True
            if found:
                self.marker = mark
                self._header.append(mark)
                return True
        self._close()
        return True

    def _is_cut(self) -> None:
        """Where a reply ends in a header, that header is no content."""
        header = "".join(self._header)
        if self.is_last and CHANNEL in header:
            read = _read(header.removesuffix(CHANNEL).removesuffix(TYPE))
            if read is not None and not read.recipient:
                self.held = None

    def _open(self, text: str) -> None:
        """Begin the message that has this header."""
        header = _read(text)
        is_ours = header is not None and header.recipient.startswith(FUNCTIONS)
        if header is None:
            self._close()
        elif is_ours and self.functions and header.recipient != FUNCTIONS:
            self.tell([Call(header.recipient.removeprefix(FUNCTIONS))])
            self.state = self._before_arguments
        elif header.channel == "analysis":
            self.held = None
            self._separator = self._separate("reasoning")
            if header.recipient:  # a tool that the model has of itself
                said = text.strip().removeprefix(ASSISTANT).lstrip()
                self._think(f"{said}{MESSAGE}")
            self.state = self._read_reasoning
        elif header.recipient:
            self._close()
        else:
            self.held = None
            self.say(self._separate("content"))
            self.state = self._read_message

    def _separate(self, kind: str) -> str:
        """Return what stands between two messages of a kind."""
        separator = "\n" if kind in self._said else ""
        self._said.add(kind)
        return separator

    def _close(self) -> None:
        self._said.add("content")
        self.give_back()
        self._header = []
        self.state = self._read_loose

    # Messages

    def _read_message(self) -> bool:
        return self.read_content(_ENDING, self._after_message)

    def _read_loose(self) -> bool:
        """Content that is in no message."""
        return self.read_content(_OPENING, self._after_message)

    def _after_message(self) -> bool:
        self._header = []
        if self.marker in ENDS:
            self.held = None
            self.state = self._between
        else:
            self._header = [self.marker] if self.marker == CHANNEL else []
            self.state = self._read_header
        return True

    def _between(self) -> bool:
        if not self.skip_space():
            return False
        if self.text[self.at] != "<":
            self.say(self._separate("content"))
        self.state = self._read_loose
        return True

    def _read_reasoning(self) -> bool:
        found = _ENDING.search(self.text, self.at)
        held = 0 if self.is_last else overlap(self.text, ENDS, self.at)
        self._think(self.take(found.start() if found else len(self.text) - held))
        return self._ends(found)

    def _think(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(self._separator + text))
            self._separator = ""

    def _ends(self, found: re.Match[str] | None) -> bool:
        if found is None:
            return False
        self.take(found.end())
        self.state = self._between
        return True

    # Arguments

    def _before_arguments(self) -> bool:
        if not self.skip_space():
            return False
        self.value = JsonValue()
        if self.text[self.at] == "{":
            self.state = self._read_own_arguments
            return True
        is_end = self._skip_any_end()
        if is_end is None:
            return False
        if is_end:
            self.events.append(Arguments("{}"))
            self.state = self._between
        else:
            self.state = self._read_other_arguments
        return True

    def _read_own_arguments(self) -> bool:
        return self.read_arguments(then=self._after_arguments)

    def _after_arguments(self) -> bool:
        if not self.skip_space():
            return False
        is_end = self._skip_any_end()
        if is_end is not None:
            self.state = self._between if is_end else self._read_other_arguments
        return is_end is not None

    def _read_other_arguments(self) -> bool:
        """Pass on arguments that are no JSON, or stand behind the JSON, as they are."""
        found = _ENDING.search(self.text, self.at)
        held = 0 if self.is_last else overlap(self.text, ENDS, self.at)
        text = self.take(found.start() if found else len(self.text) - held)
        if text:
            self.events.append(Arguments(text))
        return self._ends(found)

    def _skip_any_end(self) -> bool | None:
        """Return whether a message ends here; None: what is there may become its end."""
        is_open = False
        for end in ENDS:
            found = self.skip_end(end)
            if found:
                return True
            is_open = is_open or found is None
        return None if is_open else False


def _read(text: str) -> _Header | None:
    """Return a header; None if it says anything that no header says."""
    channel, recipient, parts = "", "", _PARTS.findall(text)
    if parts[:1] == [ASSISTANT]:
        del parts[0]
    parts.reverse()
    while parts:
        part = parts.pop()
        if part == CHANNEL and parts and parts[-1] in CHANNELS:
            channel = parts.pop()
        elif part.startswith("to=") and recipient in ("", part[3:]):
            recipient = part[3:]
        elif part == TYPE and parts and parts[-1] in _TYPES:
            parts.pop()
        elif part not in _TYPES:
            return None
    return _Header(channel, recipient)
