"""Calls in brackets: `[call get_weather]{"city": "Rome"}[/call]`, anywhere in a text."""

import re
from collections.abc import Sequence

from aioserve.features.formats import (
    Beginning,
    Call,
    CallParser,
    Function,
    JsonValue,
    Literal,
    Reply,
    any_of,
    dumps,
    json_rule,
    match_end,
    repeated,
)

_OPEN, _CLOSE = "[call ", "[/call]"
_OPENING = any_of([_OPEN])
_NAME = re.compile(r"[^\]\n]*")


class BracketFormat(CallParser):
    """What is in brackets and names no tool is content, brackets and all."""

    markers = (_OPEN, _CLOSE)
    signs = (_OPEN,)

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        rules = [
            f"calls: {repeated('call', literal(''), is_parallel)}",
            f"call: {literal(_OPEN)} opened",
            f"opened: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
        ]
        for i, function in enumerate(functions):
            begun = literal(f"{function.name}]")
            rules.append(f"call_{i}: {begun} arguments_{i} {literal(_CLOSE)}")
            rules.append(f"arguments_{i}: {json_rule(function.parameters)}")
        return "\n".join(rules)

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(_OPEN), "opened")]

    @classmethod
    def write(cls, reply: Reply) -> str:
        calls = [f"{_OPEN}{call.name}]{dumps(call.arguments)}{_CLOSE}" for call in reply.calls]
        return reply.content + "".join(calls)

    # States: each reads on from self.text[self.at], and says whether the next one can go on.

    def begin(self) -> bool:
        return self.read_content(_OPENING, self._open)

    def _open(self) -> bool:
        self._name: list[str] = []
        self.state = self._read_name
        return True

    def _read_name(self) -> bool:
        self._name.append(self.take(match_end(_NAME, self.text, self.at)))
        if self.at == len(self.text):
            return False  # the name may go on
        if self.text[self.at] == "]" and "".join(self._name) in self.functions:
            self.take(self.at + 1)
            self.state = self._before_arguments
        else:
            self._give_up()
        return True

    def _before_arguments(self) -> bool:
        if not self.skip_space():
            return False
        if self.text[self.at] == "{":
            self.tell([Call("".join(self._name))])  # from here on it is a call
            self.value = JsonValue()
            self.state = self._read_arguments
        else:
            self._give_up()
        return True

    def _read_arguments(self) -> bool:
        return self.read_arguments(then=self._close)

    def _close(self) -> bool:
        if not self.skip_space() or self.skip_end(_CLOSE) is None:
            return False
        self.state = self.begin
        return True

    def _give_up(self) -> None:
        self.give_back()  # what was held since the mark is content
        self.state = self.begin
