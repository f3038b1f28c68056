"""Row values: numbers that a runner tells of a row besides its token, for a policy that wants them.

`entropy` is built in. Any other name is that of a function, `package.module:function`, which is
given logits. Where there is no model, in the lab, the shadow and the contract, values are invented:
they say nothing. Free of torch.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from zlib import crc32

from aioserve.errors import ConfigError

#: Of the model's own distribution of the next token, in nats: 0 if it is certain.
ENTROPY = "entropy"
#: The part of a step that says which values are wanted, by request id.
ROW_VALUES = "row_values"
MAX_NAMES = 8
# Invented values lie between 0 and this. A guess at what entropies are.
MAX_INVENTED = 5.0

#: By name, the values of a request's newest token.
RowValues = Mapping[str, float]
NO_ROW_VALUES: RowValues = {}


def check_names(names: object, policy: str) -> tuple[str, ...]:
    """The names of the values that a policy wants. Raises `ConfigError` for what is none."""
    if not isinstance(names, tuple) or len(names) > MAX_NAMES:
        raise ConfigError(
            f"policy {policy}: wants_row_values must be a tuple of at most {MAX_NAMES} names, got "
            f"{names!r:.80}"
        )
    for name in names:
        if not isinstance(name, str) or (name != ENTROPY and ":" not in name):
            raise ConfigError(
                f"policy {policy}: wants_row_values names {name!r:.80}; there are {ENTROPY!r} and "
                "functions, as 'package.module:function'"
            )
    return names


@cache
def find_function(name: str) -> Callable[[Any], Any]:
    """The function of that name, which is given float logits [S, V] of S rows, not to be changed,
    and returns S numbers. Raises `ConfigError` if there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(f"the row value {name!r} cannot be imported: {error!r}") from error
    if not callable(found):
        raise ConfigError(f"the row value {name!r} is no function, it is {found!r:.80}")
    return found  # type: ignore[no-any-return]  # whatever it is, it can be called


def invented(names: tuple[str, ...], key: object, place: int) -> dict[str, float]:
    """Values for the token at `place` of the request that `key` stands for: always the same."""
    return {name: crc32(f"{name} {key} {place}".encode()) / 2**32 * MAX_INVENTED for name in names}
