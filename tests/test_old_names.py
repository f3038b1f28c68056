"""What was documented under other names can still be imported, with a word about it."""

import importlib
import sys
from collections.abc import Iterator

import pytest

from aioserve.support.old_names import MOVED


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if any(name == old or name.startswith(f"{old}.") for old in MOVED):
            del sys.modules[name]


@pytest.mark.parametrize("old", [name for name in MOVED if name != "aioserve.ray"])
def test_an_old_name_gives_the_same_module_and_a_warning(old: str) -> None:
    if (package := old.rpartition(".")[0]) in MOVED:
        with pytest.warns(DeprecationWarning, match=f"{package} is now"):
            importlib.import_module(package)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == MOVED[old]


def test_names_and_modules_within_a_moved_package_are_the_same_ones() -> None:
    from aioserve.fleet.routing import RouterInterface

    with pytest.warns(DeprecationWarning, match="is now"):
        from aioserve.routing import RouterInterface as Old  # type: ignore[import-not-found]
    assert Old is RouterInterface
    with pytest.warns(DeprecationWarning, match="is now"):
        module = importlib.import_module("aioserve.routers.llumnix")
    assert module is importlib.import_module("aioserve.fleet.routers.llumnix")


def test_a_module_that_is_imported_by_its_old_name_becomes_no_package() -> None:
    with pytest.warns(DeprecationWarning, match="is now aioserve.request"):
        module = importlib.import_module("aioserve.hints")
    assert not hasattr(module, "__path__")


def test_a_name_that_never_was_is_missing_as_before() -> None:
    with (
        pytest.warns(DeprecationWarning, match="is now"),
        pytest.raises(ModuleNotFoundError, match=r"aioserve\.routing\.no_such"),
    ):
        importlib.import_module("aioserve.routing.no_such")
    with pytest.raises(ModuleNotFoundError, match=r"aioserve\.no_such"):
        importlib.import_module("aioserve.no_such")
