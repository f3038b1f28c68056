"""What a harness drives: a scheduler, KV cache, step loop and runner, and what is seen of them.

Made from settings. Watches which prefixes the cache's events tell of, and what the policy wastes.
Calls no policy but to make it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.engine.step_loop import StepLoop, StepObserver
from aioserve.errors import StalledError
from aioserve.features.kv_connector import OffloadingConnector
from aioserve.kv_cache import (
    AllBlocksCleared,
    BlockPool,
    BlockStored,
    KVCacheManager,
    KVEvent,
    WindowSpec,
    make_resources,
)
from aioserve.kv_cache.retention import Retention
from aioserve.outputs import FinishReason
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput, hinted_flag
from aioserve.scheduler.blame import blamed
from aioserve.testing.calls import Call
from aioserve.testing.ledger import Drafter, Ledger, Life
from aioserve.testing.planned_batch import PlannedBatch, Row
from aioserve.testing.side_effects import Writes
from aioserve.testing.toy_runner import ToyRunner, ToyStore, ToyWorker
from aioserve.testing.violation import CALL_SECONDS, ContractViolation, Guard, Starvation


class Prefixes:
    """The contents of one pool that its events have told to be there."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        #: By content that can be found: the one before it in its prefix.
        self.before: dict[bytes, bytes | None] = {}
        self._removed: set[bytes] = set()  # by the events that were taken last

    def take(self, events: Iterable[KVEvent]) -> None:
        """Take in what has happened since the last call."""
        self._removed.clear()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.before.clear()
            elif isinstance(event, BlockStored):
                self.before[event.block_hash] = event.parent_hash
            else:
                self.before.pop(event.block_hash, None)
                self._removed.add(event.block_hash)

    def check_holes(self, where: str, retention: Retention) -> None:
        """Check that no block was evicted in the last plan before a free one behind it that has a
        rank. Raises `ContractViolation`.
        """
        for content, before in self.before.items() if self._removed else ():
            if before not in self._removed or before in self.before:
                continue
            block_id = self._pool.lookup(content)
            if block_id is None or self._pool.ref_counts[block_id]:
                continue
            if retention.ranking.rank_of(content) > -math.inf:
                raise ContractViolation(
                    f"{where}: the block before block {block_id}, which is cached and free, was "
                    "evicted first: a prefix has a hole"
                )

    def check_lost(self, where: str) -> None:
        """Check that all of them can still be found. Raises `ContractViolation`."""
        if lost := [content for content in self.before if self._pool.lookup(content) is None]:
            raise ContractViolation(
                f"{where}: {len(lost)} blocks left the prefix index without an event"
            )


# What a policy wastes: preemptions in vain, and half prompts that sit on their blocks. Knows plans
# and what requests need. Knows nothing about which request should run.


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


# What a harness drives, made from settings: a scheduler, KV cache, step loop and `ToyRunner`. Knows
# how these parts are put together, and what has been seen of them. Calls no policy but to make it,
# and checks nothing.


class Ends(StepObserver):
    """The requests that the step loop has ended by itself, and why."""

    def __init__(self) -> None:
        self._ended: list[tuple[str, FinishReason]] = []

    def on_ended(self, request_ids: list[str], reason: FinishReason, now: float) -> None:
        self._ended += [(request_id, reason) for request_id in request_ids]

    def take(self, reason: FinishReason) -> list[str]:
        """Return the requests that have ended since the last call, those for this reason."""
        ended, self._ended = self._ended, []
        return [request_id for request_id, why in ended if why is reason]


