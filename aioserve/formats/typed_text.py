"""Arguments that a model writes as plain text, made JSON by the schema of the tool.

For formats that write `<parameter=city>Paris</parameter>` and leave the type to the reader. Knows
JSON schemas as far as they say types. Knows no format.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates print them
MAX_DEPTH = 16  # of schemas that refer to schemas


def typed_json(text: str, schema: Mapping[str, Any], name: str) -> str:
    """The JSON text of the argument `name`, which the model wrote as `text`; `schema` is that of
    all arguments of the tool.

    A text of a type that the schema allows is that value: 5, true, null, [1] or {"a": 1}. All else
    is a string, and so is every text where the schema wants a string alone. Where the schema does
    not say a type, what reads as JSON is JSON.
    """
    types = argument_types(schema, name)
    if types == {"string"}:
        return _string(text)
    read = text.strip()
    found = type_of(read := _PYTHON.get(read, read))
    if found is None or found == "string" or not _fits(found, read, types):
        return _string(text)
    if found == "number" and "number" not in types and types:
        return str(int(float(read)))  # 5.0, where an integer is wanted
    return read


def argument_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """The names of the JSON types that a schema of arguments allows for one; empty: any type."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    if own is None:
        own = schema.get("additionalProperties")
    return set(_types(own, schema, MAX_DEPTH)) if isinstance(own, Mapping) else set()


def type_of(text: str) -> str | None:
    """The name of the JSON type of a text; None if it is no JSON."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return "null" if value is None else _NAMES.get(type(value), "object")


def _fits(found: str, text: str, types: set[str]) -> bool:
    if not types or found in types or (found == "integer" and "number" in types):
        return True
    return found == "number" and "integer" in types and float(text).is_integer()


def _types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The types that a schema names, in what it refers to as well."""
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (each for each in named if isinstance(each, str))
    else:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        for value in values if isinstance(values, list) else []:
            yield "null" if value is None else _NAMES.get(type(value), "object")
    inner = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or ()]
    if isinstance(reference := schema.get("$ref"), str):
        inner.append(_referred(reference, root))
    for each in inner if depth else ():
        if isinstance(each, Mapping):
            yield from _types(each, root, depth - 1)


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
