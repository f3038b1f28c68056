"""Calls between marks with arguments in a notation that is no JSON: `<mark>[f(a=1)]</mark>`.

The base, and the formats of Gemma 4, LFM2, Olmo 3 and Llama 4. Last, the grammar of arguments,
bound to the schema of a tool: they stand in the order of the properties, or of their names where
the notation sorts them. Bound are types, enums, items, properties, required ones, numbers, lengths
and patterns. What a schema says of several arguments together is not bound.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from aioserve.engine.chat.reply_grammar import (
    ANY,
    Rules,
    json_rule,
    text_until,
    whole_pattern,
)
from aioserve.features.formats import (
    Arguments,
    Beginning,
    Call,
    CallObject,
    CallParser,
    Function,
    Literal,
    Marks,
    Reply,
    any_of,
    match_end,
    repeated,
)
from aioserve.features.formats.call_parser import unstated_signs
from aioserve.features.formats.notation import (
    GEMMA,
    PYTHON,
    Notation,
    NotedArguments,
    noted,
    noted_arguments,
)
from aioserve.features.formats.text import referred

_NAME = re.compile(r"[\w.\-]*")
_SEPARATORS = re.compile(r"[\s,]*")


class NotedCallParser(CallParser):
    """A parser of calls between marks, where objects with a name and arguments are calls, too."""

    notation: ClassVar[Notation] = PYTHON
    #: What begins and ends calls.
    marked: ClassVar[tuple[str, str]]
    #: What stands around all calls between the marks, and between two of them.
    listed: ClassVar[tuple[str, str, str]] = ("[", ", ", "]")
    before_name: ClassVar[str] = ""
    signs = unstated_signs(lambda cls: cls.marked[:1])

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        opening, separator, closing = cls.listed
        each = " | ".join(
            f"{literal(function.name)} arguments_{i}" for i, function in enumerate(functions)
        )
        return "\n".join(
            [
                f"calls: {literal(cls.marked[0])} block",
                f"block: {literal(opening)} {repeated('call', literal(separator), is_parallel)} "
                f"{literal(closing)} {literal(cls.marked[1])}",
                f"call: {literal(cls.before_name)} ({each})",
                *noted_rules(cls.notation, functions, literal),
            ]
        )

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(cls.marked[0]), "block")]

    @classmethod
    def write(cls, reply: Reply) -> str:
        return reply.content + cls.block(reply)

    @classmethod
    def block(cls, reply: Reply) -> str:
        """Return all calls of a reply, with their marks."""
        if not reply.calls:
            return ""
        opening, separator, closing = cls.listed
        calls = separator.join(
            f"{cls.before_name}{call.name}{noted_arguments(cls.notation, call.arguments)}"
            for call in reply.calls
        )
        return f"{cls.marked[0]}{opening}{calls}{closing}{cls.marked[1]}"

    def begin(self) -> bool:
        self.state = self.rest
        return True

    def rest(self) -> bool:
        """State outside of calls: content, up to the mark that begins calls."""
        return self.read_content(any_of(self.marked[:1]), self._open)

    def _open(self) -> bool:
        if not self.skip_space():
            return False
        if self.text[self.at] == "[":
            self.take(self.at + 1)
        self._has_called = False
        self.state = self._next
        return True

    def _next(self) -> bool:
        """Read another call, or the end of the calls."""
        self.take(match_end(_SEPARATORS, self.text, self.at))
        if self.at == len(self.text):
            return False
        is_end = self.skip_end(self.marked[1])
        if is_end is None:
            return False
        is_list_end = not is_end and self.text[self.at] == "]"
        if (is_end or is_list_end) and not self._has_called:
            self._give_up()
        elif is_end:
            self.held = None
            self.state = self.rest
        elif is_list_end:
            self.take(self.at + 1)
            self.held = None
            self.state = self._close
        elif self.text[self.at] == "{" and self.marker:
            self.object = CallObject()
            self.state = self._read_call
        else:
            self._name: list[str] = []
            self.state = self._before_name
        return True

    def _close(self) -> bool:
        if not self.skip_space() or self.skip_end(self.marked[1]) is None:
            return False
        self.state = self.rest
        return True

    def _read_call(self) -> bool:
        return self.read_object(then=self._after_call, otherwise=self.rest)

    def _after_call(self) -> bool:
        self._has_called = True
        self.hold()
        self.state = self._next
        return True

    def _before_name(self) -> bool:
        found = self.skip(self.before_name)
        if found is not None:
            self.state = self._read_name if found else self._give_up
        return found is not None

    def _read_name(self) -> bool:
        self._name.append(self.take(match_end(_NAME, self.text, self.at)))
        if self.at == len(self.text):
            return False
        name = "".join(self._name)
        if self.text[self.at] != self.notation.arguments[0] or not self.is_called(name):
            return self._give_up()
        self.take(self.at + 1)
        self.tell([Call(name)])
        function = self.functions.get(name)
        self._noted = NotedArguments(self.notation, function.parameters if function else {})
        self.state = self._read_noted
        return True

    def is_called(self, name: str) -> bool:
        """Return whether what stands before arguments is a name."""
        return name != ""

    def _read_noted(self) -> bool:
        noted = self._noted
        self.take(noted.feed(self.text, self.at, self.is_last))
        told, noted.told = "".join(noted.told), []
        if told:
            self.events.append(Arguments(told))
        if noted.is_done:
            self.state = self._after_call
        elif noted.is_broken:
            self.state = self.rest
        return noted.is_done or noted.is_broken

    def _give_up(self) -> bool:
        self.give_back()
        self.state = self.rest
        return True


# Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>`, one mark for each call.


class Gemma4Parser(NotedCallParser):
    """The format of Gemma 4, whose template writes keys in sorted order."""

    notation = GEMMA
    marked = ("<|tool_call>", "<tool_call|>")
    listed = ("", "", "")
    before_name = "call:"
    marks = Marks("<|channel>thought", "<channel|>")
    markers = (*marked, *GEMMA.quotes, marks.start, "<|channel>", marks.end)

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        one = super().grammar(functions, False, literal)
        marked = f"marked: {literal(cls.marked[0])} block"
        calls = f"calls: {repeated('marked', literal(''), is_parallel)}"
        return "\n".join([calls, marked, one.partition("\n")[2]])

    @classmethod
    def block(cls, reply: Reply) -> str:
        one = super().block
        return "".join(one(Reply(calls=[call])) for call in reply.calls)


# LFM2: `<|tool_call_start|>[f(a=1, b="x")]<|tool_call_end|>`, calls as Python writes them.


class Lfm2Parser(NotedCallParser):
    """Objects with a name and arguments are read in the list as well."""

    marked = ("<|tool_call_start|>", "<|tool_call_end|>")
    marks = Marks("<think>", "</think>")
    markers = marked
    # Some of its templates write no call, and tell of the tools alone.
    signs = ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: [")


# Olmo 3: `<function_calls>` around lines with one call each, as Python writes it.


class Olmo3Parser(NotedCallParser):
    """The format of Olmo 3, whose template writes `true`, `false`, `null`, and no content beside
    calls.
    """

    notation = PYTHON._replace(words=("true", "false", "null"))
    marked = ("<function_calls>", "</function_calls>")
    listed = ("\n", "\n", "\n")
    markers = marked

    @classmethod
    def write(cls, reply: Reply) -> str:
        return "\n".join(filter(None, [reply.content, cls.block(reply)]))


# Llama 4: `[f(a=1), g(b="x")]` as Python writes it, or JSON as Llama 3, as its template says.
# Without marks a reply is calls from its beginning or not at all; after `<|python_start|>`,
# anywhere.


_START, _END = "<|python_start|>", "<|python_end|>"
_EXAMPLE = re.compile(r"\[func_name1\(\w+=\w+")  # how templates tell the model


class Llama4PythonicParser(NotedCallParser):
    """A parser for Llama 4, and for Llama 3.2 and others, whose templates ask for such calls."""

    notation = PYTHON._replace(quote='"')
    marked = (_START, _END)
    markers = marked

    @classmethod
    def evidence(cls, template: str) -> str | None:
        found = _EXAMPLE.search(template)
        return found.group() if found else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        calls = [f"{literal(each.name)} arguments_{i}" for i, each in enumerate(functions)]
        return "\n".join(
            [
                f'calls: "[" {repeated("call", literal(", "), is_parallel)} "]"',
                f'block: "[" call more {literal(_END)}?',
                'more: (", " call)* "]"',
                f"call: {' | '.join(calls)}",
                *noted_rules(cls.notation, functions, literal),
            ]
        )

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        """Return the mark, and without it a list that begins with the name of a tool."""
        bare = [
            Beginning(rf"/\s*\[\s*{re.escape(each.name)}\(/", f"opened_{i} more", has_text=False)
            for i, each in enumerate(functions)
        ]
        return [Beginning(literal(_START), "block"), *bare]

    @classmethod
    def write(cls, reply: Reply) -> str:
        if not reply.calls:
            return reply.content
        block = cls.block(reply)
        if reply.content:
            return reply.content + block
        return block.removeprefix(_START).removesuffix(_END)

    def begin(self) -> bool:
        """Calls without a mark, or anything else."""
        self.hold()
        self.state = self._first
        return True

    def _first(self) -> bool:
        if not self.skip_space():
            return False
        if self.text[self.at] == "[":
            self.take(self.at + 1)
            self._has_called = False
            self.state = self._next
        else:
            self._give_up()
        return True

    def is_called(self, name: str) -> bool:
        return name in self.functions if self.marker == "" else name != ""


# The grammar of arguments.


MAX_DEPTH = 8  # of schemas that refer to schemas, in one
MAX_NESTED = 40  # schemas in schemas; what is deeper is not bound
MAX_SHARED = 500  # schemas with references or alternatives; further ones are not bound
MAX_FREE = 16  # arguments, or items of a value, of which the schema says nothing
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_COMPOUND = {"$ref", "allOf", "anyOf", "oneOf"}
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated", "$defs"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_TEXTS = {"minLength", "maxLength", "pattern", "format"}


def noted_rules(notation: Notation, functions: Sequence[Function], literal: Literal) -> list[str]:
    """Rules of which `arguments_N` is what stands behind the name of a function: all arguments,
    with what opens and closes them; `opened_N` is the same without what opens them. Raises
    `ValueError` as `Rules.add`.
    """
    rules = Rules()
    for i, function in enumerate(functions):
        bound = _Bound(notation, literal, rules, function.parameters)
        opening, equals, closing = notation.arguments
        said = bound.items(function.parameters, equals, is_outer=True)
        rules.add(f"arguments_{i}: {literal(opening)} opened_{i}")
        rules.add(f"opened_{i}: {said} {literal(closing)}")
    return [*_any_rules(notation, literal), *rules.all]


def _any_rules(notation: Notation, literal: Literal) -> list[str]:
    """Rules of which `any_value` is any value, and `any_text` any text."""
    words = " | ".join(map(literal, dict.fromkeys((*notation.words, "true", "false", "null"))))
    separator, colon = literal(notation.separator), literal(notation.colon)
    key = "ANY_KEY" if notation.has_bare_keys else "any_text"
    if notation.is_escaped:
        text = ["any_text: /\"([^\"\\\\]|\\\\(.|\\n))*\"/ | /'([^'\\\\]|\\\\(.|\\n))*'/"]
    else:
        quote = notation.quote
        text = [f"any_text: {literal(quote)} quoted", text_until("quoted", quote, literal)]
    return [
        *text,
        "any_value: any_text | any_number | any_word | any_list | any_object",
        'any_number: %json {"type": "number"}',
        f"any_word: {words}",
        f'any_list: "[" (any_value ({separator} any_value)*)? "]"',
        f'any_object: "{{" (any_pair ({separator} any_pair)*)? "}}"',
        f"any_pair: {key} {colon} any_value",
        r"ANY_KEY: /[A-Za-z_][A-Za-z0-9_.\-]{0,63}/",
    ]


class _Bound:
    """Rules of the arguments of one function."""

    def __init__(
        self, notation: Notation, literal: Literal, rules: Rules, root: Mapping[str, Any]
    ) -> None:
        self._notation, self._literal, self._rules, self._root = notation, literal, rules, root
        self._names: dict[int, str] = {}  # of rules, by schemas that may come back
        self._kept: list[Mapping[str, Any]] = []  # these schemas, so that their ids stay theirs
        self._parts: dict[tuple[int, int], dict[str, Any]] = {}  # resolved, by schema and depth
        self._depth = 0

    def items(self, schema: Mapping[str, Any], colon: str, *, is_outer: bool = False) -> str:
        """Keys and values of an object, without what is around them."""
        schema = self._resolved(schema)
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        others = schema.get("additionalProperties")
        own = others if isinstance(others, Mapping) else {}
        names = [*properties, *(name for name in required if name not in properties)]
        if self._notation.has_bare_keys:
            names.sort(key=str.lower)
        is_bare = is_outer or self._notation.has_bare_keys
        separator = self._literal(self._notation.separator)
        if not names:
            if others is False:
                return '""'
            key = "ANY_KEY" if is_bare else "any_text"
            pair = f"{key} {self._literal(colon)} {self._value(own)}"
            return f"({pair} ({separator} {pair}){{0,{MAX_FREE - 1}}})?"
        pairs = [
            f"{self._literal((name if is_bare else self._noted(name)) + colon)} "
            f"{self._value(properties.get(name, own))}"
            for name in names
        ]
        return self._in_order(pairs, [name in required for name in names], separator)

    def _in_order(self, pairs: Sequence[str], are_required: Sequence[bool], separator: str) -> str:
        """Return these with separators between them; those that are not required may be left
        out.
        """
        first, later = '""', '""'  # what may follow nothing, and what may follow a pair
        for pair, is_required in reversed(list(zip(pairs, are_required, strict=True))):
            said = self._rule(pair)
            begun, gone_on = f"{said} {later}", f"{separator} {said} {later}"
            first = self._rule(begun if is_required else f"{begun} | {first}")
            later = self._rule(gone_on if is_required else f"{gone_on} | {later}")
        return first

    def _value(self, schema: Any) -> str:
        """Return a value by a schema; any value where schemas go too deep, or are too many."""
        if not isinstance(schema, Mapping) or self._depth > MAX_NESTED:
            return "any_value"
        self._depth += 1
        try:
            return self._shared(schema) if schema.keys() & _COMPOUND else self._plain(schema)
        finally:
            self._depth -= 1

    def _shared(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for a schema that may come back in itself."""
        if id(schema) not in self._names:
            if len(self._names) > MAX_SHARED:
                return "any_value"
            name = self._rules.name("shared")
            self._names[id(schema)] = name
            self._kept.append(schema)
            self._rules.add(f"{name}: {self._compound(schema)}")
        return self._names[id(schema)]

    def _compound(self, schema: Mapping[str, Any]) -> str:
        reference = schema.get("$ref")
        if isinstance(reference, str) and not schema.keys() - {"$ref", *_ANNOTATIONS}:
            return self._value(referred(reference, self._root))
        schema = self._resolved(schema)
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                rest = {n: each for n, each in schema.items() if n not in (key, *_ANNOTATIONS)}
                forms = [
                    {**rest, **each} if rest and isinstance(each, Mapping) else each
                    for each in schema[key]
                ]
                return f"({' | '.join(map(self._value, forms))})"
        return self._plain(schema)

    def _plain(self, schema: Mapping[str, Any]) -> str:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return f"({' | '.join(self._sayable(values))})"
        kinds = schema.get("type") or _implied(schema)
        if not kinds:
            return "any_value"
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return f"({' | '.join(self._typed(kind, schema) for kind in kinds)})"

    def _typed(self, kind: str, schema: Mapping[str, Any]) -> str:
        """Return a value of one type."""
        match kind:
            case "string":
                return self._text(schema)
            case "number" | "integer":
                own = {key: schema[key] for key in _OF_NUMBERS & schema.keys()}
                return self._rule(json_rule({"type": kind, **own}))
            case "boolean":
                return f"({' | '.join(map(self._literal, self._notation.words[:2]))})"
            case "null":
                words = dict.fromkeys((self._notation.words[2], "null"))
                return f"({' | '.join(map(self._literal, words))})"
            case "array":
                return self._list(schema)
        return f'"{{" {self.items(schema, self._notation.colon)} "}}"'

    def _list(self, schema: Mapping[str, Any]) -> str:
        item, separator = self._value(schema.get("items")), self._literal(self._notation.separator)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        said = f"{item} ({separator} {item}){more}"
        return f'"[" {said} "]"' if least else f'"[" ({said})? "]"'

    def _text(self, schema: Mapping[str, Any]) -> str:
        own = {key: schema[key] for key in _OF_TEXTS & schema.keys()}
        if not own:
            return "any_text"
        length = f"{{{own.get('minLength', 0)},{own.get('maxLength', '')}}}"
        if self._notation.is_escaped:
            as_json = self._rule(json_rule({"type": "string", **own}))
            if "format" in own:
                return as_json
            terms = [f"/'[^'\\\\\\n]{length}'/"]
            if "pattern" in own:
                terms.append(f"/'{whole_pattern(own['pattern'])}'/")
            return f"({self._terminal(terms)} | {as_json})"
        opening, closing = self._literal(self._notation.quote), ""
        if opening.startswith("<"):  # a special token, which is in no text
            terms, closing = [f"/(.|\\n){length}/"], opening
        else:
            closed = re.escape(self._notation.quote)
            terms = [f"/(.|\\n){length}{closed}/", f"~/{ANY}{closed}(.|\\n)+/"]
        if "pattern" in own:
            end = "" if closing else closed
            terms.append(f"/{whole_pattern(own['pattern'])}{end}/")
        return f"({opening} {self._terminal(terms)} {closing})"

    def _resolved(self, schema: Any, depth: int = MAX_DEPTH) -> dict[str, Any]:
        """Return the schema with what it refers to, and all of `allOf`, in it."""
        if not isinstance(schema, Mapping) or not depth:
            return {}
        found = {key: each for key, each in schema.items() if key not in ("allOf", "$ref")}
        parts = [*(schema.get("allOf") or ())]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(referred(reference, self._root))
        for part in parts:
            own = self._part(part, depth - 1)
            properties = {**(found.get("properties") or {}), **(own.get("properties") or {})}
            required = dict.fromkeys([*(found.get("required") or ()), *(own.get("required") or ())])
            found = {**found, **own}
            found |= {"properties": properties} if properties else {}
            found |= {"required": [*required]} if required else {}
        return found

    def _part(self, part: Any, depth: int) -> dict[str, Any]:
        """Return a part of the client's own schema, resolved; once, since many parts may refer to
        it.
        """
        key = id(part), depth
        if key not in self._parts:
            self._parts[key] = self._resolved(part, depth)
        return self._parts[key]

    def _sayable(self, values: Sequence[Any]) -> list[str]:
        """Return those of some values that the notation can say."""
        said = []
        for value in values:
            with suppress(ValueError):
                said.append(self._literal(self._noted(value)))
        return said or ["any_value"]

    def _noted(self, value: Any) -> str:
        return noted(self._notation, value)

    def _rule(self, right: str) -> str:
        name = self._rules.name("noted")
        self._rules.add(f"{name}: {right}")
        return name

    def _terminal(self, terms: Sequence[str]) -> str:
        """Return the name of a new rule for texts that match all of `terms`, which are patterns."""
        name = self._rules.name("TEXT")
        self._rules.add(f"{name}: {' & '.join(terms)}")
        return name


def _implied(schema: Mapping[str, Any]) -> Sequence[str]:
    """Return the types that a schema without a type is about; none if it is about any."""
    if schema.keys() & {"properties", "required", "additionalProperties"}:
        return ("object",)
    if schema.keys() & {"items", "minItems", "maxItems"}:
        return ("array",)
    return _TYPES if schema.keys() & (_OF_NUMBERS | _OF_TEXTS) else ()
