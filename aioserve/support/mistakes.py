"""What is wrong in data that is no value of a type: each mistake in a sentence, with its place.

Knows the types of msgspec and the wording of its errors. Loaded when something is wrong.
"""

import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from aioserve.errors import ConfigError, SettingError, did_you_mean

# Of msgspec's messages: what was not known, and where it stood.
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `(?P<path>.*)`)?$")
_NO_CHOICE = re.compile(r"Invalid (?:enum )?value '(?P<name>.*?)'(?: - at `(?P<path>.*)`)?$")
_MISFIT = re.compile(
    r"Expected `(?P<kinds>[\w |]+)`"
    r"(?:, got `.*?`| (?P<sign>[<>]=?) (?P<limit>\S+)| matching regex (?P<pattern>'.*'))?"
    r" - at `(?P<path>\$.+)`$"
)
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}
_ITEMS = {"int": "whole numbers", "float": "numbers", "str": "texts", "array": "lists"}
# Of msgspec's messages, also of those on the names in a mapping: what was wanted, and what came.
_OTHER_KIND = re.compile(r"Expected `(?P<kinds>[\w |]+)`, got `(?P<kind>\w+)`")
_NUMBER = "a text that looks like a number as a number, unless it is in quotes"
_DATE = "a text that looks like a date as a date, unless it is in quotes"
#: What YAML makes of some texts, by what msgspec calls that.
_UNQUOTED = {
    "int": _NUMBER,
    "float": _NUMBER,
    "bool": "yes, no, on, off, true and false as true or false, unless they are in quotes",
    "date": _DATE,
    "datetime": _DATE,
}
_BOUNDS = {"<=": "of at most", ">=": "of at least", "<": "below", ">": "above"}
MOST = 20  # mistakes of one file, each in a line


