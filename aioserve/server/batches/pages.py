"""A page out of a list of objects that have ids."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from aioserve.errors import RequestError


class _Named(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Named)


def page_of(
    found: Sequence[T], after: str | None, limit: int
) -> tuple[list[T], str | None, str | None, bool]:
    """The objects behind the one of the id `after`, `limit` of them at most; the ids of the first
    and the last of these; whether there are more. Raises `RequestError` for an unknown id.
    """
    begin = 0
    if after is not None:
        ids = [one.id for one in found]
        if after not in ids:
            raise RequestError(f"there is no {after[:64]!r} in the list", param="after")
        begin = ids.index(after) + 1
    told = list(found[begin : begin + limit])
    first, last = (told[0].id, told[-1].id) if told else (None, None)
    return told, first, last, begin + len(told) < len(found)
