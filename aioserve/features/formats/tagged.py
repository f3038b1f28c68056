"""Calls as tags: a name, then a tag around each argument, whose text the tool's schema types.

`Tags` is how a family writes them: plain data, from which a call is read, written, and bound by a
grammar.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from aioserve.engine.chat.reply_format import (
    Arguments,
    Beginning,
    Call,
    Function,
    Literal,
    Reply,
    SaidCall,
    dumps,
    overlap,
)
from aioserve.engine.chat.reply_grammar import (
    ANY,
    Rules,
    json_rule,
    repeated,
    split_literal,
    text_until,
    whole_pattern,
)
from aioserve.features.formats.call_parser import CallParser, unstated_signs
from aioserve.features.formats.text import (
    JsonValue,
    any_of,
    argument_types,
    forms,
    match_end,
    skip_space,
    typed_json,
)

NAME = re.compile(r'[^<>"\n]*')  # of a function or an argument


class Tags(NamedTuple):
    """Texts as chat templates write them, with their space; reading them, space between tags does
    not count.
    """

    wrapper: tuple[str, str]  # around a call; around all calls of a reply if `is_block`
    call: tuple[str, str, str]  # before the name, behind it, behind the arguments
    parameter: tuple[str, str, str]  # before the name, between name and value, behind the value
    gap: str  # between content and calls
    separator: str = ""  # between calls
    is_block: bool = False
    #: For `parameter[1]` where that says if the value is a text: what says so, what denies it.
    middles: tuple[str, str] | None = None
    #: What may stand there as well when it is read.
    other_middles: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()  # parts of these texts that are special tokens by themselves
    has_python: bool = False  # it writes True, False and None for true, false and null

    @property
    def opening(self) -> str:
        return self.wrapper[0].strip()

    @property
    def closing(self) -> str:
        return self.wrapper[1].strip()

    @property
    def name_end(self) -> str:
        return self.call[1].strip()

    @property
    def call_ends(self) -> tuple[str, ...]:
        """What ends a call, the last of them what is around it, too."""
        own = self.call[2].strip()
        return (own, self.closing) if own else (self.closing,)

    @property
    def value_end(self) -> str:
        return self.parameter[2].strip()

    @property
    def has_lines(self) -> bool:
        """Whether a line break after the tag and one before its end are no part of the value."""
        return self.parameter[1].endswith("\n")

    def middle(self, is_text: bool) -> str:
        """Return what stands between the name and the value of an argument."""
        return self.parameter[1] if self.middles is None else self.middles[not is_text]

    @property
    def read_middles(self) -> tuple[str, ...]:
        """All that may stand there, without the space at its end."""
        own = self.middles or (self.parameter[1].rstrip(),)
        return (*own, *self.other_middles)

    @property
    def markers(self) -> tuple[str, ...]:
        """Every tag, or the beginning of one before a name, and the tokens in them."""
        own = (*self.wrapper, *self.call, *self.parameter, *self.read_middles, *self.tokens)
        texts = [text.strip() for text in own if re.search(r"\w", text)]
        return tuple(dict.fromkeys(text for text in texts if not text.startswith('"')))

    def wrapped(self, calls: Sequence[str]) -> str:
        """Return the text of calls that are written."""
        if not calls:
            return ""
        if self.is_block:
            calls = [self.separator.join(calls)]
        before, after = self.wrapper
        return self.separator.join(f"{before}{call}{after}" for call in calls)

    def written(self, call: SaidCall, said: Callable[[Any], str]) -> str:
        """Return one call; `said` writes a value that is no text. Raises `ValueError` for a name or
        a text in which a tag would end.
        """
        for name in (call.name, *call.arguments):
            if not name.strip() or not NAME.fullmatch(name):
                raise ValueError(f"a name that cannot stand in a tag: {name!r}")
        pieces = [self.call[0], call.name, self.call[1]]
        for name, value in call.arguments.items():
            is_text = isinstance(value, str)
            if is_text and self.value_end in value:
                raise ValueError(
                    f"a text with {self.value_end} in it, where that ends it: {value!r}"
                )
            pieces += [self.parameter[0], name, self.middle(is_text)]
            pieces += [value if is_text else said(value), self.parameter[2]]
        return "".join([*pieces, self.call[2]])


# One argument of a call whose arguments stand in tags: its name, and its value as it comes. Values
# are typed by the tool's schema. Knows no family, and not what stands around arguments.


_JSON_BEGINS = frozenset('{["-0123456789tfnTFN')


class ArgumentParser(CallParser):
    """A parser that streams a text as it comes, and any other value when it has ended: at the first
    end of its tag; an object or an array at the first one behind its own end. Of a value that is
    cut, only what is known to be of its text is told.
    """

    tags: ClassVar[Tags]
    _value_ends: ClassVar[tuple[str, ...]]
    _value_end: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "tags"):
            cls.markers = cls.tags.markers
            lines = ("\n", "") if cls.tags.has_lines else ("",)
            cls._value_ends = tuple(line + cls.tags.value_end for line in lines)
            cls._value_end = any_of(cls._value_ends)

    name: list[str]  # of the call or argument that is being read, in pieces
    schema: Mapping[str, Any]  # of the arguments of this call
    num_values: int  # of this call so far

    @abstractmethod
    def next_argument(self) -> bool:
        """Read what stands behind an argument; return whether to go on at once."""

    @abstractmethod
    def end_call(self) -> None:
        """Where no argument goes on: what is held is content."""

    def skip_any(self, texts: Sequence[str], ends: Sequence[str]) -> str | None:
        """Read one of `texts` or `ends`, and return it; of `ends`, a beginning is enough at the end
        of a reply. Empty if none is there, None if what is there may become one.
        """
        is_open = False
        for text in (*texts, *ends):
            found = self.skip_end(text) if text in ends else self.skip(text)
            if found:
                return text
            is_open |= found is None
        return None if is_open else ""

    def read_key(self) -> bool:
        self.name.append(self.take(match_end(NAME, self.text, self.at)))
        if self.at == len(self.text):
            return self._is_cut()
        self.state = self._after_key
        return True

    def _is_cut(self) -> bool:
        """At the end of a reply, what was begun is no content. Returns that more text is needed."""
        if self.is_last:
            self.held = None
        return False

    def _after_key(self) -> bool:
        found = self.skip_any(self.tags.read_middles, [])
        name = "".join(self.name).strip()
        if found is None:
            return False
        if self.is_last and any(
            each.startswith(self.text[self.at :]) for each in self.tags.read_middles
        ):
            self.take(len(self.text))
            return self._is_cut()
        if not found or not name:
            self.end_call()
            return True
        self.held = None
        between = ", " if self.num_values else ""
        self.events.append(Arguments(f"{between}{dumps(name)}: "))
        self.num_values += 1
        self._key, self._types = name, argument_types(self.schema, name)
        if self.tags.middles is not None and found in self.tags.middles:
            self._types = {"string"} if found == self.tags.middles[0] else self._types - {"string"}
        self._value: list[str] = []
        self.state = self._begin_value
        return True

    def _begin_value(self) -> bool:
        if self.at == len(self.text):
            return False
        if self.tags.has_lines and self.text[self.at] == "\n":
            self.take(self.at + 1)
        if self._types == {"string"}:
            self._begin_text()
        else:
            self.state = self._see_value
        return True

    def _see_value(self) -> bool:
        """Return whether it is a text for sure, or an object or an array."""
        start = self.at
        is_seen = self.skip_space()
        self._value.append(self.text[start : self.at])
        if not is_seen:
            return False
        char, may_be_text = self.text[self.at], not self._types or "string" in self._types
        if may_be_text and char not in _JSON_BEGINS:
            self._begin_text()
        elif char in "{[" and not may_be_text:
            self.value = JsonValue()
            self.state = self._read_json
        else:
            self.state = self._read_value
        return True

    def _begin_text(self) -> None:
        self._tell_text('"', "".join(self._value))
        self.state = self._read_text

    def _tell_text(self, before: str, text: str, after: str = "") -> None:
        self.events.append(Arguments(f"{before}{dumps(text)[1:-1]}{after}"))

    def _read_text(self) -> bool:
        text, is_ended = self._take_value()
        if text or is_ended:
            self._tell_text("", text, '"' if is_ended else "")
        if is_ended:
            self.state = self.next_argument
        return is_ended

    def _read_json(self) -> bool:
        """Read an object or an array up to its own end: in its strings there may be any tag."""
        self._value.append(self.take(self.value.feed(self.text, self.at)))
        if not (self.value.is_done or self.is_last):
            return False
        if self.value.is_broken or not self.value.is_done:
            # It is none: read it again, up to the tag.
            self.text, self.at = "".join(self._value) + self.text[self.at :], 0
            self._value = []
        self.state = self._read_value
        return True

    def _read_value(self) -> bool:
        text, is_ended = self._take_value()
        self._value.append(text)
        if is_ended:
            self.events.append(Arguments(typed_json("".join(self._value), self.schema, self._key)))
            self.state = self.next_argument
        return is_ended

    def _take_value(self) -> tuple[str, bool]:
        """More of a value, and whether it has ended, with its tag."""
        found = self._value_end.search(self.text, self.at)
        if found is not None:
            text = self.take(found.start())
            self.take(found.end())
            return text, True
        text = self.take(len(self.text) - overlap(self.text, self._value_ends, self.at))
        if self.is_last:
            self.take(len(self.text))  # a tag that was cut
        return text, False


# Grammars of calls as tags: every argument bound to its schema, as the text that is in its tag.
# Arguments stand in the order of the schema's properties. JSON is bound by llguidance, texts here:
# to what they may be, their length, their pattern. Not bound are the `format` of a text, and what a
# schema says of several arguments together.


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
        """Return all arguments, in the order of the properties, by one form of the schema."""
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
        """Return what follows the name of an argument, up to the next."""
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
        """Return the right side of a rule for a value and what is around it: one of `texts`, which
        hold their end, or one of `others`, which do not.
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
        """Return a text of some length and pattern, with its end; one that is not read as JSON."""
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


