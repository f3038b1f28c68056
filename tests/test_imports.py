"""Who may import whom. The arrows point one way, and nothing heavy is loaded before it is used."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: The most floors that the rooms of the core stand on. It is only ever lowered.
MAX_FLOORS = 10
#: Folders that the core does not import: parts may import the core.
PARTS = ("apis", "features", "fleet", "gpu", "lab", "policies", "testing", "vllm")
#: What stands in front of the core and of all parts.
DOORS = ("aioserve.__main__", "aioserve.cli", "aioserve.client")
#: The only module of aioserve that policies know.
POLICIES_KNOW = {"aioserve.scheduler"}


def all_statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements at any depth, among which all imports are, without a look into expressions."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(node, name, ())


@functools.cache
def imports(path: Path) -> tuple[set[str], list[ast.Import | ast.ImportFrom]]:
    """Modules that importing the file imports, and every import that is in it: both of one parse of
    the file, whose tree is not kept.
    """
    tree = ast.parse(path.read_text())
    at_once: set[str] = set()
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            at_once |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            at_once.add(node.module)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            todo += node.body + node.orelse
        elif isinstance(node, ast.ClassDef | ast.Try):
            todo += node.body
    every = [one for one in all_statements(tree) if isinstance(one, ast.Import | ast.ImportFrom)]
    return at_once, every


def module_level_imports(path: Path) -> set[str]:
    """Modules of this project that importing the file imports."""
    return {name for name in imports(path)[0] if name.split(".")[0] == "aioserve"}


def module_name(path: Path) -> str:
    """Of policies, where setup.py puts them."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"aioserve.{name}" if path.is_relative_to(ROOT / "policies") else name


MODULES = {
    module_name(path): path
    for path in sorted([*ROOT.glob("aioserve/**/*.py"), *ROOT.glob("policies/**/*.py")])
}


@functools.cache
def known_modules() -> dict[str, set[str]]:
    """By module, those that it names in an import anywhere: in a function, or for the types."""
    known = {}
    for name, path in MODULES.items():
        found: set[str] = set()
        for node in imports(path)[1]:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= members & MODULES.keys() or {node.module}
        known[name] = found & MODULES.keys()
    return known


def is_part(module: str) -> bool:
    """Whether the module belongs to a part and not to the core."""
    return module.split(".")[1:2] != [] and module.split(".")[1] in PARTS


def is_door(module: str) -> bool:
    """Whether users come in by the module, which shows them the core and all parts."""
    return module == "aioserve" or module.startswith(DOORS)


def room(module: str) -> str:
    """What holds the module at the top of aioserve or of a part: a folder, or itself."""
    return ".".join(module.split(".")[: 3 if is_part(module) else 2])


def rooms() -> dict[str, set[str]]:
    """By room, the other rooms that importing one of its modules imports."""
    below: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        found = {room(imported) for imported in module_level_imports(path)}
        below.setdefault(room(name), set()).update(found - {room(name), "aioserve"})
    return below


def test_the_core_imports_no_part() -> None:
    """Neither at its top, nor in a function, nor for the types."""
    found = {
        f"{name} {other}"
        for name, known in known_modules().items()
        if not is_part(name) and not is_door(name)
        for other in known
        if is_part(other)
    }
    assert found == set(), "let the part say in its `BRINGS` what it brings: aioserve.support.parts"


def test_nothing_of_the_core_imports_a_door() -> None:
    for name, known in known_modules().items():
        if not is_part(name) and not is_door(name):
            assert not [other for other in known if other != "aioserve" and is_door(other)], name


def test_the_rooms_of_the_core_stand_on_floors_and_import_downwards() -> None:
    below = {
        name: {other for other in known if not is_part(other)}
        for name, known in rooms().items()
        if not is_part(name)
    }
    floors = dict[str, int]()
    for name in TopologicalSorter(below).static_order():  # raises CycleError, which names them
        floors[name] = 1 + max((floors[other] for other in below.get(name, ())), default=0)
    assert max(floors.values()) <= MAX_FLOORS, floors


