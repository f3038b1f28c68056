"""Names that dependencies keep to themselves and that the package reads all the same.

Such a name can go with any release of its owner. Here is each, why there is no other way, and what
happens without it, which `test_private_names_gone` tries. The table may only shrink.
"""

import ast
import asyncio
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_imports import MODULES

# Of what a dependency warns when it is imported, nothing is judged here: Ray does, of pydantic.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Names that are documented although they begin with an underscore.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace", "_current_frames", "_getframe"}


class Private(NamedTuple):
    """A private name of a dependency, in the module that reads it."""

    module: str
    name: str
    why: str
    if_gone: str
    find: Callable[[], object]  # raises if the installed version lacks it


def found_in(path: str) -> Callable[[], object]:
    """Finds `package.module:attribute.attribute`; skips the test where the package is missing."""

    def find() -> object:
        module, _, attributes = path.partition(":")
        return functools.reduce(getattr, attributes.split("."), pytest.importorskip(module))

    return find


def config_attribute() -> object:
    from transformers import PretrainedConfig

    return PretrainedConfig()._attn_implementation


def new_loop_has(name: str) -> None:
    loop = asyncio.SelectorEventLoop()
    loop.close()
    assert hasattr(loop, name)


TABLE = (
    Private(
        "aioserve.features.multimodal.prompt",
        "_get_num_multimodal_tokens",
        "No other method counts an image's tokens without preparing the image.",
        "An image counts as one token until it is prepared; long prompts are refused later.",
        found_in(
            "transformers.models.qwen3_vl.processing_qwen3_vl:Qwen3VLProcessor._get_num_multimodal_tokens"
        ),
    ),
    Private(
        "aioserve.lab.simulation.run",
        "_ready",
        "asyncio does not tell in public whether a callback is due; a simulated step asks it.",
        "Simulations fail in their first step, with an AttributeError.",
        lambda: new_loop_has("_ready"),
    ),
    Private(
        "aioserve.lab.simulation.run",
        "_scheduled",
        "asyncio does not tell in public when the next timer is due; a simulated step asks it.",
        "Simulations fail in their first step, with an AttributeError.",
        lambda: new_loop_has("_scheduled"),
    ),
    Private(
        "aioserve.runner.models.architecture",
        "_is_stateful",
        "transformers marks models that keep states in a way of their own so, and only so.",
        "Such a model is refused for the type of its layers, or by the probe at load.",
        found_in("transformers.models.mamba.modeling_mamba:MambaPreTrainedModel._is_stateful"),
    ),
    Private(
        "aioserve.runner.cpu.onednn",
        "_linear_pointwise",
        "oneDNN's packed product has no public operator.",
        "Weights are not packed, which costs some speed; one line of the log says so.",
        found_in("torch:ops.mkldnn._linear_pointwise"),
    ),
    Private(
        "aioserve.runner.cpu.onednn",
        "_reorder_linear_weight",
        "oneDNN's packed layout has no public operator.",
        "Weights are not packed, which costs some speed; one line of the log says so.",
        found_in("torch:ops.mkldnn._reorder_linear_weight"),
    ),
    Private(
        "aioserve.runner.fused.recognize",
        "_apply_gate",
        "The activation of a layer of experts is recognized by what this method computes.",
        "A model with experts runs as transformers wrote it, which is slower; the log says so.",
        found_in("transformers.models.mixtral.modeling_mixtral:MixtralExperts._apply_gate"),
    ),
    Private(
        "aioserve.runner.models.attention_probe",
        "_attn_implementation",
        "A configuration has no public field for the attention that its model was built with.",
        "Models run row by row, the slowest way; those with states or images are refused.",
        config_attribute,
    ),
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def defined_in(module: str) -> frozenset[str]:
    """The private names that a module defines or assigns."""
    names = set()
    for node in ast.walk(tree_of(module)):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(name, ast.Store()):
                names.add(name)
    return frozenset(filter(is_private, names))


def imports_of(module: str) -> dict[str, str]:
    """By local name, what an import in the module stands for, dotted."""
    known = {}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return known


def home_of(dotted: str) -> str | None:
    """The module of this package that a dotted name is, or lies in."""
    while dotted:
        if dotted in MODULES:
            return dotted
        dotted = dotted.rpartition(".")[0]
    return None


@functools.cache
def own_names(module: str) -> frozenset[str]:
    """The private names that a module may mean by its own: its, and those of the modules of this
    package that it imports, directly or through two others: where the bases of its classes are.
    """
    names, reached = set(defined_in(module)), {module}
    for _ in range(3):
        dotted = {name for each in reached for name in imports_of(each).values()}
        reached = {home for home in map(home_of, dotted) if home not in (None, "aioserve")}
        names.update(*map(defined_in, reached))
    return frozenset(names)


def foreign_names_of_bases(module: str) -> Iterator[tuple[ast.ClassDef, set[str]]]:
    """Each class that derives from a dependency's, with the private names of its bases."""
    known = imports_of(module)
    for node in ast.walk(tree_of(module)):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
            if first not in known:
                continue  # a class of the module's own, or a builtin
            dotted = f"{known[first]}.{rest}".strip(".")
            if home_of(dotted) is None:
                yield node, names_of_class(dotted)


@functools.cache
def names_of_class(dotted: str) -> set[str]:
    """The private names of a dependency's class and its bases, those of instances included."""
    path, _, name = dotted.rpartition(".")
    try:
        found = getattr(importlib.import_module(path), name)
    except ImportError:
        return set()  # optional, and not installed
    names = set(dir(found))
    for cls in getattr(found, "__mro__", ())[:-1]:
        try:
            source = inspect.getsource(cls)
        except (OSError, TypeError):
            continue  # not written in Python
        for node in ast.walk(ast.parse(textwrap.dedent(source))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return set(filter(is_private, names))


def private_names(module: str) -> Iterator[str]:
    """The private names of dependencies that a module reads, sets or overrides."""
    own = own_names(module)
    for node in ast.walk(tree_of(module)):
        match node:
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                yield name
            case ast.Call(
                func=ast.Name("getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(str(name)), *_],
            ) if is_private(name) and name not in own:
                yield name
            case ast.ImportFrom(module=str(path), names=names) if home_of(path) is None:
                words = [*path.split("."), *(alias.name for alias in names)]
                yield from filter(is_private, words)
    for node, theirs in foreign_names_of_bases(module):
        used = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        used |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        yield from used & theirs


@pytest.mark.slow
def test_the_table_has_every_private_name_that_is_read_and_no_other() -> None:
    found = {(m, name) for m in MODULES for name in private_names(m) if name not in DOCUMENTED}
    assert found == {(row.module, row.name) for row in TABLE}


def test_the_table_only_shrinks() -> None:
    assert len(TABLE) <= 9


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.module}:{row.name}")
def test_a_private_name_is_there_in_what_is_installed(row: Private) -> None:
    row.find()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import argparse\ndef f(p: argparse._ArgumentGroup): ...", {"_ArgumentGroup"}),
        ("from aiohttp.web_protocol import _ErrInfo", {"_ErrInfo"}),
        ("def f(x): return getattr(x, '_hidden', None)", {"_hidden"}),
        ("from aiohttp import web\nclass C(web.RequestHandler):\n _waiter = 0\n"
         " def f(self): return self._waiter", {"_waiter"}),
        ("class C:\n def __init__(self): self._own = 1\n def f(self): return self._own", set()),
    ],
    ids=["type", "import", "getattr", "base", "own"],
)  # fmt: skip
def test_a_private_name_is_found_however_it_is_reached(
    code: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sample.py"
    path.write_text(code)
    monkeypatch.setitem(MODULES, "aioserve.sample", path)
    for cached in (tree_of, defined_in, own_names):
        cached.cache_clear()
    assert set(private_names("aioserve.sample")) == expected
    for cached in (tree_of, defined_in, own_names):
        cached.cache_clear()
