"""The verbs with which a policy keeps a conversation's KV blocks for a time: `pin` and `unpin`."""

from aioserve.request import Request
from aioserve.scheduler.succession import Switchable


class Leasing(Switchable):
    """A scheduler whose policy may hold cached prefixes for later requests."""

    def pin(self, request: Request, until: float) -> int:
        """Keep the request's cached prefix until a time of the clock, for the next turn of its
        conversation: a lease, of which each conversation of a client (hint `session`, else the
        request alone) has one. `unpin` ends it.

        Leases hold at most the share `max_leased_share` of the KV blocks. The oldest make room for
        a new one, and for a request beside which nothing runs. Returns the tokens that are kept.
        """
        leases = self.kv_cache.leases
        block_ids = self.kv_cache.get_computed_blocks(request)
        num_blocks = leases.pin(request.conversation, block_ids, until)
        return num_blocks * self.kv_cache.block_size

    def unpin(self, request: Request) -> None:
        """End the lease of the request's conversation before its time, if there is one."""
        self.kv_cache.leases.end(request.conversation)