# Calls as tags: a name, then a tag around each argument, whose text is typed by the tool's schema.
# What Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2 and Seed-OSS have in common; each names its tags in
# a file of its own. Knows none of them.


class TaggedParser(ArgumentParser):
    """Reads calls between `tags`, which a family names."""

    #: Whether a call may stand alone, without the tags around it; then only of a known tool.
    may_be_bare: ClassVar[bool] = False
    signs = unstated_signs(lambda cls: (cls.tags.opening,))
    _opening: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "tags"):
            bare = [cls.tags.call[0]] if cls.may_be_bare else []
            cls._opening = any_of([cls.tags.opening, *bare])

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        return "\n".join(tagged_rules(cls.tags, functions, is_parallel, literal))

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        bare = [
            Beginning(literal(f"{cls.tags.call[0]}{each.name}{cls.tags.name_end}"), f"body_{i}")
            for i, each in enumerate(functions if cls.may_be_bare else ())
        ]
        return [Beginning(literal(cls.tags.opening), "unwrapped"), *bare]

    @classmethod
    def write(cls, reply: Reply) -> str:
        if cls._opening.search(reply.content):
            raise ValueError(f"a content with the beginning of a call in it: {reply.content!r}")
        gap = cls.tags.gap if reply.content and reply.calls else ""
        calls = [cls.tags.written(call, cls.said) for call in reply.calls]
        return reply.content + gap + cls.tags.wrapped(calls)

    @classmethod
    def said(cls, value: Any) -> str:
        """Return a value that is no text, as the chat templates of the family write it."""
        return dumps(value)

    # Around calls

    def begin(self) -> bool:
        return self.read_content(self._opening, self._open)

    def _open(self) -> bool:
        self._num_calls = 0
        self._is_bare = self.marker != self.tags.opening
        self.name: list[str] = []
        is_named = self._is_bare or not self.tags.call[0]
        self.state = self._read_name if is_named else self._between
        return True

    def _between(self) -> bool:
        """Read a call, or the end of what is around calls."""
        if not self.skip_space():
            return False
        if self._num_calls:
            self.hold()
        found = self.skip_any([self.tags.call[0]], [self.tags.closing])
        if found is None:
            return False
        if found == self.tags.call[0]:
            self.name = []
            self.state = self._read_name
        elif found and self._num_calls:
            self.held = None
            self.state = self.begin
        else:
            self._close()
        return True

    def _close(self) -> None:
        self.give_back()
        self.state = self.begin

    # A call

    def _read_name(self) -> bool:
        if not self.name and not self.skip_space():
            return False
        self.name.append(self.take(match_end(NAME, self.text, self.at)))
        if self.at == len(self.text):
            return False
        self.state = self._after_name
        return True

    def _after_name(self) -> bool:
        found = self.skip_name_end()
        if found is None:
            return False
        name = "".join(self.name).strip()
        if not found or not name or (self._is_bare and name not in self.functions):
            self._close()
            return True
        self.tell([Call(name), Arguments("{")])
        function = self.functions.get(name)
        self.schema: Mapping[str, Any] = {} if function is None else function.parameters
        self.num_values = 0
        self.state = self.next_argument
        return True

    def skip_name_end(self) -> bool | None:
        """Read what ends the name of a call; False if it is not there, None if it may be."""
        return self.skip(self.tags.name_end)

    def next_argument(self) -> bool:
        """Read an argument, or the end of the call."""
        if not self.skip_space():
            return False
        if self.is_last and self.tags.parameter[0].startswith(self.text[self.at :]):
            self.take(len(self.text))  # the reply was cut
            return False
        self.hold()
        found = self.skip_any([self.tags.parameter[0]], self.tags.call_ends)
        if found is None:
            return False
        if found == self.tags.parameter[0]:
            self.name = []
            self.state = self.read_key
            return True
        if found:
            self.held = None
        self.end_call()
        if found and found != self.tags.closing:
            self.state = self._between
        return True

    def end_call(self) -> None:
        """What is held, as there is no end, is content."""
        self.events.append(Arguments("}"))
        self._num_calls += 1
        self._close()


