"""How a model recommends to sample its replies: the values of fields that a request leaves open.

What a request states always wins. Knows ranges; knows no files and no models.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from aioserve.errors import ConfigError, RequestError
from aioserve.sampling_params import SamplingParams


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Recommended values, by the names of `SamplingParams`; None where nothing is recommended."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def fill(self, given: Mapping[str, Any], *, max_tokens: int | None = None) -> SamplingParams:
        """Parameters of a request that states `given`, by the names of `SamplingParams`.

        `max_tokens` is the limit of a request for which neither the request nor the model has one.
        Raises `RequestError` for what the request states.
        """
        recommended = self.recommended
        if max_tokens is not None:
            recommended.setdefault("max_tokens", max_tokens)
        # No recommendation contradicts the request: neither its least length, nor a prompt that is
        # cut to leave room for as many tokens as it asks for.
        limit = recommended.get("max_tokens", 0)
        if given.get("truncate_prompt_tokens") == -1 or given.get("min_tokens", 0) > limit:
            recommended.pop("max_tokens", None)
        return SamplingParams(**recommended | dict(given))

    @property
    def recommended(self) -> dict[str, Any]:
        """The values that there are, by name."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.recommended.items())


NO_DEFAULTS = SamplingDefaults()


def read_defaults(stated: Mapping[str, Any], where: str) -> SamplingDefaults:
    """The recommendation in `stated`, by the names of `SamplingParams`; None values are ignored.

    Raises `ConfigError` that names `where` and the value that makes no sense.
    """
    try:
        defaults = msgspec.convert(stated, SamplingDefaults)
        defaults.fill({})
    except (msgspec.ValidationError, RequestError) as error:
        raise ConfigError(
            f"{where} recommends sampling that makes no sense: {error}; "
            "model.generation_config none ignores it"
        ) from error
    return defaults
