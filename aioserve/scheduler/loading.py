"""Who is in no line because its blocks are on their way, and what a connector hears of steps.

Knows requests and the connector, which may not be there. Knows nothing about order or steps' rows.
"""

from aioserve.kv_cache import KVCacheManager, KVConnectorMetadata
from aioserve.request import Request


class Loading:
    """Part of the `RequestBook`: without a connector, nothing ever happens here."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._connector = kv_cache.connector
        self.requests: set[Request] = set()
        self._ready: list[Request] = []  # those whose blocks came, until they are in line

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        """Of all of them."""
        return sum(request.num_tokens for request in self.requests)

    def takes(self, request: Request) -> bool:
        """Whether a new request has to wait for blocks first."""
        if self._connector is None or not self._kv_cache.enable_prefix_caching:
            return False
        if not request.takes_cached_prefix:
            return False
        num_computed = len(self._kv_cache.get_computed_blocks(request))
        if not self._connector.on_new_request(request, num_computed):
            return False
        self.requests.add(request)
        return True

    def begin_step(self) -> list[Request]:
        """A step will be planned: returns the requests whose blocks came. Each `leave`s once it is
        in line, and is returned by the next step again if its order could not be told.
        """
        if self._connector is None:
            return []
        self._ready += self._connector.begin_step()
        return self._ready.copy()

    def leave(self, request: Request) -> None:
        """The request is in line: it needs no blocks from the connector any more."""
        self._ready.remove(request)
        self.requests.discard(request)

    def build_meta(self, step_id: int) -> KVConnectorMetadata | None:
        """What the runner copies in the step that was planned."""
        return None if self._connector is None else self._connector.build_connector_meta(step_id)

    def discard_steps(self, last_step_id: int) -> None:
        """No step after that one goes to the runner."""
        if self._connector is not None:
            self._kv_cache.forget_loads(last_step_id)
            self._connector.discard_steps(last_step_id)

    def finish(self, request: Request) -> None:
        """It has ended, wherever it was."""
        if self._connector is not None:
            self.requests.discard(request)
            if request in self._ready:
                self._ready.remove(request)
            self._connector.request_finished(request)
