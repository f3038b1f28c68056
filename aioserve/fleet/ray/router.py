"""Ray Serve's request router in front of engines: tells the ingress which replicas there are.

The ingress sends its requests to them by lines of its own. What goes through Ray, such as a call of
a handle elsewhere, goes to the replica with the shortest queue. Knows no request. Ray sends this
module to other processes by value, with all that stands in it: what is shared stands in `fleet`.
"""

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from aioserve.fleet.ray.fleet import TICKET, deployment_key, publish


class AioserveRouter(RequestRouter):
    """One per deployment and process that calls it. All of it on the router's loop."""

    def initialize_state(self) -> None:
        """Begin without the key of the deployment, as Ray calls this before it names replicas."""
        self._key = ""  # of the deployment, which its first replica tells

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Publish the replicas that there are from now on."""
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
        """Return all of them: Ray takes the one with the shortest queue."""
        return [candidate_replicas]
