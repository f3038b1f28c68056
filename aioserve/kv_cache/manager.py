"""Gives requests the KV blocks that their tokens need and finds prefixes computed before.

Knows requests' tokens and blocks. Does not know steps, queues or which request deserves what.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from aioserve.errors import InvariantError, RequestError
from aioserve.kv_cache.block_pool import (
    BlockPool,
    ExternalPrefix,
    KVEvent,
    LeaseLimits,
    Leases,
    OffloadPrice,
    hash_blocks,
    tell_stored,
)
from aioserve.kv_cache.resource import LimitOf, Resource, StatePool, WindowPool
from aioserve.request import Request, WaitReason

if TYPE_CHECKING:
    from aioserve.kv_cache.connector import KVConnectorBase
    from aioserve.kv_cache.retention import Retention
    from aioserve.kv_cache.vacancy import Vacancy


class KVCacheManager:
    """Block tables of all live requests over one `BlockPool`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        record_events: bool = False,
        connector: "KVConnectorBase | None" = None,
        resources: Iterable[Resource] = (),
        max_draft_tokens: int = 0,
    ) -> None:
        """`watermark` is the share of the pool that `can_admit` keeps free; `record_events` keeps
        for `take_events` what becomes findable and what is lost. What is not here may be loaded
        through the `connector`. `resources`: what requests hold besides blocks. At most
        `max_draft_tokens` are guessed behind the known tokens of a request; 0: none are.
        """
        self.block_size = block_size  # tokens
        self.enable_prefix_caching = enable_prefix_caching
        self._events: list[KVEvent] | None = [] if record_events else None
        self.connector = connector
        self.pool = BlockPool(
            num_blocks, self._events, None if connector is None else connector.notes
        )
        own = list(resources)
        if connector is not None:
            from aioserve.kv_cache.loads import ConnectorLoads

            own.append(ConnectorLoads(connector, block_size, self.pool, own))
        self.leases = Leases(self.pool)  # prefixes that the policy and clients keep
        self.retention: Retention | None = None  # ranks that a policy states; None: LRU
        limits = [r.max_drafts for r in own if r.max_drafts is not None]
        self.max_drafts = min(limits, default=None)  # of a request in one step; None: any number
        self.max_draft_tokens = min([max_draft_tokens, *limits])
        self._limits: list[LimitOf] = []
        self._unused: list[LimitOf] = []  # until a request comes that they concern
        self._use(own)
        self.num_watermark_blocks = int(watermark * num_blocks)
        self.num_queried_tokens = 0  # looked up at admissions, since the start
        self.num_hit_tokens = 0

    def _use(self, resources: list[Resource]) -> None:
        """Ask and tell these from now on: each by the methods that it has, so that what is off or
        has nothing to say costs no call.
        """
        self.resources = tuple(resources)

        def having(name: str) -> list[Resource]:
            return [r for r in resources if getattr(type(r), name) is not getattr(Resource, name)]

        def methods(name: str) -> tuple[Callable[..., Any], ...]:
            return tuple(getattr(resource, name) for resource in having(name))

        self._shortages, self._takes = methods("shortage"), methods("take")
        self._give_backs, self._leaves = methods("give_back"), methods("leave")
        self._reaches, self._touches = methods("num_reached_blocks"), methods("touch")
        self._caches, self._loadables = methods("cache"), methods("num_loadable_tokens")
        self._serves, self._refunds = methods("serve"), methods("refund")
        self._fits = tuple(having("fit"))
        #: Resources that tell the runner something; those that hold requests back from the line.
        self.planning, self.holding = tuple(having("plan")), tuple(having("holds_back"))
        self.wants_prices = bool(methods("learn_prices"))

    def limit(self, limits: Iterable[LimitOf], lease_limits: LeaseLimits) -> None:
        """The settings of a scheduler limit these, unless another one does already."""
        if not self._limits:
            self.leases.limit(lease_limits)
            self._limits = list(limits)
            self._unused += self._limits

    def follow(self, limits: Iterable[LimitOf], lease_limits: LeaseLimits) -> None:
        """Another scheduler is in charge, with `limits` of its settings; leases and ranks end."""
        self.leases.begin_anew(lease_limits)
        if self.retention is not None:
            self.retention = self.retention.replace(self.retention, None)
        for mine, other in zip(self._limits, limits, strict=True):
            mine.follow(other)

    def accept(self, request: Request) -> None:
        """A request comes: the resources that it concerns are in use from now on. Raises
        `RequestError` if it could not even run alone, up to its bound.
        """
        # The last token is never computed, so a request needs one slot less than its length.
        if request.max_total_tokens - 1 > self.num_slots:
            raise RequestError(
                f"prompt and output of up to {request.max_total_tokens} tokens do not fit the KV "
                f"cache of {self.num_slots} tokens",
                param="max_tokens" if request.pooling_params is None else "prompt",
            )
        for limit in self._unused:
            if limit.concerns(request):
                self._unused = [other for other in self._unused if other is not limit]
                self._use([limit.resource, *self.resources])
        for resource in self.resources:
            resource.check_alone(request)

    def holds_back(self, request: Request) -> bool:
        """Return whether a new request has to stay out of the line, until a resource says it is
        ready.
        """
        if not (self.holding and self.enable_prefix_caching and request.takes_cached_prefix):
            return False
        num_cached = len(self.get_computed_blocks(request))
        return any(resource.holds_back(request, num_cached) for resource in self.holding)

    @property
    def states(self) -> StatePool | None:
        """The slots for states, of a model whose layers have states."""
        return cast("StatePool | None", self._named(StatePool.name))

    @property
    def windows(self) -> WindowPool | None:
        """The blocks of layers with a sliding window, if they have a pool of their own."""
        return cast("WindowPool | None", self._named(WindowPool.name))

    def _named(self, name: str) -> Resource | None:
        return next((resource for resource in self.resources if resource.name == name), None)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.pool.num_blocks * self.block_size

    def get_computed_blocks(self, request: Request, gone: "Vacancy | None" = None) -> list[int]:
        """Return blocks of the longest cached prefix; takes no reference and changes nothing.

        At most `num_tokens - 1` tokens, so that at least one is left to compute and sample from.
        Of a model with states or windows, only as far as those are there, too. What the requests
        of `gone` were to compute in this step is not there.
        """
        block_ids = self._find_blocks(request)
        if gone is not None:
            block_ids = gone.leave_found(block_ids)
        num_blocks = len(block_ids)  # what is loaded behind all of them reaches far enough
        if self._reaches and not self.get_num_external_tokens(
            request, num_blocks * self.block_size
        ):
            del block_ids[self._num_reached_blocks(request, num_blocks) :]
        return block_ids

    def _num_reached_blocks(self, request: Request, num_blocks: int) -> int:
        """Return how many of `num_blocks` cached blocks every resource lets the request begin
        behind.
        """
        while True:
            before = num_blocks
            for reach in self._reaches:
                num_blocks = reach(request, num_blocks)
            if num_blocks == before:
                return num_blocks

    def _find_blocks(self, request: Request) -> list[int]:
        if not (self.enable_prefix_caching and request.takes_cached_prefix):
            return []
        num_blocks = (request.num_tokens - 1) // self.block_size
        hash_blocks(request, num_blocks, self.block_size)
        lookup, found = self.pool.lookup, []
        for block_hash in request.block_hashes[:num_blocks]:
            if (block_id := lookup(block_hash)) is None:
                break
            found.append(block_id)
        return found

    def estimate_cached_tokens(self, request: Request) -> int:
        """About how many tokens of the request are cached: by bisection, so cheap enough to ask
        for every waiting request in every step. Exact unless a prefix has a hole.
        """
        if not (self.enable_prefix_caching and request.takes_cached_prefix):
            return 0
        num_blocks = (request.num_tokens - 1) // self.block_size
        hash_blocks(request, num_blocks, self.block_size)
        lookup, hashes = self.pool.lookup, request.block_hashes
        num_found = bisect_left(range(num_blocks), True, key=lambda i: lookup(hashes[i]) is None)
        if self._reaches:
            num_found = self._num_reached_blocks(request, num_found)
        return num_found * self.block_size

    def estimate_lost_tokens(self, request: Request) -> int:
        """About how many computed tokens a running request would compute again if it lost its place
        now, while its blocks are still there: of a model with states, those behind a snapshot.
        """
        return max(request.num_computed_tokens - self.estimate_cached_tokens(request), 0)

    def refresh(self, request: Request, num_tokens: int) -> int:
        """Make the cached prefix of the request's first `num_tokens` tokens the last to be evicted.

        Of those of its rank, if it has one. For a prefix that will be asked for again: if a running
        request needs the block, it gets it. The request need not live. Returns the cached tokens.
        """
        block_ids = self.get_computed_blocks(request)[: num_tokens // self.block_size]
        self.pool.touch(block_ids)
        self.pool.free(reversed(block_ids))  # as `free` does: the tail goes first
        for touch in self._touches:
            touch(request, len(block_ids))
        return len(block_ids) * self.block_size

    def shortage(self, request: Request, gone: "Vacancy | None" = None) -> WaitReason | None:
        """Return what besides blocks is too scarce to admit the request now, were the requests of
        `gone` away; None if nothing is.
        """
        for shortage in self._shortages:
            if (reason := shortage(request, () if gone is None else gone.requests)) is not None:
                return WaitReason(reason)
        return None

    def fit(
        self, request: Request, num_tokens: int, start: int, most: int
    ) -> tuple[int, WaitReason]:
        """Return how many of `num_tokens` tokens from position `start` on may run in this step, at
        most `most`; and what a request lacks of which none may.
        """
        reason = WaitReason.BUDGET
        for resource in self._fits:
            if num_tokens > 0:
                num_tokens, reason = resource.fit(request, num_tokens, start, most), resource.unfit
        return num_tokens, reason

    def serve(self, request: Request, start: int, num_tokens: int) -> list[Request]:
        """These tokens run in this step; which others of the step compute something for them."""
        return [owner for serve in self._serves for owner in serve(request, start, num_tokens)]

    def refund(self, request: Request) -> None:
        """The request does not run in this step after all."""
        for refund in self._refunds:
            refund(request)

    def can_admit(
        self, computed_blocks: list[int], num_slots: int, is_alone: bool, gone: "Vacancy | None"
    ) -> bool:
        """Return whether `num_slots` tokens fit beside what all but the requests of `gone` hold,
        with the watermark left free, which `is_alone` waives: there is no other request to need it.
        """
        num_needed = self._num_blocks(num_slots) - len(computed_blocks)
        if num_needed <= 0:  # of a paused request
            return True
        num_revived = [self.pool.ref_counts[b] for b in computed_blocks].count(0)
        num_freed = 0 if gone is None else gone.num_freed(computed_blocks)
        num_kept = 0 if is_alone else self.num_watermark_blocks
        return num_needed + num_revived + num_kept <= self.pool.num_free_blocks + num_freed

    def get_num_external_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens behind the cached prefix can be loaded from elsewhere."""
        if not (self._loadables and self.enable_prefix_caching and request.takes_cached_prefix):
            return 0
        return sum(find(request, num_computed_tokens) for find in self._loadables)

    def get_external_prefix(self, request: Request) -> ExternalPrefix:
        """Return what a KV connector could load behind the cached prefix, were the request admitted
        now: `num_tokens`, and the `load_seconds` and `compute_seconds` that they cost; 0: not
        known.
        """
        num_cached = len(self.get_computed_blocks(request)) * self.block_size
        if self.connector is None or not (
            self.enable_prefix_caching and request.takes_cached_prefix
        ):
            return ExternalPrefix(0, 0.0, 0.0)
        return self.connector.get_external_prefix(request, num_cached)

    def offload_price(self, request: Request, num_computed: int) -> OffloadPrice:
        """Return the price of offloading a request of which steps before this one compute
        `num_computed` tokens; 0 tokens of a request that holds no blocks.
        """
        is_possible = self.enable_prefix_caching and request.takes_cached_prefix
        num_computed = num_computed if request.block_ids else 0
        if self.connector is None or not is_possible:
            return OffloadPrice(0, 0.0, 0.0, 0.0)
        # One token is left to compute and sample from.
        num_blocks = min(num_computed, request.num_tokens - 1) // self.block_size
        hash_blocks(request, num_blocks, self.block_size)
        return self.connector.get_offload_price(request, num_blocks)

    def vacancy(
        self, fresh_blocks: Mapping[int, Request], dependents: Mapping[Request, list[Request]]
    ) -> "Vacancy":
        """Return a `Vacancy` of a step in which `fresh_blocks` can be found that requests are still
        to compute, and `dependents` of a request rely on its work.
        """
        from aioserve.kv_cache.vacancy import Vacancy

        return Vacancy(self.pool, fresh_blocks, dependents)

    def admit(
        self,
        request: Request,
        computed_blocks: list[int],
        num_slots: int,
        num_external_tokens: int = 0,
    ) -> None:
        """Take the cached prefix and room for `num_slots` tokens, after `can_admit`; behind the
        prefix, `num_external_tokens` are loaded in this step.

        Room for the whole prompt at once: a prompt that is computed in chunks can then never run
        out of blocks half-way, and no request is admitted only to be preempted.
        """
        if request.block_ids:
            raise InvariantError(f"{request!r} is admitted, but it holds blocks already")
        pool = self.pool
        num_new = self._num_blocks(num_slots) - len(computed_blocks)
        pool.touch(computed_blocks)
        try:
            new_block_ids = pool.allocate(num_new)
        except BaseException:  # a policy's, too: its ranks may be asked for, and for too long
            pool.free(reversed(computed_blocks))
            raise
        request.block_ids = computed_blocks + new_block_ids
        request.num_slots = len(request.block_ids) * self.block_size
        request.num_cached_blocks = request.num_found_blocks = len(computed_blocks)
        request.num_computed_tokens = len(computed_blocks) * self.block_size
        if request.takes_cached_prefix:
            self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += request.num_computed_tokens
        request.num_computed_tokens += num_external_tokens
        if self._takes:
            found = self._find_blocks(request) if self._reaches else computed_blocks
            num_shared = len(found) * self.block_size
            for take in self._takes:
                take(request, len(computed_blocks), num_shared)
        if num_external_tokens:
            self.cache_full_blocks(request)  # they are there before another request reads them

    def grow(self, request: Request, num_blocks: int) -> list[int]:
        """Append new blocks to the request and return them; the pool must have them."""
        block_ids = self.pool.allocate(num_blocks)
        request.block_ids += block_ids
        request.num_slots += num_blocks * self.block_size
        return block_ids

    def cache_full_blocks(self, request: Request, num_computed: int | None = None) -> list[int]:
        """Make the request's full blocks of known, computed tokens findable; return the new ones.

        Called when a step is scheduled, before it runs: steps run in order, and within a step
        keys and values are written before they are read. `num_computed` are the tokens that count
        as computed, if not all that are scheduled.
        """
        if num_computed is not None:
            for cache in self._caches:
                cache(request, num_computed)
        num_known = request.num_computed_tokens if num_computed is None else num_computed
        if num_known > request.num_tokens:
            num_known = request.num_tokens
        first, end = request.num_cached_blocks, num_known // self.block_size
        if first >= end or not self.enable_prefix_caching:
            return []
        if end > len(request.block_hashes):
            hash_blocks(request, end, self.block_size)
        block_ids, hashes = request.block_ids[first:end], request.block_hashes[first:end]
        if self._events is not None:
            self._events += tell_stored(request, first, end, self.block_size, self.pool.lookup)
        self.pool.register(block_ids, hashes)
        request.num_cached_blocks = end
        return block_ids

    def forget(self, request: Request) -> None:
        """Make unfindable what steps of this request were to write, as one of them has failed. What
        the request itself found in the cache when it was last admitted stays.
        """
        hashes = request.block_hashes[request.num_found_blocks :]
        self.pool.forget(hashes)
        for resource in self.resources:
            resource.forget(request, hashes)

    def clear_index(self) -> None:
        """Forget which block has which content: it is not wanted any more."""
        self.leases.end_all()
        self.pool.clear_index()
        for resource in self.resources:
            resource.clear()

    def leave(self, request: Request) -> None:
        """The request has ended; a step in flight may still write its blocks."""
        for leave in self._leaves:
            leave(request)

    def free(self, request: Request) -> None:
        """Give back all blocks, tail first so that a head outlives its tail in the index."""
        self.pool.free(reversed(request.block_ids))
        if self.retention is not None and request.num_cached_blocks:
            self.retention.note_freed(request)
        request.block_ids = []
        request.num_slots = request.num_cached_blocks = 0
        for give_back in self._give_backs:
            give_back(request)

    def plan(
        self, tokens: dict[Request, int], step_id: int, *, is_sent: bool
    ) -> dict[str, Mapping[str, Any]]:
        """Return what resources tell the runner of a step that computes these numbers of tokens, by
        their names; nothing if it is not sent.
        """
        if not is_sent:
            for resource in self.resources:
                resource.skip()
            return {}
        plans = {resource.name: resource.plan(tokens, step_id) for resource in self.planning}
        return {name: plan for name, plan in plans.items() if plan}

    def take_events(self) -> list[KVEvent]:
        """Return what happened to the prefix index since the last call, in order; told once.

        Ask between two calls of the scheduler: then blocks, index and events agree. Empty without
        `record_events`.
        """
        if not self._events:
            return []
        events = self._events.copy()
        self._events.clear()
        return events

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
