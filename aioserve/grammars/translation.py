"""From what is asked for to a grammar in llguidance's terms.

Knows its syntax, and what its errors say; knows nothing about tokens, threads or caches.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from aioserve.config import StructuredOutputsConfig
from aioserve.finite_schema import check_finite
from aioserve.grammar_pattern import check_repetitions
from aioserve.grammar_schema import for_grammar, key_options, place_of
from aioserve.grammars.structural_tag import translated
from aioserve.params import StructuredOutputs

#: By `json_whitespace`: what may stand between the parts of JSON. Without a bound, a model that is
#: unsure fills its reply with blanks.
_WHITESPACE: dict[str, dict[str, Any]] = {
    "none": {"whitespace_flexible": False},
    "blank": {"whitespace_pattern": " "},
    "lines": {"whitespace_pattern": r" |\n[ \t]{0,20}"},  # as llama.cpp has it
}


def grammar_of(wanted: StructuredOutputs, settings: StructuredOutputsConfig) -> str:
    """All of a text that may be said. Raises `ValueError`, `TypeError` or `RecursionError`."""
    from llguidance import LLMatcher, grammar_from

    options = _WHITESPACE["none" if wanted.disable_any_whitespace else settings.json_whitespace]
    closes = settings.json_objects == "closed"
    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=options)  # type: ignore[arg-type]
    if wanted.json is not None:
        decoded = _decoded(wanted.json)
        check_finite(decoded)
        schema = for_grammar(decoded, closes_objects=closes)
        options = options | key_options(schema)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]
    if wanted.regex is not None:
        check_repetitions(wanted.regex)
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return grammar_from("choice", json.dumps(wanted.choice))
    if wanted.grammar is not None:
        return _checked(grammar_from("grammar", wanted.grammar))
    assert wanted.structural_tag is not None
    return _checked(translated(_decoded(wanted.structural_tag), options, closes_objects=closes))


def reason_of(error: str, wanted: StructuredOutputs) -> str:
    """Why llguidance refuses what is `wanted`, in a line, and where that is in a schema."""
    reason = _of_regex(error) or (error.splitlines() or [""])[0]
    if wanted.regex is not None:  # the place is one in the grammar around it
        reason = re.sub(r"^at 1\(\d+\): ", "", reason)
    place = "" if wanted.json is None else place_of(error, _decoded(wanted.json))
    return f"{place}: {reason}"[:400] if place else reason[:300]


def _of_regex(error: str) -> str | None:
    """The reason, the place and the piece of a regular expression that is refused; None if the
    error is another.
    """
    lines = error.splitlines()
    at = next((i for i, line in enumerate(lines) if line.endswith("regex parse error:")), None)
    says = next((line for line in lines if line.startswith("error: ")), None)
    if at is None or says is None or len(lines) < at + 3:
        return None
    reason, before = says.removeprefix("error: "), lines[at].removesuffix("regex parse error:")
    before = before.replace(" (in regex): ", ": ")
    head = f"{before[:200]}invalid regex: " if "invalid regex" not in before else before[:200]
    pattern, marks = lines[at + 1], lines[at + 2]
    begin, end = len(marks) - len(marks.lstrip(" ")), len(marks.rstrip())
    if not set(marks.strip()) <= {"^"} or not marks.strip():  # of several lines
        return f"{head}{reason}"
    piece = pattern[begin:end]
    return f"{head}{reason}: {piece[:60]!r} at character {begin - 3}"


def _checked(grammar: str) -> str:
    """One in Lark, or several in llguidance's JSON, with the schemas and repetitions in it made
    right.
    """
    if not grammar.lstrip().startswith("{"):
        return _checked_lark(grammar)
    try:
        whole = msgspec.json.decode(grammar, type=_Grammars)
    except msgspec.DecodeError as error:
        raise ValueError(f"no grammars in llguidance's JSON: {error}") from None
    for part in whole.grammars:
        if isinstance(part.lark_grammar, str):
            part.lark_grammar = _checked_lark(part.lark_grammar)
        if part.json_schema is not None:
            part.json_schema = _with_options(part.json_schema)
    return json.dumps(msgspec.to_builtins(whole))


class _Grammar(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One grammar of several, in llguidance's JSON."""

    name: str | None = None
    lark_grammar: str | None = None
    json_schema: dict[str, Any] | None = None


class _Grammars(msgspec.Struct, forbid_unknown_fields=True):
    """Grammars that name each other, in llguidance's JSON."""

    grammars: list[_Grammar]
    max_tokens: int | None = None


def _checked_lark(grammar: str) -> str:
    """A grammar in Lark with each schema in it, after `%json`, as `for_grammar` makes it; objects
    stay as open as they are. Raises `ValueError` as `for_grammar` and `check_repetitions` do.
    """
    made, at = [], 0
    for begin, end, piece in _lark_pieces(grammar):
        if isinstance(piece, str):
            check_repetitions(piece)
            continue
        schema = json.dumps(_with_options(piece))
        # What looks like the sign of another notation can only stand in a text.
        made += [grammar[at:begin], schema.replace("::=", ":\\u003a=")]
        at = end
    return "".join([*made, grammar[at:]])


def _with_options(given: dict[str, Any]) -> dict[str, Any]:
    """A schema within a grammar, made right, with the options that stand in it."""
    options = given.get("x-guidance", {})
    schema = for_grammar(
        {k: v for k, v in given.items() if k != "x-guidance"}, closes_objects=False
    )
    if isinstance(options, dict):
        options = key_options(schema) | options
    return schema | {"x-guidance": options} if options else schema


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
_STOPS = re.compile(r'["/#%{]')
_PIECES = {
    '"': re.compile(r'"(?:\\.|[^"\\\x00-\x1f\x7f])*+"'),
    "/": re.compile(r"/(?:\\.|[^/\\])++/"),
    "{": re.compile(r"\{[\s\d,]*+\}"),
    "%": re.compile(r"%json[ \t\r\n]*+"),
}


def _lark_pieces(grammar: str) -> Iterator[tuple[int, int, str | dict[str, Any]]]:
    """Where each regular expression, repetition and schema of a grammar begins and ends, and what
    it is; up to a text that is not closed, which the library tells of.
    """
    at = 0
    while (stop := _STOPS.search(grammar, at)) is not None:
        at, sign = stop.start(), stop[0]
        if sign == "#" or grammar.startswith("//", at):
            end = grammar.find("\n", at)
            at = len(grammar) if end < 0 else end
            continue
        found = _PIECES[sign].match(grammar, at)
        if found is None:
            if sign in '"/':
                return
            at += 1
        elif sign == "%":
            try:
                value, end = _decoder.raw_decode(grammar, found.end())
            except json.JSONDecodeError:
                return
            if isinstance(value, dict):
                yield found.end(), end, value
            at = end
        else:
            if sign != '"':
                yield at, found.end(), found[0]
            at = found.end()


def _decoded(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"no JSON object: {error}") from None
