"""Structural tags, as vLLM and xgrammar have them, to llguidance's variant of Lark.

A tree of formats, each a piece of the text. Free text ends where what follows begins: at a lazy
lexeme, which takes as little as possible. Knows nothing about tokens.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from aioserve.finite_schema import check_finite
from aioserve.grammar_schema import for_grammar, key_options


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
    """The grammar of a structural tag in either shape; `json_options` are llguidance's, for JSON,
    and `closes_objects` is as for `for_grammar`.

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
    """Of one tree. Each method puts a format before the part that follows."""

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
        """A terminal of what is free."""
        name, most = f"T{len(self._rules)}", "*" if max_chars is None else f"{{0,{max_chars}}}"
        body = f"/(?s:.{most})/"
        if excludes:
            if "" in excludes:
                raise ValueError("excludes holds an empty string")
            body += f" & ~/(?s:.*)({'|'.join(map(_escaped, excludes))})(?s:.*)/"
        self._rules.append(f"{name}: {body}")
        return name

    def _subgrammar(self, lark: str, after: _Part) -> _Part:
        """One with names of its own."""
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark})
        return _Part(f"@{name} {after.text}")


def _literal(strings: Sequence[str], after: _Part) -> _Part:
    """One of `strings`; an empty one is nothing."""
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
