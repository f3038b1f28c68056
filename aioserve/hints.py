"""Hints: what a client, or who routes for it, tells the policy about a request beyond its fields.

A small map of named values, which a policy reads as `request.hints`. No hint changes what is
answered. A name means what the policy makes of it; some have a meaning that tools share.
"""

import math
import re
from collections.abc import Mapping
from typing import TypeAlias

from aioserve.errors import RequestError

Hints: TypeAlias = dict[str, str | bool | int | float]
NO_HINTS: Hints = {}

MAX_HINTS = 16
MAX_TEXT = 256  # characters of a value that is a text
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")

#: Length of the reply in tokens, as a predictor says it: a number.
PREDICTED_OUTPUT_TOKENS = "predicted_output_tokens"
#: The conversation, and the agent's program of several requests, that the request belongs to.
SESSION, PROGRAM = "session", "program"
#: The class of service levels that the request is to be held to.
SLO_CLASS = "slo_class"
#: Time to first token, and time per further token, that the request should keep to, in seconds.
SLO_TTFT, SLO_TPOT = "slo_ttft", "slo_tpot"
#: How fast the reply is read, in tokens per second.
READING_SPEED = "reading_speed"
#: The name of the tool that the reply will call, as far as the client knows.
TOOL = "tool"
#: A flag: nobody waits for the reply now.
OFFLINE = "offline"


def check_hints(hints: Mapping[str, object]) -> None:
    """Raises `RequestError` for too many hints, a name that is none, or a value that is neither a
    short text nor a flag nor a finite number.
    """
    if not isinstance(hints, dict):
        raise RequestError(f"hints must be a map of names to values, got {hints!r:.80}", "hints")
    if len(hints) > MAX_HINTS:
        raise RequestError(f"at most {MAX_HINTS} hints are taken, got {len(hints)}", "hints")
    for name, value in hints.items():
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise RequestError(
                "the name of a hint has up to 64 of a-z, 0-9, '_', '-' and '.', and begins with a "
                f"letter; got {name!r:.80}",
                "hints",
            )
        if isinstance(value, str):
            if len(value) > MAX_TEXT or not value.isprintable():
                raise RequestError(
                    f"hints.{name} must be printable text of up to {MAX_TEXT} characters", "hints"
                )
        elif not isinstance(value, int | float):
            raise RequestError(
                f"hints.{name} must be a text, a number or a flag, got {value!r:.80}", "hints"
            )
        elif not math.isfinite(value) or abs(value) >= 2**63:
            raise RequestError(f"hints.{name} must be a finite 64-bit number, got {value}", "hints")
