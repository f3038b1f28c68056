"""Calls as tags: a name, then a tag around each argument, whose text is typed by the tool's schema.

What Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2 and Seed-OSS have in common; each names its tags in a
file of its own. Knows none of them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aioserve.formats.argument_parser import ArgumentParser
from aioserve.formats.events import Arguments, Call
from aioserve.formats.grammar import Beginning, Function, Literal
from aioserve.formats.reply_format import Reply, dumps
from aioserve.formats.tagged_grammar import tagged_rules
from aioserve.formats.tags import NAME
from aioserve.formats.text import any_of, match_end


class TaggedParser(ArgumentParser):
    """Reads calls between `tags`, which a family names."""

    #: Whether a call may stand alone, without the tags around it; then only of a known tool.
    may_be_bare: ClassVar[bool] = False
    _opening: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "tags"):
            bare = [cls.tags.call[0]] if cls.may_be_bare else []
            cls._opening = any_of([cls.tags.opening, *bare])

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        return "\n".join(tagged_rules(cls.tags, functions, is_parallel, literal))

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        bare = [
            Beginning(literal(f"{cls.tags.call[0]}{each.name}{cls.tags.name_end}"), f"body_{i}")
            for i, each in enumerate(functions if cls.may_be_bare else ())
        ]
        return [Beginning(literal(cls.tags.opening), "unwrapped"), *bare]

    @classmethod
    def write(cls, reply: Reply) -> str:
        if cls._opening.search(reply.content):
            raise ValueError(f"a content with the beginning of a call in it: {reply.content!r}")
        gap = cls.tags.gap if reply.content and reply.calls else ""
        calls = [cls.tags.written(call, cls.said) for call in reply.calls]
        return reply.content + gap + cls.tags.wrapped(calls)

    @classmethod
    def said(cls, value: Any) -> str:
        """A value that is no text, as the chat templates of the family write it."""
        return dumps(value)

    # Around calls

    def begin(self) -> bool:
        return self.read_content(self._opening, self._open)

    def _open(self) -> bool:
        self._num_calls = 0
        self._is_bare = self.marker != self.tags.opening
        self.name: list[str] = []
        is_named = self._is_bare or not self.tags.call[0]
        self.state = self._read_name if is_named else self._between
        return True

    def _between(self) -> bool:
        """A call, or the end of what is around calls."""
        if not self.skip_space():
            return False
        if self._num_calls:
            self.hold()
        found = self.skip_any([self.tags.call[0]], [self.tags.closing])
        if found is None:
            return False
        if found == self.tags.call[0]:
            self.name = []
            self.state = self._read_name
        elif found and self._num_calls:
            self.held = None
            self.state = self.begin
        else:
            self._close()
        return True

    def _close(self) -> None:
        self.give_back()
        self.state = self.begin

    # A call

    def _read_name(self) -> bool:
        if not self.name and not self.skip_space():
            return False
        self.name.append(self.take(match_end(NAME, self.text, self.at)))
        if self.at == len(self.text):
            return False
        self.state = self._after_name
        return True

    def _after_name(self) -> bool:
        found = self.skip_name_end()
        if found is None:
            return False
        name = "".join(self.name).strip()
        if not found or not name or (self._is_bare and name not in self.functions):
            self._close()
            return True
        self.tell([Call(name), Arguments("{")])
        function = self.functions.get(name)
        self.schema: Mapping[str, Any] = {} if function is None else function.parameters
        self.num_values = 0
        self.state = self.next_argument
        return True

    def skip_name_end(self) -> bool | None:
        """Read what ends the name of a call; False if it is not there, None if it may be."""
        return self.skip(self.tags.name_end)

    def next_argument(self) -> bool:
        """An argument, or the end of the call."""
        if not self.skip_space():
            return False
        if self.is_last and self.tags.parameter[0].startswith(self.text[self.at :]):
            self.take(len(self.text))  # the reply was cut
            return False
        self.hold()
        found = self.skip_any([self.tags.parameter[0]], self.tags.call_ends)
        if found is None:
            return False
        if found == self.tags.parameter[0]:
            self.name = []
            self.state = self.read_key
            return True
        if found:
            self.held = None
        self.end_call()
        if found and found != self.tags.closing:
            self.state = self._between
        return True

    def end_call(self) -> None:
        """What is held, as there is no end, is content."""
        self.events.append(Arguments("}"))
        self._num_calls += 1
        self._close()
