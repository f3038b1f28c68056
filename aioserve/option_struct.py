"""Options as a typed struct made of plain data, by messages that name the option.

Knows no kind of options: the caller says which struct they derive from, and who owns them.
"""

from typing import Any, TypeVar

import msgspec

from aioserve.errors import ConfigError
from aioserve.nearest import explain

T = TypeVar("T", bound=msgspec.Struct)


def convert_options(options: dict[str, Any], kind: Any, base: type[T], owner: str) -> T:
    """Options of type `kind`, a nested class `Options` that derives from `base`, from plain data.
    Raises `ConfigError` that names the `owner`, what is wrong and the options that there are.
    """
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{owner}: its Options must derive from {base.__name__}")
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(f.name for f in msgspec.structs.fields(kind)) or "none"
        raise ConfigError(
            f"options of {owner}: {explain(error, kind)}; options it has: {known}"
        ) from error
