"""Ray Serve's request router with the routers of `aioserve.routing`.

Knows Ray's replicas, follows their KV caches and keeps account of their work. The choice itself is
made where the lab makes it.
"""

import asyncio
import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from aioserve.ray.kv_feed import Ticket, follow
from aioserve.ray.route import ROUTE, Route
from aioserve.routing import Replica, RoutedRequest, make_router

logger = logging.getLogger(__name__)

# What is known of a call that does not say.
UNKNOWN = RoutedRequest(0)


class AioserveRouter(RequestRouter):
    """One per deployment and process that calls it. All of it on the router's loop."""

    def initialize_state(self, router: str = "prefix", seed: int = 0) -> None:
        """Make the router named `router`, one of `aioserve.routing.ROUTERS`."""
        self._choice = make_router(router, seed)
        self._known: dict[ReplicaID, Replica] = {}
        self._places: tuple[Replica, ...] = ()
        self._followers: dict[ReplicaID, asyncio.Task[None]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Those that there are from now on."""
        super().update_replicas(replicas)
        current = {replica.replica_id: replica for replica in replicas}
        for replica_id in [known for known in self._known if known not in current]:
            self._forget(replica_id)
        for replica_id, replica in current.items():
            if replica_id not in self._known:
                self._known[replica_id] = Replica(replica_id.unique_id)
                ticket = replica.replica_metadata.get("kv_feed")
                if self._choice.follows_kv_events and ticket is not None:
                    self._followers[replica_id] = self._event_loop.create_task(
                        self._follow(replica_id.unique_id, Ticket.decode(ticket))
                    )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """First the one that was chosen, then all by their work: for one that has no seat left."""
        route = _route_of(pending_request)
        if route is not None:
            candidate_replicas = self._fit(candidate_replicas, route)
        if not candidate_replicas:
            return []
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        places = tuple(self._known[replica_id] for replica_id in by_id if replica_id in self._known)
        if len(places) < len(by_id):  # Ray has a replica that is too new to be known here
            return [candidate_replicas]
        if places != self._places:  # the same tuple, while no replica comes or goes
            self._places = places
        choice = self._choice.choose(UNKNOWN if route is None else route.request, self._places)
        if route is not None:
            route.chosen = (self._places[choice.place], choice)
        ids = list(by_id)
        others = sorted(
            (i for i in range(len(ids)) if i != choice.place), key=lambda i: self._places[i].work
        )
        return [[by_id[ids[i]]] for i in (choice.place, *others)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """It is there now: work, until its caller says that it has ended. Ray tells of an end, too,
        but of a quick one before this.
        """
        replica, route = self._known.get(replica_id), _route_of(pending_request)
        if replica is not None and route is not None:
            route.assign(replica)

    def _fit(self, candidates: list[RunningReplica], route: Route) -> list[RunningReplica]:
        """Those that the call wants, or may have."""
        known = [(self._known.get(replica.replica_id), replica) for replica in candidates]
        if route.only is not None:
            return [replica for own, replica in known if own is route.only]
        if not route.avoid:
            return candidates
        return [replica for own, replica in known if own not in route.avoid] or candidates

    def _forget(self, replica_id: ReplicaID) -> None:
        if self._known.pop(replica_id, None) is not None:
            self._choice.forget(replica_id.unique_id)
        if (task := self._followers.pop(replica_id, None)) is not None:
            task.cancel()

    async def _follow(self, name: str, ticket: Ticket) -> None:
        try:
            await follow(ticket, lambda event: self._choice.on_kv_event(name, event))
        except Exception:
            logger.exception("the KV cache of replica %s cannot be followed", name)


def _route_of(pending_request: PendingRequest | None) -> Route | None:
    route = None if pending_request is None else pending_request.kwargs.get(ROUTE)
    return route if isinstance(route, Route) else None
