"""Hints that the kit's requests carry: usual values, extreme ones, and values of another kind.

A client may state all of them, so a policy meets all of them. Knows names and values of hints;
knows nothing about what a policy makes of one.
"""

from collections.abc import Mapping

from aioserve.request import (
    MAX_TEXT,
    OFFLINE,
    PREDICTED_OUTPUT_TOKENS,
    PROGRAM,
    READING_SPEED,
    SESSION,
    SLO_CLASS,
    SLO_TPOT,
    SLO_TTFT,
    TOOL,
)

Value = str | bool | int | float

_LARGE = 2**63 - 1024  # about the largest number that is taken, and one that a float holds
_NUMBERS: tuple[Value, ...] = (0, -1, 1e-300, _LARGE, -_LARGE, "soon", True)
_TEXTS: tuple[Value, ...] = ("", "x" * MAX_TEXT, 7, 0.5, False)

#: By name, what a client usually states: of the names that tools share, and of three others that
#: policies of aioserve and its documentation read.
USUAL: Mapping[str, tuple[Value, ...]] = {
    SESSION: ("s1", "s2"),
    PROGRAM: ("p1", "p2"),
    SLO_CLASS: ("chat", "batch"),
    SLO_TTFT: (2.0, 20),
    SLO_TPOT: (1.5, 0.05),
    PREDICTED_OUTPUT_TOKENS: (3, 12.5),
    READING_SPEED: (0.5, 5),
    TOOL: ("search", "shell"),
    OFFLINE: (True, False),
    "fairness_id": ("f1", "f2"),
    "type": ("api", "chat"),
    "steps_to_next_use": (0, 3),
}

#: By name, what a client may state as well: no number is too large, and no value of a wrong kind.
STRANGE: Mapping[str, tuple[Value, ...]] = {
    name: _NUMBERS if isinstance(usual[0], int | float) and name != OFFLINE else _TEXTS
    for name, usual in USUAL.items()
}

#: Names of the hints by which a request says how soon it is needed.
TIMES = (SLO_TTFT, SLO_TPOT)
