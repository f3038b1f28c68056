"""What a step costs in proportion to, as its plan says: for whoever prices or learns step times.

Knows tokens and rows. Knows no seconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from aioserve.scheduler.output import SchedulerOutput


class StepFeatures(NamedTuple):
    """Counts of one step."""

    num_prefill_tokens: int  # of rows with more than one token
    num_decodes: int  # rows with one token
    num_context_tokens: int  # sum over rows: keys and values to read
    num_query_context: int  # sum over prefill rows of what each token sees: the attention work
    num_prefills: int = 0  # rows with more than one token

    @classmethod
    def of(
        cls, num_decodes: int, num_context_tokens: int, prefills: Sequence[tuple[int, int]]
    ) -> "StepFeatures":
        """`prefills`: of each row with more than one token, how many, and its length with them."""
        return cls(
            sum(num_tokens for num_tokens, _ in prefills),
            num_decodes,
            num_context_tokens,
            sum(num_tokens * (2 * end - num_tokens + 1) // 2 for num_tokens, end in prefills),
            len(prefills),
        )


def step_features(output: SchedulerOutput) -> StepFeatures:
    """The features of a planned step."""
    cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
    num_context = sum(cached.num_computed_tokens) + output.total_num_scheduled_tokens
    num_decodes = len(cached.req_ids)
    if output.total_num_scheduled_tokens == num_decodes:  # nothing but decodes: most steps are
        return StepFeatures(0, num_decodes, num_context, 0)
    num_context += sum(data.num_computed_tokens for data in new)
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((data.request_id, data.num_computed_tokens) for data in new)
    prefills = [(n, computed[r] + n) for r, n in output.num_scheduled_tokens.items() if n > 1]
    return StepFeatures.of(len(computed) - len(prefills), num_context, prefills)
