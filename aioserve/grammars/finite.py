"""Whether a JSON schema allows any finite value, and where it does not.

A schema whose values all hold a value of the same schema allows none that ends: a reply bound to it
would go on until it is cut. Knows `$ref` within the document, and the keywords that need a value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

#: Rounds over all references: each settles what needs those before. Schemas need one or two.
MAX_ROUNDS = 8
MAX_DEPTH = 100


def endless_reference(schema: Mapping[str, Any]) -> str | None:
    """The first `$ref` of which no value is finite and without which `schema` has none; None if it
    allows a finite value, or more rounds or depth than there are bounds for would show it.
    """
    if '"$ref"' not in repr(schema).replace("'", '"'):
        return None
    return _Search(schema).blocked()


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
        if isinstance(ref := schema.get("$ref"), str) and (found := self._follow(ref, depth)):
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
    for part in _listed(schema, "allOf"):
        yield part
    if schema.get("type", "object") == "object":
        properties = schema.get("properties")
        for name in _listed(schema, "required"):
            if isinstance(properties, dict) and isinstance(name, str) and name in properties:
                yield properties[name]
            elif schema.get("type") == "object":
                yield schema.get("additionalProperties")
    if schema.get("type") == "array":
        first, least = _listed(schema, "prefixItems"), schema.get("minItems", 0)
        least = least if isinstance(least, int) else 0
        yield from first[:least]
        if least > len(first):
            yield schema.get("items")


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
