"""Rules of a bound reply, in llguidance's variant of Lark: what grammars of formats are made of.

Loaded with the first reply that is bound beside calls or reasoning, and by formats of calls. Knows
functions and their schemas; knows no format, and nothing about how grammars are compiled.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aioserve.engine.chat.reply_format import Beginning, Function, Literal

ANY = r"(.|\n)*"  # in a pattern
MAX_RULES = 1 << 18  # characters of all rules; the compiler of grammars takes no more


class Rules:
    """The rules of one grammar. A schema of a few kilobytes may refer to itself so often that its
    rules would take gigabytes: `add` stops where the compiler would refuse them.
    """

    def __init__(self) -> None:
        self.all: list[str] = []
        self._room, self._num_names = MAX_RULES, 0

    def name(self, kind: str) -> str:
        """Return a name that begins with `kind` and that no other rule has."""
        self._num_names += 1
        return f"{kind}_{self._num_names}"

    def add(self, rule: str) -> None:
        """Raises `ValueError` if all rules together have more than `MAX_RULES` characters."""
        self._room -= len(rule)
        if self._room < 0:
            raise ValueError(
                f"the schemas of the tools make a grammar of more than {MAX_RULES:,} characters"
            )
        self.all.append(rule)


def whole_pattern(pattern: str) -> str:
    """Return a schema's pattern, which may match anywhere, as a grammar's pattern of the whole
    text.
    """
    begun, ended = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = re.sub(r"(?<!\\)/", r"\\/", pattern[begun : len(pattern) - ended])
    return f"{'' if begun else ANY}({inner}){'' if ended else ANY}"


def text_until(rule: str, end: str, literal: Literal) -> str:
    """Return a rule of that name for any text up to the first `end`, which it takes as well."""
    head, tail = split_literal(end, literal)
    if tail:  # it holds a special token, which is in no text
        return f"{rule}: /{ANY}{re.escape(head).replace('/', chr(92) + '/')}/ {tail}"
    return f"{rule}[suffix={literal(end)}]: /{ANY}/"


def split_literal(text: str, literal: Literal) -> tuple[str, str]:
    """Return what stands before the first special token in a text, and the rest as a grammar writes
    it, which is empty if there is none.
    """
    for i in range(len(text)):
        written = literal(text[i:])
        if written.startswith(("<[", "(<[")):
            return text[:i], written
    return text, ""


# Of a forced reply: without a limit, a model that is unsure goes on until its text is cut.
MAX_FORCED_CALLS = 16


def repeated(call: str, separator: str, is_parallel: bool) -> str:
    """Return one, or several, in a grammar."""
    return f"{call} ({separator} {call}){{0,{MAX_FORCED_CALLS - 1}}}" if is_parallel else call


def alternatives(functions: Sequence[Function], keys: tuple[str, str], literal: Literal) -> str:
    """Grammar rules of which `call` is the JSON object of a call, by the names of its two keys."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        before = f'{{"{keys[0]}": "{function.name}", "{keys[1]}": '
        rules.append(f"call_{i}: {literal(before)} arguments_{i} {literal('}')}")
        rules.append(f"arguments_{i}: {json_rule(function.parameters)}")
    return "\n".join(rules)


def free_reply(beginnings: Sequence[Beginning]) -> list[str]:
    """Rules of which `reply` is any text in which what begins as a call is one, and `TEXT` is any
    text. They need the rules of `ReplyFormat.grammar`.
    """
    return [
        *leads(beginnings, "lead", "TEXT"),
        f"reply: ({called(beginnings, 'lead')})* TEXT",
        f"TEXT: /{ANY}/",
    ]


def leads(beginnings: Sequence[Beginning], rule: str, text: str) -> list[str]:
    """Rules, numbered from `rule`, of what ends where a call begins, as soon as that is seen; what
    stands before it is the rule `text`.
    """
    rules = []
    for i, beginning in enumerate(beginnings):
        is_token = beginning.sign.startswith("<")
        before = f"{text} " if beginning.has_text else ""
        rules.append(f"{rule}_{i}{'' if is_token else '[lazy]'}: {before}{beginning.sign}")
    return rules


def called(beginnings: Sequence[Beginning], rule: str) -> str:
    """Return the right side of a rule: one of `leads`, with its call."""
    return " | ".join(f"{rule}_{i} {each.rest}" for i, each in enumerate(beginnings))


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return a schema inside of a grammar; JSON is written as templates write it."""
    options = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    text = msgspec.json.encode({**schema, "x-guidance": options}).decode()
    # What looks like the sign of another notation can only stand in a text.
    return f"%json {text.replace('::=', ':' + chr(92) + 'u003a=')}"
