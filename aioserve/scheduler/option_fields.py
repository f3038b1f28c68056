"""The options of a policy, read from its source: names, defaults, and the comment beside each.

Runs nothing: importing a policy might take long, or fail. Knows what is written in a nested class
`Options`, not what that class inherits.
"""

import ast
from typing import Any

import msgspec


class OptionField(msgspec.Struct, frozen=True, array_like=True):
    """One option as its source declares it."""

    name: str
    default: Any  # as text, where it is no literal
    note: str  # the comment on its line


def read_options(source: str) -> list[OptionField]:
    """The fields of all nested classes `Options`, in order. Raises `SyntaxError`."""
    lines, fields = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or node.name != "Options":
            continue
        for field in node.body:
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            note = lines[field.lineno - 1].partition("  # ")[2].removeprefix("noqa: RUF012 - ")
            fields.append(OptionField(field.target.id, _value(field.value), note))
    return fields


def _value(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
