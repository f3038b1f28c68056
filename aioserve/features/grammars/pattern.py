"""Regular expressions of clients, as far as they are read before the grammar library reads them.

How often they repeat a piece, and which names they match if these are few. Knows nothing about
schemas or tokens. No expression is run on what a client sends but those written here.
"""

import re
from collections.abc import Sequence

MAX_REPETITION = 100_000  # of a piece of a pattern; the library makes states of each
MAX_NAMES = 64  # that a pattern may match to be written out

_OF_REPETITIONS = re.compile(
    r"\\[xuUpP]\{[^}]*\}|\\.|[()]|\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}|.", re.DOTALL
)


def check_repetitions(pattern: str) -> None:
    """Raises `ValueError` if a piece of `pattern`, a regular expression, is to be repeated more
    than `MAX_REPETITION` times, by itself or by the groups that it stands in.
    """
    levels, piece = [1], 1  # the most repeated piece of each open group, and of what was read last
    for found in _OF_REPETITIONS.finditer(pattern):
        sign = found[0]
        if sign == "(":
            levels.append(1)
        elif sign == ")" and len(levels) > 1:
            piece = levels.pop()
            levels[-1] = max(levels[-1], piece)
        elif found[1] is not None:
            numbers = [number for number in found.groups() if number]
            if any(len(number) > 19 for number in numbers):
                piece = MAX_REPETITION + 1
            else:
                piece *= max(1, *map(int, numbers))
            levels[-1] = max(levels[-1], piece)
            if piece > MAX_REPETITION:
                raise ValueError(
                    f"a pattern repeats a piece at most {MAX_REPETITION:,} times, got {sign[:60]}"
                    + (" in a group that is repeated" if len(levels) > 1 else "")
                )
        else:
            piece = 1


def names_of(pattern: str) -> list[str] | None:
    """Return all names that a regular expression matches, if it is bound to both ends and they are
    `MAX_NAMES` at most; else None.
    """
    if not pattern.startswith("^") or not pattern.endswith("$") or len(pattern) > 1000:
        return None
    try:
        names, at = _alternatives(pattern, 1, len(pattern) - 1, 0)
    except (_TooMany, IndexError):
        return None
    return sorted(names, key=names.index) if at == len(pattern) - 1 else None


class _TooMany(Exception):
    """A pattern matches too much, or is none that is read here."""


def _alternatives(pattern: str, at: int, end: int, depth: int) -> tuple[list[str], int]:
    """Return the texts of a pattern from `at` on, up to its end or a bracket, and where that is."""
    if depth > 20:
        raise _TooMany
    found: dict[str, None] = {}
    current = [""]
    is_anchored = depth > 0 or "|" not in pattern  # ^a|b$ are two patterns
    while at < end and pattern[at] != ")":
        sign = pattern[at]
        if sign == "|":
            if not is_anchored:
                raise _TooMany
            found |= dict.fromkeys(current)
            current, at = [""], at + 1
            continue
        if sign == "(":
            skip = 3 if pattern.startswith("(?:", at) else 1
            if skip == 1 and pattern.startswith("(?", at):
                raise _TooMany
            piece, at = _alternatives(pattern, at + skip, end, depth + 1)
            if pattern[at] != ")" or at >= end:
                raise _TooMany
            at += 1
        elif sign == "[":
            piece, at = _class(pattern, at + 1)
        elif sign == "\\":
            if pattern[at + 1].isalnum():
                if pattern[at + 1] != "d":
                    raise _TooMany
                piece = list("0123456789")
            else:
                piece = [pattern[at + 1]]
            at += 2
        elif sign in ".*+?{}^$":
            raise _TooMany
        else:
            piece, at = [sign], at + 1
        least, most, at = _times(pattern, at)
        current = _joined(current, piece, least, most)
    return list(found | dict.fromkeys(current)), at


def _joined(heads: Sequence[str], piece: Sequence[str], least: int, most: int) -> list[str]:
    if most > MAX_NAMES:
        raise _TooMany
    found: dict[str, None] = {}
    for times in range(most + 1):
        if times >= least:
            found |= dict.fromkeys(heads)
        if times < most:
            heads = list(dict.fromkeys(head + tail for head in heads for tail in piece))
        if len(found) > MAX_NAMES or len(heads) > MAX_NAMES:
            raise _TooMany
    return list(found)


def _times(pattern: str, at: int) -> tuple[int, int, int]:
    """Return how often the piece before `at` is said, at least and at most, and what follows
    that.
    """
    if pattern[at] in "*+":
        raise _TooMany
    if pattern[at] == "?":
        least, most, at = 0, 1, at + 1
    elif (found := re.compile(r"\{(\d{1,3})(?:,(\d{1,3}))?\}").match(pattern, at)) is not None:
        least, most, at = int(found[1]), int(found[2] or found[1]), found.end()
    else:
        return 1, 1, at
    if pattern[at] in "?*+{" or least > most:
        raise _TooMany
    return least, most, at


def _class(pattern: str, at: int) -> tuple[list[str], int]:
    """Return the characters of a class that begins before `at`, and what follows it."""
    found: dict[str, None] = {}
    while pattern[at] != "]":
        first = pattern[at]
        if first in "[^\\&~" or pattern.startswith("--", at):
            raise _TooMany
        last, at = first, at + 1
        if pattern[at] == "-" and pattern[at + 1] != "]":
            last, at = pattern[at + 1], at + 2
            if last in "[\\":
                raise _TooMany
        if ord(last) - ord(first) >= MAX_NAMES:
            raise _TooMany
        found |= dict.fromkeys(map(chr, range(ord(first), ord(last) + 1)))
    if not found:
        raise _TooMany
    return list(found), at + 1
