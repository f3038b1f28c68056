"""Drives a scheduler step by step and checks the contract of `SchedulerInterface` after each.

No asyncio, no threads, no wall clock: time is a counter, results come back when the test says so.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aioserve.config import SchedulerConfig
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import FinishReason
from aioserve.request import Request, RequestStatus
from aioserve.sampling_params import SamplingParams
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput
from aioserve.testing.memory import ContractViolation, KVMemory, next_token

__all__ = ["ContractViolation", "SchedulerHarness"]


class SchedulerHarness:
    """One scheduler, its requests, and a `KVMemory` that executes its steps."""

    def __init__(
        self,
        policy: type[SchedulerInterface],
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 64,
        pipeline_depth: int = 1,
        enable_prefix_caching: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.now = 0.0
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pipeline_depth=pipeline_depth,
            options=options or {},
        )
        self.max_model_len = max_model_len
        self.kv_cache = KVCacheManager(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching
        )
        make_scheduler: Callable[..., SchedulerInterface] = policy
        self.scheduler = make_scheduler(
            self.config, self.kv_cache, max_model_len=max_model_len, clock=lambda: self.now
        )
        self.memory = KVMemory(num_blocks, block_size)
        self.steps: list[SchedulerOutput] = []
        self.requests: dict[str, Request] = {}  # all ever added
        self.tokens: dict[str, list[int]] = {}  # received, by request
        self.finished: dict[str, FinishReason] = {}
        self._in_flight: deque[SchedulerOutput] = deque()
        self._block_ids: dict[str, list[int]] = {}  # as last told to the runner

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], **fields: Any
    ) -> Request:
        """Add a request; `fields` are those of `Request` and of `SamplingParams`."""
        names = ("priority", "user", "client_index", "cache_salt", "eos_token_ids")
        of_request = {name: fields.pop(name) for name in names if name in fields}
        request = Request(
            request_id,
            prompt_token_ids,
            SamplingParams(**fields),
            max_total_tokens=self.max_model_len,
            arrival_time=self.now,
            **of_request,
        )
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        self.tokens[request_id] = []
        return request

    def finish(self, request_ids: str | list[str] | None) -> list[str]:
        """Abort as a client would."""
        ended = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        for request_id in ended:
            self._end(request_id, FinishReason.ABORT)
        self.check()
        return ended

    def schedule(self) -> SchedulerOutput:
        """Plan one step and hand it to the memory, which executes it."""
        self.now += 1.0
        output = self.scheduler.schedule()
        self._check_output(output)
        self.steps.append(output)
        if output.total_num_scheduled_tokens or output.finished_req_ids or output.preempted_req_ids:
            self._in_flight.append(output)
        self.check()
        return output

    def receive(self) -> None:
        """Bring back the oldest step in flight."""
        output = self._in_flight.popleft()
        result = self.memory.execute(output)
        if output.total_num_scheduled_tokens == 0:
            return
        for outputs in self.scheduler.update_from_output(output, result).values():
            for item in outputs.outputs:
                if item.request_id in self.finished:
                    raise ContractViolation(f"{item.request_id} got tokens after its end")
                self.tokens[item.request_id] += item.new_token_ids
                if item.finish_reason is not None:
                    self._end(item.request_id, item.finish_reason)
        self.check()

    def step(self) -> SchedulerOutput | None:
        """What the engine task does: fill the pipeline, then take one result."""
        output = None
        while len(self._in_flight) < self.config.pipeline_depth and self.scheduler.has_requests():
            output = self.schedule()
            if output.total_num_scheduled_tokens == 0:
                break
        if self._in_flight:
            self.receive()
        return output

    def run_until_idle(self, max_steps: int = 20_000) -> None:
        """Step until every request has ended and check what must be true then."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                break
            self.step()
        else:
            raise ContractViolation(
                f"{self.scheduler.get_num_unfinished_requests()} requests are not finished after "
                f"{max_steps} steps without arrivals: someone is never served"
            )
        missing = self.requests.keys() - self.finished.keys()
        if missing:
            raise ContractViolation(f"requests were lost: {sorted(missing)}")
        pool = self.kv_cache.pool
        if pool.num_free_blocks != pool.num_blocks:
            raise ContractViolation(f"{pool.num_used_blocks} blocks leaked")
        self.check_tokens()

    def check_tokens(self) -> None:
        """Every request got the tokens that it would have got alone."""
        for request_id, tokens in self.tokens.items():
            sequence = self.requests[request_id].token_ids[: -len(tokens) or None]
            for i, token_id in enumerate(tokens):
                if token_id != next_token(sequence):
                    raise ContractViolation(
                        f"{request_id}: output token {i} is {token_id}, alone it would be "
                        f"{next_token(sequence)}"
                    )
                sequence.append(token_id)

    def check(self) -> None:
        """Blocks are conserved and reference counts exact (for a `BaseScheduler`)."""
        if not isinstance(self.scheduler, BaseScheduler):
            return
        pool = self.kv_cache.pool
        holders: dict[int, int] = {}
        for request in {*self.requests.values()}:
            for block_id in request.block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
        expected = [holders.get(block_id, 0) for block_id in range(pool.num_blocks)]
        if pool.ref_counts != expected:
            wrong = [b for b in range(pool.num_blocks) if pool.ref_counts[b] != expected[b]]
            raise ContractViolation(f"reference counts of blocks {wrong} are wrong")
        if pool.num_used_blocks != len(holders):
            raise ContractViolation(f"{pool.num_used_blocks - len(holders)} blocks are lost")

    def _end(self, request_id: str, reason: FinishReason) -> None:
        if request_id in self.finished:
            raise ContractViolation(f"{request_id} ended twice")
        self.finished[request_id] = reason

    def _check_output(self, output: SchedulerOutput) -> None:
        where = f"step {output.step_id}"
        scheduled = output.num_scheduled_tokens
        if output.total_num_scheduled_tokens != sum(scheduled.values()):
            raise ContractViolation(f"{where}: total_num_scheduled_tokens is not the sum")
        limit = self.config.max_num_batched_tokens
        if limit is not None and output.total_num_scheduled_tokens > limit:
            raise ContractViolation(f"{where}: more than max_num_batched_tokens ({limit})")
        if len(scheduled) > self.config.max_num_seqs:
            raise ContractViolation(f"{where}: more than max_num_seqs requests")
        for request_id, num_tokens in scheduled.items():
            if num_tokens < 1:
                raise ContractViolation(f"{where}: {request_id} runs with {num_tokens} tokens")
            if request_id not in self.requests or request_id in self.finished:
                raise ContractViolation(f"{where}: {request_id} is unknown or has ended")
        self._check_in_flight_blocks(output, where)

    def _check_in_flight_blocks(self, output: SchedulerOutput, where: str) -> None:
        """Blocks of an ended request stay with it while a step in flight can write them."""
        held = {
            block_id: request_id
            for step in self._in_flight
            for request_id in step.num_scheduled_tokens
            if request_id in self.finished
            for block_id in self._block_ids[request_id]
        }
        for request_id, block_ids in output.scheduled_cached_reqs.new_block_ids.items():
            self._block_ids[request_id] += block_ids
        handed_out = [b for ids in output.scheduled_cached_reqs.new_block_ids.values() for b in ids]
        for data in output.scheduled_new_reqs:
            self._block_ids[data.request_id] = list(data.block_ids)
            handed_out += data.block_ids[data.num_computed_tokens // self.kv_cache.block_size :]
        for block_id in handed_out:
            if block_id in held:
                raise ContractViolation(
                    f"{where}: block {block_id} is handed out while a step in flight writes it "
                    f"for {held[block_id]}"
                )
