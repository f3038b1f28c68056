"""Whether a JSON schema is one, as far as its shape tells, and where it is not.

Loaded with the first tool. Knows the keywords that hold schemas or are of one type; others may hold
what they like. What a schema means is the business of its compiler.
"""

from collections.abc import Mapping
from typing import Any

from aioserve.errors import RequestError

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_IN_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_KINDS: Mapping[str, tuple[type, str]] = {
    "required": (list, "a list of names"),
    "enum": (list, "a list"),
    "$ref": (str, "a text"),
    "pattern": (str, "a text"),
    "format": (str, "a text"),
}
MAX_DEPTH = 100


def check_schema(schema: Any, path: str, depth: int = 0) -> None:
    """Raises `RequestError` with the path, below `path`, of what is wrong."""
    if isinstance(schema, bool) and depth:
        return
    if not isinstance(schema, dict):
        raise _error(path, "a schema, which is an object", schema)
    if depth == MAX_DEPTH:
        raise RequestError(f"the schema is nested deeper than {MAX_DEPTH}", param=path)
    types = schema.get("type", "object")
    for kind in types if isinstance(types, list) else [types]:
        if kind not in _TYPES:
            raise _error(f"{path}.type", f"one of {', '.join(_TYPES)}", kind)
    for name, (expected, words) in _KINDS.items():
        if name in schema and not isinstance(schema[name], expected):
            raise _error(f"{path}.{name}", words, schema[name])
    for name in schema.get("required", ()):
        if not isinstance(name, str):
            raise _error(f"{path}.required", "a list of names", name)
    for name in _IN_MAPPINGS:
        parts = schema.get(name, {})
        if not isinstance(parts, dict):
            raise _error(f"{path}.{name}", "an object of schemas", parts)
        for key, part in parts.items():
            check_schema(part, f"{path}.{name}.{key}", depth + 1)
    for name in _IN_LISTS:
        listed = schema.get(name, [])
        if not isinstance(listed, list):
            raise _error(f"{path}.{name}", "a list of schemas", listed)
        for i, part in enumerate(listed):
            check_schema(part, f"{path}.{name}[{i}]", depth + 1)
    for name in _SINGLE:
        if name in schema:
            check_schema(schema[name], f"{path}.{name}", depth + 1)
    items = schema.get("items", True)
    for i, part in enumerate(items if isinstance(items, list) else [items]):
        check_schema(part, f"{path}.items" + f"[{i}]" * isinstance(items, list), depth + 1)


def _error(path: str, expected: str, got: Any) -> RequestError:
    shown = repr(got)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
    return RequestError(f"{path} must be {expected}, got {shown}", param=path)