class ConfigErrors(ConfigError):
    """An error that names several mistakes: `mistakes` has a sentence for each."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__(*mistakes)
        self.mistakes = mistakes

    def __str__(self) -> str:
        return "\n  ".join([f"{len(self.mistakes)} errors:", *self.mistakes])


def mistakes(
    error: msgspec.ValidationError, tree: dict[str, Any], cls: type, where: str | None
) -> ConfigError:
    """Return a `SettingError` for one value that cannot be, or `ConfigErrors` that name each of
    several in the file `where`; None: what is wrong is not in a file, and the first is named.
    """
    first = _told(error, tree, cls, where)
    others = [] if where is None else _further(error, tree, cls, where)
    if not others:
        return first
    return ConfigErrors(str(first), *others)


def explain(error: msgspec.ValidationError, kind: type) -> str:
    """Return the message of an error in converting to `kind`, with the name that was probably
    meant, and with how to write a text that YAML has read as something else.
    """
    text = str(error) + _in_quotes(error)
    if match := _UNKNOWN.match(text):
        known = [name for t in _types_at(kind, match["path"]) for name in _field_names(t)]
        return text + (_elsewhere(match["name"], kind) or did_you_mean(match["name"], known))
    if match := _NO_CHOICE.match(text):
        known = list(_choices(kind, match["path"]))
        return f"{text}; expected one of {', '.join(known)}" if known else text
    return text


def misfit(error: msgspec.ValidationError, given: Any, kind: type) -> tuple[str, str] | None:
    """Return where in `given`, which does not convert to `kind`, a value has the wrong type, is out
    of range or none of those that there are, as `server.port`; and what was expected, in words,
    with what is there. None for an error of any other kind.
    """
    match = _MISFIT.match(str(error)) or _NO_CHOICE.match(str(error))
    if match is None or match["path"] is None:
        return None
    value, steps = given, re.findall(r"\.(\w+)|\[(.*?)\]", match["path"])
    for name, index in steps:
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):  # `...` stands for a name
            break
    where = ".".join(name for name, _ in steps if name)
    near = _in_quotes(error)
    if match.re is _NO_CHOICE:
        choices = [*_choices(kind, match["path"])]
        expected = f"one of {', '.join(choices)}"
        near = did_you_mean(str(value), choices)
    else:
        expected = " or ".join(
            _KINDS.get(each, f"`{each}`") for each in match["kinds"].split(" | ")
        )
        if match["sign"]:
            expected += f" {_BOUNDS[match['sign']]} {match['limit'].removesuffix('.0')}"
        elif match["pattern"]:
            expected += f" that matches {match['pattern']}"
    return where, f"expected {expected}, got {value!r}{near}"


def _in_quotes(error: msgspec.ValidationError) -> str:
    """Return what YAML reads as no text, if a text was wanted and that came in its place."""
    match = _OTHER_KIND.match(str(error))
    is_text = match is not None and "str" in match["kinds"].split(" | ")
    read = _UNQUOTED.get(match["kind"]) if match and is_text else None
    return f"; YAML reads {read}" if read else ""


def expected(error: msgspec.ValidationError) -> str:
    """Return what a Python value had to be, in words: `a whole number or None`, or, of an item of a
    list or mapping, `a list of texts`. An error of another wording is returned as it is.
    """
    match = re.match(r"Expected `(?P<kinds>[\w |]+)`.*?(?: - at `\$(?P<path>.+)`)?$", str(error))
    if match is None:
        return str(error)
    kinds = match["kinds"].split(" | ")
    if match["path"]:
        holds = " or ".join(_ITEMS.get(each, f"`{each}`") for each in kinds)
        return f"a list of {holds}" if match["path"].endswith("]") else f"a mapping of {holds}"
    return " or ".join(_KINDS.get(each, f"`{each}`") for each in kinds).replace("nothing", "None")


def unknown_name(error: msgspec.ValidationError) -> str | None:
    """Return where a field stands that is not known, as `server.hosst`, or None."""
    if (match := _UNKNOWN.match(str(error))) is None:
        return None
    return ".".join([*re.findall(r"\.(\w+)", match["path"] or ""), match["name"]])


def _told(
    error: msgspec.ValidationError, tree: dict[str, Any], cls: type, where: str | None
) -> ConfigError:
    if (found := misfit(error, tree, cls)) is not None:
        return SettingError(where, *found)
    return ConfigError(f"{where or 'settings'}: {explain(error, cls)}")


def _further(
    error: msgspec.ValidationError, tree: dict[str, Any], cls: type, where: str
) -> list[str]:
    """Return what else of a tree cannot be, in words: it is read again without what was wrong."""
    errors: list[str] = []
    while len(errors) < MOST:
        found = misfit(error, tree, cls)
        wrong = unknown_name(error) if found is None else found[0]
        if wrong is None:
            break
        tree = _without(tree, wrong)
        try:
            msgspec.convert(tree, cls)
        except msgspec.ValidationError as another:
            error = another
            errors.append(str(_told(error, tree, cls, where)))
        else:
            break
    return errors


def _without(tree: dict[str, Any], dotted: str) -> dict[str, Any]:
    """Return a copy of the tree without the value at `a.b`; without `a`, if that is no mapping."""
    name, _, rest = dotted.partition(".")
    inner = tree.get(name)
    kept = {key: value for key, value in tree.items() if key != name}
    return kept | {name: _without(inner, rest)} if rest and isinstance(inner, dict) else kept


def _elsewhere(name: str, kind: type) -> str:
    """`" (it is scheduler.policy)"`, if the name is right but stands in another section."""
    found = [
        f"{section}.{name}"
        for section, (inner,) in _fields(kind).items()
        if any(name in _field_names(alternative) for alternative in _alternatives(inner))
    ]
    return f" (it is {found[0]})" if len(found) == 1 else ""


def _types_at(kind: Any, path: str | None) -> list[Any]:
    """Return the types that may stand at a path such as `$.classes[0].prompt`."""
    found = list(_alternatives(kind))
    for step in re.findall(r"\.(\w+)|\[(.*?)\]", path or ""):
        name = step[0]
        inner = [
            inside
            for alternative in found
            for inside in (_fields(alternative).get(name, ()) if name else _items(alternative))
        ]
        found = [alternative for inside in inner for alternative in _alternatives(inside)]
    return found


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yield the types under `Annotated` and unions."""
    if typing.get_origin(kind) is typing.Annotated:
        yield from _alternatives(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for alternative in typing.get_args(kind):
            yield from _alternatives(alternative)
    else:
        yield kind


def _fields(kind: Any) -> dict[str, tuple[Any, ...]]:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return {}
    return {field.encode_name: (field.type,) for field in msgspec.structs.fields(kind)}


def _field_names(kind: Any) -> list[str]:
    return [*_fields(kind), *filter(None, [_tag_field(kind)])]


def _tag_field(kind: Any) -> str | None:
    return kind.__struct_config__.tag_field if _fields(kind) else None


def _items(kind: Any) -> tuple[Any, ...]:
    """Return what may stand in a list, or under a name in a mapping."""
    return typing.get_args(kind)[-1:]


def _choices(kind: Any, path: str | None) -> Iterator[str]:
    """Yield the values of a `Literal`, or the tags of a union, at the path."""
    for found in _types_at(kind, path):
        if typing.get_origin(found) is typing.Literal:
            yield from map(str, typing.get_args(found))
    parent, _, last = (path or "").rpartition(".")
    for found in _types_at(kind, parent):
        if _tag_field(found) == last:
            yield str(found.__struct_config__.tag)
