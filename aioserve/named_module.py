"""Imports what strangers write: a module by its name, or a file, with errors that say where.

Knows no kind of class. The caller says by a word what is looked for, such as policy.
"""

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from aioserve.errors import ConfigError


def import_named(path: str, word: str, unknown: type[ConfigError]) -> ModuleType:
    """A file, read anew each time, or a module. Raises `unknown` if it is not there, and
    `ConfigError` with file and line if it cannot be imported; `word` says what was looked for.
    """
    if path.endswith(".py"):
        return _import_file(Path(path), word, unknown)
    return _import_module(path, word, unknown)


def _import_module(name: str, word: str, unknown: type[ConfigError]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _not_importable(error, name, word) from error  # something that it imports
        raise unknown(f"no module named {error.name!r} to take a {word} from") from error
    except (Exception, SystemExit) as error:
        raise _not_importable(error, name, word) from error


def _import_file(path: Path, word: str, unknown: type[ConfigError]) -> ModuleType:
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise unknown(f"no file {path}{where} to take a {word} from")
    module = ModuleType(f"aioserve_{word}_{path.stem}")
    module.__file__ = str(path.absolute())
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # so that dataclasses, pickles and tracebacks find it
    try:
        # Not by a loader: that would take the code of a file edited a moment ago from its cache.
        code = compile(path.read_bytes(), module.__file__, "exec")
        exec(code, module.__dict__)  # noqa: S102 - it is code, by an operator's word
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before
        raise _not_importable(error, str(path), word) from error
    return module


def _not_importable(error: BaseException, path: str, word: str) -> ConfigError:
    """In one line, with the place: of what is wrong in Python's eyes, or of what was running."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        where, message = f"{_shown(error.filename)}:{error.lineno}", error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if not f.filename.startswith("<") and f.filename != __file__]
        where = f"{_shown(own[-1].filename)}:{own[-1].lineno}" if own else path
        message = " ".join(str(error).split())
    return ConfigError(f"{where}: cannot import the {word}: {type(error).__name__}: {message}")


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
