"""How it is said that a row of logits gives no token, or that weights are no numbers.

Knows words and numbers; knows nothing about how either was found.
"""

import math
from collections.abc import Mapping, Sequence

NOT_FINITE = (
    "the model gives no numbers for this request (NaN or infinity among its logits), as damaged "
    "weights do"
)
NOTHING_LEFT = "no token is left that may come next in this request"


def why_unsound(best: float) -> str:
    """Why nothing can be chosen from a row of logits whose largest is `best`, which is not finite.
    It is minus infinity if all tokens are masked.
    """
    return NOTHING_LEFT if best == -math.inf else NOT_FINITE


def step_failed(error: BaseException) -> str:
    """The text for the client of a request for which something unforeseen was raised. An error may
    quote anything, so only its type is told; the log has it all.
    """
    return f"the step that served this request failed ({type(error).__name__})"


def failed_requests(
    failed: Mapping[int, str], sampling: Sequence[int], kept: Sequence[Sequence[int]]
) -> dict[int, str]:
    """Which rows of a step fail because of the samples that did, by their places among the S, and
    why. `sampling` is the row of each sample, `kept` are the tokens that each row has kept: what
    was sampled behind a wrong draft does not count.
    """
    found: dict[int, str] = {}
    for place, why in failed.items():
        row = sampling[place]
        if place - sampling.index(row) < len(kept[row]):
            found[row] = why
    return found
