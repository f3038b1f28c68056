"""Features of a planned step (token and row counts), used by step-time models.

Knows tokens and rows. Knows no seconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from aioserve.scheduler.output import SchedulerOutput


class StepFeatures(NamedTuple):
    """Token and row counts of one step."""

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
        num_prefill_tokens = num_query_context = 0
        for num_tokens, end in prefills:
            num_prefill_tokens += num_tokens
            num_query_context += num_tokens * (2 * end - num_tokens + 1) // 2
        return cls(
            num_prefill_tokens, num_decodes, num_context_tokens, num_query_context, len(prefills)
        )

    def with_drafts(self, num_rows: int, num_drafts: int) -> "StepFeatures":
        """Add `num_rows` rows that verify `num_drafts` draft tokens: each row counts as a decode,
        each draft token as a prompt token, no row as a prefill.
        """
        return self._replace(
            num_prefill_tokens=self.num_prefill_tokens + num_drafts,
            num_decodes=self.num_decodes + num_rows,
        )


def count_tokens(output: SchedulerOutput) -> tuple[int, int, int]:
    """Prefill tokens, decodes and context tokens of a planned step: what is quick to count."""
    cached, total = output.scheduled_cached_reqs, output.total_num_scheduled_tokens
    num_context = sum(cached.num_computed_tokens) + total
    if total == len(cached.req_ids):  # nothing but decodes: most steps are
        return 0, total, num_context
    num_context += sum([data.num_computed_tokens for data in output.scheduled_new_reqs])
    num_decodes = list(output.num_scheduled_tokens.values()).count(1)
    return total - num_decodes, num_decodes, num_context


def step_features(output: SchedulerOutput) -> StepFeatures:
    """The features of a planned step."""
    num_prefill_tokens, num_decodes, num_context = count_tokens(output)
    if not num_prefill_tokens:
        return StepFeatures(0, num_decodes, num_context, 0)
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for data in output.scheduled_new_reqs:
        computed[data.request_id] = data.num_computed_tokens
    drafts = output.scheduled_spec_decode_tokens
    prefills = [
        (n, computed[r] + n)
        for r, n in output.num_scheduled_tokens.items()
        if n > 1 and r not in drafts
    ]
    found = StepFeatures.of(num_decodes, num_context, prefills)
    return found.with_drafts(len(drafts), sum(map(len, drafts.values())))
