"""Everything about scheduling except the decision: the class that policies derive from.

Knows requests, counts, blocks and steps. Knows nothing about text, tensors, tasks or threads.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError, InvariantError, PolicyError, RequestError
from aioserve.kv_cache import EncoderCacheManager, KVCacheManager
from aioserve.nearest import explain
from aioserve.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler.admission import check_encoder_inputs, check_queue, check_size
from aioserve.scheduler.blame import place
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.queue import RequestQueue
from aioserve.scheduler.step import Decodes, Step
from aioserve.scheduler.succession import Switchable
from aioserve.scheduler.timers import Timers
from aioserve.scheduler.victims import VICTIM_KEYS, order_key

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048


class PolicyOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Base of a policy's nested `Options`: typed, validated, unknown names refused."""


class BaseScheduler(Switchable):
    """A complete scheduler but for `schedule`, which a policy writes with the verbs of `Step`.

    A policy may also override `order` (who goes first) and `victim` (who gives way), and read
    `running`, `waiting`, `options`, `clock` and whatever a `Request` says. It needs no bookkeeping.
    """

    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    #: True if the policy never splits a prompt: a step must then hold the longest one.
    runs_whole_prompts: ClassVar[bool] = False
    #: What the policy promises of `order`, and the contract checks: that nobody is admitted while
    #: somebody with a smaller key waits, among "all" or those of one "user". None: no promise.
    admits_in_order: ClassVar[Literal["all", "user"] | None] = None

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        """Raises `ConfigError` if options or limits cannot work. `clock` returns seconds."""
        self.options: Any = self.parse_options(config.options)  # of the class `Options`
        self.max_num_batched_tokens = self.check_limits(config, max_model_len)  # of a step
        self.max_num_seqs = config.max_num_seqs  # seats: most requests that run at once
        self.long_prefill_token_threshold = config.long_prefill_token_threshold
        self.num_lookahead_tokens = config.num_lookahead_tokens
        self.max_encoder_tokens = config.max_encoder_tokens
        self.max_model_len = max_model_len  # of prompt and output together, tokens
        self.kv_cache = kv_cache  # blocks and cached prefixes
        self.encoder_cache = EncoderCacheManager(config.encoder_cache_tokens)
        self.clock = clock  # `self.clock()` is the time, in seconds; never use the time module
        self.waiting = RequestQueue()  # in the order of `order`
        self.running: list[Request] = []  # in order of admission; replaced, never shrunk in place
        self.num_steps = 0  # planned so far
        self._config = config
        self._victim_key = VICTIM_KEYS.get(config.victim)  # None: the policy decides
        self._requests: dict[str, Request] = {}  # all that are not finished
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._ended: set[Request] = set()  # finished, but a step in flight may write their blocks
        self._finished_req_ids: list[str] = []  # not yet told to the runner
        self._timers = Timers(config.queue_timeout)
        self._open_step: Step | None = None
        self._last_decodes = Decodes([])
        self._last_output: SchedulerOutput | None = None
        self._untold_preempted: list[str] = []  # from a step that the runner never saw
        self._num_added = 0
        self._num_preemptions = 0
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0

    # What a policy writes.

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Who runs in this step, with how many tokens? Ends with `return step.output()`."""

    def order(self, request: Request) -> Any:
        """Who goes first: smaller keys do. Asked whenever a request enters the queue: when it
        comes, when it is preempted, and for all when the policy takes over.
        """
        return request.arrival_time

    def victim(self) -> Request | None:
        """Who gives way when blocks run out: the last of `running` in the policy's order, so that
        the first always makes progress. Not asked if the setting `victim` says otherwise.
        """
        return max(self.running, key=order_key, default=None)

    # What a policy uses.

    def new_step(self, token_budget: int | None = None) -> Step:
        """An empty step of at most `token_budget` and never more than `max_num_batched_tokens`."""
        if self._open_step is not None:
            raise PolicyError(
                f"policy {type(self).__name__}: a new step was begun, but output() of the last one "
                "was not returned"
            )
        limit = self.max_num_batched_tokens
        if token_budget is not None:
            limit = min(token_budget, limit)
        self._open_step = Step(self, limit, self._untold_preempted)
        self._untold_preempted = []
        return self._open_step

    def take_over(self, other: "BaseScheduler") -> None:
        """Continue where `other`, which shares the KV cache, stands: between two steps, and before
        this one has a request of its own. What `other` counted for its own policy stays behind.

        Called by `make_successor`, which puts the order keys back if this raises: `PolicyError` if
        `order` fails for a request, `ConfigError` if one could never run under this policy.
        """
        if self._requests or self.kv_cache is not other.kv_cache:
            raise InvariantError("only a fresh scheduler on the same KV cache can take over")
        waiting = list(other.waiting)  # before its keys change
        for request in other.get_requests():
            self._check_takeover(request)
            request.order_key = self._order_key(request, request.order_key[1])
        for request in waiting:
            self._line_up(request)
        for name in HANDED_OVER:
            setattr(self, name, getattr(other, name))

    def choose_victim(self) -> Request | None:
        """Who gives way when blocks run out: by the setting `victim`, or the policy's choice."""
        if self._victim_key is None:
            return self.victim()
        return max(self.running, key=self._victim_key, default=None)

    # What is checked before anything is loaded.

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> PolicyOptions:
        """The policy's `Options` from plain data; raises `ConfigError` that names the option."""
        if not (isinstance(cls.Options, type) and issubclass(cls.Options, PolicyOptions)):
            raise ConfigError(f"policy {cls.__name__}: its Options must derive from PolicyOptions")
        try:
            return msgspec.convert(options, cls.Options)
        except msgspec.ValidationError as error:
            known = ", ".join(f.name for f in msgspec.structs.fields(cls.Options)) or "none"
            raise ConfigError(
                f"options of policy {cls.__name__}: {explain(error, cls.Options)}; options it has: "
                f"{known}"
            ) from error

    @classmethod
    def check_limits(cls, config: SchedulerConfig, max_model_len: int) -> int:
        """The token budget of a step. Raises `ConfigError` for limits that cannot work together."""
        if cls.runs_whole_prompts:
            for name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
                limit = getattr(config, name)
                if limit is not None and limit < max_model_len:
                    raise ConfigError(
                        f"policy {cls.__name__} runs whole prompts, so {name} ({limit}) must be at "
                        f"least max_model_len ({max_model_len})"
                    )
        if config.max_num_batched_tokens is None:
            return max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_model_len)
        return config.max_num_batched_tokens

    # SchedulerInterface.

    def add_request(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        request.bound_length(self.max_model_len)
        check_size(request, self.kv_cache.num_slots)
        check_encoder_inputs(request, self._config, whole=self.runs_whole_prompts)
        check_queue(request.num_tokens, self.waiting, self._config)
        request.order_key = self._order_key(request, self._num_added)
        self._line_up(request)
        self._requests[request.request_id] = request
        self._timers.add(request)
        self._num_added += 1

    def check_queue(self, num_tokens: int, num_arriving: int, arriving_tokens: int) -> None:
        check_queue(num_tokens, self.waiting, self._config, num_arriving, arriving_tokens)

    def next_expiry(self) -> float | None:
        return self._timers.next_due()

    def expire_requests(self) -> list[str]:
        if not self._timers:
            return []
        due = [request.request_id for request in self._timers.take_due(self.clock())]
        return self.finish_requests(due, RequestStatus.FINISHED_TIMEOUT) if due else []

    def discard_step(self, last_step_id: int) -> list[str]:
        step, output = self._open_step, self._last_output
        self._open_step = None
        touched: list[Request] = []
        if step is not None:
            touched += step.requests
            self._untold_preempted = step._preempted_req_ids
        if output is not None and output.step_id > last_step_id:
            self._untold_preempted = output.preempted_req_ids + self._untold_preempted
            self._finished_req_ids = output.finished_req_ids + self._finished_req_ids
            self.encoder_cache.return_evicted(output.free_encoder_hashes)
            if self._in_flight and self._in_flight[-1][0] is output:
                touched += self._in_flight.pop()[1]
        request_ids = [r.request_id for r in touched if not r.status.is_finished]
        return self.finish_requests(request_ids or None, RequestStatus.FINISHED_ERROR)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        expected, requests = self._in_flight.popleft()
        while expected is not scheduler_output:
            self._settle(requests)  # a policy raised over its result; whom it carried has ended
            expected, requests = self._in_flight.popleft()
        outputs: dict[int, list[EngineCoreOutput]] = {}
        client_index: int | None = None  # of `outs`; most engines have one client
        outs: list[EngineCoreOutput] = []
        any_finished = False
        sampled = zip(requests, model_runner_output.sampled_token_ids, strict=True)
        logprobs = model_runner_output.logprobs
        drafted = scheduler_output.scheduled_spec_decode_tokens
        running = RequestStatus.RUNNING
        for request, token_ids in sampled:
            if not token_ids or (request.status is not running and request.status.is_finished):
                continue
            new_logprobs = logprobs.get(request.request_id) if logprobs else None
            num_tokens = request.num_tokens + 1
            if (
                num_tokens <= request.num_target_tokens
                and num_tokens < request.max_total_tokens
                and len(token_ids) == 1
                and token_ids[0] not in request.stop_token_ids
            ):  # the hot path: one more token that ends nothing
                request.token_ids.append(token_ids[0])
                request.num_tokens = num_tokens
                output = EngineCoreOutput(request.request_id, token_ids, None, None, new_logprobs)
            else:
                output = self._append_tokens(request, token_ids, new_logprobs)
                if output.finish_reason is not None:
                    any_finished = True
            if drafted and request.request_id in drafted:
                self._roll_back(request)
            if request.client_index != client_index:
                client_index = request.client_index
                outs = outputs.setdefault(client_index, [])
            outs.append(output)
        if any_finished:
            self._drop_finished()
        if self._ended:
            self._settle(requests)
        if model_runner_output.draft_token_ids:
            self._take_drafts(requests, model_runner_output.draft_token_ids)
        now = self.clock()
        return {client: EngineCoreOutputs(outs, now) for client, outs in outputs.items()}

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if not finished_status.is_finished:
            raise InvariantError(f"requests cannot end with status {finished_status.name}")
        if request_ids is None:
            request_ids = list(self._requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        finished = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, finished_status)
                finished.append(request_id)
        if finished:
            self._drop_finished()
        if finished_status is RequestStatus.FINISHED_ERROR:
            # A step that failed may not have written what is listed as computed by it.
            self.kv_cache.pool.clear_index()
            self.encoder_cache.forget_released()
        return finished

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def get_request(self, request_id: str) -> Request | None:
        """An unfinished request by its id; None if there is none."""
        return self._requests.get(request_id)

    def get_requests(self) -> list[Request]:
        """All unfinished requests, in order of arrival."""
        return list(self._requests.values())

    def get_wait_reasons(self) -> dict[str, WaitReason]:
        in_flight = {request for _, requests in self._in_flight for request in requests}
        return {
            request.request_id: (
                WaitReason.IN_FLIGHT
                if request in in_flight
                else request.wait_reason
                if request.wait_step_id == self.num_steps
                else WaitReason.POLICY
            )
            for request in self.waiting
        }

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self._requests) - len(self.running)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def has_finished_requests(self) -> bool:
        return bool(self._finished_req_ids)

    def has_requests(self) -> bool:
        return bool(self._requests or self._finished_req_ids)

    def reset_prefix_cache(self) -> bool:
        self.kv_cache.pool.clear_index()
        return self.kv_cache.pool.num_used_blocks == 0

    def make_stats(self) -> SchedulerStats:
        num_running, num_waiting = self.get_request_counts()
        return SchedulerStats(
            num_steps=self.num_steps,
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_waiting_tokens=self.waiting.num_tokens,
            num_kv_blocks=self.kv_cache.pool.num_blocks,
            num_used_kv_blocks=self.kv_cache.pool.num_used_blocks,
            num_preemptions=self._num_preemptions,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_prefix_queried_tokens=self.kv_cache.num_queried_tokens,
            num_prefix_hit_tokens=self.kv_cache.num_hit_tokens,
        )

    # Bookkeeping behind the verbs of Step.

    def _append_tokens(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> EngineCoreOutput:
        """Append sampled tokens up to the first that ends the request."""
        if len(token_ids) > 1:
            token_ids = self._until_stop(request, token_ids)
        request.token_ids += token_ids
        request.num_tokens = num_tokens = request.num_tokens + len(token_ids)
        if request.status is RequestStatus.PREEMPTED:
            self.waiting.num_tokens += len(token_ids)
        if request.num_target_tokens < num_tokens:
            # It was preempted with this token in flight, or reached its limit.
            request.num_target_tokens = min(num_tokens, request.max_total_tokens - 1)
        status = None
        if token_ids[-1] in request.stop_token_ids:
            if request.num_output_tokens > request.sampling_params.min_tokens:
                status = RequestStatus.FINISHED_STOPPED
                if token_ids[-1] in request.sampling_params.stop_token_ids:  # not for EOS
                    request.stop_reason = token_ids[-1]
        if status is None and num_tokens >= request.max_total_tokens:
            status = RequestStatus.FINISHED_LENGTH_CAPPED
        if status is None:
            return EngineCoreOutput(request.request_id, token_ids, None, None, logprobs)
        self._finish(request, status)
        return EngineCoreOutput(
            request.request_id, token_ids, status.finish_reason, request.stop_reason, logprobs
        )

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """End a request; the caller drops it from `running`."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request.status is not RequestStatus.WAITING:  # else the runner never heard of it
            self._finished_req_ids.append(request.request_id)
        request.status = status
        del self._requests[request.request_id]
        self._timers.forget(request)
        self._release_encoder_outputs(request)
        if request.block_ids and status is not RequestStatus.FINISHED_ERROR:
            self.kv_cache.cache_full_blocks(request, self._num_written_tokens(request))
        if self._is_in_flight(request):
            self._ended.add(request)
        else:
            self.kv_cache.free(request)

    def _drop_finished(self) -> None:
        """Some of `running` have ended: nothing here may keep them."""
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        self._last_decodes = Decodes([])

    def _requeue(self, requests: dict[Request, RequestStatus | None]) -> None:
        """Let running requests wait again, each where `order` puts it now; by each its status
        before, if it was admitted in this very step. If the policy raises, nothing has changed.
        """
        before = [
            (r.status, r.num_computed_tokens, r.num_preemptions, r.order_key) for r in requests
        ]
        try:
            for request, status in requests.items():
                request.status = status or RequestStatus.PREEMPTED
                request.num_computed_tokens = 0
                request.num_preemptions += status is None
                request.order_key = self._order_key(request, request.order_key[1])
                self._line_up(request)
        except Exception:
            for request, (status, num_computed, num_preemptions, key) in zip(
                requests, before, strict=True
            ):
                if request in self.waiting:
                    self.waiting.remove(request)
                request.status, request.num_computed_tokens = status, num_computed
                request.num_preemptions, request.order_key = num_preemptions, key
            raise
        self._num_preemptions += sum(status is None for status in requests.values())
        self.running = [r for r in self.running if r not in requests]

    def _take_back(self, request: Request) -> None:
        """Take everything from a request that waits again."""
        self.kv_cache.free(request)
        self._release_encoder_outputs(request)
        request.draft_token_ids = []
        request.num_target_tokens = request.num_tokens

    def _settle(self, requests: list[Request]) -> None:
        """After a step is back: blocks are freed that were only held for it."""
        for request in requests:
            if request in self._ended and not self._is_in_flight(request):
                self._ended.remove(request)
                self.kv_cache.free(request)

    def _num_written_tokens(self, request: Request) -> int:
        """How many tokens have their keys and values in blocks now: not those of steps in flight.

        The newest never counts: a draft token that was wrong may stand in its place.
        """
        num_in_flight = sum(
            output.num_scheduled_tokens[request.request_id]
            for output, requests in self._in_flight
            if request in requests
        )
        return min(request.num_computed_tokens - num_in_flight, request.num_tokens - 1)

    def _is_in_flight(self, request: Request) -> bool:
        return any(request in requests for _, requests in self._in_flight)

    def _order_key(self, request: Request, number: int) -> tuple[Any, int]:
        """The running number keeps equals in order of arrival, also after a preemption."""
        try:
            return self.order(request), number
        except Exception as error:
            raise PolicyError(
                f"policy {type(self).__name__} raised {error!r} in order()"
                f"{place(error, type(self))}"
            ) from error

    def _line_up(self, request: Request) -> None:
        """Put a request in its place. Raises `PolicyError` for a key that cannot be compared."""
        try:
            self.waiting.add(request)
        except InvariantError:
            raise
        except Exception as error:
            raise PolicyError(
                f"policy {type(self).__name__}: order() returned {request.order_key[0]!r:.100}, "
                f"which cannot be compared: {error!r}"
            ) from error

    def _check_takeover(self, request: Request) -> None:
        """What was accepted for another policy must be able to run under this one."""
        try:
            check_encoder_inputs(request, self._config, whole=self.runs_whole_prompts)
        except RequestError as error:
            raise ConfigError(
                f"policy {type(self).__name__} cannot run request {request.request_id!r}, which "
                f"was accepted for another: {error}"
            ) from error

    def _until_stop(self, request: Request, token_ids: list[int]) -> list[int]:
        """Verified drafts may run past the end of a request: cut them there."""
        num_output = request.num_output_tokens
        for i, token_id in enumerate(token_ids, start=1):
            is_stop = token_id in request.stop_token_ids
            if is_stop and num_output + i > request.sampling_params.min_tokens:
                return token_ids[:i]
        return token_ids[: request.max_total_tokens - request.num_tokens]

    def _roll_back(self, request: Request) -> None:
        """Drafts were verified: all tokens but the newest are computed, the rest were wrong."""
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens = request.num_tokens - 1

    def _take_drafts(self, requests: list[Request], drafts: dict[str, list[int]]) -> None:
        """Next time these requests verify guesses, unless a step ahead has overtaken them."""
        for request in requests:
            guesses = drafts.get(request.request_id)
            if guesses and request.status is RequestStatus.RUNNING:
                room = request.max_total_tokens - 1 - request.num_tokens
                if room > 0 and not self._is_in_flight(request):
                    request.draft_token_ids = guesses[:room]
                    request.num_target_tokens = request.num_tokens + len(request.draft_token_ids)

    def _release_encoder_outputs(self, request: Request, computed: int | None = None) -> None:
        """The request needs no encoder output any more, or none before position `computed`."""
        for item in request.encoder_inputs:
            if computed is None or item.end <= computed:
                self.encoder_cache.release(request.request_id, item)

    def _num_common_prefix_blocks(self) -> int:
        """Leading blocks that every holder of blocks shares."""
        if len(self.running) < 2:
            return len(self.running[0].block_ids) if self.running else 0
        num_holders = len(self.running) + len(self._ended)
        ref_counts = self.kv_cache.pool.ref_counts
        count = 0
        for block_id in self.running[0].block_ids:
            if ref_counts[block_id] != num_holders:
                break
            count += 1
        return count

    def _close_step(self, step: Step) -> None:
        if self._open_step is not step:
            raise PolicyError(
                f"policy {type(self).__name__}: output() was called twice, or on an old step"
            )
        self._open_step = None
        self.num_steps = step.step_id

    def _commit(
        self, output: SchedulerOutput, requests: list[Request], num_prefill_tokens: int
    ) -> None:
        self._last_output = output
        if not requests:
            return
        self._in_flight.append((output, requests))
        self._num_prefill_tokens += num_prefill_tokens
        self._num_decode_tokens += output.total_num_scheduled_tokens - num_prefill_tokens
        if self.encoder_cache.has_holders:
            for request in requests:  # steps run in order: who comes later cannot be too early
                self._release_encoder_outputs(request, request.num_computed_tokens)


# What a scheduler knows of requests and steps, whatever its policy.
HANDED_OVER = (
    "encoder_cache",
    "num_steps",
    "running",
    "_ended",
    "_finished_req_ids",
    "_in_flight",
    "_last_output",
    "_num_added",
    "_num_decode_tokens",
    "_num_preemptions",
    "_num_prefill_tokens",
    "_requests",
    "_timers",
    "_untold_preempted",
)
