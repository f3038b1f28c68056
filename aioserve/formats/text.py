"""What every parser here asks of a piece of text: its space, and markers that begin at its end.

Knows no format.
"""

import re
from collections.abc import Sequence

SPACE = " \t\r\n"


def skip_space(text: str, start: int) -> int:
    """Where the next character stands that is no space, or the length of `text`."""
    while start < len(text) and text[start] in SPACE:
        start += 1
    return start


def match_end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Where `pattern`, which may match nothing, ends that begins at `text[start]`."""
    match = pattern.match(text, start)
    assert match is not None, "the pattern matches nothing, too"
    return match.end()


def overlap(text: str, markers: Sequence[str], start: int = 0) -> int:
    """How many characters at the end of `text[start:]` begin a marker, but are not all of it."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest


def any_of(markers: Sequence[str]) -> re.Pattern[str]:
    """A pattern that finds the first of them."""
    return re.compile("|".join(map(re.escape, markers)))
