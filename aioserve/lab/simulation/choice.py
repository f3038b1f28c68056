"""A router or an autoscaler as a fleet file names it: with options, and a name for tables.

Knows what both have. Loads neither.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from aioserve.errors import ConfigError
from aioserve.routing import short_name


class Chosen(Protocol):
    """What a fleet file names, with or without options."""

    @property
    def spec(self) -> str:
        """A name, `package.module:Class` or a file."""

    @property
    def name(self) -> str:
        """The name that tables have; "" for that of the class."""

    @property
    def shown(self) -> str:
        """The name that tables have."""

    def check(self) -> None:
        """Raise `ConfigError` for a class that there is not, or options that it has not."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what a fleet file names with options; a class adds its `spec`, and loads it."""

    options: dict[str, Any] = {}
    name: str = ""  # in tables (default: the name of the class)

    @property
    def shown(self: Chosen) -> str:
        """The name that tables have."""
        return self.name or short_name(self.spec)


def check_choices(choices: Sequence[Chosen], word: str) -> None:
    """Raise `ConfigError` if one of them cannot be, or two have one name in tables. `word` says
    what they are, as `a router`.
    """
    for choice in choices:
        choice.check()
    shown = [choice.shown for choice in choices]
    if len(set(shown)) < len(shown):
        raise ConfigError(f"{word} is named twice: {', '.join(shown)}")
