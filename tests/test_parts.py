"""What parts bring to the core: each line of `BRINGS` can be had, and nothing else names a part."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from aioserve.support.parts import PARTS, brought, load
from tests.test_imports import MODULES, is_door, is_part
from tests.test_imports import PARTS as PART_NAMES

BROUGHT = sorted({kind for package in PARTS for kind in importlib.import_module(package).BRINGS})
#: Core modules that may name modules of parts: the list of parts, names of the last release, and
#: where policies are known by their names, as settings have them.
NAMING = {
    "aioserve.support.parts",
    "aioserve.support.old_names",
    "aioserve.support.plugins",
    "aioserve.scheduler.parts",
    "aioserve.scheduler.registry",
}


@pytest.mark.parametrize("kind", BROUGHT)
def test_all_that_parts_bring_can_be_loaded(kind: str) -> None:
    for name in brought(kind):
        found = load(kind, name)
        assert inspect.ismodule(found) or getattr(found, "__doc__", None)


def test_no_two_parts_bring_the_same() -> None:
    names = [
        (kind, name)
        for package in PARTS
        for kind, own in importlib.import_module(package).BRINGS.items()
        for name in own
    ]
    assert len(names) == len(set(names))


def _named_parts(path: Path) -> set[str]:
    """Texts in a file that are the name of a module of a part, or of what it has."""
    source = path.read_text()
    if not any(f"aioserve.{part}" in source for part in PART_NAMES):  # most need not be parsed
        return set()
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and is_part(node.value.partition(":")[0])
        and node.value.partition(":")[0] in MODULES
    }


def test_the_core_names_no_module_of_a_part() -> None:
    """As a text, by which it could be imported past the rule for imports."""
    found = {
        name: named
        for name, path in MODULES.items()
        if not (is_part(name) or is_door(name) or name in NAMING) and (named := _named_parts(path))
    }
    assert found == {}
