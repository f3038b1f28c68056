"""Ray Serve's request router with the routers of `aioserve.routing`.

Knows Ray's replicas and follows what they say of themselves. The choice itself is made where the
lab makes it.
"""

import asyncio
import logging
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from aioserve.ray.kv_feed import Ticket, follow
from aioserve.ray.route import ROUTE, Route
from aioserve.routing import (
    ReplicaReport,
    RoutedRequest,
    RouterError,
    make_dispatcher,
)

logger = logging.getLogger(__name__)

# What is known of a call that does not say.
UNKNOWN = RoutedRequest(num_tokens=0)


class AioserveRouter(RequestRouter):
    """One per deployment and process that calls it. All of it on the router's loop."""

    def initialize_state(
        self, router: str = "prefix", options: dict[str, Any] | None = None, seed: int = 0
    ) -> None:
        """Make the router that `router` names: a name, a module or a file."""
        self._dispatcher = make_dispatcher(router, options, seed=seed, clock=time.monotonic)
        self._known: dict[ReplicaID, str] = {}
        self._followers: dict[ReplicaID, asyncio.Task[None]] = {}
        self._last_error = ""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Those that there are from now on."""
        super().update_replicas(replicas)
        current = {replica.replica_id: replica for replica in replicas}
        for replica_id in [known for known in self._known if known not in current]:
            self._forget(replica_id)
        kind = self._dispatcher.kind
        for replica_id, replica in current.items():
            if replica_id not in self._known:
                self._known[replica_id] = name = replica_id.unique_id
                self._tell_router(self._dispatcher.join, name)
                ticket = replica.replica_metadata.get("kv_feed")
                if ticket is not None and (kind.uses_prefixes or kind.uses_reports):
                    self._followers[replica_id] = self._event_loop.create_task(
                        self._follow(name, Ticket.decode(ticket))
                    )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """First the one that was chosen, then all by their work: for one that has no seat left. An
        empty list for a call that is refused or waits, until its caller has taken it back: then
        any, at which Ray sees that it is over.
        """
        route = _route_of(pending_request)
        if pending_request is not None and pending_request.future.done():
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if route is not None and route.only is not None:
            return [[by_name[route.only]]] if route.only in by_name else []
        if pending_request is not None:  # else Ray asks again at once, and nothing else has a turn
            pending_request.routing_context.should_backoff = True
        if route is not None and route.answer is not None:
            return []
        known = set(self._known.values())
        if not by_name.keys() <= known:  # Ray has a replica that is too new to be known here
            return [candidate_replicas]
        chosen = self._choose(route, by_name, frozenset(known - by_name.keys()))
        if chosen is None:
            return []
        others = sorted(by_name.keys() - {chosen}, key=self._dispatcher.work_of)
        return [[by_name[name]] for name in (chosen, *others)]

    def _choose(
        self, route: Route | None, names: dict[str, RunningReplica], gone: frozenset[str]
    ) -> str | None:
        """The name of a replica, of those in `names`; None: the call is refused or waits."""
        request, avoid = UNKNOWN, gone
        if route is not None:
            request, avoid = route.request, gone | route.avoid
            if not names.keys() - avoid:
                avoid = gone
        try:
            answer = self._dispatcher.choose(request, avoid)
        except RouterError as error:
            if str(error) != self._last_error:
                logger.error("%s; the replica with the least work gets the request", error)
                self._last_error = str(error)
            return min(names.keys() - avoid, key=self._dispatcher.work_of)
        if isinstance(answer, str):
            return answer
        if route is None:  # such as a health check: its caller hears no refusal
            return min(names.keys() - avoid, key=self._dispatcher.work_of)
        if answer is not None:
            route.answered(answer)
        return None

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """It is there now: work, until its caller says that it has ended. Ray tells of an end, too,
        but of a quick one before this. An order for one replica, such as an abort, is no work.
        """
        name, route = self._known.get(replica_id), _route_of(pending_request)
        if name is not None and route is not None and route.only is None:
            route.assign(self._dispatcher.assign(route.request, name))

    def _forget(self, replica_id: ReplicaID) -> None:
        if (name := self._known.pop(replica_id, None)) is not None:
            self._tell_router(self._dispatcher.leave, name)
        if (task := self._followers.pop(replica_id, None)) is not None:
            task.cancel()

    def _tell_router(self, tell: Any, name: str) -> None:
        """A router that raises when replicas come and go keeps no replica from serving."""
        try:
            tell(name)
        except RouterError:
            logger.exception("the router has not taken in that a replica came or went")

    async def _follow(self, name: str, ticket: Ticket) -> None:
        dispatcher = self._dispatcher

        def on_report(report: ReplicaReport) -> None:
            reported = report, time.monotonic()
            dispatcher.on_report(name, lambda: reported)

        try:
            await follow(ticket, lambda event: dispatcher.on_kv_event(name, event), on_report)
        except Exception:
            logger.exception("the KV cache of replica %s cannot be followed", name)


def _route_of(pending_request: PendingRequest | None) -> Route | None:
    route = None if pending_request is None else pending_request.kwargs.get(ROUTE)
    return route if isinstance(route, Route) else None