# Formats whose calls are tags: Qwen3-Coder, Seed-OSS, GLM, MiniMax, DeepSeek V3.2 and V4.


class Qwen3CoderParser(TaggedParser):
    """Models forget the `<tool_call>` around it: then it is a call if the tool is known."""

    tags: ClassVar[Tags] = Tags(
        wrapper=("<tool_call>\n", "\n</tool_call>"),
        call=("<function=", ">\n", "</function>"),
        parameter=("<parameter=", ">\n", "\n</parameter>\n"),
        gap="\n\n",
        separator="\n",
        has_python=True,
    )
    may_be_bare = True

    @classmethod
    def evidence(cls, template: str) -> str | None:
        own = (cls.tags.opening, cls.tags.call[0], cls.tags.parameter[0])
        return own[1] if all(each in template for each in own) else None

    @classmethod
    def said(cls, value: Any) -> str:
        return dumps(value) if isinstance(value, (dict, list)) else str(value)


# Seed-OSS: `<function=NAME><parameter=K>V</parameter>...` in `<seed:tool_call>`.


class SeedOssParser(TaggedParser):
    """Lists and objects are read as JSON, or as Python prints them."""

    tags: ClassVar[Tags] = Tags(
        wrapper=("<seed:tool_call>\n", "\n</seed:tool_call>"),
        call=("<function=", ">\n", "</function>"),
        parameter=("<parameter=", ">", "</parameter>\n"),
        gap="\n\n",
        separator="\n",
        has_python=True,
    )
    may_be_bare = True

    @classmethod
    def said(cls, value: Any) -> str:
        return str(value)


