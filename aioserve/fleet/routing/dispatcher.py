"""Keeps what a sender knows of its replicas, and asks the router where each request goes.

Serves live and simulated senders. Knows no transport: which replicas there are, and what comes of
requests, its sender tells it.
"""

import math
from bisect import insort
from collections.abc import Callable, Sequence, Set
from typing import Any

import msgspec

from aioserve.errors import place_of
from aioserve.fleet.routing.interface import (
    BaseRouter,
    Hold,
    Migrate,
    Refuse,
    RouterError,
    RouterInterface,
    Split,
    Wait,
    blamed,
    load_router,
)
from aioserve.fleet.routing.views import (
    Prefixes,
    PrefixIndex,
    Programs,
    ReplicaReport,
    ReplicaView,
    RoutedRequest,
    SentLoad,
)
from aioserve.kv_cache.block_pool import KVEvent

# A token that is held while a reply is made, beside one that still has to be computed. A guess: by
# the profile h200-llama-8b-roofline, 300 tokens of a reply read a token of context for 9 us, and
# computing one of a prompt takes 18.
HELD_SHARE = 0.5

#: A report and the time at which it was true.
Reported = tuple[ReplicaReport, float]


class Account:
    """One replica, as its sender keeps account of it; a replica that comes back has a new one."""

    __slots__ = ("changed", "make_report", "name", "num_sent", "num_unstarted_tokens", "order",
                 "others", "place", "reported", "role", "work")  # fmt: skip

    def __init__(self, name: str, order: int, changed: "set[Account]", role: str = "") -> None:
        """`changed` takes in the account when its view is no longer what the router should see."""
        self.name = name
        self.role = role
        self.order = order  # by which replicas are sorted
        self.place = 0  # among those that there are
        self.changed = changed
        self.work = 0.0
        self.num_sent = 0
        self.num_unstarted_tokens = 0
        self.others = SentLoad()  # of other senders
        self.reported: Reported | None = None
        self.make_report: Callable[[], Reported] | None = None  # one that is newer, if asked for

    def view(self) -> ReplicaView:
        """Return the view of the replica that a router gets now."""
        if self.make_report is not None:
            self.reported, self.make_report = self.make_report(), None
        return self.view_with(self.reported)

    def view_with(self, reported: Reported | None) -> ReplicaView:
        """Return the account beside a report."""
        others = self.others
        own = (
            self.name,
            self.work + others.work,
            self.num_sent + others.num_requests,
            self.num_unstarted_tokens + others.num_unstarted_tokens,
        )
        if reported is None:
            return ReplicaView(*own, role=self.role)
        report, known_at = reported
        return ReplicaView(
            *own,
            known_at,
            report.num_running,
            report.num_waiting,
            report.num_waiting_tokens,
            report.max_num_seqs,
            report.num_kv_tokens,
            report.num_free_kv_tokens,
            report.step_seconds,
            report.step_base_seconds,
            report.step_request_seconds,
            report.num_evictable_kv_tokens,
            report.adapters,
            report.num_leased_kv_tokens,
            self.role,
        )


