"""Programs of the project that stand outside its package, as modules that tests can call."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_program(path: str) -> ModuleType:
    """The program in the file `path`, such as `docs/make_zoo.py`, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
