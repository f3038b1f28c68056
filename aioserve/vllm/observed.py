"""What vLLM's own scheduler does, in aioserve's words: requests, plans, tokens and ends.

For the lab, which drives that scheduler, and for the recorder, which watches it where it serves.
Decides nothing, and changes nothing of vLLM's. Block ids are one lower than vLLM's, whose block 0
is held by no request; of several KV cache groups those of the first count.
"""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput as TheirPlan

from aioserve.outputs import SchedulerStats
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import SchedulerOutput
from aioserve.scheduler.output import CachedRequestData, NewRequestData

#: By the name of vLLM's reason, how a request has ended by what its tokens are.
_ENDS = {
    "STOP": RequestStatus.FINISHED_STOPPED,
    "LENGTH": RequestStatus.FINISHED_LENGTH_CAPPED,
    "ABORT": RequestStatus.FINISHED_ABORTED,
    "ERROR": RequestStatus.FINISHED_ERROR,
    "REPETITION": RequestStatus.FINISHED_STOPPED,
}


class Observed:
    """The unfinished requests of one scheduler of vLLM's, and counts of what it has planned."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}  # by vLLM's ids
        self.num_steps = 0
        self._places: dict[str, int] = {}  # of vLLM's ids, in order of arrival, until all is told
        self._ended: dict[str, str] = {}  # aioserve's ids by vLLM's, of which no plan has told
        self._num_added = self._num_preemptions = 0
        self._num_prefill_tokens = self._num_decode_tokens = 0
        self._num_queried_tokens = self._num_hit_tokens = 0

    @property
    def has_untold(self) -> bool:
        """Whether requests have ended of which no plan has told."""
        return bool(self._ended)

    def add(self, name: str, request: Request) -> None:
        """vLLM has accepted a request under an id of its own, which comes but once."""
        self._num_added += 1
        self.requests[name], self._places[name] = request, self._num_added

    def end(self, name: str, status: RequestStatus) -> Request:
        """Take a request out of those that run, with the status in which it has ended."""
        request = self.requests.pop(name)
        request.status = status
        self._ended[name] = request.request_id
        return request

    def planned(self, plan: TheirPlan) -> SchedulerOutput:
        """Return the plan as aioserve's runners and logs know one. Whatever vLLM keeps as a set
        comes in the order in which the requests came.
        """
        self.num_steps += 1
        requests, cached = self.requests, plan.scheduled_cached_reqs
        names = {name: requests[name].request_id for name in plan.num_scheduled_tokens}
        preempted = sorted(set(plan.preempted_req_ids or ()) & requests.keys(), key=self._place)
        for name in preempted:
            requests[name].status = RequestStatus.PREEMPTED
        new = [
            self._entering(data.req_id, data.block_ids, data.num_computed_tokens)
            for data in plan.scheduled_new_reqs
        ]
        stays: list[str] = []
        computed: list[int] = []
        new_block_ids: dict[str, list[int]] = {}
        for name, blocks, count in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                new.append(self._entering(name, blocks, count))
                continue
            stays.append(names[name])
            computed.append(count)
            if blocks is not None and blocks[0]:
                new_block_ids[names[name]] = _own_ids(blocks)
        told = sorted(set(plan.finished_req_ids) & self._ended.keys(), key=self._place)
        drafts = plan.scheduled_spec_decode_tokens
        output = SchedulerOutput(
            step_id=self.num_steps,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(stays, computed, new_block_ids),
            num_scheduled_tokens={names[n]: c for n, c in plan.num_scheduled_tokens.items()},
            total_num_scheduled_tokens=plan.total_num_scheduled_tokens,
            preempted_req_ids=[requests[name].request_id for name in preempted],
            finished_req_ids=[self._ended.pop(name) for name in told],
            scheduled_spec_decode_tokens={names[n]: list(ids) for n, ids in drafts.items()},
        )
        for name in told:
            del self._places[name]
        self._count(output)
        return output

    def _place(self, name: str) -> int:
        return self._places[name]

    def _entering(
        self, name: str, blocks: tuple[list[int], ...] | None, num_computed: int
    ) -> NewRequestData:
        """Return a request that enters the batch, for the first time or anew."""
        request = self.requests[name]
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_computed
        request.status = RequestStatus.RUNNING
        self._num_queried_tokens += request.num_tokens
        self._num_hit_tokens += num_computed
        return NewRequestData(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            stop_token_ids=request.stop_token_ids,
            block_ids=[] if blocks is None else _own_ids(blocks),
            num_computed_tokens=num_computed,
            cache_salt=request.cache_salt,
            adapter_id=request.adapter_id,
        )

    def _count(self, output: SchedulerOutput) -> None:
        num_decodes = list(output.num_scheduled_tokens.values()).count(1)
        self._num_decode_tokens += num_decodes
        self._num_prefill_tokens += output.total_num_scheduled_tokens - num_decodes
        self._num_preemptions += len(output.preempted_req_ids)

    def took(self, output: Any) -> tuple[Request, list[int]]:
        """vLLM has given a request these tokens, and may have ended it: the request, with them, and
        the tokens. `output` is an `EngineCoreOutput` of vLLM's.
        """
        request = self.requests[output.request_id]
        token_ids = list(output.new_token_ids)
        if request.sampling_params.max_tokens == 0:  # its prompt is computed: that was all
            token_ids = []
        request.token_ids += token_ids
        request.num_tokens += len(token_ids)
        if output.finish_reason is not None:
            if output.stop_reason in request.sampling_params.stop_token_ids:
                request.stop_reason = output.stop_reason
            self.end(output.request_id, _ENDS[output.finish_reason.name])
        return request, token_ids

    def stats(self, theirs: Any, policy: str) -> SchedulerStats:
        """Return the state of the scheduler `theirs`, of which these are the requests."""
        num_running = len(theirs.running)
        pool = theirs.kv_cache_manager.block_pool
        num_blocks = pool.num_gpu_blocks - 1
        return SchedulerStats(
            num_steps=self.num_steps,
            num_running_reqs=num_running,
            num_waiting_reqs=len(self.requests) - num_running,
            num_waiting_tokens=sum(request.num_tokens for request in theirs.waiting),
            num_kv_blocks=num_blocks,
            num_used_kv_blocks=num_blocks - pool.get_num_free_blocks(),
            num_preemptions=self._num_preemptions,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_prefix_queried_tokens=self._num_queried_tokens,
            num_prefix_hit_tokens=self._num_hit_tokens,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            policy=policy,
        )


def _own_ids(blocks: tuple[list[int], ...]) -> list[int]:
    return [block_id - 1 for block_id in blocks[0]]
