"""The options of a policy, read from its source: names, defaults, and the comment beside each.

Runs nothing: importing a policy might take long, or fail. Knows what is written in the nested class
`Options` and in the classes of the same file that it derives from.
"""

import ast
from typing import Any

import msgspec


class OptionField(msgspec.Struct, frozen=True, array_like=True):
    """One option as its source declares it."""

    name: str
    default: Any  # as text, where it is no literal
    note: str  # the comment on its line


def read_options(source: str, owner: str = "") -> list[OptionField]:
    """The fields of the class `Options` nested in the class `owner`, those that it inherits first;
    without an owner, in the last class of the file. Raises `SyntaxError`.
    """
    tree, lines = ast.parse(source), source.splitlines()
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    owner = owner or next(reversed(classes), "")
    fields = _nested(classes, owner, lines) if owner in classes else {}
    return list(fields.values())


def _nested(
    classes: dict[str, ast.ClassDef], owner: str, lines: list[str]
) -> dict[str, OptionField]:
    """The options of a class: of its nested `Options`, else of a base in the same file."""
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