class Assignment:
    """A request at a replica, as work: its prompt until the first token, then what it holds."""

    __slots__ = ("_account", "_held", "_is_over", "_is_started", "_programs", "_queued", "_router",
                 "_sent_at", "request")  # fmt: skip

    def __init__(
        self,
        account: Account,
        request: RoutedRequest,
        num_cached_tokens: int,
        router: RouterInterface,
        now: float,
        programs: Programs | None = None,
    ) -> None:
        """The request was sent at `now` to the replica of `account`, which finds
        `num_cached_tokens` of its prompt cached. `programs` hears of it, if the router uses them.
        """
        self.request = request
        self._programs = programs
        self._account = account
        self._router = router
        self._sent_at = now
        self._is_started = self._is_over = False
        self._queued = request.num_tokens - num_cached_tokens
        self._held = HELD_SHARE * request.num_tokens
        account.work += self._queued + self._held
        account.num_sent += 1
        account.num_unstarted_tokens += self._queued
        account.changed.add(account)
        if programs is not None:
            programs.sent(request, account.name)

    @property
    def name(self) -> str:
        """The name of the replica that has the request."""
        return self._account.name

    @property
    def is_started(self) -> bool:
        """Whether the first token of the request has come."""
        return self._is_started

    def has_started(self, now: float) -> None:
        """Note that the first token has come. Told again it changes nothing."""
        if self._is_over or self._is_started:
            return
        self._is_started = True
        self._take_off(self._account)
        name = self._account.name
        with blamed(type(self._router), "on_first_token()"):
            self._router.on_first_token(self.request, name, now - self._sent_at)

    def has_ended(self, num_output_tokens: int = 0) -> None:
        """The request has ended, in whatever way, with as many tokens of a reply: the replica's
        work is less. Told again it changes nothing. Raises `RouterError`, as `has_started` does.
        """
        if self._is_over:
            return
        self._is_over = True
        account = self._account
        self._take_off(account)
        account.work -= self._held
        account.num_sent -= 1
        if self._programs is not None:
            self._programs.ended(self.request, num_output_tokens)
        with blamed(type(self._router), "on_end()"):
            self._router.on_end(self.request, account.name)

    def has_moved(self, account: Account) -> None:
        """The request, which has started, goes on at another replica."""
        if self._is_over:
            return
        source, self._account = self._account, account
        self._take_off(source)
        source.work -= self._held
        source.num_sent -= 1
        account.work += self._held
        account.num_sent += 1
        account.changed.add(account)
        self._is_started = True
        if self._programs is not None:
            self._programs.moved(self.request, account.name)
        with blamed(type(self._router), "on_move()"):
            self._router.on_move(self.request, source.name, account.name)

    def _take_off(self, account: Account) -> None:
        account.work -= self._queued
        account.num_unstarted_tokens -= self._queued
        account.changed.add(account)
        self._queued = 0


