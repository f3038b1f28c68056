"""Everything about scheduling except the decision: the class that policies derive from.

Knows requests, counts, blocks and steps. Knows nothing about text, tensors, tasks or threads.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, ClassVar

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError, EngineOverloadedError, RequestError
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from aioserve.request import Request, RequestStatus
from aioserve.scheduler.interface import SchedulerInterface
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.queue import RequestQueue
from aioserve.scheduler.step import Step

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048


class PolicyOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Base of a policy's nested `Options`: typed, validated, unknown names refused."""


class BaseScheduler(SchedulerInterface):
    """A complete scheduler but for `schedule`, which a policy writes with the verbs of `Step`.

    A policy may also override `order` (who goes first) and `victim` (who gives way), and read
    `running`, `waiting`, `options`, `clock` and whatever a `Request` says. It needs no bookkeeping.
    """

    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    #: True if the policy never splits a prompt: a step must then hold the longest one.
    runs_whole_prompts: ClassVar[bool] = False

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        """Raises `ConfigError` if options or limits cannot work. `clock` returns seconds."""
        self.options: Any = self.parse_options(config.options)
        self.max_num_batched_tokens = self.check_limits(config, max_model_len)
        self.max_num_seqs = config.max_num_seqs
        self.kv_cache = kv_cache
        self.clock = clock
        self.waiting = RequestQueue()
        self.running: list[Request] = []  # in order of admission; replaced, never shrunk in place
        self._max_waiting_requests = config.max_waiting_requests
        self._requests: dict[str, Request] = {}  # all that are not finished
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._returning: set[Request] = set()  # preempted, but a step in flight still has them
        self._ended: set[Request] = set()  # finished, but a step in flight may write their blocks
        self._finished_req_ids: list[str] = []  # not yet told to the runner
        self._num_added = 0
        self._num_steps = 0
        self._num_preemptions = 0

    # What a policy writes.

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Who runs in this step, with how many tokens? Ends with `return step.output()`."""

    def order(self, request: Request) -> Any:
        """Who goes first: smaller keys do. Asked when a request enters the queue."""
        return request.arrival_time

    def victim(self) -> Request | None:
        """Who gives way when blocks run out: the last of `running` in the policy's order."""
        return max(self.running, key=_order_key, default=None)

    # What a policy uses.

    def new_step(self, token_budget: int | None = None) -> Step:
        """An empty step of at most `token_budget` and never more than `max_num_batched_tokens`."""
        limit = self.max_num_batched_tokens
        return Step(self, limit if token_budget is None else min(token_budget, limit))

    # What is checked before anything is loaded.

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> PolicyOptions:
        """The policy's `Options` from plain data; raises `ConfigError` that names the option."""
        try:
            return msgspec.convert(options, cls.Options)
        except msgspec.ValidationError as error:
            known = ", ".join(f.name for f in msgspec.structs.fields(cls.Options)) or "none"
            raise ConfigError(
                f"options of policy {cls.__name__}: {error}; options it has: {known}"
            ) from error

    @classmethod
    def check_limits(cls, config: SchedulerConfig, max_model_len: int) -> int:
        """The token budget of a step. Raises `ConfigError` for limits that cannot work together."""
        limit = config.max_num_batched_tokens
        if limit is None:
            return max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_model_len)
        if cls.runs_whole_prompts and limit < max_model_len:
            raise ConfigError(
                f"policy {cls.__name__} runs whole prompts, so max_num_batched_tokens ({limit}) "
                f"must be at least max_model_len ({max_model_len})"
            )
        return limit

    # SchedulerInterface.

    def add_request(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        if request.num_prompt_tokens < 1:
            raise RequestError("the prompt must have at least one token", param="prompt")
        # The last token is never computed, so a request needs one slot less than its length.
        if request.max_total_tokens - 1 > self.kv_cache.num_slots:
            raise RequestError(
                f"prompt and output of up to {request.max_total_tokens} tokens do not fit the KV "
                f"cache of {self.kv_cache.num_slots} tokens",
                param="max_tokens",
            )
        if len(self.waiting) >= self._max_waiting_requests:
            raise EngineOverloadedError(
                f"{len(self.waiting)} requests are waiting already (max_waiting_requests)"
            )
        # The running number keeps equals in order of arrival, also after a preemption.
        request.order_key = (self.order(request), self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self.waiting.add(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        expected, requests = self._in_flight.popleft()
        assert expected is scheduler_output, "results must come in the order of the steps"
        outputs: dict[int, list[EngineCoreOutput]] = {}
        any_finished = False
        sampled = zip(requests, model_runner_output.sampled_token_ids, strict=True)
        logprobs = model_runner_output.logprobs
        for request, token_ids in sampled:
            if not token_ids or request.status.is_finished:
                continue
            new_logprobs = logprobs.get(request.request_id) if logprobs else None
            output = self._append_tokens(request, token_ids, new_logprobs)
            any_finished |= output.finish_reason is not None
            outputs.setdefault(request.client_index, []).append(output)
        if any_finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        if self._returning or self._ended:
            self._settle(requests)
        now = self.clock()
        return {client: EngineCoreOutputs(outs, now) for client, outs in outputs.items()}

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        assert finished_status.is_finished
        if request_ids is None:
            request_ids = list(self._requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        finished = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                if request in self.waiting:
                    self.waiting.remove(request)
                self._finish(request, finished_status)
                finished.append(request_id)
        if finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        if finished_status is RequestStatus.FINISHED_ERROR:
            # A step that failed may not have written the blocks that were registered for it.
            self.kv_cache.pool.clear_index()
        return finished

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self._requests) - len(self.running)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def has_finished_requests(self) -> bool:
        return bool(self._finished_req_ids)

    def reset_prefix_cache(self) -> bool:
        self.kv_cache.pool.clear_index()
        return self.kv_cache.pool.num_used_blocks == 0

    def make_stats(self) -> SchedulerStats:
        num_running, num_waiting = self.get_request_counts()
        return SchedulerStats(
            num_steps=self._num_steps,
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_kv_blocks=self.kv_cache.pool.num_blocks,
            num_used_kv_blocks=self.kv_cache.pool.num_used_blocks,
            num_preemptions=self._num_preemptions,
            num_prefix_queried_tokens=self.kv_cache.num_queried_tokens,
            num_prefix_hit_tokens=self.kv_cache.num_hit_tokens,
        )

    # Bookkeeping behind the verbs of Step.

    def _append_tokens(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> EngineCoreOutput:
        """Append sampled tokens up to the first that ends the request."""
        request.token_ids += token_ids
        request.num_tokens += len(token_ids)
        if request.num_target_tokens < request.num_tokens:
            # It was preempted with this token in flight, or reached its limit.
            request.num_target_tokens = min(request.num_tokens, request.max_total_tokens - 1)
        status = None
        if token_ids[-1] in request.stop_token_ids:
            if request.num_output_tokens > request.sampling_params.min_tokens:
                status, request.stop_reason = RequestStatus.FINISHED_STOPPED, token_ids[-1]
        if status is None and request.num_tokens >= request.max_total_tokens:
            status = RequestStatus.FINISHED_LENGTH_CAPPED
        if status is None:
            return EngineCoreOutput(request.request_id, token_ids, None, None, logprobs)
        self._finish(request, status)
        return EngineCoreOutput(
            request.request_id, token_ids, status.finish_reason, request.stop_reason, logprobs
        )

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """End a request; the caller drops it from `waiting` and `running`."""
        if request.status is not RequestStatus.WAITING:  # else the runner never heard of it
            self._finished_req_ids.append(request.request_id)
        request.status = status
        del self._requests[request.request_id]
        self._returning.discard(request)
        if self._is_in_flight(request):
            self._ended.add(request)
        else:
            self.kv_cache.free(request)

    def _return_to_queue(self, request: Request, status_before: RequestStatus | None) -> None:
        """Take everything from a running request and let it wait again, in its old place.

        `status_before` is set for one that was admitted in this very step.
        """
        self.kv_cache.free(request)
        request.status = status_before or RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_target_tokens = request.num_tokens
        self.running = [r for r in self.running if r is not request]
        if status_before is None:
            request.num_preemptions += 1
            self._num_preemptions += 1
        if self._is_in_flight(request):
            self._returning.add(request)  # its next token is on the way
        else:
            self.waiting.add(request)

    def _settle(self, requests: list[Request]) -> None:
        """After a step is back: what only waited for it is freed or waits in line again."""
        for request in requests:
            if request in self._ended and not self._is_in_flight(request):
                self._ended.remove(request)
                self.kv_cache.free(request)
            elif request in self._returning and not self._is_in_flight(request):
                self._returning.remove(request)
                self.waiting.add(request)

    def _is_in_flight(self, request: Request) -> bool:
        return any(request in requests for _, requests in self._in_flight)

    def _next_step_id(self) -> int:
        self._num_steps += 1
        return self._num_steps

    def _take_finished_req_ids(self) -> list[str]:
        finished, self._finished_req_ids = self._finished_req_ids, []
        return finished

    def _commit(self, output: SchedulerOutput, requests: list[Request]) -> None:
        self._in_flight.append((output, requests))


_order_key = attrgetter("order_key")
