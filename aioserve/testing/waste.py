"""What a policy wastes: preemptions in vain, and half prompts that sit on their blocks.

Knows plans and what requests need. Knows nothing about which request should run.
"""

from collections import Counter
from collections.abc import Mapping

from aioserve.config import SchedulerConfig
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerOutput, hinted_flag
from aioserve.testing.violation import ContractViolation

#: Steps for which a half prompt may sit while no other uses the room. A guess: more than any chunk.
PATIENCE = 8


class Waste:
    """Looks at every step of one harness. Raises `ContractViolation`."""

    def __init__(self, config: SchedulerConfig, max_tokens: int) -> None:
        """`max_tokens` is the budget of a step."""
        self._config = config
        self._max_tokens = max_tokens
        self._idle: Counter[Request] = Counter()  # steps for which a half prompt has sat

    def check(
        self, scheduler: BaseScheduler, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> None:
        """Check the step that was just planned; `requests` are those of its ids."""
        names = [n for n in output.preempted_req_ids if n not in output.paused_req_ids]
        preempted = [requests[name] for name in names]  # the others keep their blocks
        if (connector := scheduler.kv_cache.connector) is not None:  # offloaded ones find them
            preempted = [request for request in preempted if not connector.keeps(request)]
        if preempted:
            self._check_preempted(scheduler, output, preempted)
        self._check_half_prompts(scheduler, output)

    def _check_preempted(
        self, scheduler: BaseScheduler, output: SchedulerOutput, preempted: list[Request]
    ) -> None:
        """What was taken from some must be another's by the end of the step, unless there is not
        enough for themselves.
        """
        if output.scheduled_new_reqs or output.scheduled_cached_reqs.new_block_ids:
            return
        size, free = scheduler.kv_cache.block_size, scheduler.kv_cache.pool.num_free_blocks
        # A token that a step in flight brings needs a slot, too.
        ahead = self._config.num_lookahead_tokens + self._config.depth - 1
        needed = sum(
            -(-min(r.num_target_tokens + ahead, r.max_total_tokens - 1) // size) for r in preempted
        )
        if needed <= free:
            names = [request.request_id for request in preempted]
            raise ContractViolation(
                f"step {output.step_id}: {', '.join(names)} was preempted in vain: no request was "
                f"admitted and none got a block in this step, at whose end {free} blocks are free, "
                f"and {needed} are enough for it to run on"
            )

    def _check_half_prompts(self, scheduler: BaseScheduler, output: SchedulerOutput) -> None:
        """A prompt that is half computed holds blocks: it goes on if no other prompt does, and the
        step has room. Offline work may wait for the end of online requests: that room is theirs.
        """
        tokens = output.num_scheduled_tokens
        has_online = any(not hinted_flag(r, "offline") for r in scheduler.running)
        total = output.total_num_scheduled_tokens
        has_room = total < self._max_tokens and total == len(tokens)
        idle = [
            request
            for request in scheduler.running
            if request.is_prefill
            and request.status is RequestStatus.RUNNING
            and request.request_id not in tokens
            and not (has_online and hinted_flag(request, "offline"))
        ]
        self._idle = Counter({r: self._idle[r] + 1 for r in idle} if has_room else {})
        for request, num_steps in self._idle.items():
            if num_steps >= PATIENCE:
                raise ContractViolation(
                    f"step {output.step_id}: {request.request_id} got no token in {num_steps} "
                    f"steps, {request.num_computed_tokens} of its {request.num_tokens} tokens "
                    f"computed, though no other prompt did and {self._max_tokens - total} tokens "
                    f"of the step are left: it sits on {len(request.block_ids)} blocks"
                )
