"""A published result, and what running it again gave: plain data, and the verdict.

Knows numbers and how near they are. Knows nothing about how they are found.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from aioserve.lab.simulation.run import Progress

#: How far a value may be from the published one, as a share of it, to count as reproduced.
CLOSE = 0.10

Verdict = Literal["reproduced", "direction only", "not reproduced"]
WORST_FIRST: tuple[Verdict, ...] = ("not reproduced", "direction only", "reproduced")


class Finding(msgspec.Struct, frozen=True):
    """One quantity, as it was published and as it comes out here.

    A ratio is of the new policy to the baseline, so that 1 is no effect. What the source gives as a
    range, such as "1.12 to 3.66 times", has a published value that is a range too.
    """

    quantity: str
    published: tuple[float, float]  # from, to; the same twice for a number
    runs: list[float]  # here, a value for each seed
    is_ratio: bool = True

    @property
    def ours(self) -> float:
        """The mean of the runs, in the unit of the quantity."""
        return sum(self.runs) / len(self.runs)

    @property
    def verdict(self) -> Verdict:
        """Whether the value is in the published range, give or take `CLOSE`, a ratio on the same
        side of 1; if not, whether a ratio is on that side in every run.
        """
        low, high = self.published
        is_close = low * (1 - CLOSE) <= self.ours <= high * (1 + CLOSE)
        if is_close and (not self.is_ratio or self._has_direction(self.ours)):
            return "reproduced"
        same_side = self.is_ratio and all(self._has_direction(run) for run in self.runs)
        return "direction only" if same_side else "not reproduced"

    def _has_direction(self, ratio: float) -> bool:
        """Return whether a ratio is on the side of 1 on which the published one is."""
        return ratio != 1 and (ratio < 1) == (self.published[1] < 1)


class Claim(msgspec.Struct, frozen=True):
    """A published result: where it stands, its setting, and how it is run again."""

    name: str
    title: str
    source: str
    setting: str  # as published
    here: str  # what is otherwise in the run here, and what the source leaves open
    run: Callable[[Sequence[int], Progress], list[Finding]]  # for seeds


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the worst of the verdicts of the findings."""
    return min((finding.verdict for finding in findings), key=WORST_FIRST.index)
