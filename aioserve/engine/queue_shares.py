"""The shares of the waiting queue that API keys have: loaded with the first request of a key.

Knows names of keys and lengths of prompts; knows no order.
"""

from collections import Counter

from aioserve.config import EngineConfig
from aioserve.errors import KeyLimitError
from aioserve.request import Request, RequestSpec


class QueueShares:
    """The shares of the waiting queue that API keys have, and may have: no key fills it alone. A
    sequence counts until a step has it for the first time; requests without a key have no share.
    """

    def __init__(self, config: EngineConfig) -> None:
        share, scheduler = config.access.max_queue_share, config.scheduler
        self._max_requests = max(1, int(share * scheduler.max_waiting_requests))
        limit = scheduler.max_waiting_tokens
        self._max_tokens = None if limit is None else max(1, int(share * limit))
        self._num_requests: Counter[str] = Counter()
        self._num_tokens: Counter[str] = Counter()

    def check(self, spec: RequestSpec) -> None:
        """Raises `KeyLimitError` if the key of the request has no room in the queue for all of its
        samples.
        """
        name, n = spec.key_name, spec.sampling_params.n
        if not name:
            return
        waiting = self._num_requests[name]
        if waiting + n > self._max_requests:
            raise KeyLimitError(
                f"key {name!r} has {waiting} sequences waiting already, and {n} more would be over "
                f"its share of the queue ({self._max_requests}, access.max_queue_share)"
            )
        tokens, more = self._num_tokens[name], n * len(spec.prompt_token_ids)
        if self._max_tokens is not None and waiting and tokens + more > self._max_tokens:
            raise KeyLimitError(
                f"key {name!r} has {tokens} prompt tokens waiting already, and {more} more would "
                f"be over its share of the queue ({self._max_tokens}, access.max_queue_share)"
            )

    def add(self, request: Request) -> None:
        """Count a sequence that is in the queue now."""
        if name := request.spec.key_name:
            self._num_requests[name] += 1
            self._num_tokens[name] += request.num_prompt_tokens

    def leave(self, request: Request) -> None:
        """A step has it for the first time, or it has ended before."""
        if name := request.spec.key_name:
            self._num_requests[name] -= 1
            self._num_tokens[name] -= request.num_prompt_tokens
            if not self._num_requests[name]:
                del self._num_requests[name], self._num_tokens[name]
