"""Grammars of calls as tags: every argument bound to its schema, as the text that is in its tag.

Arguments stand in the order of the schema's properties. JSON is bound by llguidance, texts here: to
what they may be, their length, their pattern. Not bound are the `format` of a text, and what a
schema says of several arguments together.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aioserve.formats.grammar import (
    ANY,
    Function,
    Literal,
    Rules,
    json_rule,
    repeated,
    split_literal,
    text_until,
    whole_pattern,
)
from aioserve.formats.tags import NAME, Tags
from aioserve.formats.typed_text import argument_types, forms

MAX_LENGTH = 2_000  # characters of a text, up to which a schema's `maxLength` is bound
MAX_FREE = 16  # arguments of a tool whose schema names none
_PYTHON = (("boolean", "True"), ("boolean", "False"), ("null", "None"))
_NESTED = ["object", "array"]
_OTHERS = [*_NESTED, "integer", "number", "boolean", "null"]  # types that are no text
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated"}
_BOUNDS = ("minLength", "maxLength", "pattern")
# What may be read as a list or an object where the schema allows texts as well.
_LIKE_JSON = rf"\s*[\[{{]{ANY}"


def tagged_rules(
    tags: Tags, functions: Sequence[Function], is_parallel: bool, literal: Literal
) -> list[str]:
    """Rules of which `calls` is one call or several; `unwrapped` is what follows the opening, and
    `body_0` what follows the name of the first function. Raises `ValueError` as `Rules.add`.
    """
    lead, separator = tags.wrapper[0][len(tags.opening) :], literal(tags.separator)
    calls = repeated("call", separator, is_parallel and tags.is_block)
    rules = [
        f"calls: {repeated('wrapped', separator, is_parallel and not tags.is_block)}",
        f"wrapped: {literal(tags.opening)} unwrapped",
        f"unwrapped: {literal(lead)} {calls} {literal(tags.wrapper[1])}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
        text_until("text", tags.value_end, literal),
    ]
    bodies = Rules()
    for i, function in enumerate(functions):
        named = literal(f"{tags.call[0]}{function.name}{tags.name_end}")
        bodies.add(f"call_{i}: {named} body_{i}")
        _Body(tags, literal, i, bodies).add(function.parameters)
    return [*rules, *bodies.all]


class _Body:
    """The rules of what follows the name of one function."""

    def __init__(self, tags: Tags, literal: Literal, number: int, rules: Rules) -> None:
        self._tags, self._literal, self._number, self._rules = tags, literal, number, rules

    def add(self, schema: Mapping[str, Any]) -> None:
        """Add `body_N` and all that it refers to to the rules."""
        before = self._literal(self._tags.call[1][len(self._tags.name_end) :])
        bodies = " | ".join(self._arguments(each) for each in forms(schema, schema))
        end = self._literal(self._tags.call[2])
        self._rules.add(f"body_{self._number}: {before} ({bodies}) {end}")

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        """All arguments, in the order of the properties, by one form of the schema."""
        properties, required = schema.get("properties"), schema.get("required") or ()
        names = [
            each
            for each in dict.fromkeys([*(properties or ()), *required])
            if (properties or {}).get(each) is not False and each.strip() and NAME.fullmatch(each)
        ]
        before = self._tags.parameter[0]
        if not names and properties is None and schema.get("additionalProperties") is not False:
            free = rf'{self._literal(before)} /[^<>"\n]{{1,64}}/ {self._value(schema, "")}'
            return f"({free}){{0,{MAX_FREE}}}"
        said = [
            f"({self._literal(before + name)} {self._value(schema, name)})"
            + ("" if name in required else "?")
            for name in names
        ]
        return " ".join(said) or '""'

    def _value(self, root: Mapping[str, Any], name: str) -> str:
        """What follows the name of an argument, up to the next."""
        own = (root.get("properties") or {}).get(name, root.get("additionalProperties"))
        schema = own if isinstance(own, Mapping) else {}
        kinds = argument_types(root, name)
        definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        if kinds and "string" not in kinds:
            return self._told([], self._json([schema], definitions))
        if not kinds and not schema.keys() - _ANNOTATIONS and self._tags.middles is None:
            return self._told(["text"], [])  # whatever it is read as
        found = forms(schema, root)
        # Numbers, true and null are texts here: whatever is read is of a type that is allowed.
        is_plain = self._tags.middles is not None or (
            bool(kinds) and not kinds & {"array", "object"}
        )
        texts = self._texts(found, is_plain)
        is_free = any(each.startswith(("text", "TEXT")) for each in texts)
        types = _NESTED if is_free and self._tags.middles is None else _OTHERS
        return self._told(
            texts, self._json([_without_texts(form, types) for form in found], definitions)
        )

    def _json(
        self, schemas: Sequence[Mapping[str, Any]], definitions: Mapping[str, Any]
    ) -> list[str]:
        """Right sides of rules for JSON that fits one of `schemas`, and for Python's words that
        stand for it.
        """
        schemas = [schema for schema in schemas if schema]
        words = []
        for form in forms({"anyOf": schemas}, definitions) if self._tags.has_python else ():
            kinds = form.get("type", ())
            if "enum" not in form and "const" not in form:
                words += [
                    word
                    for kind, word in _PYTHON
                    if kind in ([kinds] if isinstance(kinds, str) else kinds)
                ]
        rules = [self._rule(json_rule({**schema, **definitions})) for schema in schemas]
        return [*rules, *(self._literal(word) for word in dict.fromkeys(words))]

    def _told(self, texts: Sequence[str], others: Sequence[str]) -> str:
        """The right side of a rule for a value and what is around it: one of `texts`, which hold
        their end, or one of `others`, which do not.
        """
        rest = self._tags.parameter[2].lstrip("\n")[len(self._tags.value_end) :]
        said = []
        if texts:
            middle = self._literal(self._tags.middle(is_text=True))
            said.append(f"{middle} ({' | '.join(texts)}) {self._literal(rest)}")
        if others:
            middle = self._literal(self._tags.middle(is_text=False))
            end = self._literal(self._tags.parameter[2])
            said.append(f"{middle} ({' | '.join(others)}) {end}")
        return f"({' | '.join(said)})"

    def _texts(self, schemas: Sequence[Mapping[str, Any]], is_plain: bool) -> list[str]:
        """Right sides of rules for the texts that `schemas` allow, each with its end."""
        texts = []
        for schema in schemas:
            kinds = schema.get("type", "string")
            values = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
                continue
            if values is not None:
                ends = self._tags.parameter[2].rstrip("\n")
                texts += [self._literal(each + ends) for each in values if isinstance(each, str)]
            elif is_plain and not any(bound in schema for bound in _BOUNDS):
                return ["text"]
            else:
                texts.append(self._bound_text(schema, is_plain))
        return texts

    def _bound_text(self, schema: Mapping[str, Any], is_plain: bool) -> str:
        """A text of some length and pattern, with its end; one that is not read as JSON."""
        head, tail = split_literal(self._tags.parameter[2].rstrip("\n"), self._literal)
        end, whole = _escaped(head), _escaped(self._tags.value_end)
        most = schema.get("maxLength", "")
        if isinstance(most, int) and most > MAX_LENGTH:
            most = ""  # to count so far takes more than it is worth
        terms = [f"/(.|\\n){{{schema.get('minLength', 0)},{most}}}{end}/"]
        if not tail:  # else a special token ends it, which is in no text
            terms.append(f"~/{ANY}{whole}(.|\\n)+/")
        if "pattern" in schema:
            terms.append(f"/{whole_pattern(schema['pattern'])}{end}/")
        if not is_plain:
            terms.append(f"~/{_LIKE_JSON}/")
        name = self._rules.name("TEXT")
        self._rules.add(f"{name}: {' & '.join(terms)}")
        return f"{name} {tail}".rstrip()

    def _rule(self, right: str) -> str:
        name = self._rules.name("value")
        self._rules.add(f"{name}: {right}")
        return name


def _without_texts(form: Mapping[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """`form` with no type but `types`, which hold no string; empty if it allows no such value."""
    if "enum" in form or "const" in form:
        values = form.get("enum", [form.get("const")])
        kept = [each for each in values if not isinstance(each, str)]
        return {"enum": kept} if kept else {}
    kinds = form.get("type", types)
    kept = [each for each in (kinds if isinstance(kinds, list) else [kinds]) if each in types]
    return {**form, "type": kept} if kept else {}


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
