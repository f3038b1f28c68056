"""What the installed policies say of themselves: a line on each, and their options.

For `--help` and the page. Reads sources and runs nothing: importing a policy might take long, or
fail.
"""

import ast
import importlib.util
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Lock

from aioserve.scheduler.option_fields import OptionField, read_options
from aioserve.scheduler.registry import available_policies

# Python 3.11 counts the depth of all threads' trees together: where two parse at once, one may end
# in a SystemError (python/cpython#106905). Two browsers that open the page at once are two threads.
_parsing = Lock()


def describe_policies() -> dict[str, str]:
    """The installed policies by name, each with the first line of its docstring.

    Raises `ConfigError` if two packages claim one name.
    """
    return {name: _first_line(entry_point) for name, entry_point in available_policies().items()}


def describe_options() -> dict[str, list[OptionField]]:
    """The options of the installed policies by name, as their sources declare them.

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
