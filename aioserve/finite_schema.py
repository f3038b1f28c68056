"""Whether a JSON schema allows any finite value, and where it does not.

A schema whose values all hold a value of the same schema allows none that ends: a reply bound to it
would go on until it is cut. Knows `$ref` within the document, and the keywords that need a value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

#: Rounds over all references: each settles what needs those before. Schemas need one or two.
MAX_ROUNDS = 8
MAX_DEPTH = 100


def check_finite(schema: Mapping[str, Any]) -> None:
    """Raises `ValueError` that names the `$ref` which every value of `schema` follows without end.

    What more than `MAX_ROUNDS` or `MAX_DEPTH` would show passes.
    """
    if (ref := _Search(schema).blocked()) is not None:
        raise ValueError(f"no value of the schema is finite: {ref!r} always holds another of it")


class _Search:
    """Which references of one document have finite values, as far as is known."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._finite: set[str] = set()  # references that have a finite value
        self._open: set[str] = set()  # those that are looked at, in this round or right now

    def blocked(self) -> str | None:
        for _ in range(MAX_ROUNDS):
            known = len(self._finite)
            self._open.clear()
            found = self._blocked(self._root, 0)
            if found is None or len(self._finite) == known:
                return found
        return None

    def _blocked(self, schema: Any, depth: int) -> str | None:
        """The reference for which no finite value is known; None if there is one."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        if "const" in schema or "enum" in schema:
            return None
        ref = schema.get("$ref")
        if isinstance(ref, str) and (found := self._follow(ref, depth)) is not None:
            return found
        for name in ("anyOf", "oneOf"):
            options = schema.get(name)
            if isinstance(options, list) and options:
                blocks = [self._blocked(option, depth + 1) for option in options]
                if all(blocks):
                    return blocks[0]
        return next(filter(None, (self._blocked(s, depth + 1) for s in _needed(schema))), None)

    def _follow(self, ref: str, depth: int) -> str | None:
        if ref in self._finite:
            return None
        if ref in self._open:
            return ref
        self._open.add(ref)
        found = self._blocked(_at(self._root, ref), depth + 1)
        if found is None:
            self._finite.add(ref)
        return found


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of which every value of `schema` holds a value, or which it fits as well."""
    yield from _listed(schema, "allOf")
    if schema.get("type") == "object":
        properties, names = schema.get("properties"), _listed(schema, "required")
        properties = properties if isinstance(properties, dict) else {}
        yield from (properties[n] for n in names if isinstance(n, str) and n in properties)
        if not properties and (names or _least(schema, "minProperties")):
            yield schema.get("additionalProperties")
    elif schema.get("type") == "array":
        first, least = _listed(schema, "prefixItems"), _least(schema, "minItems")
        yield from first[:least]
        if least > len(first):
            yield schema.get("items")


def _least(schema: Mapping[str, Any], name: str) -> int:
    found = schema.get(name)
    return max(found, 0) if isinstance(found, int) else 0


def _listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _at(root: Any, ref: str) -> Any:
    """What a reference within the document names; None for any other, which may hold values."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    for step in ref.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = root[int(step)] if step.isdigit() and int(step) < len(root) else None
        else:
            root = root.get(step) if isinstance(root, dict) else None
    return root