def test_policies_import_the_scheduler_alone() -> None:
    policies = {name for name in MODULES if name.startswith("aioserve.policies")}
    others = {name: module_level_imports(MODULES[name]) - POLICIES_KNOW for name in policies}
    assert len(policies) > 40
    assert {
        f"{name} {other}"
        for name, found in others.items()
        for other in found
        if not other.startswith("aioserve.policies")
    } == set()


def test_no_module_knows_another_that_knows_it() -> None:
    """Directly or by a detour, if only in a function or for the types."""
    TopologicalSorter(known_modules()).prepare()  # raises CycleError, which names them


def test_no_folder_of_the_lab_knows_another_that_knows_it() -> None:
    lab = {
        name: name if path.parent.name == "lab" else name.rpartition(".")[0]
        for name, path in MODULES.items()
        if name.startswith("aioserve.lab.") and path.name != "__init__.py"
    }
    folders: dict[str, set[str]] = {}
    for name, folder in lab.items():
        known = {lab[other] for other in known_modules()[name] & lab.keys()} - {folder}
        folders.setdefault(folder, set()).update(known)
    TopologicalSorter(folders).prepare()


@pytest.mark.parametrize(
    ("package", "place"),
    [
        ("aioserve.runner.cpu", "aioserve.engine.builder"),
        ("aioserve.gpu.cuda", None),
        ("aioserve.kernels", "aioserve.runner.cpu"),
    ],
)
def test_what_computes_is_known_in_one_place(package: str, place: str | None) -> None:
    """The seams of the runner know neither side of it, and the sides do not know each other. What a
    part adds to one side is in its files named for that side; a side that is a part itself is known
    to none, but by what it brings. The doctor computes nothing: it asks all of them what they find
    here.
    """
    own = {name for name in MODULES if f"{name}.".startswith(f"{package}.")}
    knowing = {name for name, known in known_modules().items() if known & own} - own
    knowing -= {"aioserve.cli.doctor"}
    knowing -= {name for name in knowing if name.rpartition(".")[2].startswith("cpu_")}
    assert bool(knowing) == (place is not None)
    assert all(f"{name}.".startswith(f"{place}.") for name in knowing), knowing


#: What a process does, one after the other, and what it may not have loaded by then.
LIGHT = {
    "from aioserve.scheduler import available_policies as names, load_policy; "
    "[load_policy(name) for name in names()]": (
        *("torch", "transformers", "aiohttp", "asyncio", "aioserve.engine", "aioserve.server"),
    ),
    "from aioserve.cli.serve import build_parser; build_parser().format_help()": (
        *("torch", "transformers", "aiohttp", "aioserve.engine", "aioserve.server"),
    ),
    "import aioserve, aioserve.testing, aioserve.runner.cpu.runner": ("torch", "transformers"),
}


def test_policies_help_and_the_package_load_nothing_heavy() -> None:
    """In one process: whatever an import loads is there at the end as well."""
    tell = "; print([m for m in {!r} if m in sys.modules])\n"
    code = "import sys\n" + "".join(do + tell.format(heavy) for do, heavy in LIGHT.items())
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert dict(zip(LIGHT, result.stdout.splitlines(), strict=True)) == dict.fromkeys(LIGHT, "[]")


def test_no_test_reaches_into_the_parts_of_an_engine() -> None:
    """`AsyncEngine.inspect` tells what they do; a fault is put around a class."""
    private = f".{'_parts'}"
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    assert len(files) > 100
    assert [str(path) for path in files if private in path.read_text(encoding="utf-8")] == []


def test_every_public_name_can_be_had() -> None:
    import aioserve

    for name in aioserve.__all__:
        assert getattr(aioserve, name) is not None


@pytest.mark.parametrize("package", ["aioserve.runner"])
def test_no_room_of_a_package_knows_another_that_knows_it(package: str) -> None:
    """Rooms are the folders below a package; what stands beside them puts them together."""
    rooms = {
        name: ".".join(name.split(".")[:3])
        for name, path in MODULES.items()
        if name.startswith(f"{package}.") and path.parent.parent.name == package.split(".")[1]
    }
    known: dict[str, set[str]] = {}
    for name, room in rooms.items():
        others = {rooms[other] for other in known_modules()[name] & rooms.keys()} - {room}
        known.setdefault(room, set()).update(others)
    assert len(known) >= 4
    TopologicalSorter(known).prepare()
