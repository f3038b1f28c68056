"""From what is asked for to a grammar in llguidance's terms.

Knows its syntax; knows nothing about tokens, threads or caches.
"""

import json
import re
from typing import Any

import msgspec

from aioserve.finite_schema import check_finite
from aioserve.grammars.structural_tag import translated
from aioserve.structured_outputs import StructuredOutputs

# Between the parts of JSON: what models write, and no more. Without a bound, one that is unsure
# fills its reply with blanks. As llama.cpp has it.
WHITESPACE = r" |\n[ \t]{0,20}"


# Whole numbers that llguidance rounds to the least of 64 bits, whose amount it then looks for until
# its stack is full: that ends the process.
_LEAST = re.compile(r"-922337203685477\d{4}(?![\d.eE])")


def grammar_of(wanted: StructuredOutputs) -> str:
    """All of a text that may be said. Raises `ValueError`, `TypeError` or `RecursionError`."""
    grammar = _grammar_of(wanted)
    for match in _LEAST.finditer(grammar):
        if float(match[0]) == -(2.0**63):
            raise ValueError(f"the number {match[0]} is too small for a grammar")
    return grammar


def _grammar_of(wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher, grammar_from

    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if wanted.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=options)  # type: ignore[arg-type]
    if wanted.json is not None:
        decoded = _decoded(wanted.json)
        check_finite(decoded)
        schema = json.dumps(decoded)  # not by llguidance: numbers of any size
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return grammar_from("choice", json.dumps(wanted.choice))
    if wanted.grammar is not None:
        return grammar_from("grammar", wanted.grammar)
    assert wanted.structural_tag is not None
    return translated(_decoded(wanted.structural_tag), options)


def _decoded(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"no JSON object: {error}") from None
