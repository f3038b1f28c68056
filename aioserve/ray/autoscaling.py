"""How many replicas there should be, from what their schedulers say.

Ray asks; the numbers are those of `EngineReplica.record_autoscaling_stats`. Keeps no state: delays
and bounds are Ray's.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingContext


class TokensQueued:
    """Autoscaling policy: enough replicas that none has more prompt tokens in its queue, nor more
    of its KV cache in use, than its target, were both spread evenly.
    """

    def __init__(
        self, target_queued_prompt_tokens: float = 8192.0, target_kv_cache_usage: float = 0.8
    ) -> None:
        """Both are of one replica; the usage is a share, 0 to 1."""
        self._tokens = target_queued_prompt_tokens
        self._usage = target_kv_cache_usage

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number that is wanted, before Ray's delays and bounds."""
        metrics = context.aggregated_metrics or {}
        tokens = sum(metrics.get("queued_prompt_tokens", {}).values())
        usage = sum(metrics.get("kv_cache_usage", {}).values())
        if not metrics and context.current_num_replicas:
            return context.target_num_replicas, {}  # no replica has reported yet
        wanted = max(tokens / self._tokens, usage / self._usage)
        busy = sum(metrics.get("num_requests", {}).values()) > 0
        return max(math.ceil(wanted), int(busy)), {}
