"""The search for stop strings in the text of one reply, which comes in pieces.

Loaded with the first request that has some. Knows nothing about tokens or requests.
"""

from collections import deque
from collections.abc import Sequence


class StopStringMatcher:
    """Finds stop strings that may span tokens; holds back text that could begin one.

    Each character of the text costs one step or two for every stop string, however much text is
    held back: what was read is never read again (Knuth, Morris and Pratt).
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool) -> None:
        self._stops = [_StopString(stop) for stop in stop_strings]
        self._include_stop = include_stop
        self._held: deque[str] = deque()  # in pieces, as it came
        self._num_held = 0  # characters

    def append(self, text: str) -> tuple[str, str | None]:
        """`(text to send, the stop string that was found)`; nothing may be sent after a match."""
        found: tuple[int, int, str] | None = None  # where it begins; the longest of several there
        longest = 0
        for stop in self._stops:
            end = stop.read(text)
            if end is None:
                longest = max(longest, stop.num_read)
                continue
            match = (self._num_held + end - len(stop.text), -len(stop.text), stop.text)
            found = match if found is None else min(found, match)
        self._held.append(text)
        self._num_held += len(text)
        if found is None:
            return self._take(self._num_held - longest), None
        begin, _, stop_string = found
        sent = self._take(begin + len(stop_string) if self._include_stop else begin)
        self._held.clear()
        self._num_held = 0
        return sent, stop_string

    def flush(self) -> str:
        """Return what was held back, now that nothing more comes."""
        return self._take(self._num_held)

    def _take(self, length: int) -> str:
        """Return the first characters of what is held, which is held no more."""
        taken = []
        self._num_held -= length
        while length > 0:
            piece = self._held.popleft()
            if len(piece) > length:
                self._held.appendleft(piece[length:])
                piece = piece[:length]
            taken.append(piece)
            length -= len(piece)
        return "".join(taken)


class _StopString:
    """A stop string, and how much of it stands at the end of the text so far."""

    __slots__ = ("_borders", "num_read", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_read = 0  # the longest beginning of `text` with which what was read ends
        # By length of a beginning: of its own beginnings the longest, but for itself, with which it
        # ends. Only as far as was read yet: most texts read no stop string far.
        self._borders = [0, 0]

    def read(self, text: str) -> int | None:
        """Read on; where in `text` the first whole stop string ends, or None."""
        stop, count, at = self.text, self.num_read, 0
        while at < len(text):
            if count == 0:  # most of the time, and quick
                at = text.find(stop[0], at)
                if at < 0:
                    break
                count, at = 1, at + 1
            elif text[at] == stop[count]:
                count, at = count + 1, at + 1
            else:
                count = self._border(count)
                continue
            if count == len(stop):
                self.num_read = 0
                return at
        self.num_read = count
        return None

    def _border(self, length: int) -> int:
        borders, stop = self._borders, self.text
        while len(borders) <= length:
            border, last = borders[-1], stop[len(borders) - 1]
            while border and stop[border] != last:
                border = borders[border]
            borders.append(border + 1 if stop[border] == last else 0)
        return borders[length]
