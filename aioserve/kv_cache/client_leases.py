"""Leases that clients ask for: a prefix is kept for as long as a request states.

Clients state a time by Anthropic's `cache_control.ttl`, or by the hint `cache_seconds`. The rules
keep one client from ending what another keeps, and leases of clients give way before a running or
paused request is preempted. Loaded with the first request that asks. Knows names of clients and
blocks; knows no scheduler.
"""

from collections import Counter
from collections.abc import Hashable

from aioserve.kv_cache.block_pool import Lease, Leases
from aioserve.kv_cache.manager import KVCacheManager
from aioserve.request import Request

MAX_LEASES = 256  # of all clients together: what follows looks at each of them


def lease(kv_cache: KVCacheManager, request: Request, until: float) -> None:
    """Keep the cached prefix of a request that has ended until a time, for its client."""
    block_ids = kv_cache.get_computed_blocks(request)
    pin(kv_cache.leases, request.conversation, block_ids, until, request.spec.key_name)


def pin(
    leases: Leases, conversation: Hashable, block_ids: list[int], until: float, client: str
) -> int:
    """Hold these cached blocks until a time at the wish of a client, in the place of what the
    client has held of the conversation. Its earlier leases that this one covers, as those of
    earlier turns, end. Returns how many of the first blocks are held.

    Where `max_client_blocks` leaves no room, the client that holds the most loses its oldest lease
    if it holds more than this client would. Otherwise this client loses its own oldest one, or, if
    it has none, holds only the first blocks. So no client ends the leases of one that holds less.
    """
    leases.end((client, conversation))
    if not block_ids:
        return 0
    _end_covered(leases, block_ids, until, client)
    while len(_of_clients(leases)) >= MAX_LEASES:
        most, _ = Counter(lease.client for lease in _of_clients(leases)).most_common(1)[0]
        _end_oldest(leases, most)
    while (num_over := _over(leases, len(block_ids))) > 0:
        others = _num_blocks(leases)
        own = others.pop(client, 0)
        greediest, most_blocks = max(others.items(), key=lambda item: item[1], default=("", 0))
        if most_blocks > own + len(block_ids) - num_over:
            _end_oldest(leases, greediest)
        elif not _end_oldest(leases, client):
            block_ids = block_ids[: max(len(block_ids) - num_over, 0)]
    leases.pool.touch(block_ids)
    leases.add(Lease(conversation, block_ids, until, client))
    leases.client_rule = give_way
    return len(block_ids)


def give_way(leases: Leases) -> bool:
    """End a lease of the client that holds the most: its oldest that holds a block which no request
    does. False: no client has such a lease.
    """
    held = _num_blocks(leases)
    for lease in sorted(_of_clients(leases), key=lambda lease: -held[lease.client or ""]):
        if leases.has_alone(lease.block_ids):
            leases.end(lease.key)
            return True
    return False


def _of_clients(leases: Leases) -> list[Lease]:
    return [lease for lease in leases.held.values() if lease.client is not None]


def _num_blocks(leases: Leases) -> Counter[str]:
    """Return the blocks of each client's leases."""
    found: Counter[str] = Counter()
    for lease in _of_clients(leases):
        found[lease.client or ""] += len(lease.block_ids)
    return found


def _over(leases: Leases, more: int) -> int:
    return _num_blocks(leases).total() + more - leases.max_client_blocks


def _end_covered(leases: Leases, block_ids: list[int], until: float, client: str) -> None:
    """End each lease of the client that a new one until `until` makes needless: it holds the first
    of these blocks, and would end no later.
    """
    places = {block_id: place for place, block_id in enumerate(block_ids)}
    for lease in _of_clients(leases):  # equal last blocks have equal tokens before them
        is_beginning = places.get(lease.block_ids[-1]) == len(lease.block_ids) - 1
        if lease.client == client and is_beginning and lease.until <= until:
            leases.end(lease.key)


def _end_oldest(leases: Leases, client: str | None) -> bool:
    """End the oldest lease of a client. False: it has none."""
    for lease in _of_clients(leases):
        if lease.client == client:
            leases.end(lease.key)
            return True
    return False
