"""Finds what other authors write: a class by name, by `package.module:Class`, or by `file.py`.

What registers itself by name are entry points of other packages and files of packages here; the
zoo's policies are files of `policies/zoo`. A module that cannot be imported is told with the line
at fault. Options become a typed struct, by messages that name the option.
"""

import importlib
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeGuard, TypeVar

import msgspec

from aioserve.errors import ConfigError, did_you_mean


def import_named(path: str, word: str, unknown: type[ConfigError]) -> ModuleType:
    """Return a file, read anew each time, or a module. Raises `unknown` if it is not there, and
    `ConfigError` with file and line if it cannot be imported; `word` says what was looked for.
    """
    if path.endswith(".py"):
        return _import_file(Path(path), word, unknown)
    return _import_module(path, word, unknown)


def _import_module(name: str, word: str, unknown: type[ConfigError]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ConfigError:
        raise  # the module says itself what it lacks
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
    """Return the error in one line, with its place in the source, or in what was running."""
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


# Finds a class by installed name, by `package.module:Class`, or by `file.py`. What ships and what
# strangers write come through the same door. Imports nothing but the one class that is asked for.
# Knows no kind of class.


T = TypeVar("T")


def has_no_dot(spec: str) -> bool:
    """Return whether `spec` is a name, and neither a file nor a module."""
    return "." not in spec


@dataclass(frozen=True)
class Kind(Generic[T]):
    """Classes that can be had by name, and the words for them in messages."""

    word: str  # as policy
    words: str  # as policies
    interface: type[T]
    base: str  # what authors derive from
    available: Callable[[], Mapping[str, EntryPoint]]
    is_name: Callable[[str], bool] = has_no_dot
    unknown: type[ConfigError] = ConfigError

    def load(self, spec: str) -> type[T]:
        """Return the class that `spec` names; a file is read anew each time. No class: the only
        one.

        Raises `unknown` that lists what there is, or `ConfigError` if it is no such class or cannot
        be imported: then with the file and line of the error, which is the cause.
        """
        path, name = self._parse(spec)
        module = import_named(path, self.word, self.unknown)
        found = getattr(module, name, None) if name else self._only_one(module, path)
        if found is None:
            known = [kind.__name__ for kind in self._defined_in(module)]
            raise self.unknown(
                f"unknown {self.word} {spec!r}: no {name!r} in {path}{did_you_mean(name, known)}"
            )
        if not self._is_one(found):
            raise ConfigError(
                f"{self.word} {spec!r} is not a {self.interface.__name__}; derive from {self.base}"
            )
        if unfinished := _unfinished(found):
            missing = ", ".join(sorted(unfinished))
            written = did_you_mean(missing, vars(found)).replace("did you mean", "is it")
            raise ConfigError(f"{self.word} {spec!r} does not implement {missing}{written}")
        return found

    def _parse(self, spec: str) -> tuple[str, str]:
        """File or module, and class; "" if it names none."""
        path, colon, name = spec.rpartition(":")
        if colon:
            return path, name
        if not self.is_name(spec):
            return spec, ""
        known = self.available()
        if spec not in known:
            raise self.unknown(
                f"unknown {self.word} {spec!r}{did_you_mean(spec, known)}; available: "
                f"{', '.join(known) or 'none'}; or give package.module:Class or path/to/file.py"
            )
        path, _, name = known[spec].value.partition(":")
        return path, name

    def _is_one(self, kind: Any) -> TypeGuard[type[T]]:
        return isinstance(kind, type) and issubclass(kind, self.interface)

    def _defined_in(self, module: ModuleType) -> list[type[T]]:
        """Return those that it defines itself, finished or not."""
        kinds = filter(self._is_one, vars(module).values())
        return [kind for kind in kinds if kind.__module__ == module.__name__]

    def _only_one(self, module: ModuleType, path: str) -> type[T]:
        """Return the one that it defines. Raises `ConfigError` if there are more, or none."""
        found = self._defined_in(module)
        complete = [kind for kind in found if not _unfinished(kind)] or found
        if not complete:
            raise ConfigError(f"{path} defines no {self.word}: derive a class from {self.base}")
        if len(complete) > 1:
            raise ConfigError(
                f"{path} defines several {self.words}: say which, one of "
                + ", ".join(f"{path}:{kind.__name__}" for kind in complete)
            )
        return complete[0]


def _unfinished(kind: Any) -> frozenset[str]:
    return getattr(kind, "__abstractmethods__", frozenset())


# Finds what registers itself by name: entry points of other packages, files of packages here. Knows
# where names are listed. Imports none of what they name.


Folders = tuple[tuple[Path, int], ...]  # each with the time of its last change, in nanoseconds


def installed_entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group that installed packages have; packages are read anew where
    a folder of `sys.path` has changed, as every installation changes one.
    """
    return _read(group, _changed(sys.path))


def _changed(paths: Iterable[str]) -> Folders:
    """Return the folders that there are, each with the time of its last change."""
    folders = [Path(path or ".") for path in paths]
    return tuple((folder, folder.stat().st_mtime_ns) for folder in folders if folder.exists())


@lru_cache
def _read(group: str, folders: Folders) -> EntryPoints:
    """Return the entry points of a group, as these folders with their times of change hold them."""
    return entry_points(group=group)


def shipped(package: str, group: str, prefix: str = "") -> list[EntryPoint]:
    """Return an entry point for each module of a package, sorted by name. Its value names the
    module, its name begins with `prefix`.
    """
    spec = find_spec(package)
    paths = spec.submodule_search_locations if spec is not None else None
    names = _modules(_changed(paths or ()))
    return [EntryPoint(prefix + name, f"{package}.{name}", group) for name in names]


@lru_cache
def _modules(folders: Folders) -> list[str]:
    """Return the names of the modules that these folders with their times of change hold,
    sorted.
    """
    return sorted(found.name for found in pkgutil.iter_modules([str(f) for f, _ in folders]))


def installed(group: str, word: str, more: Iterable[EntryPoint] = ()) -> dict[str, EntryPoint]:
    """Entry points of a group, and `more`, by name; `ConfigError` if two packages claim one name.
    `word` says in that message what they are, as `policy`.
    """
    found: dict[str, EntryPoint] = {}
    for entry_point in sorted([*installed_entry_points(group), *more], key=lambda e: e.name):
        other = found.setdefault(entry_point.name, entry_point)
        if other.value != entry_point.value:
            raise ConfigError(
                f"two installed packages offer a {word} {entry_point.name!r}: "
                f"{other.value} and {entry_point.value}"
            )
    return found


# Options as a typed struct made of plain data, by messages that name the option. Knows no kind of
# options: the caller says which struct they derive from, and who owns them.


S = TypeVar("S", bound=msgspec.Struct)


def convert_options(options: dict[str, Any], kind: Any, base: type[S], owner: str) -> S:
    """Options of type `kind`, a nested class `Options` that derives from `base`, from plain data.
    Raises `ConfigError` that names the `owner`, what is wrong and the options that there are.
    """
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{owner}: its Options must derive from {base.__name__}")
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        from aioserve.support.mistakes import explain

        known = ", ".join(f.name for f in msgspec.structs.fields(kind)) or "none"
        raise ConfigError(
            f"options of {owner}: {explain(error, kind)}; options it has: {known}"
        ) from error


# Names of the zoo: the published policies of `policies/zoo`, each of which is one file. The file
# `policies/zoo/srpt.py` is the policy `zoo.srpt`, and `configs/zoo/srpt.yaml` its configuration;
# nothing else registers them. Knows where they lie. Imports none of them.


PACKAGE = "aioserve.policies.zoo"
PREFIX = "zoo."
GROUP = "aioserve.policies"  # of entry points, by which other packages register policies

# `zoo.py` and `zoo.yaml` are files of a user.
_NAME = re.compile(r"zoo\.(?!(?:py|ya?ml|csv|jsonl)$)[a-zA-Z0-9_-]+")


def is_zoo_name(text: str) -> bool:
    """Return whether `text` names a policy of the zoo, such as `zoo.srpt`, be there one or not."""
    return _NAME.fullmatch(text) is not None


def zoo_entry_points() -> list[EntryPoint]:
    """Return an entry point for each policy of the zoo, sorted by name. Its value names a module,
    which defines one policy.
    """
    return shipped(PACKAGE, GROUP, PREFIX)
