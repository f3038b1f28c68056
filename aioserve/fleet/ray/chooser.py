"""Who says which replica gets a request, a router of aioserve's or one of Ray's, with metrics."""

import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from aioserve.engine.metrics import LATENCY_BUCKETS, Histogram
from aioserve.engine.operations.command import Counted
from aioserve.errors import EngineOverloadedError
from aioserve.fleet.ray.fleet import Fleet, ReplicaLine
from aioserve.fleet.routing import (
    Assignment,
    Dispatcher,
    Hold,
    Refuse,
    RoutedRequest,
    RouterError,
    Wait,
)
from aioserve.request import RequestSpec

#: What became of a question to the router: a replica; a refusal; a wait; an error of the router,
#: for which the replica with the least work got the request; each replica had as many requests as
#: it may have; there was no replica.
Outcome = Literal["sent", "refused", "waits", "failed", "full", "no_replica"]

# Of a decision, which takes microseconds, and of what is known, which is a tenth of a second old.
DECISION_BUCKETS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, *LATENCY_BUCKETS)

# Reasons of refusals that are told apart; what comes after them is "other". A router that puts
# numbers into its reasons would fill Prometheus otherwise. A guess.
MAX_REASONS = 20


class RouterMetrics:
    """The metrics of one router in one ingress, since its start."""

    def __init__(self, model: str, router: str, get_num_replicas: Callable[[], int]) -> None:
        """`model` and `router` are their names; `get_num_replicas` says how many can be sent
        requests.
        """
        self.labels = (model, router)
        self.get_num_replicas = get_num_replicas
        self.outcomes: Counter[Outcome] = Counter()
        self.refusals: Counter[str] = Counter()  # by reason
        self.num_resent = 0  # requests whose replica was gone before it had told anything
        self.num_moved = 0  # requests with which another replica went on
        self.decision_seconds = Histogram(DECISION_BUCKETS)
        self.knowledge_age = Histogram()  # seconds, of the replica that was chosen

    def on_refused(self, reason: str) -> None:
        """Count a request that the router refuses."""
        self.outcomes["refused"] += 1
        known = reason in self.refusals or len(self.refusals) < MAX_REASONS
        self.refusals[reason if known else "other"] += 1

    def on_resent(self) -> None:
        """Count a request that goes to another replica because one has failed it."""
        self.num_resent += 1

    def on_sent(self, age: float) -> None:
        """A replica was chosen, of which was known what was so `age` seconds ago; infinite: the
        router knows nothing that replicas report.
        """
        self.outcomes["sent"] += 1
        if age < math.inf:
            self.knowledge_age.observe(age)


def render(all_metrics: Sequence[RouterMetrics], counted: Sequence[Counted] = ()) -> bytes:
    """Return the metrics of routers in Prometheus text format, with what the HTTP server has
    counted.
    """
    registry = CollectorRegistry()
    registry.register(_Collected(all_metrics, counted))
    return bytes(generate_latest(registry))