# GLM 4.5 to 4.7, Ling 3, Laguna, Spark: `<tool_call>NAME<arg_key>K</arg_key>...`.


_KEY, _BETWEEN, _VALUE_END = "<arg_key>", "</arg_key>", "</arg_value>"
_VALUE = "<arg_value>"


class GlmParser(TaggedParser):
    """A parser of both forms: that of GLM 4.5 and 4.6, with line breaks between tags, and that of
    4.7, without. It writes the first where a call is forced.
    """

    tags: ClassVar[Tags] = Tags(
        wrapper=("<tool_call>", "</tool_call>"),
        call=("", "\n", ""),
        parameter=(_KEY, f"{_BETWEEN}\n{_VALUE}", f"{_VALUE_END}\n"),
        other_middles=(f"{_BETWEEN}{_VALUE}",),
        tokens=(_BETWEEN, _VALUE),
        gap="\n",
        separator="\n",
    )

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return _KEY if _KEY in template and cls.tags.opening in template else None

    def skip_name_end(self) -> bool | None:
        """Return a call only if an argument or the end follows."""
        at = skip_space(self.text, self.at)
        rest = self.text[at : at + len(self.tags.closing)]
        for mark in (_KEY, self.tags.closing):
            if rest.startswith(mark) or (self.is_last and rest and mark.startswith(rest)):
                return True
        is_open = any(mark.startswith(rest) for mark in (_KEY, self.tags.closing))
        return None if is_open and not self.is_last else False


