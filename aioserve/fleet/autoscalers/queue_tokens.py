"""As many replicas as have no more tokens queued, nor more KV cache in use, than their targets.

Source: the autoscaling policy of `aioserve.fleet.ray`, which Ray Serve asks; its delays are here as
`stable_seconds`. A queue in tokens tells a long document from a short question.

Simplified: while a replica has not said how full its KV cache is, none is stopped.

Cost: O(n) of n replicas.
"""

import math
from typing import Annotated

from msgspec import Meta

from aioserve.fleet.routing import (
    AutoscalerInterface,
    AutoscalerOptions,
    FleetView,
    NonNegativeFloat,
    PositiveFloat,
)


class QueueTokens(AutoscalerInterface):
    """Scales by queued prompt tokens and KV cache, down only after a while."""

    class Options(AutoscalerOptions):
        queued_tokens: PositiveFloat = 8192.0  # of prompts without a first token, a replica
        kv_cache: Annotated[float, Meta(gt=0, le=1)] = 0.8  # share in use, a replica
        stable_seconds: NonNegativeFloat = 60.0  # for which fewer must have been enough

    options: Options

    def decide(self, fleet: FleetView) -> int:
        tokens = sum(replica.num_unstarted_tokens for replica in fleet.replicas)
        used = sum(
            1 - replica.num_free_kv_tokens / replica.num_kv_tokens
            for replica in fleet.replicas
            if replica.num_kv_tokens
        )
        wanted = max(tokens / self.options.queued_tokens, used / self.options.kv_cache)
        if not all(replica.num_kv_tokens for replica in fleet.replicas):
            wanted = max(wanted, fleet.num_replicas)
        return self.steady(math.ceil(wanted), fleet, self.options.stable_seconds)