class _Collected(Collector):
    def __init__(self, all_metrics: Sequence[RouterMetrics], counted: Sequence[Counted]) -> None:
        self._all = all_metrics
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all routers, for one scrape by the registry."""
        own = ["model", "router"]
        decisions = CounterMetricFamily(
            "aioserve_router_decisions",
            "Answers of the router, by what became of them",
            labels=[*own, "outcome"],
        )
        refusals = CounterMetricFamily(
            "aioserve_router_refusals", "Requests that the router refused", labels=[*own, "reason"]
        )
        resent = CounterMetricFamily(
            "aioserve_router_resent_requests",
            "Requests sent again, since their replica was gone before it told anything",
            labels=own,
        )
        moved = CounterMetricFamily(
            "aioserve_router_moved_requests",
            "Requests with which another replica went on",
            labels=own,
        )
        replicas = GaugeMetricFamily(
            "aioserve_router_replicas", "Replicas that can be sent requests", labels=own
        )
        seconds = HistogramMetricFamily(
            "aioserve_router_decision_seconds", "One question to the router", labels=own
        )
        age = HistogramMetricFamily(
            "aioserve_router_knowledge_age_seconds",
            "Since the chosen replica reported what the router knew of it",
            labels=own,
        )
        for one in self._all:
            labels = one.labels
            for outcome, count in one.outcomes.items():
                decisions.add_metric([*labels, outcome], count)
            for reason, count in one.refusals.items():
                refusals.add_metric([*labels, reason], count)
            resent.add_metric(labels, one.num_resent)
            moved.add_metric(labels, one.num_moved)
            replicas.add_metric(labels, one.get_num_replicas())
            for family, histogram in ((seconds, one.decision_seconds), (age, one.knowledge_age)):
                family.add_metric(labels, histogram.cumulative(), histogram.total)
        yield from (decisions, refusals, resent, moved, replicas, seconds, age)
        for told in self._counted:
            kind = GaugeMetricFamily if told.is_gauge else CounterMetricFamily
            labels_of = [*told.labels, "process"]
            counts = kind(f"aioserve_{told.name}", told.documentation, labels=labels_of)
            for values, count in told.counts:
                counts.add_metric([*values, "ingress"], count)
            yield counts


# Who says which replica gets a request: a router of aioserve's, or one of Ray's. Both answer a seat
# at a replica, or a wait. Knows accounts and handles; does not know how requests travel.


logger = logging.getLogger(__name__)

#: No replica is there: one is waited for as long as the request may wait for its end.
NO_REPLICA = Wait(0.1)
#: All replicas serve another model than this ingress, which goes as well.
ALL_LEFT = Wait(0.1)
#: Each replica has as many requests as `max_ongoing_requests` allows.
ALL_FULL = Wait(0.05)


class Seat(ABC):
    """A request's place at one replica, until it ends there."""

    def __init__(self, line: ReplicaLine) -> None:
        self.line = line

    @abstractmethod
    def has_started(self) -> None:
        """Note that the first token of the request has come."""

    @abstractmethod
    def has_ended(self) -> None:
        """The request has ended or failed, or its reader has left. Told again it changes
        nothing.
        """


class Chooser(ABC):
    """Chooses replicas for requests; each front end has one."""

    @abstractmethod
    async def choose(
        self, request: RoutedRequest, avoid: Set[str], spec: RequestSpec
    ) -> Seat | Wait:
        """Return a seat at a replica that none of `avoid` is, if there is another. Raises
        `EngineOverloadedError` for a request that is refused.
        """


class AccountSeat(Seat):
    """A seat from a router that keeps account."""

    def __init__(self, line: ReplicaLine, assignment: Assignment, decode: str = "") -> None:
        """`decode` is the name of the replica that is to go on behind the first token."""
        super().__init__(line)
        self.decode = decode
        self._assignment = assignment

    @property
    def assignment(self) -> Assignment:
        """The request, as the account of its replica has it."""
        return self._assignment

    def has_started(self) -> None:
        try:
            self._assignment.has_started(time.monotonic())
        except RouterError:
            logger.exception("the router has not taken in a first token")

    def has_ended(self) -> None:
        try:
            self._assignment.has_ended()
        except RouterError:
            logger.exception("the router has not taken in the end of a request")


