"""What a sender knows of each replica: what it has sent there, and what the replica has said.

Knows work in tokens. Does not know who chooses, nor how requests travel.
"""

from collections.abc import Callable

from aioserve.routing.errors import blamed
from aioserve.routing.interface import RouterInterface
from aioserve.routing.views import ReplicaReport, ReplicaView, RoutedRequest, SentLoad

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
        """What a router sees of it now."""
        if self.make_report is not None:
            self.reported, self.make_report = self.make_report(), None
        return self.view_with(self.reported)

    def view_with(self, reported: Reported | None) -> ReplicaView:
        """The account beside a report."""
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
            self.role,
        )


class Assignment:
    """A request at a replica, as work: its prompt until the first token, then what it holds."""

    __slots__ = ("_account", "_held", "_is_over", "_is_started", "_queued", "_router", "_sent_at",
                 "request")  # fmt: skip

    def __init__(
        self,
        account: Account,
        request: RoutedRequest,
        num_cached_tokens: int,
        router: RouterInterface,
        now: float,
    ) -> None:
        """The request was sent at `now` to the replica of `account`, which finds
        `num_cached_tokens` of its prompt cached.
        """
        self.request = request
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

    @property
    def name(self) -> str:
        """The name of the replica."""
        return self._account.name

    @property
    def is_started(self) -> bool:
        """Whether its first token has come."""
        return self._is_started

    def has_started(self, now: float) -> None:
        """Its first token is here. Told again it changes nothing."""
        if self._is_over or self._is_started:
            return
        self._is_started = True
        self._take_off(self._account)
        name = self._account.name
        with blamed(type(self._router), "on_first_token()"):
            self._router.on_first_token(self.request, name, now - self._sent_at)

    def has_ended(self) -> None:
        """The request has ended, in whatever way: the replica's work is less. Told again it changes
        nothing. Raises `RouterError`, as `has_started` does.
        """
        if self._is_over:
            return
        self._is_over = True
        account = self._account
        self._take_off(account)
        account.work -= self._held
        account.num_sent -= 1
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
        with blamed(type(self._router), "on_move()"):
            self._router.on_move(self.request, source.name, account.name)

    def _take_off(self, account: Account) -> None:
        account.work -= self._queued
        account.num_unstarted_tokens -= self._queued
        account.changed.add(account)
        self._queued = 0
