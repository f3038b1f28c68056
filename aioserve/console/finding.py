"""One thing that was looked at on this machine. Knows nothing of what there is to look at."""

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found of `name`, and what to do about it.

    `missing`: aioserve does not run without it, or makes less of this machine than it could.
    `note`: it can be added for what it says.
    """

    name: str
    state: Literal["ok", "note", "missing"]
    text: str
    remedy: str | None = None


def ok(name: str, text: str) -> Finding:
    """A finding of something that is as it should be."""
    return Finding(name=name, state="ok", text=text)
