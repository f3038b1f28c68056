"""The class that policies derive from: what an author writes, reads and calls.

Knows options, limits, and what to ask for the rest: state is in the book, a decision in a step.
Knows nothing about text, tensors, tasks or threads.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Literal

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError, InvariantError, PolicyError, RequestError
from aioserve.kv_cache import KVCacheManager, KVConnectorBase, make_limits
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput, SchedulerStats
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler.admission import check_queue, check_size
from aioserve.scheduler.blame import asking
from aioserve.scheduler.bounded_step import BoundedStep
from aioserve.scheduler.draft_lengths import Drafting
from aioserve.scheduler.encoder_limits import encoder_limits
from aioserve.scheduler.gauges import Gauging
from aioserve.scheduler.hearing import Hearing
from aioserve.scheduler.inquiry import stats, wait_reasons
from aioserve.scheduler.interface import POLICY_API
from aioserve.scheduler.memory import Memory
from aioserve.scheduler.offloading import Offloading, drop_copies
from aioserve.scheduler.options import PolicyOptions, make_options
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.queue import RequestQueue, by_user, order_key
from aioserve.scheduler.rejection import Rejection
from aioserve.scheduler.reordering import Reordering
from aioserve.scheduler.request_table import RequestTable
from aioserve.scheduler.results import take_results
from aioserve.scheduler.retention_verbs import Retaining
from aioserve.scheduler.row_reading import RowReading
from aioserve.scheduler.sleeping import Sleeping
from aioserve.scheduler.step import Step
from aioserve.scheduler.step_time import OnlineStepTime
from aioserve.scheduler.victims import VICTIM_KEYS
from aioserve.scheduler.wake_up import Waking


class BaseScheduler(
    Reordering, Retaining, Waking, Drafting, RowReading, Hearing, Gauging, Sleeping, Offloading
):
    """A complete scheduler but for `schedule`, which a policy writes with the verbs of `Step`.

    A policy may also override `order` (admission order) and `victim` (preemption), and read
    `running`, `waiting`, `options`, `clock` and whatever a `Request` says. It needs no bookkeeping.
    """

    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    #: The version of the policy API (`POLICY_API`) that the policy is written for: another one is
    #: refused at the start, in a line that says what to do.
    policy_api: ClassVar[int] = POLICY_API
    #: True if the policy never splits a prompt: a step must then hold the longest one.
    runs_whole_prompts: ClassVar[bool] = False
    #: A promise about `order` that the contract checks: no request is admitted while another with
    #: a smaller key waits, among "all" requests or those of one "user" or "group" (`group_by`).
    #: None: no promise.
    admits_in_order: Literal["all", "user", "group"] | None = None
    #: True if the policy asks `step_time`: it then learns from every step.
    uses_step_time: bool = False
    #: A promise that the contract checks: while no request waits and every prompt is computed, a
    #: step gives each request one token, whatever the clock says, and changes nothing in the
    #: policy. `compare --fleet` then plans many such steps at once. A class that overrides
    #: `schedule` or `update_from_output` must set it again.
    keeps_decoding: ClassVar[bool] = False

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        """Raises `ConfigError` if options or limits cannot work. `clock` returns seconds."""
        self.options: Any = self.parse_options(config.options)  # of the policy's class `Options`
        self.max_num_batched_tokens = self.check_limits(config, max_model_len)  # per step
        self.step_limit = self.max_num_batched_tokens  # token budget of the newest step
        self.max_num_seqs = config.max_num_seqs  # most requests that run at once
        self.max_loras = config.max_loras  # most different adapters among running requests
        self.max_model_len = max_model_len  # tokens of prompt and output together
        self.kv_cache = kv_cache  # KV blocks and cached prefixes
        self.memory = Memory(self)  # how many KV tokens are free, held, leased or cached
        self.clock = clock  # `self.clock()` is the time, in seconds; never use the time module
        self._ask_order = asking(self, "order")
        is_grouped = type(self).group_by is not BaseScheduler.group_by
        self._ask_group = asking(self, "group_by", str) if is_grouped else by_user
        # The state that the verbs write; a policy reads the part of it that follows.
        name = type(self).__name__
        self.book = RequestTable(name, kv_cache, config.queue_timeout, self._ask_group)
        encoder = encoder_limits(config, max_model_len, self.runs_whole_prompts)
        self._on_end = self._end_hooks()
        self.book.just_ended = [] if self._on_end else None
        self._ranks = self._asked_ranks()
        self._limits = make_limits(config.max_loras, encoder, kv_cache.pool)
        self._max_leased = int(config.max_leased_share * kv_cache.pool.num_blocks)
        kv_cache.limit(self._limits, self._max_leased)
        self._config = config
        self._victim_key = VICTIM_KEYS.get(config.victim)  # None: the policy decides
        is_timed = self.uses_step_time or kv_cache.wants_prices
        self._step_time = OnlineStepTime() if is_timed else None
        noted = (self._note_planned,) if is_timed else ()
        self._on_output = (*noted, *self._draft_hooks(), *self._row_hooks())  # with every step

    @property
    def running(self) -> list[Request]:
        """Running requests in order of admission; the list is replaced, never shrunk in place."""
        return self.book.running

    @property
    def running_adapters(self) -> set[str]:
        """Adapter ids of running requests, at most `max_loras`: other adapters have to wait."""
        return {request.adapter_id for request in self.running} - {""}

    @property
    def waiting(self) -> RequestQueue:
        """Waiting requests, sorted by `order`."""
        return self.book.waiting

    @property
    def num_steps(self) -> int:
        """Number of steps planned so far."""
        return self.book.num_steps

    @property
    def step_time(self) -> OnlineStepTime:
        """Model of step time, fitted to completed steps. Needs `uses_step_time = True`."""
        if self._step_time is None:
            raise PolicyError(
                f"policy {type(self).__name__} reads step_time without uses_step_time = True"
            )
        return self._step_time

    def get_request(self, request_id: str) -> Request | None:
        """An unfinished request by its id; None if there is none."""
        return self.book.requests.get(request_id)

    def get_requests(self) -> list[Request]:
        """All unfinished requests, in order of arrival."""
        return list(self.book.requests.values())

    # What a policy writes.

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Choose the requests of this step and their tokens. Ends with `return step.output()`."""

    def order(self, request: Request) -> Any:
        """Sort key of a waiting request: the smallest is admitted first. Called when a request
        enters the queue (on arrival, after a preemption or pause, and for all when the policy takes
        over), by `reorder` and `reorder_all`, and as `reorder_every` says.
        """
        return request.arrival_time

    def group_by(self, request: Request) -> str:
        """Name of the group of a waiting request, for `self.waiting.heads()` and its neighbours: a
        tenant, a program, a class. Called when the request enters the queue and when it gets
        another key. By default the `user`.
        """
        return request.user

    def victim(self) -> Request | None:
        """The request to preempt when KV blocks run out: the last of `running` by the keys that
        `order` gave while they waited, so that the first one always makes progress. Not called if
        `--victim` names a rule.
        """
        return max(self.running, key=order_key, default=None)

    # What a policy uses.

    def new_step(self, token_budget: int | None = None, max_requests: int | None = None) -> Step:
        """An empty step of at most `token_budget` and never more than `max_num_batched_tokens`;
        if `max_requests` is given, at most `max_requests` requests get tokens, decodes included.
        """
        most = self.max_num_batched_tokens
        limit = self.step_limit = most if token_budget is None else min(token_budget, most)
        self._wake_time = None
        if self.kv_cache.leases.held:
            self.kv_cache.leases.expire(self.clock())
        if self.book.just_ended:
            self._tell_ends(self.book.just_ended)
        if self._ranks is not None:
            self._begin_ranks().settle()
        if self.reorder_every is not None and self.book.waiting:
            self._reorder_if_due(self.reorder_every)
        make: Callable[..., Step] = Step
        if max_requests is not None:
            make = partial(BoundedStep, max_requests)
        return make(
            self.book,
            self._config,
            self._ask_order,
            self.choose_victim,
            limit,
            self.max_num_seqs,
            self._on_output,
            self.max_num_batched_tokens,
        )

    def take_over(self, other: "BaseScheduler") -> None:
        """Continue where `other`, which shares the KV cache, stands: between two steps, and before
        this one has a request of its own. What `other` counted for its own policy stays behind.

        Called by `make_successor`, which puts the order keys back if this raises: `PolicyError` if
        `order` fails for a request, `ConfigError` if one could never run under this policy.
        """
        if self.book.requests or self.kv_cache is not other.kv_cache:
            raise InvariantError("only a fresh scheduler on the same KV cache can take over")
        for request in other.get_requests():
            self._check_takeover(request)
        other.book.follow(type(self).__name__, self._ask_order, self._ask_group)
        self.book = other.book

    def take_charge(self) -> None:
        self.book.just_ended = [] if self._on_end else None
        self.kv_cache.follow(self._limits, self._max_leased)

    def choose_victim(self) -> Request | None:
        """The request to preempt when KV blocks run out: by `--victim` or the policy."""
        key = self._victim_key
        if key is None:
            return self.victim()
        return max(self.running, key=lambda request: key(request, self.kv_cache), default=None)

    # What is checked before anything is loaded.

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> PolicyOptions:
        """The policy's `Options` from plain data; raises `ConfigError` that names the option."""
        return make_options(options, cls.Options, f"policy {cls.__name__}")

    @classmethod
    def check_limits(cls, config: SchedulerConfig, max_model_len: int) -> int:
        """The token budget of a step. Raises `ConfigError` for limits that cannot work together."""
        if cls.runs_whole_prompts:
            limits = {
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "long_prefill_token_threshold": config.long_prefill_token_threshold,
            }
            for name, limit in limits.items():
                if limit is not None and limit < max_model_len:
                    raise ConfigError(
                        f"policy {cls.__name__} runs whole prompts, so {name} ({limit}) must be at "
                        f"least max_model_len ({max_model_len})"
                    )
        return config.step_budget(max_model_len)

    # SchedulerInterface.

    def add_request(self, request: Request) -> None:
        if request.request_id in self.book.requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        request.bound_length(self.max_model_len)
        check_size(request, self.kv_cache)
        self.check_queue(request.num_tokens, 0, 0)
        if self.kv_cache.wants_prices:  # those of the policy in charge
            for resource in self.kv_cache.resources:
                resource.learn_prices(self._step_time)
        self.book.add(request, self._ask_order)

    def check_queue(self, num_tokens: int, num_arriving: int, arriving_tokens: int) -> None:
        for request in self.book.aside:  # they wait, too
            num_arriving, arriving_tokens = num_arriving + 1, arriving_tokens + request.num_tokens
        check_queue(num_tokens, self.waiting, self._config, num_arriving, arriving_tokens)

    def next_expiry(self) -> float | None:
        return self.kv_cache.leases.next_due(self.book.timers.next_due())

    def take_rejections(self) -> dict[str, Rejection]:
        return self.book.take_rejected() if self.book.rejected else {}

    def expire_requests(self) -> list[str]:
        now = self.clock()
        self.kv_cache.leases.expire(now)
        due = [r.request_id for r in self.book.timers.take_due(now)]
        return self.finish_requests(due, RequestStatus.FINISHED_TIMEOUT) if due else []

    def discard_step(self, last_step_id: int) -> list[str]:
        touched = self.book.discard_step(last_step_id)
        drop_copies(self.book)
        if not touched:
            return []
        ids = [request.request_id for request in touched]
        ended = self.finish_requests(ids, RequestStatus.FINISHED_ERROR)
        self.book.forget(touched)
        return ended

    def abandon_step(self, scheduler_output: SchedulerOutput) -> list[str]:
        return self.book.abandon(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._step_time is not None:
            self._step_time.returned(scheduler_output, self.clock())
        return take_results(
            self.book, scheduler_output, model_runner_output, self.clock, self._ask_order
        )

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if self.book.open_step is not None:
            raise PolicyError(
                f"policy {type(self).__name__}: finish_requests() was called while a step is under "
                "construction: schedule() plans, and the engine ends requests"
            )
        if finished_status is RequestStatus.FINISHED_ERROR:
            drop_copies(self.book)
        return self.book.finish_requests(request_ids, finished_status)

    def get_num_unfinished_requests(self) -> int:
        return len(self.book.requests)

    def get_wait_reasons(self) -> dict[str, WaitReason]:
        return wait_reasons(self.book)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.book.requests) - len(self.running)

    def has_unfinished_requests(self) -> bool:
        return bool(self.book.requests)

    def has_finished_requests(self) -> bool:
        return bool(self.book.finished_req_ids)

    def reset_prefix_cache(self) -> bool:
        self.kv_cache.clear_index()
        return self.kv_cache.pool.num_used_blocks == 0

    def get_kv_connector(self) -> KVConnectorBase | None:
        return self.kv_cache.connector

    def make_stats(self) -> SchedulerStats:
        return stats(self.book, self._config.policy, self.read_gauges())

    def _note_planned(self, output: SchedulerOutput) -> None:
        self.step_time.planned(output, self.clock())

    def _check_takeover(self, request: Request) -> None:
        """What was accepted for another policy must be able to run under this one."""
        try:
            for limit in self._limits:
                limit.check_alone(request)
        except RequestError as error:
            raise ConfigError(
                f"policy {type(self).__name__} cannot run request {request.request_id!r}, which "
                f"was accepted for another: {error}"
            ) from error
