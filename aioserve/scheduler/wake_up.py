"""The verb `wake_at`: when a policy that holds all requests back wants to be asked again."""

from aioserve.scheduler.succession import Switchable


class Waking(Switchable):
    """A scheduler whose policy may wait for a time."""

    _wake_time: float | None = None  # of the newest step

    def wake_at(self, when: float) -> None:
        """Have `schedule` called at this time of the clock, if it serves no request now, in the
        place of every 10 ms; holding all back until then is no fault. The earliest time counts.
        """
        self._wake_time = when if self._wake_time is None else min(when, self._wake_time)

    def next_wake(self) -> float | None:
        return self._wake_time
