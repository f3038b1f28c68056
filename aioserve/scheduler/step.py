"""One step under construction: the verbs with which a policy says which requests run.

Does all bookkeeping of a decision: budget, seats, blocks, status, refunds. Decides nothing.

A paused request waits in line like any other. It holds no seat, no row of the runner's batch and no
adapter's place, and goes on where it stopped. Its blocks are what gives way first when memory runs
short. (Andes, Liu et al., 2024, and TokenFlow, Chen et al., 2025, pause requests that are ahead of
their readers.) What is offloaded is kept for its request in host memory by the KV connector, and
loaded when the request is admitted, or before that. (FastServe, Wu et al., 2023, and InferCept,
Abhyankar et al., 2024, swap; TokenFlow does it ahead of time.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from aioserve.errors import PolicyError
from aioserve.request import Request, RequestStatus, WaitReason, order_key
from aioserve.scheduler.interface import Rejection
from aioserve.scheduler.output import CachedRequestData, NewRequestData, OpenStep, SchedulerOutput

if TYPE_CHECKING:
    from aioserve.config import SchedulerConfig
    from aioserve.kv_cache.vacancy import Vacancy
    from aioserve.scheduler.table import Order, RequestTable

Place = WaitReason | tuple[list[int], int, int]  # why a request has to wait, or what it gets

#: What no request has to give, paused or running: it is the step's own.
OF_STEP = (WaitReason.BUDGET, WaitReason.ENCODER_BUDGET)
#: What paused requests do not hold.
OF_RUNNING = (*OF_STEP, WaitReason.SEATS, WaitReason.ADAPTERS)
#: What a paused request holds beside KV blocks.
HELD_IN_PAUSE = (WaitReason.STATES, WaitReason.WINDOWS)
#: In which a request holds KV blocks.
HOLDING = (RequestStatus.RUNNING, RequestStatus.PAUSED)


class Step(OpenStep):
    """A step, made by `BaseScheduler.new_step`, filled by the verbs, frozen by `output`.

    `token_budget` is what remains of this step, in tokens.
    """

    __slots__ = (
        "_admitted",
        "_book",
        "_choose_victim",
        "_config",
        "_dependents",
        "_drafts",
        "_fresh_blocks",
        "_kv_cache",
        "_last_asked",
        "_max_num_seqs",
        "_max_num_tokens",
        "_new_block_ids",
        "_num_lookahead_tokens",
        "_num_prefill_tokens",
        "_on_output",
        "_order",
        "_preempted",
        "_request_limit",
        "token_budget",
    )

    def __init__(
        self,
        book: RequestTable,
        config: SchedulerConfig,
        order: Order,
        choose_victim: Callable[[], Request | None],
        token_budget: int,
        max_num_seqs: int,
        on_output: Iterable[Callable[[SchedulerOutput], None]] = (),
        max_num_tokens: int | None = None,
    ) -> None:
        """`on_output` are told the plan, and may add parts to it; no plan has more than
        `max_num_tokens`. Raises `PolicyError` if a step of the book is open.
        """
        book.begin_step(self)
        self.step_id = book.num_steps + 1  # counts the steps planned
        self.token_budget = token_budget  # tokens that remain
        self._request_limit = config.long_prefill_token_threshold or token_budget
        self._max_num_tokens = token_budget if max_num_tokens is None else max_num_tokens
        self._max_num_seqs = max_num_seqs
        self._num_lookahead_tokens = config.num_lookahead_tokens
        self._config = config
        self._book = book
        self._order = order
        self._choose_victim = choose_victim
        self._on_output = on_output
        self._kv_cache = book.kv_cache
        self._num_prefill_tokens = 0
        self._drafts: dict[str, list[int]] = {}
        self._admitted: dict[Request, RequestStatus] = {}  # with the status before
        self._new_block_ids: dict[str, list[int]] = {}  # of requests that ran already
        self._preempted: set[Request] = set()
        self._fresh_blocks: dict[int, Request] = {}  # findable, but computed only by this step
        self._last_asked: tuple[Any, WaitReason | None] = (None, None)  # order key; what it lacked
        self._dependents: dict[Request, list[Request]] = {}  # that rely on its work in this step

    @property
    def requests(self) -> list[Request]:
        """Requests that got tokens in this step so far, in order."""
        return list(self.tokens)

    def run_decodes(self) -> list[Request]:
        """`run` every running request whose prompt is computed, in order; returns the others.

        As a loop would, but quicker: this is what most rows of most steps are.
        """
        tokens, budget = self.tokens, self.token_budget
        num_lookahead_tokens = self._num_lookahead_tokens
        running, prefills = RequestStatus.RUNNING, []
        is_first = not tokens  # no request is served twice then: each runs once
        for request in self._book.running:
            end = request.num_computed_tokens + 1
            if end < request.num_tokens:
                prefills.append(request)
            elif (
                end == request.num_target_tokens
                and request.status is running
                and budget > 0
                and request.plain_from < end
                and not request.draft_token_ids
                and (is_first or request not in tokens)
            ):  # one token, and nothing but room to be seen to
                if end + num_lookahead_tokens > request.num_slots:
                    self.token_budget = budget
                    if not self._find_blocks(request, end):
                        budget = self.token_budget
                        continue
                    budget = self.token_budget
                budget -= 1
                tokens[request] = 1
                request.num_computed_tokens = end
                if end < request.max_total_tokens - 1:
                    request.num_target_tokens = end + 1  # the token that it samples
            else:
                self.token_budget = budget
                self.run(request)
                budget = self.token_budget
        self.token_budget = budget
        return [r for r in prefills if r.status is running]  # victims of the others are not

    def run(self, request: Request, max_tokens: int | None = None) -> int:
        """Give a running request what it lacks, within the budget and `max_tokens`; more, to the
        end of an image that has to run whole, once it has begun.

        Preempts `victim()` until there are blocks for it. Returns the tokens granted; 0 if it
        lacks nothing, was served or preempted in this step, or cannot be served.
        """
        if request in self.tokens or request.status is not RequestStatus.RUNNING:
            return 0
        num_computed = request.num_computed_tokens
        num_tokens = request.num_target_tokens - num_computed
        if num_tokens > self.token_budget:
            num_tokens = self.token_budget
        if num_tokens > self._request_limit:
            num_tokens = self._request_limit
        if max_tokens is not None and num_tokens > max_tokens:
            num_tokens = max_tokens
        if num_tokens <= 0:
            return 0
        if num_computed < request.plain_from:
            num_tokens, _ = self._kv_cache.fit(request, num_tokens, num_computed, self._most())
            if num_tokens <= 0:
                return 0
        end = num_computed + num_tokens
        if end + self._num_lookahead_tokens > request.num_slots:
            if request.draft_token_ids:  # no request is preempted for a guess
                free = self._kv_cache.pool.num_free_blocks * self._kv_cache.block_size
                room = request.num_slots + free - self._num_lookahead_tokens
                end = max(min(end, room), num_computed + 1)
                num_tokens = end - num_computed
            if not self._find_blocks(request, end):
                return 0
        self.token_budget -= num_tokens
        self.tokens[request] = num_tokens
        request.num_computed_tokens = end
        if end >= request.num_tokens:  # this step samples
            if request.draft_token_ids:
                self._take_drafts(request, num_tokens - 1)
            elif end < request.max_total_tokens - 1:
                request.num_target_tokens = end + 1  # the token that it samples
            if num_tokens == 1 and num_computed >= request.plain_from:
                return 1
        self._note_chunk(request, num_computed, num_tokens)
        return num_tokens

    def admit(
        self,
        request: Request,
        max_tokens: int | None = None,
        whole: bool = False,
        displacing: Iterable[Request] = (),
    ) -> int:
        """Move a waiting request to `running` and give it tokens after its cached prefix.

        Takes a seat and blocks for all its known tokens. `whole` refuses a first chunk that is not
        all it lacks. If running requests hold what it needs, those of `displacing` may lose it, the
        first of them first: as few as are needed are preempted, and none if the request would have
        to wait all the same. Returns the tokens granted; 0: it has to wait.
        """
        book = self._book
        if request not in book.waiting:
            if not isinstance(request, Request):  # which no policy would notice but by a stall
                raise PolicyError(
                    f"policy {book.policy_name}: admit() takes a Request, got {request!r}"
                )
            return 0
        if request in self._preempted:
            is_paused = request.status is RequestStatus.PAUSED  # it may come back in the next step
            return self.hold(request, WaitReason.PAUSED if is_paused else WaitReason.PREEMPTED)
        if request.status is not RequestStatus.WAITING and book.in_flight.carries(request):
            return self.hold(request, WaitReason.IN_FLIGHT)  # its next token is on the way
        if not self._config.admit_beside_preemption and any(
            other.status is RequestStatus.PREEMPTED for other in self._preempted
        ):
            return self.hold(request, WaitReason.BLOCKS)
        place = self._find_place(request, max_tokens, whole)
        if isinstance(place, WaitReason):
            if displacing or book.paused or self._kv_cache.leases.held:
                find = partial(self._find_place, request, max_tokens, whole)
                place = self._make_room(request, place, find, displacing)
            if isinstance(place, WaitReason):
                self._last_asked = request.order_key, place
                return self.hold(request, place)
        self._last_asked = request.order_key, None
        computed_blocks, num_slots, num_external = place
        if request.status is RequestStatus.PAUSED:
            self._resume(request, num_slots)
        else:
            fresh = self._fresh_blocks
            for owner in {fresh[b] for b in computed_blocks if b in fresh} if fresh else ():
                self._dependents.setdefault(owner, []).append(request)
            self._kv_cache.admit(request, computed_blocks, num_slots, num_external)
            if request.num_preemptions == 0:
                request.num_cached_tokens = request.num_computed_tokens
                request.num_external_tokens = num_external
        self._admitted[request] = request.status
        book.start(request)
        return self.run(request, max_tokens)

    def hold(self, request: Request, reason: WaitReason) -> int:
        """Record why a request has to wait (`wait_reason`). Returns 0, the tokens granted."""
        request.wait_reason = reason
        request.wait_step_id = self.step_id
        return 0

    def preempt(self, request: Request) -> None:
        """Free the blocks of a running or paused request, refund its tokens of this step, queue it.

        It will be computed again from the start, less what the prefix cache still has. Raises
        `PolicyError` if `order` does; it runs on then.
        """
        if request.status is RequestStatus.PAUSED:
            self._drop_paused(request)
        if request.status is not RequestStatus.RUNNING:
            return
        victims = {request: self._status_before(request)}
        line = [request]
        for victim in line:  # requests that rely on what it would have computed go, too
            for dependent in self._dependents.get(victim, ()):
                if dependent not in victims and dependent.status is RequestStatus.RUNNING:
                    victims[dependent] = self._status_before(dependent)
                    line.append(dependent)
        self._book.requeue(victims, self._order)
        for victim, status_before in victims.items():
            self._refund(victim)
            self._book.take_back(victim)
            self._dependents.pop(victim, None)
            self._admitted.pop(victim, None)
            self._preempted.add(victim)
            if status_before is None:
                self._note_preempted(victim)

    def pause(self, request: Request) -> bool:
        """Let a running request step aside: it gives up its seat, keeps its KV blocks, and goes on
        from there when `admit` takes it again. Until then it is in `waiting` and `paused_requests`.

        Its tokens of this step are refunded. When memory runs short, paused requests lose their
        blocks, the last of them in order first, before a running request does; they are preempted
        then. Returns whether it is paused: not if it does not run, was admitted in this step, or
        needs the states of all its prompt (`takes_cached_prefix` is False). Raises `PolicyError` if
        `order` does; it runs on then.
        """
        if request in self._admitted or not request.takes_cached_prefix:
            return False
        for dependent in self._dependents.pop(request, ()):  # for these it was to compute something
            self.preempt(dependent)
        if request.status is not RequestStatus.RUNNING:  # also if each relies on the other
            return False
        num_computed = request.num_computed_tokens - self.tokens.get(request, 0)
        new_block_ids = self._new_block_ids.get(request.request_id, [])
        self._book.requeue({request: RequestStatus.PAUSED}, self._order)
        self._refund(request)
        self._take_back_blocks(request, new_block_ids)
        request.num_computed_tokens = num_computed
        request.num_target_tokens = request.num_tokens
        request.draft_token_ids = []
        num_full = min(num_computed, request.num_tokens) // self._kv_cache.block_size
        request.num_cached_blocks = min(request.num_cached_blocks, num_full)
        for resource in self._kv_cache.resources:
            resource.pause(request)
        self._book.paused[request] = False
        self._preempted.add(request)
        self.preempted_req_ids.append(request.request_id)
        return True

    def offload(self, request: Request) -> int:
        """Preempt a running or paused request, and keep its KV blocks in host memory for it.

        They are copied in this step, by the KV connector, and loaded when the request is admitted
        again, or before by `prefetch`; what is behind the last whole block is computed again.
        Returns the tokens that are kept. 0: the request goes on as it is, since there is no
        connector (`--kv-connector`), too little room in its host memory, or no whole block.
        """
        connector = self._kv_cache.connector
        if connector is None or request.status not in HOLDING or request in self._admitted:
            return 0
        num_computed = request.num_computed_tokens - self.tokens.get(request, 0)
        num_tokens = self._kv_cache.offload_price(request, num_computed).num_tokens
        if num_tokens:
            connector.keep(request, num_tokens // self._kv_cache.block_size)
            self.preempt(request)
        return num_tokens

    def prefetch(self, request: Request) -> int:
        """Bring the KV blocks of a preempted request back into the cache before it is admitted.

        What host memory has of it is loaded in this step, or in the next one that serves a request,
        into free blocks alone, behind what the cache still has. The request holds all this from now
        on as a paused request does: `admit` lets it go on, and it is the first to give way. Returns
        the tokens that are there. 0: there is no connector, nothing to hold or no room for it, or
        the request was not preempted.
        """
        book, kv_cache = self._book, self._kv_cache
        is_away = request.status is RequestStatus.PREEMPTED and request not in self._preempted
        if kv_cache.connector is None or not is_away or book.in_flight.carries(request):
            return 0
        block_ids = kv_cache.get_computed_blocks(request)
        fresh = (i for i, block_id in enumerate(block_ids) if block_id in self._fresh_blocks)
        del block_ids[next(fresh, len(block_ids)) :]  # what this step computes may be taken back
        num_cached = len(block_ids) * kv_cache.block_size
        num_loaded = kv_cache.connector.get_external_prefix(request, num_cached).num_tokens
        num_tokens = num_cached + num_loaded
        if not num_tokens or not kv_cache.can_admit(block_ids, num_tokens, False, None):
            return 0
        if kv_cache.shortage(request) in HELD_IN_PAUSE:
            return 0
        kv_cache.admit(request, block_ids, num_tokens, num_loaded)
        for resource in kv_cache.resources:
            resource.pause(request)
        request.status = RequestStatus.PAUSED
        book.paused[request] = True
        return num_tokens

    def reject(self, request: Request, reason: str, retry_after: float = 1.0) -> bool:
        """End a waiting request that never ran: its client is told the `reason`, and after how
        many seconds, a day at most, to ask again. False: it does not wait, or has run.

        What comes again to an idle engine and states no time has to be served some day: what can
        never run, `add_request` refuses with `RequestError`.
        """
        book = self._book
        why = Rejection.of(book.policy_name, reason, retry_after)
        if request not in book.waiting or request.status is not RequestStatus.WAITING:
            return False
        book.rejected[request] = why
        return True

    def output(self) -> SchedulerOutput:
        """Freeze the step. Call it once, last. Raises `PolicyError` for fractions of tokens."""
        book, kv_cache, tokens, admitted = self._book, self._kv_cache, self.tokens, self._admitted
        total = sum(tokens.values())
        if isinstance(total, float):
            raise PolicyError(
                f"policy {book.policy_name}: a request gets a whole number of tokens, not one of "
                f"{[*tokens.values()]!r:.60}: budgets and max_tokens must be ints (n // 2)"
            )
        finished_req_ids = book.close_step(self)
        requests = list(tokens)
        if total == len(requests) and not admitted:  # nothing but decodes: most steps are
            decodes = book.decodes_of(requests)
            requests, req_ids = decodes.requests, decodes.req_ids
            num_scheduled = decodes.num_scheduled
            num_computed = [r.num_computed_tokens - 1 for r in requests]
        else:
            req_ids = [r.request_id for r in requests]
            num_scheduled = dict(zip(req_ids, tokens.values(), strict=True))
            cached = requests[: len(requests) - len(admitted)]
            if requests[len(cached) :] != [*admitted]:  # most policies serve the new ones last
                cached = [r for r in requests if r not in admitted]
                req_ids = [r.request_id for r in cached]
            del req_ids[len(cached) :]
            num_computed = [r.num_computed_tokens - tokens[r] for r in cached]
        if book.waiting:
            book.line_stop = (self.step_id, *self._stop())
        # A step that says nothing else is not handed to the runner.
        is_sent = bool(tokens or finished_req_ids or self.preempted_req_ids)
        output = SchedulerOutput(
            step_id=self.step_id,
            scheduled_new_reqs=[NewRequestData.of(r, tokens[r]) for r in admitted],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=req_ids,
                num_computed_tokens=num_computed,
                new_block_ids=self._new_block_ids,
            ),
            num_scheduled_tokens=num_scheduled,
            total_num_scheduled_tokens=total,
            preempted_req_ids=self.preempted_req_ids,
            finished_req_ids=finished_req_ids,
            scheduled_spec_decode_tokens=self._drafts,
            parts=(
                kv_cache.plan(tokens, self.step_id, is_sent=is_sent) if kv_cache.planning else {}
            ),
            paused_req_ids=self._paused_req_ids() if book.paused else [],
        )
        book.commit(output, requests, self._num_prefill_tokens)
        for tell in self._on_output:
            tell(output)
        return output

    def _stop(self) -> tuple[Any, WaitReason | None]:
        """Return the order key of the last request that was asked for, and what it lacked, or what
        one behind it lacks whichever it is.
        """
        key, reason = self._last_asked
        if reason is None and self.token_budget <= 0:
            reason = WaitReason.BUDGET
        elif reason is None and len(self._book.running) >= self._max_num_seqs:
            reason = WaitReason.SEATS
        return key, reason

    def _find_place(
        self, request: Request, max_tokens: int | None, whole: bool, gone: Vacancy | None = None
    ) -> Place:
        """Return the cached blocks behind which a waiting request can begin now, the slots that it
        takes and the tokens that are loaded; or why it has to wait, were the requests of `gone`
        away.
        """
        kv_cache, num_running = self._kv_cache, len(self._book.running)
        if gone is not None:
            num_running -= gone.num_seats
        limit = min(self.token_budget, self._request_limit)
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        if limit <= 0:
            return WaitReason.BUDGET
        if num_running >= self._max_num_seqs:
            return WaitReason.SEATS
        if (lacking := kv_cache.shortage(request, gone)) is not None:
            return lacking
        if request.status is RequestStatus.PAUSED:
            computed_blocks, num_external = request.block_ids, 0
            num_computed = request.num_computed_tokens
        else:
            computed_blocks = kv_cache.get_computed_blocks(request, gone)
            num_cached = len(computed_blocks) * kv_cache.block_size
            num_external = kv_cache.get_num_external_tokens(request, num_cached)
            num_computed = num_cached + num_external
        num_lacking = request.num_target_tokens - num_computed
        if whole and num_lacking > limit:
            return WaitReason.BUDGET
        if num_computed < request.plain_from:
            wanted = min(num_lacking, limit)
            fitting, unfit = kv_cache.fit(request, wanted, num_computed, self._most())
            if fitting <= 0 or (whole and fitting < num_lacking):
                return unfit
        num_slots = self._num_slots(request, request.num_target_tokens)
        if not kv_cache.can_admit(computed_blocks, num_slots, not num_running, gone):
            return WaitReason.BLOCKS
        return computed_blocks, num_slots, num_external

    def _make_room(
        self, request: Request, place: Place, find: Callable[..., Place], others: Iterable[Request]
    ) -> Place:
        """Return the place of a waiting request that has to wait, once the paused requests and
        `others` have lost what it lacks: as few as are needed, and none if that does not help.
        Before them leases end: those of clients, and if nothing runs those of the policy.
        """
        leases = self._kv_cache.leases
        while place is WaitReason.BLOCKS and not self._book.running and leases.give_way():
            place = find()
        if place is WaitReason.BLOCKS and leases.held and leases.has_alone(leases.references):
            place = WaitReason.LEASES
        if not isinstance(place, WaitReason):
            return place
        if place in OF_STEP or not (others or place not in OF_RUNNING):
            return place
        paused = [r for r in self._book.paused if r is not request]
        paused.sort(key=order_key, reverse=True)
        if place is WaitReason.LEASES:
            others = [*others]  # may be asked again
        gone = self._kv_cache.vacancy(self._fresh_blocks, self._dependents)
        victims = gone.choose(chain(paused, others), partial(find, gone))
        if victims and place is WaitReason.LEASES and leases.give_way_of_clients():
            return self._make_room(request, find(), find, others)
        for victim in victims:
            self.preempt(victim)
        return find() if victims else place

    def _most(self) -> int:
        """Return the number of tokens that a request may still get for an image that runs whole,
        beyond the budget.
        """
        room = self._max_num_tokens - sum(self.tokens.values())
        return min(room, self._config.long_prefill_token_threshold or room)

    def _num_slots(self, request: Request, num_tokens: int) -> int:
        """KV slots for `num_tokens` tokens and the drafts after them; the last one needs none."""
        return min(num_tokens + self._num_lookahead_tokens, request.max_total_tokens - 1)

    def _find_blocks(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens, preempting victims; False if it lost its own place."""
        kv_cache, pool = self._kv_cache, self._kv_cache.pool
        num_slots = self._num_slots(request, num_tokens)
        num_missing = -(-num_slots // kv_cache.block_size) - len(request.block_ids)
        if num_missing <= 0:
            return True  # near its limit it needs no lookahead
        kv_cache.cache_full_blocks(request)  # filled by earlier steps
        while num_missing > pool.num_free_blocks:
            leases = kv_cache.leases
            if leases.held and leases.give_way_of_clients():
                continue  # no request that runs is preempted for a client's later one
            if self._book.running == [request] and leases.give_way():
                continue  # else it would be its own victim
            if self._book.paused and self._drop_last_paused(request):
                continue
            victim = self._choose_victim()
            if not isinstance(victim, Request) or victim.status is not RequestStatus.RUNNING:
                raise PolicyError(
                    f"policy {self._book.policy_name}: victim() must return a running request, "
                    f"got {victim!r}"
                )
            self.preempt(victim)
            if request.status is not RequestStatus.RUNNING:
                return False  # it was its own victim, or relied on the victim's work
        new_block_ids = kv_cache.grow(request, num_missing)
        if request not in self._admitted:
            self._new_block_ids[request.request_id] = new_block_ids
        return True

    def _drop_last_paused(self, but: Request) -> bool:
        """Preempt the paused request that is last in order. False: there is none."""
        last = max((r for r in self._book.paused if r is not but), key=order_key, default=None)
        if last is not None:
            self.preempt(last)
        return last is not None

    def _note_chunk(self, request: Request, start: int, num_tokens: int) -> None:
        """Note what more than one decode token brings: full blocks, and their resources."""
        if request.request_id not in self._drafts:
            self._num_prefill_tokens += num_tokens
        if filled := self._kv_cache.cache_full_blocks(request):
            self._fresh_blocks.update(dict.fromkeys(filled, request))
        if start < request.plain_from:
            for owner in self._kv_cache.serve(request, start, num_tokens):
                self._dependents.setdefault(owner, []).append(request)

    def _take_drafts(self, request: Request, num_drafts: int) -> None:
        """Send along the draft tokens that were granted; how many are right is not known yet."""
        drafts = request.draft_token_ids[:num_drafts]
        if drafts:
            self._drafts[request.request_id] = drafts
        request.draft_token_ids = []
        # Behind drafts nothing more until the step is back.
        request.num_target_tokens = request.num_computed_tokens + (0 if drafts else 1)

    def _resume(self, request: Request, num_slots: int) -> None:
        """A paused request, of which there is room for `num_slots` tokens, runs again."""
        kv_cache = self._kv_cache
        num_missing = -(-num_slots // kv_cache.block_size) - len(request.block_ids)
        if num_missing > 0:
            kv_cache.grow(request, num_missing)
        for resource in kv_cache.resources:
            resource.resume(request)

    def _refund(self, request: Request) -> None:
        num_tokens = self.tokens.pop(request, 0)
        self.token_budget += num_tokens
        self._new_block_ids.pop(request.request_id, None)
        self._drafts.pop(request.request_id, None)
        self._kv_cache.refund(request)
        for block_id, owner in list(self._fresh_blocks.items()):
            if owner is request:
                del self._fresh_blocks[block_id]
                if num_tokens:  # it would have been written by the tokens just refunded
                    self._kv_cache.pool.unregister(block_id)

    def _take_back_blocks(self, request: Request, block_ids: list[int]) -> None:
        """The last blocks of a request, which were for what has been refunded."""
        self._kv_cache.pool.free(reversed(block_ids))
        request.block_ids = request.block_ids[: len(request.block_ids) - len(block_ids)]
        request.num_slots = len(request.block_ids) * self._kv_cache.block_size

    def _status_before(self, request: Request) -> RequestStatus | None:
        """Return what a running request goes back to if it loses its place; None: it is
        preempted.
        """
        status = self._admitted.get(request)
        return None if status is RequestStatus.PAUSED else status

    def _drop_paused(self, request: Request) -> None:
        self._book.drop_paused(request)
        self._note_preempted(request)

    def _note_preempted(self, request: Request) -> None:
        self._preempted.add(request)
        if request.request_id not in self.preempted_req_ids:  # if it was paused in this step
            self.preempted_req_ids.append(request.request_id)

    def _paused_req_ids(self) -> list[str]:
        """Return the requests that leave the batch and keep their blocks."""
        requests, paused = self._book.requests, self._book.paused
        return [i for i in self.preempted_req_ids if requests.get(i) in paused]


class BoundedStep(Step):
    """A `Step` whose verbs grant nothing once `max_requests` requests have tokens in it."""

    __slots__ = ("_max_requests",)

    def __init__(self, max_requests: int, book: RequestTable, *args: Any) -> None:
        """`args` as of `Step`. Raises `PolicyError` for a bound that is no number of requests."""
        if not isinstance(max_requests, int) or max_requests < 0:
            raise PolicyError(
                f"policy {book.policy_name}: new_step() takes max_requests as an int of 0 or more, "
                f"got {max_requests!r:.80}"
            )
        super().__init__(book, *args)
        self._max_requests = max_requests

    def run_decodes(self) -> list[Request]:
        prefills = []
        for request in self._book.running:
            if request.num_computed_tokens + 1 < request.num_tokens:
                prefills.append(request)
            else:
                self.run(request)
        # The victims of those that ran above do not run any more.
        return [r for r in prefills if r.status is RequestStatus.RUNNING]

    def run(self, request: Request, max_tokens: int | None = None) -> int:
        return 0 if len(self.tokens) >= self._max_requests else super().run(request, max_tokens)

    def _find_place(
        self, request: Request, max_tokens: int | None, whole: bool, gone: Vacancy | None = None
    ) -> Place:
        if len(self.tokens) >= self._max_requests:
            return WaitReason.BUDGET
        return super()._find_place(request, max_tokens, whole, gone)