class Glm47Parser(GlmParser):
    """A parser that writes the form of GLM 4.7 where a call is forced."""

    tags: ClassVar[Tags] = Tags(
        wrapper=("<tool_call>", "</tool_call>"),
        call=("", "", ""),
        parameter=(_KEY, f"{_BETWEEN}{_VALUE}", _VALUE_END),
        other_middles=(f"{_BETWEEN}\n{_VALUE}",),
        tokens=(_BETWEEN, _VALUE),
        gap="",
    )

    @classmethod
    def evidence(cls, template: str) -> str | None:
        dense = f"{_BETWEEN}{_VALUE}"
        return super().evidence(template) and (dense if dense in template else None)


# MiniMax M2: `<minimax:tool_call>` around all calls, each an `<invoke name="...">`.


class MiniMaxM2Parser(TaggedParser):
    """Several calls stand between one pair of marks."""

    tags: ClassVar[Tags] = Tags(
        wrapper=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        call=('<invoke name="', '">\n', "</invoke>\n"),
        parameter=('<parameter name="', '">', "</parameter>\n"),
        gap="\n",
        is_block=True,
    )


# DeepSeek V3.2 and V4: tags with the token DSML around all calls, each an `invoke`.


_DSML = "\uff5cDSML\uff5c"  # bars of full width; a special token


def _tags(calls: str) -> Tags:
    return Tags(
        wrapper=(f"<{_DSML}{calls}>\n", f"</{_DSML}{calls}>"),
        call=(f'<{_DSML}invoke name="', '">\n', f"</{_DSML}invoke>\n"),
        parameter=(f'<{_DSML}parameter name="', '" string="true">', f"</{_DSML}parameter>\n"),
        middles=('" string="true">', '" string="false">'),
        other_middles=('">',),
        gap="\n\n",
        is_block=True,
        tokens=(_DSML,),
    )


class DeepSeekV32Parser(TaggedParser):
    """Every argument says whether it is a text or JSON; only without that the schema decides."""

    _calls: ClassVar[str] = "function_calls"
    tags: ClassVar[Tags] = _tags(_calls)

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return _DSML if _DSML in template and f"{cls._calls}>" in template else None


class DeepSeekV4Parser(DeepSeekV32Parser):
    """DeepSeek V4, which writes the tags of V3.2 in `tool_calls` instead of `function_calls`."""

    _calls = "tool_calls"
    tags: ClassVar[Tags] = _tags(_calls)