class Dispatcher:
    """One for each router that lives. What the router raises, or answers that is no answer, is a
    `RouterError`.
    """

    def __init__(
        self,
        kind: type[BaseRouter],
        options: dict[str, Any] | None = None,
        *,
        seed: int = 0,
        clock: Callable[[], float],
    ) -> None:
        """Raises `ConfigError` for options that the router does not have."""
        self.kind = kind
        self._clock = clock
        self._index = PrefixIndex()
        self._prefixes = Prefixes(self._index)
        self._programs = Programs(clock) if kind.uses_programs else None
        known = {} if self._programs is None else {"programs": self._programs}
        with blamed(kind, "__init__()"):
            self._router = kind(options, seed=seed, clock=clock, prefixes=self._prefixes, **known)
        # By id: a request in line, what asks about it again, and its place among equal ones.
        self._held: dict[str, tuple[RoutedRequest, Callable[[], None], int]] = {}
        self._num_held = 0  # so far
        self._accounts: dict[str, Account] = {}
        self._ordered: list[tuple[int, str]] = []
        self._views: list[ReplicaView] | None = None  # in order; None: replicas came or went
        self._changed: set[Account] = set()
        self._num_joined = 0

    @property
    def names(self) -> list[str]:
        """Names of the replicas that are known, in order."""
        return [name for _, name in self._ordered]

    def join(self, name: str, order: int | None = None, role: str = "") -> None:
        """A replica is there from now on; `order` is its place among the others, the last one if
        it is None, and `role` one of `ROLES`.
        """
        self._num_joined += 1
        place = self._num_joined if order is None else order
        account = Account(name, place, self._changed, role)
        self._accounts[name] = account
        insort(self._ordered, (account.order, name))
        self._views = None
        with blamed(self.kind, "on_join()"):
            self._router.on_join(name)

    def leave(self, name: str) -> None:
        """The replica is gone. A name that is not known changes nothing."""
        account = self._accounts.pop(name, None)
        if account is None:
            return
        self._ordered.remove((account.order, name))
        self._views = None
        self._changed.discard(account)
        account.changed = set()  # what it had ends later
        self._index.forget(name)
        if self._programs is not None:
            self._programs.forget(name)
        with blamed(self.kind, "on_leave()"):
            self._router.on_leave(name)

    def on_kv_event(self, name: str, event: KVEvent) -> None:
        """Take an event of the KV cache of a replica. Changes nothing if the replica is not known,
        or the router does not use prefixes.
        """
        if self.kind.uses_prefixes and name in self._accounts:
            self._index.apply(name, event)

    def on_report(self, name: str, make_report: Callable[[], Reported]) -> None:
        """A replica has said something new, which `make_report` gives with the time at which it was
        true: asked for when the router is asked next, unless something newer came before. Changes
        nothing if the replica is not known, or the router does not use reports.
        """
        account = self._accounts.get(name)
        if account is not None and self.kind.uses_reports:
            account.make_report = make_report
            self._changed.add(account)

    def view_with(self, name: str, reported: Reported) -> ReplicaView:
        """Return what is known of a replica, beside a report that the router need not have."""
        return self._accounts[name].view_with(reported)

    def on_others(self, name: str, load: SentLoad) -> None:
        """Other senders have sent this to a replica. Changes nothing if it is not known."""
        if (account := self._accounts.get(name)) is not None:
            account.others = load
            self._changed.add(account)

    def own_load(self, name: str) -> SentLoad:
        """Return what this sender alone has sent to a replica; nothing to one that is not known."""
        account = self._accounts.get(name)
        if account is None:
            return SentLoad()
        return SentLoad(account.work, account.num_sent, account.num_unstarted_tokens)

    def work_of(self, name: str) -> float:
        """Return the work of a replica, in tokens, by the accounts of all senders."""
        account = self._accounts[name]
        return account.work + account.others.work

    def known_at(self, name: str) -> float:
        """Return the time at which what the router was shown of a replica's report was so; -inf: it
        was shown none.
        """
        reported = self._accounts[name].reported
        return -math.inf if reported is None else reported[1]

    def has_room(self, name: str, num_tokens: int) -> bool:
        """Return whether as many tokens are free in the KV cache of a replica, as far as it has
        said.
        """
        reported = self._accounts[name].reported
        return reported is None or reported[0].num_free_kv_tokens >= num_tokens

    def num_requests_of(self, name: str) -> int:
        """Return requests that all senders have sent to a replica and have not ended."""
        account = self._accounts[name]
        return account.num_sent + account.others.num_requests

    def choose(
        self, request: RoutedRequest, avoid: Set[str] = frozenset()
    ) -> str | Refuse | Wait | Hold | None:
        """Return the name of a replica, a refusal, a wait or a place in line (`hold`); None if
        there is none but those of `avoid`. Raises `RouterError`. For senders that hand no KV blocks
        over.
        """
        return self.choose_both(request, avoid)[0]

    def choose_both(
        self, request: RoutedRequest, avoid: Set[str] = frozenset()
    ) -> tuple[str | Refuse | Wait | Hold | None, str | None]:
        """As `choose`; behind it the name of the replica that makes the reply, if that is another
        one (`Split`).
        """
        replicas = self._shown(avoid)
        if not replicas:
            return None, None
        with blamed(self.kind, "choose()"):
            answer = self._router.choose(self._with_turn(request), replicas)
        if isinstance(answer, ReplicaView):
            if self._are_shown((answer,), avoid):
                return answer.name, None
        elif isinstance(answer, Refuse | Wait) or (isinstance(answer, Hold) and self.kind.holds):
            return answer, None
        elif isinstance(answer, Split) and self.kind.splits:
            if self._are_shown((answer.prefill, answer.decode), avoid):
                prefill, decode = answer.prefill.name, answer.decode.name
                return prefill, None if decode == prefill else decode
        others = ["Hold"] * self.kind.holds + ["Split"] * self.kind.splits
        *first, last = "Refuse", "Wait", *others
        raise RouterError(
            f"{self.kind.__name__}: choose() must return one of the replicas that it is shown, "
            f"{', '.join(first)} or {last}; got {answer!r:.100}{place_of(self.kind, 'choose')}"
        )

    def rebalance(self) -> list[Migrate]:
        """Return requests that are to move to other replicas. Raises `RouterError`."""
        with blamed(self.kind, "rebalance()"):
            answers = self._router.rebalance(self._shown(frozenset()))
        if not isinstance(answers, list | tuple):
            raise RouterError(
                f"{self.kind.__name__}: rebalance() must return a list of Migrate; got "
                f"{answers!r:.100}{place_of(self.kind, 'rebalance')}"
            )
        for answer in answers:
            if not (isinstance(answer, Migrate) and self._are_shown((answer.to,), frozenset())):
                raise RouterError(
                    f"{self.kind.__name__}: rebalance() must return Migrate to replicas that it is "
                    f"shown; got {answer!r:.100}{place_of(self.kind, 'rebalance')}"
                )
        return list(answers)

    def _are_shown(self, views: Sequence[object], avoid: Set[str]) -> bool:
        return all(
            isinstance(view, ReplicaView) and view.name in self._accounts and view.name not in avoid
            for view in views
        )

    def assign(self, request: RoutedRequest, name: str) -> Assignment:
        """The request was sent to the replica of this name. To be told when it starts and ends."""
        cached = self._prefixes.cached_tokens(request, name)
        return Assignment(
            self._accounts[name],
            self._with_turn(request),
            cached,
            self._router,
            self._clock(),
            self._programs,
        )

    def hold(self, request: RoutedRequest, again: Callable[[], None]) -> None:
        """Keep a request in line, about which the router has answered `Hold`. `again` is called
        when it is to be asked about again, and keeps it here if the answer is the same.
        """
        self._num_held += 1
        self._held[request.request_id] = request, again, self._num_held

    def drop(self, request_id: str) -> bool:
        """Let a request wait in line no longer; return whether it did."""
        return self._held.pop(request_id, None) is not None

    @property
    def is_holding(self) -> bool:
        """Whether requests are held in line for a replica."""
        return bool(self._held)

    def ask_held(self) -> None:
        """Ask again about requests in line, after something has changed at a replica, in the order
        of the router, equal ones as they came, until one is held again. Raises `RouterError`. Costs
        O(h) of h in line, for each that leaves it.
        """
        order, held = self._router.order, self._held
        while held:
            with blamed(self.kind, "order()"):
                first = min(held, key=lambda name: (order(held[name][0]), held[name][2]))
            _, again, place = held.pop(first)
            again()
            if first in held:
                held[first] = *held[first][:2], place
                return

    def _with_turn(self, request: RoutedRequest) -> RoutedRequest:
        """Return the request with its turn, if the router uses programs."""
        if self._programs is None or request.turn:
            return request
        known = self._programs.of(request)
        turn = 1 if known is None else known.num_turns + (request.num_attempts == 0)
        return msgspec.structs.replace(request, turn=max(turn, 1))

    def move(self, assignment: Assignment, name: str) -> None:
        """The request, which has started, goes on at the replica of this name."""
        assignment.has_moved(self._accounts[name])

    def _shown(self, avoid: Set[str]) -> tuple[ReplicaView, ...]:
        """Return a view of each replica; those that have not changed are the same objects."""
        if self._views is None:
            self._views = []
            for _, name in self._ordered:
                self._accounts[name].place = len(self._views)
                self._views.append(self._accounts[name].view())
        else:
            for account in self._changed:
                self._views[account.place] = account.view()
        self._changed.clear()
        if avoid:
            return tuple(view for view in self._views if view.name not in avoid)
        return tuple(self._views)


def make_dispatcher(
    spec: str,
    options: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    clock: Callable[[], float],
) -> Dispatcher:
    """Return a dispatcher that asks a router of the class that `spec` names. Raises
    `ConfigError`.
    """
    return Dispatcher(load_router(spec), options, seed=seed, clock=clock)