class OwnChooser(Chooser):
    """A chooser that asks a router of `aioserve.fleet.routing`."""

    def __init__(
        self, dispatcher: Dispatcher, fleet: Fleet, max_requests: int, metrics: RouterMetrics
    ) -> None:
        """`max_requests`: how many a replica gets at a time, from all ingresses."""
        self._metrics = metrics
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._max_requests = max_requests
        self._last_error = ""

    async def choose(
        self, request: RoutedRequest, avoid: Set[str], spec: RequestSpec
    ) -> Seat | Wait:
        lines, metrics = self._fleet.lines, self._metrics
        if not lines:
            metrics.outcomes["no_replica"] += 1
            return ALL_LEFT if self._fleet.is_left else NO_REPLICA
        shunned = frozenset(avoid if lines.keys() - avoid else ())
        while True:
            answer, decode = self._ask(request, shunned)
            if decode is not None and spec.sampling_params.n > 1:  # replies that cannot be shared
                answer, decode = decode, None
            if answer is None:
                metrics.outcomes["full"] += 1
                return ALL_FULL
            if isinstance(answer, Wait):
                metrics.outcomes["waits"] += 1
                return answer
            if isinstance(answer, Refuse):
                metrics.on_refused(answer.reason)
                raise EngineOverloadedError(answer.reason, answer.retry_after)
            if self._dispatcher.num_requests_of(answer) < self._max_requests:
                metrics.on_sent(time.monotonic() - self._dispatcher.known_at(answer))
                assignment = self._dispatcher.assign(request, answer)
                return AccountSeat(lines[answer], assignment, decode or "")
            shunned |= {answer}

    def moved(self, seat: Seat, name: str) -> AccountSeat | None:
        """Return the place of a request at the replica of this name, with the account of `seat`;
        None if there is no line to it.
        """
        line = self._fleet.lines.get(name)
        if line is None or not isinstance(seat, AccountSeat):
            return None
        if name != seat.assignment.name:
            try:
                self._dispatcher.move(seat.assignment, name)
            except RouterError:
                logger.exception("the router has not taken in that a request moves")
        return AccountSeat(line, seat.assignment)

    def has_moved(self, source: str, seat: Seat) -> None:
        """The replica of `seat` goes on with a request that `source` had."""
        self._metrics.num_moved += seat.line.name != source

    def has_room(self, name: str, num_tokens: int) -> bool:
        """Return whether the replica of this name could take a request of as many tokens in now, as
        far as it has reported.
        """
        return name in self._fleet.lines and self._dispatcher.has_room(name, num_tokens)

    def _ask(
        self, request: RoutedRequest, shunned: frozenset[str]
    ) -> tuple[str | Refuse | Wait | None, str | None]:
        since = time.perf_counter()
        try:
            answer, decode = self._dispatcher.choose_both(request, shunned)
            assert not isinstance(answer, Hold), "routers that hold are refused at the start"
            return answer, decode
        except RouterError as error:
            self._metrics.outcomes["failed"] += 1
            if str(error) != self._last_error:
                logger.error("%s; the replica with the least work gets the request", error)
                self._last_error = str(error)
            names = self._fleet.lines.keys() - shunned
            return min(names, key=self._dispatcher.work_of), None
        finally:
            self._metrics.decision_seconds.observe(time.perf_counter() - since)


class HeldSeat(Seat):
    """A seat from a router of Ray's: a call that is open as long as the request is there."""

    def __init__(self, line: ReplicaLine, call: DeploymentResponseGenerator[Any]) -> None:
        super().__init__(line)
        self._call = call

    def has_started(self) -> None:
        """Do nothing: a router of Ray's counts requests, and asks for no first tokens."""

    def has_ended(self) -> None:
        with contextlib.suppress(Exception):
            self._call.cancel()


class RayChooser(Chooser):
    """Asks Ray, with a call that holds a place in its books."""

    def __init__(self, handle: DeploymentHandle, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._hold = handle.options(method_name="hold", stream=True)
        self._fleet = fleet

    async def choose(
        self, request: RoutedRequest, avoid: Set[str], spec: RequestSpec
    ) -> Seat | Wait:
        call = self._hold.remote(prompt=list(spec.prompt_token_ids))
        try:
            name, ticket = await anext(call)
            line = await self._fleet.reach(name, ticket)
            self._metrics.on_sent(math.inf)
            return HeldSeat(line, call)
        except BaseException:
            with contextlib.suppress(Exception):
                call.cancel()
            raise
