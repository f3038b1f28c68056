"""How long replies were lately, by group: what is expected of the next one of a group.

Needs no model. Knows lengths and groups; knows nothing about requests. Bounded: the newest lengths
of the groups that were heard of last.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable

MAX_GROUPS = 4096  # the one of which nothing was heard for longest is forgotten first
NEWEST = 64  # lengths of a group that count
NEWEST_OF_ALL = 256  # lengths that count of all groups together
# Lengths of a group that weigh as much as all that is known of all groups. A guess.
WEIGHT_OF_ALL = 4.0


class _Newest:
    """The newest lengths of a group, and their sum."""

    __slots__ = ("lengths", "total")

    def __init__(self, count: int) -> None:
        self.lengths: deque[int] = deque(maxlen=count)
        self.total = 0

    def add(self, length: int) -> None:
        if len(self.lengths) == self.lengths.maxlen:
            self.total -= self.lengths[0]
        self.lengths.append(length)
        self.total += length

    def beyond(self, so_far: int) -> tuple[int, int]:
        """Number and sum of the lengths above `so_far`."""
        if so_far <= 0:
            return len(self.lengths), self.total
        longer = [length for length in self.lengths if length > so_far]
        return len(longer), sum(longer)


class LengthHistory:
    """Lengths in tokens of replies that have ended."""

    def __init__(self) -> None:
        self._all = _Newest(NEWEST_OF_ALL)
        self._groups: OrderedDict[Hashable, _Newest] = OrderedDict()

    def __len__(self) -> int:
        """Number of groups that are known."""
        return len(self._groups)

    def note(self, group: Hashable, length: int) -> None:
        """A reply of the group has ended after `length` tokens."""
        if (own := self._groups.get(group)) is None:
            own = self._groups[group] = _Newest(NEWEST)
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        own.add(length)
        self._all.add(length)

    def expect(self, group: Hashable, so_far: int = 0) -> float | None:
        """The mean length of replies that got beyond `so_far` tokens: of the group's, drawn towards
        that of all groups while there are few. None if none got there.
        """
        count, total = self._all.beyond(so_far)
        own = self._groups.get(group)
        own_count, own_total = (0, 0) if own is None else own.beyond(so_far)
        if not count:
            return own_total / own_count if own_count else None
        return (own_total + WEIGHT_OF_ALL * total / count) / (own_count + WEIGHT_OF_ALL)
