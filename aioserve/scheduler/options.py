"""The options of a policy: a typed struct made of plain data, by messages that name the option."""

from typing import Any

import msgspec

from aioserve.option_struct import convert_options


class PolicyOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Base of a policy's nested `Options`: typed, validated, unknown names refused."""


def make_options(options: dict[str, Any], kind: Any, owner: str) -> PolicyOptions:
    """Options of type `kind`, a nested class `Options`, from plain data. Raises `ConfigError` that
    names the `owner`, what is wrong and the options that there are.
    """
    return convert_options(options, kind, PolicyOptions, owner)
