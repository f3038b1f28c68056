"""Blocks that a KV connector loads, as one of the things that requests need.

A request whose blocks are on their way is in no line, which takes any number of steps and may fail:
then the request is computed instead, and nothing here has to be undone. Knows which requests wait
so; the connector knows where the blocks are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aioserve.kv_cache.connector import KVConnectorBase
from aioserve.kv_cache.resources.base import Resource
from aioserve.request import Request


class ConnectorLoads(Resource):
    """What the scheduler and the manager tell a connector, and what it holds back."""

    name = "loads"

    def __init__(
        self,
        connector: KVConnectorBase,
        block_size: int,
        forget_blocks: Callable[[Iterable[int]], None],
    ) -> None:
        """`forget_blocks` makes unfindable what these blocks hold."""
        self._connector = connector
        self._block_size = block_size
        self._forget_blocks = forget_blocks
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
        return {} if found is None else {"saves": found.saves, "loads": found.loads}

    def discard_steps(self, last_step_id: int) -> None:
        self._forget_blocks(self._connector.loading_blocks(last_step_id))
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
        self._forget_blocks(self._connector.loading_blocks())
        self._connector.forget_unsettled()

    def clear(self) -> None:
        self._connector.reset()
