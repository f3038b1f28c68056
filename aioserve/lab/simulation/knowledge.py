"""What a simulated sender hears of its replicas, and when: some seconds after it was so.

Knows the order of what happened. Knows no engine; what is told, the caller says.
"""

from collections import deque
from collections.abc import Callable

Notice = Callable[[], None]


class DelayLine:
    """Notices in the order in which they were given, each `delay` seconds later. Without a delay
    each at once.
    """

    def __init__(self, delay: float, clock: Callable[[], float]) -> None:
        self.delay = delay
        self._clock = clock
        self._line: deque[tuple[float, Notice]] = deque()

    def tell(self, notice: Notice) -> None:
        """Give a notice of what is so now."""
        if self.delay:
            self._line.append((self._clock() + self.delay, notice))
        else:
            notice()

    def catch_up(self) -> None:
        """Have all notices heard that are due by now."""
        line, now = self._line, self._clock()
        while line and line[0][0] <= now:
            line.popleft()[1]()
