"""Plans many pure-decode steps at once, for the simulator.

Does the bookkeeping of `Step.run_decodes`, `Step.output` and `take_results`, in the same order.
Knows no time. Valid only for policies that declare `keeps_decoding`.
"""

from collections.abc import Sequence
from operator import itemgetter

from aioserve.request import Request
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput


class MultiStepDecode:
    """What follows a step of decodes that is alone in flight: the same rows again."""

    def __init__(self, scheduler: BaseScheduler) -> None:
        """`follows` must have been true of this scheduler's newest step."""
        self._book = scheduler.book
        self._kv_cache = scheduler.kv_cache
        self.requests: list[Request] = scheduler.book.in_flight[0][1]

    @staticmethod
    def is_promised_by(policy: type[SchedulerInterface]) -> bool:
        """Whether this class promises `keeps_decoding`: not one that plans or counts otherwise than
        the base that does, nor one that learns from every step.
        """
        if not issubclass(policy, BaseScheduler):
            return False
        if policy.uses_step_time or policy.wants_row_values:
            return False
        for cls in policy.__mro__:
            if "keeps_decoding" in vars(cls):
                return bool(vars(cls)["keeps_decoding"])
            if not vars(cls).keys().isdisjoint(("schedule", "update_from_output")):
                return False
        return False

    @staticmethod
    def follows(scheduler: BaseScheduler, output: SchedulerOutput) -> bool:
        """Whether the steps after this one, just planned, are the same until a request arrives
        or ends or blocks run out. The policy must declare `keeps_decoding`; no lookahead. The
        caller knows how many steps bring no stop token, since a scheduler cannot know it.
        """
        book, num_rows = scheduler.book, len(output.num_scheduled_tokens)
        return (
            num_rows == output.total_num_scheduled_tokens
            and num_rows == len(output.scheduled_cached_reqs.req_ids)
            and num_rows == len(book.running)
            and not book.waiting
            and len(book.in_flight) == 1
            and not output.scheduled_spec_decode_tokens
            and not any(resource.plans_decodes for resource in scheduler.kv_cache.resources)
            and all(
                r.num_computed_tokens == r.num_tokens and r.pooling_params is None
                for r in book.in_flight[0][1]
            )
        )

    def num_steps(self, limit: int) -> int:
        """How many more steps, at most `limit`, can be planned before a step that ends a request
        or lacks blocks.
        """
        count = min([limit, *(r.max_total_tokens - r.num_tokens - 1 for r in self.requests)])
        while count > 0 and self._num_missing(count) > self._kv_cache.pool.num_free_blocks:
            count //= 2
        return count

    def go_on(self, token_ids: Sequence[Sequence[int]]) -> None:
        """The step in flight has come back, and those after it but the last, which is in flight in
        its place, as the same output. `token_ids` are what they brought, by row, one a step.
        """
        count, size = len(token_ids[0]), self._kv_cache.block_size
        growing: list[tuple[int, Request, int]] = []  # step, request, its computed tokens before
        for request, tokens in zip(self.requests, token_ids, strict=True):
            computed = request.num_computed_tokens
            first = request.num_slots - computed + 1  # the first step for which there is no slot
            for step in range(first, count + 1, size):
                growing.append((step, request, computed + step - 1))
            request.token_ids += tokens
            request.num_tokens += count
            request.num_computed_tokens = end = computed + count
            request.num_target_tokens = min(end + 1, request.max_total_tokens - 1)
        growing.sort(key=itemgetter(0))  # stable: within a step in the order of the rows
        for _, request, num_computed in growing:
            self._kv_cache.cache_full_blocks(request, num_computed)
            self._kv_cache.grow(request, 1)
        self._book.count_decodes(count, len(self.requests))

    def _num_missing(self, count: int) -> int:
        """KV blocks that `count` more steps take."""
        size = self._kv_cache.block_size
        return sum(
            max(-(-(r.num_computed_tokens + count) // size) - len(r.block_ids), 0)
            for r in self.requests
        )
