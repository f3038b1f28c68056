"""Calls as tags: a name, then a tag around each argument, whose text is typed by the tool's schema.

What Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2 and Seed-OSS have in common; each names its tags in a
file of its own. Knows none of them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aioserve.formats.call_parser import CallParser
from aioserve.formats.events import Arguments, Call
from aioserve.formats.grammar import Beginning, Function, Literal
from aioserve.formats.json_value import JsonValue
from aioserve.formats.reply_format import Reply, dumps
from aioserve.formats.tagged_grammar import tagged_rules
from aioserve.formats.tags import NAME, Tags
from aioserve.formats.text import any_of, match_end, overlap
from aioserve.formats.typed_text import argument_types, typed_json

_JSON_BEGINS = frozenset('{["-0123456789tfnTFN')


class TaggedParser(CallParser):
    """Reads calls between `tags`. A text is streamed as it comes, any other argument when its tag
    has ended: at the first end of a tag; for an object or an array, at the first one behind it.
    """

    tags: ClassVar[Tags]
    #: Whether a call may stand alone, without the tags around it; then only of a known tool.
    may_be_bare: ClassVar[bool] = False
    _opening: ClassVar[re.Pattern[str]]
    _value_end: ClassVar[re.Pattern[str]]
    _value_ends: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "tags"):
            return
        tags = cls.tags
        cls.markers = tags.markers
        cls._opening = any_of([tags.opening, *([tags.call[0]] if cls.may_be_bare else [])])
        lines = ("\n", "") if tags.has_lines else ("",)
        cls._value_ends = tuple(line + tags.value_end for line in lines)
        cls._value_end = any_of(cls._value_ends)

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
        self._name: list[str] = []
        is_named = self._is_bare or not self.tags.call[0]
        self.state = self._read_name if is_named else self._between
        return True

    def _between(self) -> bool:
        """A call, or the end of what is around calls."""
        if not self.skip_space():
            return False
        if self._num_calls:
            self.hold()
        found = self._skip_any([self.tags.call[0]], [self.tags.closing])
        if found is None:
            return False
        if found == self.tags.call[0]:
            self._name = []
            self.state = self._read_name
        elif found and self._num_calls:
            self.held = None
            self.state = self.begin
        else:
            self._close()
        return True

    def _skip_any(self, texts: Sequence[str], ends: Sequence[str]) -> str | None:
        """Read one of these; empty if none is there, None if what is there may become one."""
        is_open = False
        for text in (*texts, *ends):
            found = self.skip_end(text) if text in ends else self.skip(text)
            if found:
                return text
            is_open |= found is None
        return None if is_open else ""

    def _close(self) -> None:
        self.give_back()
        self.state = self.begin

    # A call

    def _read_name(self) -> bool:
        self._name.append(self.take(match_end(NAME, self.text, self.at)))
        if self.at == len(self.text):
            return False
        self.state = self._after_name
        return True

    def _after_name(self) -> bool:
        found = self.skip_name_end()
        if found is None:
            return False
        name = "".join(self._name).strip()
        if not found or not name or (self._is_bare and name not in self.functions):
            self._close()
            return True
        self.tell([Call(name), Arguments("{")])
        function = self.functions.get(name)
        self._schema: Mapping[str, Any] = {} if function is None else function.parameters
        self._num_values = 0
        self.state = self._next
        return True

    def skip_name_end(self) -> bool | None:
        """Read what ends the name of a call; False if it is not there, None if it may be."""
        return self.skip(self.tags.name_end)

    def _next(self) -> bool:
        """An argument, or the end of the call."""
        if not self.skip_space():
            return False
        if self.is_last and self.tags.parameter[0].startswith(self.text[self.at :]):
            self.take(len(self.text))  # the reply was cut
            return False
        self.hold()
        found = self._skip_any([self.tags.parameter[0]], self.tags.call_ends)
        if found is None:
            return False
        if found == self.tags.parameter[0]:
            self._name = []
            self.state = self._read_key
            return True
        if found:
            self.held = None
        self._end_call()
        if found and found != self.tags.closing:
            self.state = self._between
        return True

    def _end_call(self) -> None:
        """What is held, as there is no end, is content."""
        self.events.append(Arguments("}"))
        self._num_calls += 1
        self._close()

    # An argument

    def _read_key(self) -> bool:
        self._name.append(self.take(match_end(NAME, self.text, self.at)))
        if self.at == len(self.text):
            return self._is_cut()
        self.state = self._after_key
        return True

    def _is_cut(self) -> bool:
        """At the end of a reply, what was begun is no content. Returns that more text is needed."""
        if self.is_last:
            self.held = None
        return False

    def _after_key(self) -> bool:
        found = self._skip_any(self.tags.read_middles, [])
        name = "".join(self._name).strip()
        if found is None:
            return False
        if self.is_last and any(
            each.startswith(self.text[self.at :]) for each in self.tags.read_middles
        ):
            self.take(len(self.text))
            return self._is_cut()
        if not found or not name:
            self._end_call()
            return True
        self.held = None
        between = ", " if self._num_values else ""
        self.events.append(Arguments(f"{between}{dumps(name)}: "))
        self._num_values += 1
        self._key, self._types = name, argument_types(self._schema, name)
        if self.tags.middles is not None and found in self.tags.middles:
            self._types = {"string"} if found == self.tags.middles[0] else self._types - {"string"}
        self._value: list[str] = []
        self.state = self._begin_value
        return True

    def _begin_value(self) -> bool:
        if self.at == len(self.text):
            return False
        if self.tags.has_lines and self.text[self.at] == "\n":
            self.take(self.at + 1)
        if self._types == {"string"}:
            self._begin_text()
        else:
            self.state = self._see_value
        return True

    def _see_value(self) -> bool:
        """Whether it is a text for sure, or an object or an array."""
        start = self.at
        is_seen = self.skip_space()
        self._value.append(self.text[start : self.at])
        if not is_seen:
            return False
        char, may_be_text = self.text[self.at], not self._types or "string" in self._types
        if may_be_text and char not in _JSON_BEGINS:
            self._begin_text()
        elif char in "{[" and not may_be_text:
            self.value = JsonValue()
            self.state = self._read_json
        else:
            self.state = self._read_value
        return True

    def _begin_text(self) -> None:
        self._tell_text('"', "".join(self._value))
        self.state = self._read_text

    def _tell_text(self, before: str, text: str, after: str = "") -> None:
        self.events.append(Arguments(f"{before}{dumps(text)[1:-1]}{after}"))

    def _read_text(self) -> bool:
        text, is_ended = self._take_value()
        if text or is_ended:
            self._tell_text("", text, '"' if is_ended else "")
        if is_ended:
            self.state = self._next
        return is_ended

    def _read_json(self) -> bool:
        """An object or an array, up to its own end: in its strings there may be any tag."""
        self._value.append(self.take(self.value.feed(self.text, self.at)))
        if not (self.value.is_done or self.is_last):
            return False
        if self.value.is_broken or not self.value.is_done:
            # It is none: read it again, up to the tag.
            self.text, self.at = "".join(self._value) + self.text[self.at :], 0
            self._value = []
        self.state = self._read_value
        return True

    def _read_value(self) -> bool:
        text, is_ended = self._take_value()
        self._value.append(text)
        if not is_ended and not self.is_last:
            return False
        whole = "".join(self._value)
        if is_ended:
            whole = typed_json(whole, self._schema, self._key)
            self.state = self._next
        self.events.append(Arguments(whole))
        return is_ended

    def _take_value(self) -> tuple[str, bool]:
        """More of a value, and whether it has ended, with its tag."""
        found = self._value_end.search(self.text, self.at)
        if found is not None:
            text = self.take(found.start())
            self.take(found.end())
            return text, True
        held = 0 if self.is_last else overlap(self.text, self._value_ends, self.at)
        return self.take(len(self.text) - held), False
