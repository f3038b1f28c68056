"""Ray Serve's request router in front of engines: tells the ingress which replicas there are."""

import threading
from collections.abc import Callable

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

Tickets = dict[str, str]  # of KV feeds, by names of replicas

_lock = threading.Lock()
_known: dict[str, Tickets] = {}  # by deployment
_followers: dict[str, list[Callable[[Tickets], object]]] = {}


def publish(deployment: str, tickets: Tickets) -> None:
    """These are all replicas of a deployment from now on. From any thread."""
    with _lock:
        _known[deployment] = tickets
        followers = list(_followers.get(deployment, ()))
    for follower in followers:
        follower(tickets)


def subscribe(deployment: str, follower: Callable[[Tickets], object]) -> None:
    """Call `follower` with all replicas of a deployment, now if any are known, and whenever they
    change: on the thread of Ray's router.
    """
    with _lock:
        _followers.setdefault(deployment, []).append(follower)
        tickets = _known.get(deployment)
    if tickets is not None:
        follower(tickets)


def unsubscribe(deployment: str, follower: Callable[[Tickets], object]) -> None:
    """End a subscription: `follower` is not called for this deployment any more."""
    with _lock:
        _followers[deployment].remove(follower)


# Ray Serve's request router in front of engines: tells the ingress which replicas there are. The
# ingress sends its requests to them by lines of its own. What goes through Ray, such as a call of a
# handle elsewhere, goes to the replica with the shortest queue. Knows no request.


#: The key of a replica's metadata under which its ticket lies.
TICKET = "kv_feed"


def deployment_key(name: str, app_name: str) -> str:
    """What the directory calls a deployment."""
    return f"{app_name}#{name}"


class AioserveRouter(RequestRouter):
    """One per deployment and process that calls it. All of it on the router's loop."""

    def initialize_state(self) -> None:
        """Begin without the key of the deployment, as Ray calls this before it names replicas."""
        self._key = ""  # of the deployment, which its first replica tells

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Those that there are from now on."""
        super().update_replicas(replicas)
        self._publish(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish(list(self.curr_replicas.values()))

    def _publish(self, replicas: list[RunningReplica]) -> None:
        tickets = {
            replica.replica_id.unique_id: replica.replica_metadata[TICKET]
            for replica in replicas
            if TICKET in replica.replica_metadata
        }
        for replica in replicas:
            deployment = replica.replica_id.deployment_id
            self._key = deployment_key(deployment.name, deployment.app_name)
        if self._key:
            publish(self._key, tickets)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All of them: Ray takes the one with the shortest queue."""
        return [candidate_replicas]
