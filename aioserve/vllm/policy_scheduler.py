"""vLLM's own scheduler with parts of a policy: which request is next, and which gives way.

    vllm serve MODEL --scheduler-cls aioserve.vllm.PolicyScheduler \\
        --additional-config '{"aioserve": {"order": "fair"}}'

For what `Scheduler` refuses: models with several kinds of KV cache, KV connectors, encoders. All of
vLLM's features stay, since vLLM still plans every step; its waiting queue is exchanged, its list of
running requests sorted, and its token budget lowered. So no verb of a policy works here, and no
file of a policy, each of which writes `schedule()`: what is named are parts, the options `order`,
`budget` and `victim` of the policy `composed`. Parts that hold requests back or reject them, or set
a budget by what a step has already, are refused at the start.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput as TheirPlan
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput as TheirResult
from vllm.v1.request import Request as TheirRequest
from vllm.v1.request import RequestStatus as TheirStatus

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError, RequestError
from aioserve.kv_cache import KVCacheManager
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BudgetPart, OrderPart, SchedulerOutput, Step, load_policy
from aioserve.vllm.observed import Observed
from aioserve.vllm.requests import STATUSES, Arrivals, to_ours
from aioserve.vllm.settings import KEY, UNBOUNDED

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
OPTIONS = ("order", "budget", "victim")


class PolicyScheduler:
    """The scheduler that vLLM would take, with its requests in a policy's order: for
    `--scheduler-cls`. What is not said here is passed on as it is asked.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: Any,
        block_size: int,
        **others: Any,
    ) -> None:
        """Raises `ConfigError` for parts that are not there, or cannot work here."""
        self.parts = Parts(vllm_config, kv_cache_config, block_size)
        config = copy.copy(vllm_config.scheduler_config)
        config.scheduler_cls = None  # then it is the one for these settings
        self.live: Any = config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=structured_output_manager,
            block_size=block_size,
            **others,
        )
        self._most_tokens: int = self.live.max_num_scheduled_tokens
        self._line = self.live.waiting = Line(self.parts)

    def __getattr__(self, name: str) -> Any:
        """Return whatever else vLLM asks of its scheduler."""
        if name == "live":  # it is not there yet
            raise AttributeError(name)
        return getattr(self.live, name)

    def add_request(self, request: TheirRequest) -> None:
        """Add a request, as vLLM's own scheduler does."""
        self.parts.add(request)
        self.live.add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> TheirPlan:
        """Plan a step as vLLM does, which finds its requests in the order of the policy."""
        live, parts = self.live, self.parts
        self._line.begin()
        live.running, most = parts.begin(live.running) or (live.running, None)
        live.max_num_scheduled_tokens = min(most or self._most_tokens, self._most_tokens)
        plan: TheirPlan = live.schedule(throttle_prefills)
        parts.planned(plan)
        return plan

    def update_from_output(
        self, scheduler_output: TheirPlan, model_runner_output: TheirResult
    ) -> Any:
        """Take a result as vLLM's scheduler does; the parts hear of tokens and ends."""
        outputs = self.live.update_from_output(scheduler_output, model_runner_output)
        self.parts.returned(scheduler_output, outputs)
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: TheirStatus
    ) -> Any:
        """End requests as vLLM's scheduler does; the parts hear of it."""
        ended = self.live.finish_requests(request_ids, finished_status)
        for request in ended:
            self.parts.end(request.request_id, STATUSES[finished_status])
        return ended


