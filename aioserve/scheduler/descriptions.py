"""Descriptions of policies and their options, for `--help` and the page, read from sources.

Reading a source runs nothing: importing a policy might take long, or fail.
"""

import ast
import importlib.util
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from aioserve.scheduler.registry import available_policies

# Python 3.11 counts the depth of all threads' trees together: where two parse at once, one may end
# in a SystemError (python/cpython#106905). Two browsers that open the page at once are two threads.
_parsing = Lock()


class OptionField(msgspec.Struct, frozen=True, array_like=True):
    """One option as its source declares it."""

    name: str
    default: Any  # as text, where it is no literal
    note: str  # the comment on its line


def describe_policies() -> dict[str, str]:
    """Return the installed policies by name, each with the first line of its docstring.

    Raises `ConfigError` if two packages claim one name.
    """
    return {name: _first_line(entry_point) for name, entry_point in available_policies().items()}


def describe_options() -> dict[str, list[OptionField]]:
    """Return the options of the installed policies by name, as their sources declare them.

    Raises `ConfigError` if two packages claim one name.
    """
    found = {}
    for name, entry_point in available_policies().items():
        try:
            with _parsing:
                owner = entry_point.value.partition(":")[2]
                found[name] = read_options(_source(entry_point).decode(), owner)
        except (ImportError, OSError, SyntaxError, ValueError):
            found[name] = []
    return found


def _source(entry_point: EntryPoint) -> bytes:
    spec = importlib.util.find_spec(entry_point.value.partition(":")[0])
    return Path(spec.origin).read_bytes() if spec and spec.origin else b""


def _first_line(entry_point: EntryPoint) -> str:
    """Of the class' docstring. Of an entry point without a class: of the last class in its file."""
    name = entry_point.value.partition(":")[2]
    try:
        with _parsing:
            tree = ast.parse(_source(entry_point))
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""
    for node in reversed(tree.body):
        if isinstance(node, ast.ClassDef) and name in ("", node.name):
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def read_options(source: str, owner: str = "") -> list[OptionField]:
    """Return the fields of the class `Options` nested in the class `owner`, those that it inherits
    first; without an owner, in the last class of the file. Raises `SyntaxError`.
    """
    tree, lines = ast.parse(source), source.splitlines()
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    owner = owner or next(reversed(classes), "")
    fields = _nested(classes, owner, lines) if owner in classes else {}
    return list(fields.values())


def _nested(
    classes: dict[str, ast.ClassDef], owner: str, lines: list[str]
) -> dict[str, OptionField]:
    """Return the options of a class: of its nested `Options`, else of a base in the same file."""
    for node in classes[owner].body:
        if isinstance(node, ast.ClassDef) and node.name == "Options":
            return _fields(classes, node, lines)
    found: dict[str, OptionField] = {}
    for base in classes[owner].bases:
        if isinstance(base, ast.Name) and base.id in classes and not found:
            found = _nested(classes, base.id, lines)
    return found


def _fields(
    classes: dict[str, ast.ClassDef], options: ast.ClassDef, lines: list[str]
) -> dict[str, OptionField]:
    """By name, the fields of a class of options, after those of its bases in the same file."""
    found: dict[str, OptionField] = {}
    for base in options.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= _fields(classes, classes[base.id], lines)
        elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            if base.value.id in classes:
                found |= _nested(classes, base.value.id, lines)
    for field in options.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            note = lines[field.lineno - 1].partition("  # ")[2].removeprefix("noqa: RUF012 - ")
            name = field.target.id
            found[name] = OptionField(name, _value(field.value), note)
    return found


def _value(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
