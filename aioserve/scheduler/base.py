"""The class that policies derive from: all that a policy may override, read and call.

`BaseScheduler` is the whole API of a policy beside the verbs of a `Step`. State is in `self.book`,
a `RequestTable`; what follows from a step's result, in `results`. It knows nothing about text,
tensors, tasks or threads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from aioserve.errors import (
    FROM_OUTSIDE,
    AioserveError,
    ConfigError,
    InvariantError,
    PolicyError,
    RequestError,
)
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput, SchedulerStats
from aioserve.request import (
    CACHE_SECONDS,
    MAX_CACHE_SECONDS,
    PREDICTED_OUTPUT_TOKENS,
    ROW_VALUES,
    SLO_CLASS,
    Request,
    RequestStatus,
    WaitReason,
    by_arrival,
    by_user,
    check_names,
    hinted_number,
    hinted_text,
    order_key,
)
from aioserve.scheduler.interface import (
    CANNOT_BE_SWITCHED,
    POLICY_API,
    PolicyOptions,
    Rejection,
    SchedulerInterface,
)
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.step import BoundedStep, Step

if TYPE_CHECKING:
    from aioserve.config import SchedulerConfig
    from aioserve.kv_cache import KVCacheManager, KVConnectorBase, OffloadPrice
    from aioserve.kv_cache.retention import Retention
    from aioserve.scheduler.estimates import OnlineStepTime, PredictedLengths
    from aioserve.scheduler.memory import Memory
    from aioserve.scheduler.stats import GaugeReader
    from aioserve.scheduler.table import RequestQueue

#: By a value of the setting `victim`, the key whose largest value gives way when KV blocks run out,
#: ties broken by the policy's order; `last_admitted` is the end of `running`. Under all but
#: `least_lost` one request is never the victim; there the one that takes the blocks gets a token.
VICTIM_KEYS: dict[str, Callable[[Request, KVCacheManager], Any]] = {
    "newest": lambda r, _: (r.arrival_time, r.order_key),
    "lowest_priority": lambda r, _: (r.priority, r.order_key),
    "least_computed": lambda r, _: (-r.num_computed_tokens, r.order_key),
    "most_remaining": lambda r, _: (r.max_total_tokens - r.num_tokens, r.order_key),
    "least_lost": lambda r, kv_cache: (-kv_cache.estimate_lost_tokens(r), r.order_key),
}

#: The lowest clock of a card that a policy may set, as a share of its highest.
LEAST_FREQUENCY = 0.2


class BaseScheduler(SchedulerInterface):
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
    #: policy but what `decoded_on` does as well. `compare --fleet` then plans many such steps at
    #: once. A class that overrides `schedule` or `update_from_output` must set it again.
    keeps_decoding: ClassVar[bool] = False
    #: Seconds after which `order` is asked again for every waiting request, before the next step:
    #: for keys that depend on the time. None: only on entry, and by `reorder` and `reorder_all`.
    #: May be set in `__init__`, from an option.
    reorder_every: float | None = None
    #: True if the policy asks for predicted lengths: it then learns from each reply that ends.
    uses_predicted_tokens: ClassVar[bool] = False
    #: Names of the values that the policy reads as `request.row_values`: `"entropy"` of the model's
    #: distribution of the next token, in nats, or `"package.module:function"`, which is given float
    #: logits [S, V] of S rows and returns S numbers. Computed on a CPU; refused at the start on
    #: CUDA; invented in the lab and in the shadow, which have no model.
    wants_row_values: ClassVar[tuple[str, ...]] = ()
    #: True if the policy sets the card's clock by `set_frequency`: the simulated runner alone has
    #: one to set, and with any other the policy is refused at the start.
    sets_frequency: ClassVar[bool] = False

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        """Raises `ConfigError` if options or limits cannot work. `clock` returns seconds."""
        # Loaded with the first scheduler: to import a policy takes none of it.
        from aioserve.kv_cache import EncoderLimits, LeaseLimits, make_limits
        from aioserve.scheduler.blame import asking
        from aioserve.scheduler.results import take_results
        from aioserve.scheduler.table import RequestTable

        cls, name = type(self), type(self).__name__
        self.options: Any = self.parse_options(config.options)  # of the policy's class `Options`
        self.max_num_batched_tokens = self.check_limits(config, max_model_len)  # per step
        self.step_limit = self.max_num_batched_tokens  # token budget of the newest step
        self.max_num_seqs = config.max_num_seqs  # most requests that run at once
        self.max_loras = config.max_loras  # most different adapters among running requests
        self.max_model_len = max_model_len  # tokens of prompt and output together
        self.kv_cache = kv_cache  # KV blocks and cached prefixes
        self.frequency = 1.0  # the card's clock as set by `set_frequency`, a share of its highest
        self.clock = clock  # `self.clock()` is the time, in seconds; never use the time module
        self._config = config
        # What the policy is asked; of what it leaves as it is here, nothing is asked.
        has_order = cls.order is not BaseScheduler.order
        self._ask_order = asking(self, "order") if has_order else by_arrival
        self._ask_draft_length = asking(self, "draft_length")
        is_grouped = cls.group_by is not BaseScheduler.group_by
        self._ask_group = asking(self, "group_by", str) if is_grouped else by_user
        is_ranked = cls.retention is not BaseScheduler.retention
        # Ranks of cached prefixes; None: the policy has given none, and is not asked for any.
        self._ranks = self._make_ranks(asking(self, "retention")) if is_ranked else None
        self._gauges: GaugeReader | None = None
        if cls.gauges is not BaseScheduler.gauges:
            from aioserve.scheduler.stats import GaugeReader

            self._gauges = GaugeReader(self)
        self._take_results = take_results
        self._reorder_at: float | None = None  # None: no request has waited yet
        self._wake_time: float | None = None  # of the newest step
        # The state that the verbs write; a policy reads the part of it that follows.
        self.book = RequestTable(name, kv_cache, config.queue_timeout, self._ask_group)
        self._on_end = self._end_hooks()
        self._watch_ends()
        encoder = EncoderLimits(
            num_slots=config.encoder_cache_tokens,
            step_tokens=config.max_encoder_tokens,
            max_whole=config.max_whole(max_model_len),
            runs_whole_prompts=self.runs_whole_prompts,
            chunk=config.encoder_chunk_tokens,
        )
        self._limits = make_limits(config.max_loras, encoder, kv_cache.pool)
        shares = config.max_leased_share, config.max_client_leased_share
        self._lease_limits = LeaseLimits(*(int(s * kv_cache.pool.num_blocks) for s in shares))
        kv_cache.limit(self._limits, self._lease_limits)
        self._step_time: OnlineStepTime | None = None
        if self.uses_step_time or kv_cache.wants_prices:
            from aioserve.scheduler.estimates import OnlineStepTime

            self._step_time = OnlineStepTime()
        self._on_output = self._output_hooks()

    # What a policy reads.

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
    def paused_requests(self) -> list[Request]:
        """Waiting requests that `step.pause` let step aside, the first of them first."""
        return list(self.book.paused)

    @property
    def step_time(self) -> OnlineStepTime:
        """Model of step time, fitted to completed steps. Needs `uses_step_time = True`."""
        if self._step_time is None:
            raise PolicyError(
                f"policy {type(self).__name__} reads step_time without uses_step_time = True"
            )
        return self._step_time

    def get_request(self, request_id: str) -> Request | None:
        """Return an unfinished request by its id; None if there is none."""
        return self.book.requests.get(request_id)

    def get_requests(self) -> list[Request]:
        """Return all unfinished requests, in order of arrival."""
        return list(self.book.requests.values())

    @cached_property
    def memory(self) -> Memory:
        """How many KV tokens are free, held, leased or cached."""
        from aioserve.scheduler.memory import Memory

        return Memory(self)

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens that are guessed for a request after a step; 0: speculative decoding is
        off.
        """
        return self.kv_cache.max_draft_tokens

    # What a policy writes: `schedule`, and as much of the rest as it needs.

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
        """Return the request to preempt when KV blocks run out: the last of `running` by the keys
        that `order` gave while they waited, so that the first one always makes progress. Not called
        if `--victim` names a rule.
        """
        return max(self.running, key=order_key, default=None)

    def on_finish(self, request: Request, reason: str) -> None:
        """Called before the next step for each request that has ended. The reason is "stop",
        "length", "abort", "timeout", "error" or "rejected".
        """

    def decoded_on(self, requests: list[Request], num_steps: int) -> None:
        """Count `num_steps` steps that a policy with `keeps_decoding` was not asked for: each gave
        a token to each of these requests, all that run, while none waited.
        """

    def draft_length(self, request: Request) -> int | None:
        """Return how many draft tokens to guess for a request after this step, before any is: 0 to
        `max_draft_tokens`, of which a later step verifies what it grants; None: as many as the
        runner finds to pay. Asked by `step.output()`, for each request of the step, where tokens
        are guessed at all. Tokens that a grammar leaves no choice about come all the same.
        """
        return None

    def retention(self, request: Request) -> float:
        """Rank of the request's cached blocks once it has given them up: when blocks are needed,
        those of the smallest rank are evicted first, of equal ranks the least recently used.

        Asked before the next step, after `on_finish`, or in the step that preempts the request, if
        it needs blocks after that. A time until which the prefix is worth its memory is a rank, and
        so is a probability that it is used again; what has no rank is evicted first. What several
        requests share has the rank that was stated last, and in any case no block is evicted before
        a cached one behind it. The rank holds in the host memory of a KV connector as well, which
        has less room than is saved into it. A policy that does not override this method is not
        asked, and the least recently used block is evicted.
        """
        return 0.0

    def gauges(self) -> dict[str, float]:
        """Numbers to show on `/metrics` and on the page, by name: at most 32, finite, with names of
        a-z, 0-9 and _ of up to 48 characters. Called when somebody looks, so it must change
        nothing. A name of a tenant is seen by all that see the metrics.
        """
        return {}

    # What a policy calls.

    def new_step(self, token_budget: int | None = None, max_requests: int | None = None) -> Step:
        """Return an empty step of at most `token_budget` and never more than
        `max_num_batched_tokens`; if `max_requests` is given, at most `max_requests` requests get
        tokens, decodes included.
        """
        most = self.max_num_batched_tokens
        limit = self.step_limit = most if token_budget is None else min(token_budget, most)
        self._wake_time = None
        if self.kv_cache.leases.held:
            self.kv_cache.leases.expire(self.clock())
        if self.book.just_ended:
            self._tell_ends(self.book.just_ended)
        if self._ranks is not None:
            self._evict_by(self._ranks)
            self._ranks.settle()
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

    def wake_at(self, when: float) -> None:
        """Have `schedule` called at this time of the clock, if it serves no request now, in the
        place of every 10 ms; holding all back until then is no fault. The earliest time counts.
        Raises `PolicyError` for what is no finite number of seconds.
        """
        if not isinstance(when, int | float) or not math.isfinite(when):
            raise PolicyError(
                f"policy {type(self).__name__}: wake_at() takes a time of the clock in seconds, "
                f"got {when!r:.80}"
            )
        self._wake_time = when if self._wake_time is None else min(when, self._wake_time)

    def reorder(self, request: Request) -> None:
        """Ask `order` again for a request whose key has changed, if the request waits."""
        self.book.reorder([request], self._ask_order)

    def reorder_all(self, requests: Iterable[Request] | None = None) -> None:
        """Ask `order` again for `requests`, such as `self.waiting.group(name)`, or all that wait.
        Costs an `order` for each and one sort. If `order` raises, nothing has changed.
        """
        self.book.reorder(self.waiting if requests is None else requests, self._ask_order)

    def predicted_tokens(self, request: Request, default: float) -> float:
        """Return how many tokens the reply is expected to have in all. The hint
        `predicted_output_tokens`, if the request states it; else the mean of the newest replies to
        requests of the same API key, `user`, adapter and hint `slo_class`, as far as these got
        beyond what it has now, drawn towards the mean of all replies while there are few; `default`
        until a reply has ended.

        A reply that has outgrown its prediction counts as half-way. Never more than the request may
        have. Needs `uses_predicted_tokens = True`.
        """
        if not self.uses_predicted_tokens:
            raise PolicyError(
                f"policy {type(self).__name__} asks predicted_tokens() without "
                "uses_predicted_tokens = True"
            )
        so_far, history = request.num_output_tokens, self.book.reply_lengths
        expected = hinted_number(request, PREDICTED_OUTPUT_TOKENS, 0.0)
        if expected <= 0:
            known = default if history is None else history.expect(_alike(request), so_far)
            expected = known or 0.0
        if expected <= so_far:
            expected = 2.0 * so_far
        return min(expected, request.max_total_tokens - request.num_prompt_tokens)

    def predicted_lengths(self, request: Request, default: float) -> PredictedLengths:
        """Return the distribution around `predicted_tokens`, for this step: `quantile(share)`, and
        `chance(num_tokens)` of an end within the next tokens. The hint is one length.
        """
        from aioserve.scheduler.estimates import PredictedLengths

        told, history = self.predicted_tokens(request, default), self.book.reply_lengths
        return PredictedLengths.of(request, told, history, _alike(request))

    def estimate_offload(self, request: Request) -> OffloadPrice:
        """Return what `step.offload` would keep of a running or paused request: `num_tokens`, and
        their `save_seconds`, `load_seconds` and, in place of both, `compute_seconds`; 0 seconds:
        not known yet. Without a KV connector, or room in its host memory, there are 0 tokens.
        """
        return self.kv_cache.offload_price(request, request.num_computed_tokens)

    def set_frequency(self, share: float) -> None:
        """Run the card's clock at this share of its highest, 0.2 to 1, from the step on that is
        planned now, until it is set again. What that changes is assumed, not measured: see
        `StepTimeSource.seconds_at`. Needs `sets_frequency = True`.
        """
        if not self.sets_frequency:
            raise PolicyError(
                f"policy {type(self).__name__} calls set_frequency() without sets_frequency = True"
            )
        if not isinstance(share, int | float) or not LEAST_FREQUENCY <= share <= 1:
            raise PolicyError(
                f"policy {type(self).__name__}: a frequency is a share of the highest from "
                f"{LEAST_FREQUENCY} to 1, got {share!r:.80}"
            )
        self.frequency = float(share)

    def retain(self, request: Request, rank: float, num_tokens: int | None = None) -> int:
        """Give the request's cached prefix, or that of its first `num_tokens` tokens, another rank
        than `retention` did: it has become more or less likely to be used. Holds until `retention`
        is asked again. The request need not live. Returns the tokens that are cached.
        """
        if self._ranks is None:
            self._ranks = self._make_ranks(None)
        num_cached = self._ranks.rank(request, rank, num_tokens)
        self._evict_by(self._ranks)
        return num_cached

    def _make_ranks(self, ask: Callable[[Request], float] | None) -> Retention:
        from aioserve.kv_cache.retention import Retention

        kv_cache, connector = self.kv_cache, self.kv_cache.connector
        outside = None if connector is None else connector.outside
        return Retention(kv_cache.pool, kv_cache.block_size, type(self).__name__, ask, outside)

    def _evict_by(self, ranks: Retention) -> None:
        """Let these ranks decide what is evicted, unless they do already."""
        self.kv_cache.retention = ranks.replace(self.kv_cache.retention, ranks)

    def pin(self, request: Request, until: float) -> int:
        """Keep the request's cached prefix until a time of the clock, for the next turn of its
        conversation: a lease, of which each conversation of a client (hint `session`, else the
        request alone) has one. `unpin` ends it.

        The policy's leases hold at most the share `max_leased_share` of the KV blocks. The oldest
        make room for a new one, and for a request beside which nothing runs. Leases that clients
        ask for (hint `cache_seconds`) are apart, with a share of their own. Returns the tokens that
        are kept.
        """
        block_ids = self.kv_cache.get_computed_blocks(request)
        num_blocks = self.kv_cache.leases.pin(request.conversation, block_ids, until)
        return num_blocks * self.kv_cache.block_size

    def unpin(self, request: Request) -> None:
        """End the lease of the request's conversation before its time, if there is one."""
        self.kv_cache.leases.end(request.conversation)

    # A policy that follows another one, by `make_successor`.

    def take_over(self, other: BaseScheduler) -> None:
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
        """`take_over` has succeeded: the limits of this scheduler count from here on, and all
        leases end, those of clients included.
        """
        self._watch_ends()
        self.kv_cache.follow(self._limits, self._lease_limits)

    def switch(self, settings: SchedulerConfig) -> SchedulerInterface:
        from aioserve.scheduler.registry import load_policy

        return make_successor(self, load_policy(settings.policy), settings)

    # What is checked before anything is loaded.

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> PolicyOptions:
        """Return the policy's `Options` from plain data; raises `ConfigError` that names the
        option.
        """
        from aioserve.scheduler.registry import make_options

        return make_options(options, cls.Options, f"policy {cls.__name__}")

    @classmethod
    def check_limits(cls, config: SchedulerConfig, max_model_len: int) -> int:
        """Return the token budget of a step. Raises `ConfigError` for limits that cannot work
        together.
        """
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
        self.kv_cache.accept(request)
        self.check_queue(request.num_tokens, 0, 0)
        if self.kv_cache.wants_prices:  # those of the policy in charge
            for resource in self.kv_cache.resources:
                resource.learn_prices(self._step_time)
        self.book.add(request, self._ask_order)

    def check_queue(self, num_tokens: int, num_arriving: int, arriving_tokens: int) -> None:
        for request in self.book.aside if self.kv_cache.holding else ():  # they wait, too
            num_arriving, arriving_tokens = num_arriving + 1, arriving_tokens + request.num_tokens
        self.book.check_queue(self._config, num_tokens, num_arriving, arriving_tokens)

    def next_wake(self) -> float | None:
        return self._wake_time

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
        self.book.drop_copies()
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
        return self._take_results(
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
            self.book.drop_copies()
        return self.book.finish_requests(request_ids, finished_status)

    def get_num_unfinished_requests(self) -> int:
        return len(self.book.requests)

    def get_wait_reasons(self) -> dict[str, WaitReason]:
        from aioserve.scheduler.stats import wait_reasons

        return wait_reasons(self.book)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.book.requests) - len(self.running)

    def has_unfinished_requests(self) -> bool:
        return bool(self.book.requests)

    def has_finished_requests(self) -> bool:
        return bool(self.book.finished_req_ids)

    def has_requests(self) -> bool:
        return bool(self.book.requests or self.book.finished_req_ids)

    def vacate(self) -> SchedulerOutput:
        step = self.new_step()
        for request in (*self.book.running, *self.book.paused):
            step.preempt(request)
        self.kv_cache.leases.end_all()
        for resource in self.kv_cache.resources:
            resource.vacate()
        return step.output()

    def reset_prefix_cache(self) -> bool:
        self.kv_cache.clear_index()
        return self.kv_cache.pool.num_used_blocks == 0

    def get_kv_connector(self) -> KVConnectorBase | None:
        return self.kv_cache.connector

    def read_gauges(self) -> dict[str, float]:
        """Return the gauges of the policy; none if there is something wrong with them, which is
        logged.
        """
        return {} if self._gauges is None else self._gauges.read()

    def make_stats(self) -> SchedulerStats:
        from aioserve.scheduler.stats import stats

        return stats(self.book, self._config.policy, self.read_gauges())

    def choose_victim(self) -> Request | None:
        """Return the request to preempt when KV blocks run out: by `--victim` or the policy."""
        if (rule := self._config.victim) in ("policy", "last_admitted"):
            return self.victim() if rule == "policy" else next(reversed(self.running), None)
        key = VICTIM_KEYS[rule]
        return max(self.running, key=lambda request: key(request, self.kv_cache), default=None)

    # What a step is told besides the policy's choice, and what the policy is told.

    def _output_hooks(self) -> tuple[Callable[[SchedulerOutput], None], ...]:
        """Return what is called with each step that is planned: nothing that is not asked for.
        Raises `ConfigError` for names of row values that are none.
        """
        drafts = type(self).draft_length is not BaseScheduler.draft_length and self.max_draft_tokens
        hooks = {
            self._note_planned: self._step_time is not None,
            self._tell_draft_lengths: drafts,
            self._ask_row_values: check_names(self.wants_row_values, type(self).__name__),
            self._tell_frequency: self.sets_frequency,
        }
        return tuple(hook for hook, is_wanted in hooks.items() if is_wanted)

    def _note_planned(self, output: SchedulerOutput) -> None:
        self.step_time.planned(output, self.clock())

    def _tell_draft_lengths(self, output: SchedulerOutput) -> None:
        """Add what the policy answers to a step that has not been sent yet."""
        if not output.num_scheduled_tokens:
            return
        ask = self._ask_draft_length
        lengths: dict[str, int] = {}
        for request in self.book.in_flight[-1][1]:
            if request.pooling_params is not None or (length := ask(request)) is None:
                continue
            if type(length) is not int or not 0 <= length <= self.max_draft_tokens:
                raise PolicyError(
                    f"policy {type(self).__name__}: draft_length() must return None or a whole "
                    f"number from 0 to {self.max_draft_tokens}, got {length!r:.80}"
                )
            lengths[request.request_id] = length
        if lengths:
            output.parts["draft_lengths"] = lengths

    def _tell_frequency(self, output: SchedulerOutput) -> None:
        """Add the clock to a step that has not been sent yet, unless it is the highest."""
        if output.num_scheduled_tokens and self.frequency != 1.0:
            output.parts["frequency"] = {"share": self.frequency}

    def _ask_row_values(self, output: SchedulerOutput) -> None:
        """Add the wanted names to a step that has not been sent yet."""
        if rows := output.num_scheduled_tokens:
            output.parts[ROW_VALUES] = dict.fromkeys(rows, self.wants_row_values)

    def _end_hooks(self) -> tuple[Callable[[Request, str], None], ...]:
        """Return what is called with each request that has ended, what the policy does last."""
        hears = type(self).on_finish is not BaseScheduler.on_finish
        hooks = {
            self._learn_length: self.uses_predicted_tokens,
            self._lease_to_client: self._config.max_client_leased_share > 0,
            self.on_finish: hears,
        }
        return tuple(hook for hook, is_wanted in hooks.items() if is_wanted)

    def _watch_ends(self) -> None:
        self.book.just_ended = [] if self._on_end else None
        self.book.tells_all_ends = any(tell != self._lease_to_client for tell in self._on_end)

    def _lease_to_client(self, request: Request, reason: str) -> None:
        """Keep the prefix of a request that has its reply for as long as its client asks for."""
        seconds = hinted_number(request, CACHE_SECONDS, 0.0)
        if seconds > 0 and reason in ("stop", "length"):
            from aioserve.kv_cache.client_leases import lease

            lease(self.kv_cache, request, self.clock() + min(seconds, MAX_CACHE_SECONDS))

    def _tell_ends(self, ended: list[Request]) -> None:
        """Tell of requests that ended since the last step; the next step tells of later ends."""
        self.book.just_ended = []
        for tell in self._on_end:  # a policy that raises keeps none from the lease of its client
            for request in ended:
                tell(request, request.status.finish_reason or "")

    def _learn_length(self, request: Request, reason: str) -> None:
        """Replies that were broken off say nothing of their length."""
        if reason not in ("stop", "length") or not request.num_output_tokens:
            return
        if self.book.reply_lengths is None:
            from aioserve.scheduler.estimates import LengthHistory

            self.book.reply_lengths = LengthHistory()
        self.book.reply_lengths.note(_alike(request), request.num_output_tokens)

    def _reorder_if_due(self, period: float) -> None:
        """Called while requests wait, so that steps without any need not be planned one by one."""
        now = self.clock()
        if self._reorder_at is not None and now >= self._reorder_at:
            self.reorder_all()
        elif self._reorder_at is not None:
            return
        self._reorder_at = now + period

    def _check_takeover(self, request: Request) -> None:
        """Raise if a request that another policy accepted could never run under this one."""
        try:
            for limit in self._limits:
                limit.check_alone(request)
        except RequestError as error:
            raise ConfigError(
                f"policy {type(self).__name__} cannot run request {request.request_id!r}, which "
                f"was accepted for another: {error}"
            ) from error


