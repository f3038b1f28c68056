"""Ray's own prefix router, for calls that have token ids where its own have text.

It notes which texts it has sent where, and guesses from that what is cached there.
"""

import dataclasses
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.request_router import PendingRequest, RunningReplica


class TextPrefixRouter(PrefixCacheAffinityRouter):
    """A character for each token."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        return "".join(map(chr, pending_request.kwargs.get("prompt", ())))

    async def _prefix_match_best_replicas(
        self, pending_request: PendingRequest | None, candidate_replicas: list[RunningReplica]
    ) -> Any:
        if pending_request is not None and "prompt" in pending_request.kwargs:  # it looks at these
            pending_request = dataclasses.replace(pending_request, args=[None])
        elif pending_request is not None:
            pending_request = dataclasses.replace(pending_request, args=[])
        return await super()._prefix_match_best_replicas(pending_request, candidate_replicas)
