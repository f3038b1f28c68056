"""The verb `wake_at`: when a policy that holds all requests back wants to be asked again."""

import math

from aioserve.errors import PolicyError
from aioserve.scheduler.succession import Switchable


class Waking(Switchable):
    """A scheduler whose policy may wait for a time."""

    _wake_time: float | None = None  # of the newest step

    def wake_at(self, when: float) -> None:
        """Have `schedule` called at this time of the clock, if it serves no request now, in the
        place of every 10 ms; holding all back until then is no fault. The earliest time counts.
        Raises `PolicyError` for what is no number of seconds.
        """
        if not isinstance(when, int | float) or math.isnan(when):
            raise PolicyError(
                f"policy {type(self).__name__}: wake_at() takes a time of the clock in seconds, "
                f"got {when!r:.80}"
            )
        self._wake_time = when if self._wake_time is None else min(when, self._wake_time)

    def next_wake(self) -> float | None:
        return self._wake_time
