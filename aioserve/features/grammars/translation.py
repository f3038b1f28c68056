"""From what is asked for to a grammar in llguidance's terms.

Knows its syntax, and what its errors say; knows nothing about tokens, threads or caches.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from aioserve.config import StructuredOutputsConfig
from aioserve.features.grammars.pattern import check_repetitions
from aioserve.features.grammars.schema import check_finite, for_grammar, key_options, place_of
from aioserve.params import StructuredOutputs

#: By `json_whitespace`: what may stand between the parts of JSON. Without a bound, a model that is
#: unsure fills its reply with blanks.
_WHITESPACE: dict[str, dict[str, Any]] = {
    "none": {"whitespace_flexible": False},
    "blank": {"whitespace_pattern": " "},
    "lines": {"whitespace_pattern": r" |\n[ \t]{0,20}"},  # as llama.cpp has it
}


def grammar_of(wanted: StructuredOutputs, settings: StructuredOutputsConfig) -> str:
    """Return all of a text that may be said. Raises `ValueError`, `TypeError` or
    `RecursionError`.
    """
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
    """Return why llguidance refuses what is `wanted`, in a line, and where that is in a schema."""
    reason = _of_regex(error) or (error.splitlines() or [""])[0]
    if reason == "NoExtensionBias":  # of its first token, in llguidance's words
        reason = "no text fits it"
    if wanted.regex is not None:  # the place is one in the grammar around it
        reason = re.sub(r"^at 1\(\d+\): ", "", reason)
    place = "" if wanted.json is None else place_of(error, _decoded(wanted.json))
    return f"{place}: {reason}"[:400] if place else reason[:300]


def _of_regex(error: str) -> str | None:
    """Return the reason, the place and the piece of a regular expression that is refused; None if
    the error is another.
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
    """Return one in Lark, or several in llguidance's JSON, with the schemas and repetitions in it
    made right.
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
    """Return a grammar in Lark with each schema in it, after `%json`, as `for_grammar` makes it;
    objects stay as open as they are. Raises `ValueError` as `for_grammar` and `check_repetitions`
    do.
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
    """Return a schema within a grammar, made right, with the options that stand in it."""
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
    """Yield where each regular expression, repetition and schema of a grammar begins and ends, and
    what it is; up to a text that is not closed, which the library tells of.
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


# Structural tags, as vLLM and xgrammar have them, to llguidance's variant of Lark. A tree of
# formats, each a piece of the text. Free text ends where what follows begins: at a lazy lexeme,
# which takes as little as possible. Knows nothing about tokens.


class _Format(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    """A node of a structural tag; its field `type` says which kind of text it stands for."""


class ConstString(_Format, tag="const_string"):
    value: str


class JsonSchema(_Format, tag="json_schema"):
    json_schema: dict[str, Any]
    style: Literal["json"] = "json"
    any_order: bool = False


class Regex(_Format, tag="regex"):
    pattern: str


class Grammar(_Format, tag="grammar"):
    grammar: str


class AnyText(_Format, tag="any_text"):
    excludes: list[str] = []
    max_tokens: None = None
    max_chars: int | None = None


class SequenceOf(_Format, tag="sequence"):
    elements: list["Format"]


class Or(_Format, tag="or"):
    elements: list["Format"]


class Optional(_Format, tag="optional"):
    content: "Format"


class Star(_Format, tag="star"):
    content: "Format"


class Plus(_Format, tag="plus"):
    content: "Format"


class Repeat(_Format, tag="repeat"):
    content: "Format"
    min: int
    max: int  # -1: any


class Tag(_Format, tag="tag"):
    begin: str
    content: "Format"
    end: str | list[str]


class TriggeredTags(_Format, tag="triggered_tags"):
    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class TagsWithSeparator(_Format, tag="tags_with_separator"):
    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Format, tag="dispatch"):
    rules: list[tuple[str, "Format"]]
    loop: bool = True
    excludes: list[str] = []


Format = (
    ConstString
    | JsonSchema
    | Regex
    | Grammar
    | AnyText
    | SequenceOf
    | Or
    | Optional
    | Star
    | Plus
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator
    | Dispatch
)


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: dict[str, Any]


class _Structures(msgspec.Struct, forbid_unknown_fields=True):
    """A structural tag in vLLM's older shape: begin, schema and end per tag, and the triggers."""

    structures: list[_Structure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    format: Format
    type: Literal["structural_tag"] = "structural_tag"


def translated(given: dict[str, Any], json_options: dict[str, Any], *, closes_objects: bool) -> str:
    """Return the grammar of a structural tag in either shape; `json_options` are llguidance's, for
    JSON, and `closes_objects` is as for `for_grammar`.

    Raises `ValueError` for what is no structural tag, or cannot be said in Lark.
    """
    try:
        if "structures" in given or "triggers" in given:
            old = msgspec.convert(given, _Structures)
            tags = [Tag(s.begin, JsonSchema(s.schema), s.end) for s in old.structures]
            whole: Format = TriggeredTags(old.triggers, tags)
        else:
            whole = msgspec.convert(given, _StructuralTag).format
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    return _Translation(json_options, closes_objects).grammar(whole)


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of text with all that follows it."""

    text: str  # in Lark
    #: Strings with one of which it begins, each with the rest in Lark; None: with anything.
    heads: Sequence[tuple[str, str]] | None = None
    is_end: bool = False  # of all text


_END = _Part("", is_end=True)
_UNKNOWN = _Part("")


class _Translation:
    """A translation of one tree. Each method puts a format before the part that follows."""

    def __init__(self, json_options: dict[str, Any], closes_objects: bool) -> None:
        self._json_options, self._closes_objects = json_options, closes_objects
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []  # with syntax of their own

    def grammar(self, whole: Format) -> str:
        """Translate `whole` to llguidance's JSON. Raises `ValueError` for what Lark cannot say."""
        start = self._put(whole, _END).text
        rules = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": rules}, *self._grammars]})

    def _put(self, piece: Format, after: _Part) -> _Part:
        from llguidance import LLMatcher, grammar_from

        match piece:
            case ConstString(value):
                return _literal([value], after)
            case JsonSchema(any_order=True):
                raise ValueError("json_schema: any_order is not supported")
            case JsonSchema(schema):
                check_finite(schema)
                schema = for_grammar(schema, closes_objects=self._closes_objects)
                schema |= {"x-guidance": self._json_options | key_options(schema)}
                return _Part(f"{self._rule('%json ' + json.dumps(schema))} {after.text}")
            case Regex(pattern):
                found = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
                return self._subgrammar(found[0]["lark_grammar"], after)
            case Grammar(grammar):
                return self._subgrammar(grammar_from("grammar", grammar), after)
            case AnyText():
                return self._free([], self._text(piece.excludes, piece.max_chars), "", after)
            case SequenceOf(elements):
                for element in reversed(elements):
                    after = self._put(element, after)
                return after
            case Or(elements):
                if not elements:
                    raise ValueError("or: elements is empty")
                return self._either([self._put(element, after) for element in elements])
            case Optional(content):
                return self._either([self._put(content, after), after])
            case Star(content):
                return self._repeat(content, "*", after)
            case Plus(content):
                return self._repeat(content, "+", after)
            case Repeat(content, least, most):
                if least < 0 or (most != -1 and most < max(1, least)):
                    raise ValueError(f"repeat: no number is from {least} to {most}")
                return self._repeat(content, f"{{{least},{'' if most == -1 else most}}}", after)
            case Tag():
                return self._tag(piece, after)
            case TriggeredTags():
                return self._triggered(piece, after)
            case TagsWithSeparator():
                return self._separated(piece, after)
            case Dispatch(rules, loop, excludes):
                leads = [(mark, self._put(content, _UNKNOWN).text) for mark, content in rules]
                return self._free(leads, self._text(excludes), "*" if loop else "?", after)

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _either(self, parts: Sequence[_Part]) -> _Part:
        heads: list[tuple[str, str]] | None = []
        for part in parts:
            heads = None if heads is None or part.heads is None else [*heads, *part.heads]
        return _Part(self._rule(" | ".join(part.text or '""' for part in parts)), heads)

    def _repeat(self, content: Format, times: str, after: _Part) -> _Part:
        return _Part(f"({self._put(content, _UNKNOWN).text}){times} {after.text}")

    def _tag(self, tag: Tag, after: _Part) -> _Part:
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        return _literal([tag.begin], self._put(tag.content, _literal(ends, after)))

    def _triggered(self, tags: TriggeredTags, after: _Part) -> _Part:
        if not tags.tags:
            raise ValueError("no tags: structures, or tags, is empty")
        alone = [self._tag(tag, _UNKNOWN) for tag in tags.tags]
        leads = []
        for tag, part in zip(tags.tags, alone, strict=True):
            trigger = next((t for t in tags.triggers if t and tag.begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger is the beginning of {tag.begin!r}")
            assert part.heads is not None, "it begins with a trigger"
            rest = [_literal([begin[len(trigger) :]], _Part(rest)) for begin, rest in part.heads]
            leads.append((trigger, self._either(rest).text))
        text, first = self._text(tags.excludes), self._either(alone)
        if tags.at_least_one and tags.stop_after_first:
            return _Part(f"{first.text} {after.text}")
        more = self._free(leads, text, "?" if tags.stop_after_first else "*", after)
        return _Part(f"{first.text} {more.text}") if tags.at_least_one else more

    def _separated(self, tags: TagsWithSeparator, after: _Part) -> _Part:
        if not tags.tags:
            raise ValueError("tags_with_separator: tags is empty")
        one = self._either([self._tag(tag, _UNKNOWN) for tag in tags.tags]).text
        if not tags.stop_after_first:
            one = f"{one} ({_quoted(tags.separator)} {one})*"
        return _Part(f"({one}){'' if tags.at_least_one else '?'} {after.text}")

    def _free(self, leads: Sequence[tuple[str, str]], text: str, times: str, after: _Part) -> _Part:
        """Free `text` in which each mark of `leads` is followed by its rest; up to what follows."""
        called = [f"{self._lead(text, mark)} {rest}" for mark, rest in leads]
        if after.is_end:
            last = text
        elif after.heads is not None:
            last = self._rule(" | ".join(f"{self._lead(text, m)} {r}" for m, r in after.heads))
        else:
            raise ValueError("free text must be the last, or what follows begin with a string")
        if not called:
            return _Part(last)
        calls = self._rule(" | ".join(called))
        # After the only one free text is over.
        rest = f"{calls}* {last}" if times == "*" else f"({calls} {after.text} | {last})"
        return _Part(rest)

    def _lead(self, text: str, mark: str) -> str:
        if not mark:
            raise ValueError("free text cannot end with an empty string")
        return self._rule(f"{text} {_quoted(mark)}", "[lazy]")

    def _text(self, excludes: Sequence[str], max_chars: int | None = None) -> str:
        """Return a terminal of what is free."""
        name, most = f"T{len(self._rules)}", "*" if max_chars is None else f"{{0,{max_chars}}}"
        body = f"/(?s:.{most})/"
        if excludes:
            if "" in excludes:
                raise ValueError("excludes holds an empty string")
            body += f" & ~/(?s:.*)({'|'.join(map(_escaped, excludes))})(?s:.*)/"
        self._rules.append(f"{name}: {body}")
        return name

    def _subgrammar(self, lark: str, after: _Part) -> _Part:
        """Return a grammar with names of its own."""
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark})
        return _Part(f"@{name} {after.text}")


def _literal(strings: Sequence[str], after: _Part) -> _Part:
    """Return one of `strings`; an empty one is nothing."""
    if not any(strings):
        return after
    if not all(strings):
        raise ValueError(f"of several strings none may be empty: {list(strings)}")
    text = " | ".join(map(_quoted, strings))
    return _Part(f"({text}) {after.text}", [(string, after.text) for string in strings])


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
