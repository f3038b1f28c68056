"""Blocks that a KV connector loads, as one of the things that requests need.

A request whose blocks are on their way is in no line, which takes any number of steps and may fail:
then the request is computed instead, and nothing here has to be undone. Knows which requests wait
so; the connector knows where the blocks are.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aioserve.kv_cache.block_pool import BLOCKS, BlockPool
from aioserve.kv_cache.connector import KVConnectorBase
from aioserve.kv_cache.resource import Resource
from aioserve.request import Request


class _KVBlocks:
    """The pool of KV blocks, as a connector sees it."""

    name = BLOCKS

    def __init__(self, pool: BlockPool) -> None:
        self.lookup, self.forget_blocks = pool.lookup, pool.forget_blocks

    def needed(self, num_blocks: int) -> range:
        return range(num_blocks)

    def num_reached_blocks(self, request: Request, num_blocks: int) -> int:
        return num_blocks  # the manager looks for them itself


class ConnectorLoads(Resource):
    """The loads of a connector, as the scheduler and the manager tell it of them, and the requests
    that it holds back.
    """

    name = "loads"

    def __init__(
        self,
        connector: KVConnectorBase,
        block_size: int,
        pool: BlockPool,
        others: Iterable[Resource],
    ) -> None:
        """The connector keeps the KV blocks of `pool`, and of the `others` what has pools too."""
        self._connector = connector
        self._block_size = block_size
        connector.join(_KVBlocks(pool))
        for other in others:
            other.join(connector)
        self._aside: set[Request] = set()
        self._ready: list[Request] = []  # requests whose blocks came, until they are in line

    @property
    def aside(self) -> set[Request]:
        return self._aside

    def holds_back(self, request: Request, num_cached_blocks: int) -> bool:
        if not self._connector.on_new_request(request, num_cached_blocks):
            return False
        self._aside.add(request)
        return True

    def ready(self) -> list[Request]:
        self._ready += self._connector.begin_step()
        return self._ready.copy()

    def let_go(self, request: Request) -> None:
        self._ready.remove(request)
        self._aside.discard(request)

    def learn_prices(self, step_time: Any) -> None:
        self._connector.step_time = step_time

    def num_loadable_tokens(self, request: Request, num_cached_tokens: int) -> int:
        return self._connector.get_num_new_matched_tokens(request, num_cached_tokens)

    def take(self, request: Request, num_blocks: int, num_shared_tokens: int) -> None:
        num_loaded = request.num_computed_tokens - num_blocks * self._block_size
        self._connector.update_state_after_alloc(request, num_loaded)

    def plan(self, tokens: dict[Request, int], step_id: int) -> Mapping[str, Any]:
        found = self._connector.build_connector_meta(step_id)
        if found is None:
            return {}
        told: dict[str, Any] = {"saves": found.saves, "loads": found.loads}
        return told | {"others": found.others} if found.others else told

    def discard_steps(self, last_step_id: int) -> None:
        self._connector.discard_steps(last_step_id)

    def leave(self, request: Request) -> None:
        self._aside.discard(request)
        if request in self._ready:
            self._ready.remove(request)
        self._connector.request_finished(request)

    def forget(self, request: Request, block_hashes: Sequence[bytes]) -> None:
        """Whether what steps in flight load or save is there is not known: nothing of it counts. A
        request that would have read it may have been preempted since.
        """
        self._connector.forget_unsettled()

    def clear(self) -> None:
        self._connector.reset()