def _alike(request: Request) -> Hashable:
    """Equal for requests whose replies are compared; of one client, so far as the server can tell
    clients apart.
    """
    slo_class = hinted_text(request, SLO_CLASS)
    return request.spec.key_name, request.user, request.adapter_id, slo_class


def make_successor(
    old: SchedulerInterface, policy: type[SchedulerInterface], config: SchedulerConfig
) -> BaseScheduler:
    """Return a scheduler of class `policy` that stands where `old` stands: between two steps, with
    its requests, KV cache, clock and length limit. From then on `old` is to be dropped.

    Raises `ConfigError` if it cannot be built or could never run a request that is there, and
    `PolicyError` if it raises. Nothing has changed then, and `old` goes on.
    """
    if not (isinstance(old, BaseScheduler) and issubclass(policy, BaseScheduler)):
        raise ConfigError(CANNOT_BE_SWITCHED)
    try:
        with old.book.restored_on_error():
            new = policy(config, old.kv_cache, max_model_len=old.max_model_len, clock=old.clock)
            new.take_over(old)
        new.take_charge()
    except AioserveError:
        raise
    except FROM_OUTSIDE:
        raise
    except BaseException as error:
        from aioserve.scheduler.blame import place

        raise PolicyError(
            f"policy {policy.__name__} raised {error!r} while it took over{place(error, policy)}"
        ) from error
    return new
