"""What a policy did wrong, how often in a row, and what took its place.

Knows no scheduler: the step loop says when the policy has failed and when a step of it has worked.
"""

from aioserve.scheduler import FAILURES_UNTIL_FALLBACK


class PolicyFailures:
    """The failures of the policies of one engine, counted since its start."""

    def __init__(self) -> None:
        self.count = 0
        self.first: Exception | None = None
        #: What the policy did wrong in its last step, and when; None: its last step worked.
        self.last: tuple[Exception, float] | None = None
        #: The failure after which the fallback took the policy's place; None: the policy plans.
        self.replaced_after: Exception | None = None
        self.num_in_row = 0
        self._last_step_id = 0  # the newest step that had been planned at the last failure

    @property
    def are_too_many(self) -> bool:
        """Whether another policy has to plan: this one has failed too often in a row."""
        return self.num_in_row >= FAILURES_UNTIL_FALLBACK

    def note(self, error: Exception, now: float, step_id: int) -> None:
        """The policy has failed at the time `now`, when `step_id` was the newest step."""
        self.last = error, now
        self.first = self.first or error
        self.count += 1
        self.num_in_row += 1
        self._last_step_id = step_id

    def note_success(self, step_id: int) -> None:
        """A step is back, and the policy has taken its result. Of a step that was planned before
        the last failure it proves nothing about what the policy does since.
        """
        self.last = None
        if step_id > self._last_step_id:
            self.num_in_row = 0

    def forgive(self) -> None:
        """Another policy plans, which an operator has chosen: it begins without failures."""
        self.last = self.replaced_after = None
        self.num_in_row = 0
