"""What all sections of settings have in common, and the types that they share."""

from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError

EMBEDDED_MODEL = "embedded"
DEFAULT_STEP_BUDGET = 2048
DEFAULT_CHAT_TOKENS = 2048  # a reply of some pages; a model that repeats itself ends there

LogLevel = Literal["debug", "info", "warning", "error"]
PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


def doc(text: str, **limits: Any) -> Meta:
    """The help text of a setting, and the limits of its value, such as `ge=0`."""
    return Meta(description=text, **limits)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings: immutable, unknown names refused, and values checked however it is
    made: raises `ConfigError`. A mapping will do for a section within.
    """

    def __post_init__(self) -> None:
        for name, kind in _field_types(type(self)).items():
            given = getattr(self, name)
            try:
                value = msgspec.convert(given, kind)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{type(self).__name__}.{name}: {error}, got {given!r}") from None
            if value is not given:
                msgspec.structs.force_setattr(self, name, value)


@cache
def _field_types(section: type[Section]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(section)}
