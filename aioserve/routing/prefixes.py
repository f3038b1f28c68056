"""How much of a prompt each replica holds, in tokens, as a router asks.

Knows the index of blocks. What is known may be older than what is: KV caches tell of a block after
it has come or gone.
"""

from aioserve.routing.prefix_index import PrefixIndex
from aioserve.routing.views import RoutedRequest


class Prefixes:
    """Cached tokens of prompts, by replica. All is 0 unless the router `uses_prefixes`."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self._index = PrefixIndex() if index is None else index  # an empty one is false

    def cached_tokens(self, request: RoutedRequest, name: str) -> int:
        """Tokens of the prompt, from its first on, that the replica of this name holds. Costs
        O(blocks that it holds).
        """
        return self._index.num_blocks(name, request.block_hashes) * request.block_size

    def longest(self, request: RoutedRequest) -> tuple[int, list[str]]:
        """Tokens of the longest prefix that any replica holds, and the names of those that hold as
        much: `(0, [])` if none holds any. Costs O(blocks + replicas).
        """
        count, names = self._index.longest(request.block_hashes)
        return count * request.block_size, names

    def by_name(self, request: RoutedRequest) -> dict[str, int]:
        """Tokens of the prompt that each replica holds, of those that hold any. Costs O(blocks +
        replicas).
        """
        size = request.block_size
        found = self._index.num_blocks_by_name(request.block_hashes)
        return {name: count * size for name, count in found.items()}
