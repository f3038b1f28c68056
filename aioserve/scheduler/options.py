"""The options of a policy: a typed struct made of plain data, by messages that name the option."""

from typing import Any

import msgspec

from aioserve.errors import ConfigError
from aioserve.nearest import explain


class PolicyOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Base of a policy's nested `Options`: typed, validated, unknown names refused."""


def make_options(options: dict[str, Any], kind: Any, owner: str) -> PolicyOptions:
    """Options of type `kind`, a nested class `Options`, from plain data. Raises `ConfigError` that
    names the `owner`, what is wrong and the options that there are.
    """
    if not (isinstance(kind, type) and issubclass(kind, PolicyOptions)):
        raise ConfigError(f"{owner}: its Options must derive from PolicyOptions")
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(f.name for f in msgspec.structs.fields(kind)) or "none"
        raise ConfigError(
            f"options of {owner}: {explain(error, kind)}; options it has: {known}"
        ) from error
