"""What came of a run of a fleet: what its clients saw, and where each request was.

Plain records. Judges nothing.
"""

from array import array

from aioserve.lab.simulation.outcome import RunOutcome


class FleetOutcome(RunOutcome):
    """The outcome of a run of a fleet: the steps are those of its first replica."""

    def __init__(self, num_requests: int, num_replicas: int) -> None:
        super().__init__(num_requests)
        self.num_moved = 0  # running requests that went on at another replica
        self.num_resent = 0  # their replica died before it had streamed anything
        self.replica_of = array("l", [-1]) * num_requests  # that had it last; -1: none
        self.busy_seconds = [0.0] * num_replicas
        self.replica_seconds = 0.0  # that are paid for, of all replicas
