"""Pieces of text that parsers here share: space, markers, JSON values, and text made JSON.

A marker may begin at the end of a piece, and a value go on in the next one: every character is
looked at once. Knows no format.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

import msgspec

from aioserve.engine.chat.reply_format import SPACE


def skip_space(text: str, start: int) -> int:
    """Return where the next character stands that is no space, or the length of `text`."""
    while start < len(text) and text[start] in SPACE:
        start += 1
    return start


def match_end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Return where `pattern`, which may match nothing, ends that begins at `text[start]`."""
    match = pattern.match(text, start)
    assert match is not None, "the pattern matches nothing, too"
    return match.end()


def any_of(markers: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds the first of them."""
    return re.compile("|".join(map(re.escape, markers)))


# Where a JSON value ends, found as its text comes: every character is looked at once. Knows strings
# and brackets, no more: what stands inside of them is not judged.


# What stands outside of strings: all else, as the "<" of a marker, shows that the value is broken.
_PLAIN = re.compile(r"[\w\s+\-.,:]*", re.ASCII)
_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[\w+\-.]*", re.ASCII)


class JsonValue:
    """One value. `feed` it text until it `is_done`; `is_broken` if no JSON goes on like that."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False

    def feed(self, text: str, start: int) -> int:
        """Read on from `text[start]`. Returns where the value ends, or the length of `text`."""
        i = start
        while i < len(text) and not self.is_done:
            if self._is_escaped:
                self._is_escaped = False
                i += 1
            elif self._in_string:
                i = self._in_string_end(text, i)
            elif self._is_scalar:
                i = match_end(_SCALAR, text, i)
                self.is_done = i < len(text)
            else:
                i = self._next(text, i)
        return i

    def finish(self) -> None:
        """Nothing more comes: a number is over, all else is broken."""
        if not self.is_done:
            self.is_done, self.is_broken = True, not self._is_scalar

    def _in_string_end(self, text: str, i: int) -> int:
        i = match_end(_IN_STRING, text, i)
        if i == len(text):
            return i
        if text[i] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_done = self._depth == 0
        return i + 1

    def _next(self, text: str, i: int) -> int:
        if self._depth:
            i = match_end(_PLAIN, text, i)
            if i == len(text):
                return i
        char = text[i]
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            self.is_done = self._depth == 0
        elif not self._depth and _SCALAR.fullmatch(char):
            self._is_scalar = True
        else:
            self.is_done = self.is_broken = True
            return i
        return i + 1


# Arguments that a model writes as plain text, made JSON by the schema of the tool. For formats that
# write `<parameter=city>Paris</parameter>` and leave the type to the reader. Knows JSON schemas as
# far as they say types. Knows no format.


_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates print them
MAX_DEPTH = 16  # of schemas that refer to schemas
MAX_FORMS = 32  # of one schema
_COMPOUND = {"$ref", "anyOf", "oneOf", "allOf"}


def typed_json(text: str, schema: Mapping[str, Any], name: str) -> str:
    """Return the JSON text of the argument `name`, which the model wrote as `text`; `schema` is
    that of all arguments of the tool.

    A text of a type that the schema allows is that value: 5, true, null, [1] or {"a": 1}. All else
    is a string, and so is every text where the schema wants a string alone. Where the schema does
    not say a type, what reads as JSON is JSON.
    """
    types = argument_types(schema, name)
    if types == {"string"}:
        return _string(text)
    read = text.strip()
    found = type_of(read := _PYTHON.get(read, read))
    if found is None and read[:1] in ("[", "{") and "string" not in types:
        found = type_of(read := _from_python(read))
    if found is None or found == "string" or not _fits(found, read, types):
        return _string(text)
    if found == "number" and "number" not in types and types:
        return str(int(float(read)))  # 5.0, where an integer is wanted
    return read


def _from_python(text: str) -> str:
    """JSON of a list or a dictionary that a template has printed as Python does, as it was if it is
    none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def argument_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the names of the JSON types that a schema of arguments allows for one; empty: any
    type.
    """
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    if own is None:
        own = schema.get("additionalProperties")
    return set(_types(own, schema)) if isinstance(own, Mapping) else set()


def forms(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas of which a value fits one if it fits `schema`, without references and
    without `anyOf`, `oneOf` and `allOf`: at most `MAX_FORMS`. `root` is what references refer to.
    """
    return _forms(schema, root, {}, MAX_DEPTH)


def _forms(
    schema: Mapping[str, Any], root: Mapping[str, Any], known: dict[int, Any], depth: int
) -> list[dict[str, Any]]:
    """As `forms`; each schema is looked at once, since it is a client that wrote them: `known` are
    those of the schemas that were, by `id`.
    """
    if id(schema) in known:
        return list(known[id(schema)])
    found = [{key: value for key, value in schema.items() if key not in _COMPOUND}]
    known[id(schema)] = found  # for one that refers to itself
    choices = [[each] for each in schema.get("allOf") or ()]
    choices += [list(schema[key]) for key in ("anyOf", "oneOf") if schema.get(key)]
    if isinstance(reference := schema.get("$ref"), str):
        choices.append([referred(reference, root)])
    for each in choices if depth else ():
        some = [one for one in each if isinstance(one, Mapping)]
        inner = [form for one in some for form in _forms(one, root, known, depth - 1)]
        found = [_merged(a, b) for a, b in islice(product(found, inner), MAX_FORMS)] or found
    known[id(schema)] = found
    return found


def _merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    both = {**a, **b}
    if "properties" in both:
        both["properties"] = {**(a.get("properties") or {}), **(b.get("properties") or {})}
    if "required" in both:
        both["required"] = [
            *dict.fromkeys([*(a.get("required") or ()), *(b.get("required") or ())])
        ]
    return both


def type_of(text: str) -> str | None:
    """Return the name of the JSON type of a text; None if it is no JSON."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return "null" if value is None else _NAMES.get(type(value), "object")


def _fits(found: str, text: str, types: set[str]) -> bool:
    if not types or found in types or (found == "integer" and "number" in types):
        return True
    return found == "number" and "integer" in types and float(text).is_integer()


def _types(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types that a schema names, in what it refers to as well; each schema is looked at
    once, since a client may send one that refers to itself ten times.
    """
    todo, seen = [schema], set()
    while todo:
        each = todo.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        yield from _own_types(each)
        for key in ("anyOf", "oneOf", "allOf"):
            todo += each.get(key) or ()
        if isinstance(reference := each.get("$ref"), str):
            todo.append(referred(reference, root))


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type")
    if named is not None:
        return [named] if isinstance(named, str) else list(named)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return ["null" if value is None else _NAMES.get(type(value), "object") for value in values]


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a `$ref` refers to in the schema `root`; None if that is not in it."""
    found: Any = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