def asks(
    method: Callable[Concatenate["Parts", P], T],
) -> Callable[Concatenate["Parts", P], T | None]:
    """Decorate a method that asks the parts: what one of them raises ends the asking, and not vLLM;
    the method returns None then.
    """

    @wraps(method)
    def ask(self: "Parts", /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if self.error is not None:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            logger.exception("a part of the policy failed; vLLM's own order counts from now on")
            self.error = error
            return None

    return ask


class Parts:
    """The parts of a policy, with vLLM's requests as they know them. A part that raises is asked no
    more: what waits is then served in order of arrival.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int
    ) -> None:
        """Raises `ConfigError` for parts that are not there, or cannot work here."""
        theirs = vllm_config.scheduler_config
        if theirs.policy != "fcfs":
            raise ConfigError(
                "aioserve.vllm.PolicyScheduler decides the order: leave out --scheduling-policy"
            )
        config = SchedulerConfig(
            policy="composed",
            options=_options(vllm_config.additional_config),
            max_num_seqs=theirs.max_num_active_seqs or theirs.max_num_seqs,
            max_num_batched_tokens=theirs.max_num_batched_tokens,
            max_waiting_requests=UNBOUNDED,
        )
        composed: Any = load_policy("composed")
        self.policy: Any = composed(
            config,
            KVCacheManager(max(kv_cache_config.num_blocks - 1, 1), block_size),
            max_model_len=vllm_config.model_config.max_model_len,
            clock=time.monotonic,
        )
        self._order: OrderPart = self.policy.first
        self._budget: BudgetPart = self.policy.budget
        for method in ("for_prompts", "max_requests"):
            if getattr(type(self._budget), method) is not getattr(BudgetPart, method) and (
                method != "max_requests" or self._budget.max_requests() is not None
            ):
                raise ConfigError(
                    f"{KEY}.budget, part {type(self._budget).__name__}: its {method}() has no "
                    "counterpart in vLLM's scheduler; a fixed number of tokens a step has: "
                    '{"part": "chunk", "chunk_size": 256}'
                )
        self.observed = Observed()
        self._arrivals = Arrivals(time.monotonic)
        self._step: Step | None = None
        self._line: Iterator[Request] | None = None  # of this step
        self._in_flight: dict[int, SchedulerOutput] = {}  # by the plan's identity
        self._started: set[str] = set()  # by the step that is planned
        self.error: Exception | None = None  # of a part: none is asked any more

    # Requests come and go.

    @asks
    def add(self, theirs: TheirRequest) -> None:
        """A request has come. One that aioserve has no words for, as with streaming input, comes
        behind those that the parts know.
        """
        try:
            request = to_ours(theirs, self._arrivals, only_ordered=True).ours
        except RequestError:
            return
        self.policy.book.add(request, self.policy.order)
        self.observed.add(theirs.request_id, request)

    @asks
    def end(self, name: str, status: RequestStatus) -> None:
        """A request has ended from outside."""
        if name in self.observed.requests:
            self.policy.finish_requests([self.observed.requests[name].request_id], status)
            self.observed.end(name, status)

    # A step.

    @asks
    def begin(self, running: list[TheirRequest]) -> tuple[list[TheirRequest], int | None] | None:
        """A step is to be planned: the running requests in the order in which they are served, the
        one that gives way first at the end; and the most tokens of the step. None: the parts
        have failed.
        """
        self._started.clear()
        most = self._budget.num_tokens()
        self._step, self._line = self.policy.new_step(most), None
        self._order.begin()
        known = self.observed.requests
        decodes = [
            known[r.request_id] for r in running if not r.is_prefill_chunk and r.request_id in known
        ]
        self._order.decoded(decodes)
        victim = self.policy.victim()
        last = None if victim is None else victim.request_id

        def place(theirs: TheirRequest) -> tuple[bool, bool, bool, Any]:
            request = known.get(theirs.request_id)
            key = () if request is None else request.order_key
            return theirs.request_id == last, theirs.is_prefill_chunk, request is not None, key

        return sorted(running, key=place), most

    @asks
    def next_in_line(self) -> str | None:
        """Return the waiting request that is next, once the one before was admitted, or was not;
        None: none is, in this step.
        """
        if self._line is None:
            assert self._step is not None
            self._line = self._order.line(self._step, [], None)
        waiting = (r for r in self._line if r.status is not RequestStatus.RUNNING)
        request = next(waiting, None)
        return None if request is None else request.request_id

    def knows(self, name: str) -> bool:
        """Return whether the parts are asked about this request."""
        return self.error is None and name in self.observed.requests

    @asks
    def start(self, name: str) -> None:
        """vLLM has taken the request out of its queue, to run it, or to put it back."""
        if (request := self.observed.requests.get(name)) is not None:
            self.policy.book.start(request)
            self._started.add(name)

    @asks
    def requeue(self, name: str) -> None:
        """vLLM has put the request back: it was preempted, or could not be started."""
        request = self.observed.requests.get(name)
        if request is None or request.status is not RequestStatus.RUNNING:
            return
        before = RequestStatus.WAITING if name in self._started else None
        self.policy.book.requeue({request: before}, self.policy.order)

    @asks
    def planned(self, plan: TheirPlan) -> None:
        """Tell the policy what vLLM has planned for the step."""
        assert self._step is not None
        self._step.output()  # what it says of ends is said
        self._step = None
        known, cached = self.observed.requests, plan.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        for name, count in plan.num_scheduled_tokens.items():
            if (request := known.get(name)) is not None:
                request.num_computed_tokens = starts[name]
                if request.is_prefill:
                    self._order.served(request, count)
                request.num_computed_tokens += count
        if plan.num_scheduled_tokens.keys() <= known.keys():
            output = self.observed.planned(plan)
            if output.num_scheduled_tokens and self.policy.uses_step_time:
                self.policy.step_time.planned(output, time.monotonic())
                self._in_flight[id(plan)] = output

    @asks
    def returned(self, plan: TheirPlan, outputs: Mapping[int, Any]) -> None:
        """Tell the policy the result of a step."""
        if (output := self._in_flight.pop(id(plan), None)) is not None:
            self.policy.step_time.returned(output, time.monotonic())
        for batch in outputs.values():
            for told in batch.outputs:
                if told.request_id in self.observed.requests:
                    request, _ = self.observed.took(told)
                    if request.status.is_finished:
                        self.policy.finish_requests([request.request_id], request.status)


class Line(RequestQueue):
    """The waiting queue of vLLM's scheduler, whose first request is the one that the parts name.
    In a step, a request that was put back is not named again.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._requests: dict[str, TheirRequest] = {}
        self._walk: Iterator[str] | None = None  # of this step
        self._next: str | None = None

    def begin(self) -> None:
        """A step is to be planned: the line is asked for anew."""
        self._walk = self._next = None

    def _find(self) -> str | None:
        """Return the request that is next; None: none in this step."""
        if self._next is not None and self._next in self._requests:
            return self._next
        if self._walk is None:
            self._walk = self._in_order()
        self._next = next(self._walk, None)
        return self._next

    def _in_order(self) -> Iterator[str]:
        """Yield what the parts name, then what they do not know."""
        named: set[str] = set()
        while (name := self.parts.next_in_line()) is not None:
            if name in self._requests and name not in named:
                named.add(name)
                yield name
        for name in sorted(self._requests, key=lambda n: self._requests[n].arrival_time):
            if name not in named and (name in self._requests) and not self.parts.knows(name):
                yield name

    def add_request(self, request: TheirRequest) -> None:
        self._requests[request.request_id] = request

    def pop_request(self) -> TheirRequest:
        request = self.peek_request()
        del self._requests[request.request_id]
        self.parts.start(request.request_id)
        return request

    def peek_request(self) -> TheirRequest:
        if (name := self._find()) is None:
            raise IndexError("no request is next in this step")
        return self._requests[name]

    def prepend_request(self, request: TheirRequest) -> None:
        self._requests[request.request_id] = request
        self.parts.requeue(request.request_id)

    def prepend_requests(self, requests: Iterable[TheirRequest]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: TheirRequest) -> None:
        self._requests.pop(request.request_id, None)

    def remove_requests(self, requests: Iterable[TheirRequest]) -> None:
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        return self._find() is not None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TheirRequest]:
        return iter(list(self._requests.values()))


def _options(additional_config: Any) -> dict[str, Any]:
    """Return the options of the policy `composed`. Raises `ConfigError` for what has no counterpart
    in vLLM's scheduler.
    """
    stated = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if not isinstance(stated, Mapping) or not stated:
        raise ConfigError(
            "aioserve.vllm.PolicyScheduler needs the parts of a policy, as --additional-config "
            f'\'{{"{KEY}": {{"order": "fair"}}}}\'; got {stated!r:.80}'
        )
    if others := sorted(set(stated) - set(OPTIONS)):
        raise ConfigError(
            f"aioserve.vllm.PolicyScheduler takes {', '.join(OPTIONS)} of {KEY}, a policy's parts, "
            f"and not {', '.join(others)}: vLLM plans the steps itself (aioserve.vllm.Scheduler "
            "takes whole policies)"
        )
    return dict(stated)
