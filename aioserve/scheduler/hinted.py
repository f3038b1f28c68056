"""Reads what clients tell policies: the value of a hint in the type that the policy expects.

A client may state anything under any name, so a hint of another type counts as not given.
"""

from aioserve.request import Request


def hinted_number(request: Request, name: str, default: float) -> float:
    """The number that the request states as the hint `name`, else `default`; a flag is none."""
    value = request.hints.get(name)
    return default if isinstance(value, bool | str | None) else float(value)


def hinted_text(request: Request, name: str, default: str = "") -> str:
    """The text that the request states as the hint `name`, else `default`; a number is none."""
    value = request.hints.get(name)
    return value if isinstance(value, str) else default


def hinted_flag(request: Request, name: str) -> bool:
    """Whether the request states the hint `name` as true."""
    return request.hints.get(name) is True
