"""What a caller may ask of an embedding: which hidden states, and what becomes of their vector.

Knows nothing about models: what one pools by default, and whether its vectors may be cut, is known
at the engine's door.
"""

from typing import Literal

import msgspec

from aioserve.errors import RequestError
from aioserve.sampling_params import Range

Pooling = Literal["mean", "last"]

#: By field, of numbers.
POOLING_RANGES: dict[str, Range] = {
    "dimensions": Range("at least 1", ge=1),
    "truncate_prompt_tokens": Range("-1 (the model's limit) or at least 1", ge=-1, other_than=0),
}


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one prompt becomes a vector. Raises `RequestError` that names the field.

    States are those after the model's last norm. The vector is cut to `dimensions` first, then
    normalized.
    """

    pooling: Pooling | None = None  # of all tokens, or the last one's; None: as the model was saved
    normalize: bool = True  # to length 1
    dimensions: int | None = None  # only of models that were trained to be cut (Matryoshka)
    truncate_prompt_tokens: int | None = None  # tokens kept, the last ones; -1: the model's limit

    def __post_init__(self) -> None:
        if self.pooling not in (None, "mean", "last"):
            raise RequestError(f"pooling must be mean or last, got {self.pooling!r}", "pooling")
        for name, numbers in POOLING_RANGES.items():
            value = getattr(self, name)
            if value is not None and not numbers.holds(value):
                raise RequestError(f"{name} must be {numbers.words}, got {value}", param=name)