class Bench:
    """The parts of a harness, and where its requests and steps stand."""

    def __init__(
        self,
        policy: type[SchedulerInterface],
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int | None = 64,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        step_seconds: float = 1.0,
        drafter: Drafter | None = None,
        max_draft_tokens: int = 4,
        tolerates_errors: bool = False,
        forbids_waste: bool = False,
        kv_connector: str = "none",
        num_host_slots: int = 8,
        num_state_slots: int | None = None,
        window: int | None = None,
        num_spare_window_blocks: int = 0,
        call_seconds: float = CALL_SECONDS,
        **settings: Any,
    ) -> None:
        """`settings` are those of `SchedulerConfig`; a step takes `step_seconds` of its clock. A
        call of the policy that has not come back after `call_seconds` of real time is ended, and
        breaks the contract; under a debugger none is.

        `kv_connector` is as in `CacheConfig`, with `num_host_slots` blocks in host memory. Given
        `num_state_slots`, it is a model with states. Given `window`, it has layers that see that
        many tokens, with blocks for one request and `num_spare_window_blocks`.

        With `forbids_waste`, a preemption from which no request gains breaks the contract, and so
        does a prompt that sits half-way on its blocks while no other is computed.

        `drafter` proposes draft tokens, and `max_draft_tokens` is the most that a policy may ask
        for with `draft_length`: fewer with a `window`. With `tolerates_errors`, a policy may raise
        in `schedule`: as in the engine, the requests of that step end with an error; `errors` keeps
        what was raised. Raises `ConfigError` if the settings cannot work.
        """
        self.setup = _without_defaults(locals())  # what it takes to make another one like it
        self.policy = policy
        self.calls: list[Call] = []  # from outside, in order
        self.is_in_call = False
        self.tolerates_errors = tolerates_errors
        self.errors: list[Exception] = []
        self.reads_gauges = True  # after every call
        self.now = 0.0
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **settings
        )
        self.max_model_len = max_model_len
        self.guard = Guard(call_seconds, lambda: self.where)
        worker = ToyWorker(num_host_slots)
        self.store = ToyStore(worker)
        self.connector: OffloadingConnector | None = None
        if kv_connector != "none":
            store = self.store if kv_connector == "disk" else None
            self.connector = OffloadingConnector(worker, block_size, store=store)
        windows = None
        if window is not None:
            spec = WindowSpec(window, 1, self.config.max_chunk(max_model_len), max_drafts=2)
            windows = _with_blocks(spec, max_model_len - 1, block_size, num_spare_window_blocks)
        self.kv_cache = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            watermark=watermark,
            record_events=True,
            connector=self.connector,
            resources=make_resources(
                num_state_slots, windows, block_size, keeps_prefixes=enable_prefix_caching
            ),
            max_draft_tokens=max_draft_tokens,
        )
        self.prefixes = Prefixes(self.kv_cache.pool)
        make_scheduler: Callable[..., SchedulerInterface] = policy
        self.steps: list[SchedulerOutput] = []
        with self.guard.timed(policy, "__init__"), blamed(policy, "__init__()"):
            scheduler = make_scheduler(
                self.config, self.kv_cache, max_model_len=max_model_len, clock=lambda: self.now
            )
        #: The engine's own; the handle of a step is the rows that it runs.
        self.loop: StepLoop[list[Row]] = StepLoop(
            scheduler,
            depth=self.config.depth,
            clock=lambda: self.now,
            stall_timeout=self.config.stall_timeout,
            raises=not tolerates_errors,
        )
        self.ends = Ends()
        self.loop.observers.subscribe(self.ends)
        self.writes = Writes()
        self.writes.watch(scheduler)
        self.runner = ToyRunner(
            num_blocks,
            block_size,
            max_num_seqs=max_num_seqs,
            max_encoder_tokens=self.config.max_encoder_tokens,
            encoder_cache_tokens=self.config.encoder_cache_tokens,
            drafter=drafter,
            kv_worker=worker,
            num_state_slots=num_state_slots,
            windows=windows,
        )
        self.ledger = Ledger()
        budget = self.config.step_budget(max_model_len)
        self.planned = PlannedBatch(self.config, self.ledger, num_blocks, block_size, budget)
        self.waste = Waste(self.config, budget) if forbids_waste else None
        self.requests: dict[str, Request] = {}  # the latest of each name
        self.num_tokens_planned = 0
        self.num_refused = 0  # requests that the policy did not let in
        #: Requests that the policy has rejected or not let in, and when each may ask again.
        self.turned_away: list[tuple[Request, float]] = []
        self.step_seconds = step_seconds
        self.recomputed: set[Life] = set()  # what steps in flight bring for them is dropped

    @property
    def scheduler(self) -> SchedulerInterface:
        """The scheduler that plans now; a test may put another one in its place."""
        return self.loop.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: SchedulerInterface) -> None:
        self.loop.scheduler = scheduler
        self.writes.watch(scheduler)

    @property
    def tokens(self) -> dict[str, list[int]]:
        """Tokens received so far, by request id."""
        return {name: life.tokens for name, life in self.ledger.lives.items()}

    @property
    def finished(self) -> dict[str, FinishReason]:
        """Why each ended, of those that have."""
        lives = self.ledger.lives.items()
        return {name: life.finish_reason for name, life in lives if life.finish_reason is not None}

    @property
    def num_in_flight(self) -> int:
        """Steps that are planned and not received."""
        return len(self.loop.in_flight)

    @property
    def findable(self) -> set[bytes]:
        """Hashes of the blocks that can be found, as KV events tell."""
        return set(self.prefixes.before)

    @property
    def where(self) -> str:
        """The newest step, as messages begin."""
        return f"after step {self.steps[-1].step_id}" if self.steps else "before the first step"

    @property
    def loading(self) -> set[Request]:
        """Requests that wait for KV blocks to load; they delay no other request."""
        scheduler = self.scheduler
        return scheduler.book.aside if isinstance(scheduler, BaseScheduler) else set()

    @property
    def rows_in_flight(self) -> set[Row]:
        """Rows of all steps that are not back."""
        return {row for step in self.loop.in_flight for row in step.handle}

    @contextmanager
    def blame(self, method: str) -> Iterator[None]:
        """What the scheduler in charge raises in the block is its fault, a stall included."""
        try:
            with self.guard.blame(type(self.scheduler), method):
                yield
        except StalledError:
            raise self.starvation() from None
        finally:
            self.writes.check(self.where)

    def starvation(self) -> Starvation:
        """Return the error for requests that wait while none is scheduled."""
        return Starvation(
            f"{self.where}: no request was scheduled for {self.config.stall_timeout:g} s although "
            f"{list(self.ledger.alive)} wait"
        )


def _with_blocks(spec: WindowSpec, longest: int, block_size: int, num_spare: int) -> WindowSpec:
    """Return the spec with blocks for one request of `longest` tokens, and some to spare."""
    least = spec.num_request_blocks(longest, longest, block_size)
    return msgspec.structs.replace(spec, num_blocks=least + num_spare)


def _without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of a harness, besides the policy, that say something."""
    defaults = {
        **{field.name: field.default for field in msgspec.structs.fields(SchedulerConfig)},
        **(Bench.__init__.__kwdefaults__ or {}),
    }
    given = {**arguments, **arguments["settings"]}
    for name in ("self", "policy", "settings"):
        del given[name]
    return {n: v for n, v in given.items() if n not in defaults or defaults[n] != v}
