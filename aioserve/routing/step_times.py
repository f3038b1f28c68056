"""Learns how long a step takes by its batch: a line over the number of requests in it.

Knows numbers. Does not know where they come from: a simulated engine or a live one.
"""

KEPT = 0.99  # weight of what is known beside a new step


class StepTimes:
    """The line of least squares through the newest steps, some hundred of them."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums = (0.0,) * 5  # of 1, x, y, x * x, x * y: batch and seconds

    def learn(self, batch: int, seconds: float, count: int = 1) -> None:
        """`count` steps of `batch` requests, each of which took `seconds`."""
        kept = KEPT**count
        new = 1.0 - kept
        n, x, y, xx, xy = self._sums
        self._sums = (
            kept * n + new,
            kept * x + new * batch,
            kept * y + new * seconds,
            kept * xx + new * batch * batch,
            kept * xy + new * batch * seconds,
        )

    def line(self) -> tuple[float, float]:
        """Seconds of a step, and seconds that each request adds; zeros before any step."""
        n, x, y, xx, xy = self._sums
        if not n:
            return 0.0, 0.0
        spread = n * xx - x * x
        slope = max((n * xy - x * y) / spread, 0.0) if spread > 1e-9 else 0.0
        base = (y - slope * x) / n
        if base < 0:  # a line that begins at 0
            return 0.0, y / x
        return base, slope
