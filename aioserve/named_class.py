"""Finds a class by installed name, by `package.module:Class`, or by `file.py`.

What ships and what strangers write come through the same door. Imports nothing but the one class
that is asked for. Knows no kind of class.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, Generic, TypeGuard, TypeVar

from aioserve.errors import ConfigError
from aioserve.named_module import import_named
from aioserve.nearest import did_you_mean

T = TypeVar("T")


def has_no_dot(spec: str) -> bool:
    """Whether `spec` is a name, and neither a file nor a module."""
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
        """The class that `spec` names; a file is read anew each time. No class: the only one.

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
        """Those that it defines itself, finished or not."""
        kinds = filter(self._is_one, vars(module).values())
        return [kind for kind in kinds if kind.__module__ == module.__name__]

    def _only_one(self, module: ModuleType, path: str) -> type[T]:
        """The one that it defines. Raises `ConfigError` if there are more, or none."""
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
