"""How many draft tokens pay: each is sent along if its chance is worth its time.

A step of D tokens takes T seconds, and a token more in it c seconds. A draft that turns out right
with chance p is a gain if p / c > D / T. So on an idle engine, where a step costs the same for one
token or eight, long drafts pay; in a full batch, which computes no token for nothing, none do.
Knows chances and step times; knows nothing about where drafts come from.
"""

import math
from collections.abc import Hashable

# What is believed of a request before the first of its drafts is verified: that so many of so many
# were right. Guesses.
FIRST_RIGHT, FIRST_TRIED = 1.0, 2.0
MEMORY = 0.8  # weight of a verification against the one after it
STEP_MEMORY = 0.98  # weight of a step against the one after it: half after 34 steps
FORGETTING = 0.98  # and while its drafts are not sent: they may have become better
# One in so many that do not seem to pay is sent whole: what is never tried is never learned. In a
# batch of 16 it costs less than a hundredth.
TRIAL_INTERVAL = 64


class _Record:
    """How often the drafts of a request were right, of late."""

    __slots__ = ("right", "tried")

    def __init__(self) -> None:
        self.right = self.tried = 0.0

    @property
    def chance(self) -> float:
        return (self.right + FIRST_RIGHT) / (self.tried + FIRST_TRIED)


class _StepCost:
    """A line through the steps of late: seconds = base + tokens * slope, in both directions.

    Least squares of the relative error, with weights that fade.
    """

    def __init__(self) -> None:
        # Sums of 1, tokens, tokens ** 2, seconds and tokens * seconds, each over seconds ** 2.
        self._sums = [0.0] * 5

    def add(self, num_tokens: int, seconds: float) -> None:
        values = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        pairs = zip(self._sums, values, strict=True)
        self._sums = [STEP_MEMORY * old + new / seconds**2 for old, new in pairs]

    def share(self, num_tokens: int) -> float:
        """What one of so many tokens costs of their step, times their number: 0 as long as steps of
        different sizes were not seen, 1 if a step costs nothing besides its tokens.
        """
        weight, tokens, squares, seconds, products = self._sums
        spread = weight * squares - tokens**2
        if spread <= 1e-9 * weight * squares:
            return 0.0
        slope = (weight * products - tokens * seconds) / spread
        base = (seconds - slope * tokens) / weight
        of_tokens = max(slope, 0.0) * num_tokens
        return of_tokens / (of_tokens + max(base, 0.0)) if of_tokens else 0.0


class DraftLength:
    """Tell it what each step cost, and of each draft that was `verified`; ask for the `limit` of a
    request's next one.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._cost = _StepCost()
        self._records: dict[Hashable, _Record] = {}
        self._num_withheld = 0
        self.price = 0.0  # the least chance that pays, as things stand

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step is done; the next one may have as many rows."""
        self._cost.add(num_tokens, max(seconds, 1e-6))
        self.price = self._cost.share(num_rows)

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        """So many were sent, and so many were right before the first that was not."""
        record = self._records.setdefault(request, _Record())
        record.right = MEMORY * record.right + num_right
        record.tried = MEMORY * record.tried + min(num_right + 1, num_drafts)

    def limit(self, request: Hashable) -> int:
        """The most draft tokens that pay for it now: the n-th is right with chance ** n."""
        record = self._records.setdefault(request, _Record())
        chance = record.chance
        if chance < self.price:
            record.right *= FORGETTING
            record.tried *= FORGETTING
            self._num_withheld += 1
            return 0 if self._num_withheld % TRIAL_INTERVAL else self._max_tokens
        if chance >= 1.0 or self.price <= 0.0:
            return self._max_tokens
        return min(int(math.log(self.price) / math.log(chance)), self._max_tokens)

    def forget(self, request: Hashable) -> None:
        """It is gone, or somebody else bears its name from now on."""
        self._records.pop(request, None)
