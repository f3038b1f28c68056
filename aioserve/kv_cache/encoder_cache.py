"""Where outputs of encoders (images, audio) wait until the decoder has read them.

Knows content hashes, sizes in tokens, and which requests need them. No tensors: the runner keeps
those and is told what to drop.
"""

from collections import OrderedDict
from collections.abc import Iterable

from aioserve.request import EncoderInput


class EncoderCacheManager:
    """Encoder outputs by content, shared by all requests that need them.

    An output is held while a request needs it; afterwards it stays until its room is wanted,
    least recently released first.
    """

    def __init__(self, num_slots: int) -> None:
        """`num_slots` is the room, in tokens."""
        self.num_slots = num_slots
        self.num_inputs = 0  # that were to be computed; what was planned and taken back is not
        self.num_tokens = 0  # of these
        self.num_hits = 0  # inputs of requests that were there, or on their way
        self._num_free_slots = num_slots  # not taken by anything, held or released
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}  # by content: ids of requests
        self._released: OrderedDict[str, None] = OrderedDict()
        self._evicted: list[str] = []
        self._unread: set[str] = set()  # computed ahead, and held by no request since

    def __contains__(self, content_hash: str) -> bool:
        return content_hash in self._sizes

    @property
    def num_used_slots(self) -> int:
        """Taken by outputs, held or released."""
        return self.num_slots - self._num_free_slots

    def can_allocate(self, num_tokens: int, keep: Iterable[str]) -> bool:
        """Whether there is room, or can be made by dropping unused outputs, except `keep`."""
        droppable = sum(self._sizes[h] for h in self._released.keys() - set(keep))
        return num_tokens <= self._num_free_slots + droppable

    def hold(self, request_id: str, item: EncoderInput) -> None:
        """Keep an output for a request; make room if it is not there yet (`can_allocate` first)."""
        content_hash = item.content_hash
        if content_hash in self._unread:
            self._unread.remove(content_hash)
        elif content_hash in self._sizes:
            self.num_hits += request_id not in self._holders.get(content_hash, ())
        else:
            self.num_inputs += 1
            self.num_tokens += item.num_tokens
            while self._num_free_slots < item.num_tokens:
                evicted, _ = self._released.popitem(last=False)
                self._num_free_slots += self._sizes.pop(evicted)
                self._evicted.append(evicted)
                self._unread.discard(evicted)
            self._sizes[content_hash] = item.num_tokens
            self._num_free_slots -= item.num_tokens
            if content_hash in self._evicted:
                self._evicted.remove(content_hash)  # it comes again before the runner was told
        self._released.pop(content_hash, None)
        self._holders.setdefault(content_hash, set()).add(request_id)

    def hold_ahead(self, holder: str, item: EncoderInput) -> None:
        """As `hold`, for an output that is computed before a request takes it."""
        self.hold(holder, item)
        self._unread.add(item.content_hash)

    def release(self, request_id: str, item: EncoderInput) -> None:
        """The request needs it no longer. Ignores what it does not hold."""
        holders = self._holders.get(item.content_hash)
        if holders is None or request_id not in holders:
            return
        holders.remove(request_id)
        if not holders:
            del self._holders[item.content_hash]
            self._released[item.content_hash] = None

    def drop(self, item: EncoderInput) -> None:
        """Forget an output that will not be computed after all, even if a request holds it."""
        self._holders.pop(item.content_hash, None)
        self._unread.discard(item.content_hash)
        self._released.pop(item.content_hash, None)
        size = self._sizes.pop(item.content_hash, 0)
        self._num_free_slots += size
        self.num_inputs -= bool(size)
        self.num_tokens -= size
        self._evicted.append(item.content_hash)  # an older copy may be with the runner

    def forget(self, items: Iterable[EncoderInput]) -> None:
        """Drop these outputs unless a request holds them: the step that was to compute them has
        failed.
        """
        for item in items:
            if item.content_hash in self._released:
                del self._released[item.content_hash]
                self._num_free_slots += self._sizes.pop(item.content_hash)
                self._evicted.append(item.content_hash)
                self._unread.discard(item.content_hash)

    def forget_released(self) -> None:
        """Drop the outputs that no request holds."""
        for content_hash in self._released:
            self._num_free_slots += self._sizes.pop(content_hash)
            self._evicted.append(content_hash)
            self._unread.discard(content_hash)
        self._released.clear()

    @property
    def has_holders(self) -> bool:
        """Whether live requests hold anything."""
        return bool(self._holders)

    def take_evicted(self) -> list[str]:
        """Contents that the runner may drop, told once."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def return_evicted(self, content_hashes: Iterable[str]) -> None:
        """The runner was not told of these after all."""
        self._evicted += [h for h in content_hashes if h not in self._sizes]
