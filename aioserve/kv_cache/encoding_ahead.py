"""An encoder input that is encoded over several steps, while others decode, before its tokens run.

Knows sizes and progress in tokens, and which requests the last step ran. How a part of an encoder's
work is done is the runner's business.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from aioserve.kv_cache.block_pool import BlockPool
from aioserve.kv_cache.encoder_cache import EncoderCacheManager
from aioserve.request import EncoderInput, Request

_NOBODY = "\0encoding ahead"  # holds room for what is being encoded: the id of no request


class Ahead(msgspec.Struct, frozen=True, gc=False):
    """What the runner is told in a step: encode so much of an input. A request whose tokens are not
    in the step, nor the request in the batch perhaps, needs it.
    """

    item: EncoderInput
    token_ids: Sequence[int]  # those that the input stands for
    num_before: int  # of the item's tokens: how much of the work earlier steps were told to do
    done: int  # how much is done with this step; all of them: the output is there

    @classmethod
    def of(cls, parts: Mapping[str, Mapping[str, Any]]) -> "Ahead | None":
        """What the `parts` of a step say; None if it encodes nothing ahead."""
        found: Ahead | None = parts.get("encoder", {}).get("ahead")
        return found

    @property
    def num_tokens(self) -> int:
        """How much of the work is this step's."""
        return self.done - self.num_before

    @property
    def is_last(self) -> bool:
        """Whether the output is there with this step."""
        return self.done == self.item.num_tokens


class _Wanted(NamedTuple):
    """An input that a request asks for, and what it needs before that one."""

    request: Request
    item: EncoderInput
    num_tokens: int  # to be encoded for the request, up to this input
    before: Collection[str]  # contents


class EncodingAhead:
    """At most one input at a time: the first that a policy asks for in a step, and then until it is
    done, or no request needs it, or a step asks for another one alone, or for its room and not for
    it. What was begun for nothing is dropped.
    """

    def __init__(self, cache: EncoderCacheManager, chunk: int, pool: BlockPool) -> None:
        """`chunk`: most tokens that a step encodes beside other requests; 0: any number. Requests
        that run have blocks of `pool`.
        """
        self.chunk, self._pool = chunk, pool
        self._cache = cache
        #: Of the last step that was sent; None before the first, when no step had an image.
        self._last: Collection[Request] | None = None
        self._wanted: list[_Wanted] = []  # asked for in this step
        self._lacks_room = False  # an input that this step was to encode
        self._owner: Request | None = None  # of what is begun
        self._item: EncoderInput | None = None  # begun and not done
        self._done = 0  # of its tokens
        self._told: tuple[int, EncoderInput] | None = None  # by which step, of which input

    def is_begun(self, item: EncoderInput) -> bool:
        """Whether the cache has room for the output, and it is not there yet."""
        return self._item is not None and item.content_hash == self._item.content_hash

    def delays(
        self, request: Request, item: EncoderInput, num_tokens: int, before: Collection[str]
    ) -> bool:
        """Whether the tokens of `item`, whose output is missing, have to wait until it is encoded
        beside others. With it, a step would encode `num_tokens` for the request, which reads the
        contents `before` first.
        """
        if not self.is_begun(item) and (not self.chunk or num_tokens <= self.chunk):
            return False
        if not self._is_beside_others(request):
            if self.is_begun(item):
                self.drop()  # the step encodes what is left: the runner may still have its part
            return False
        self._wanted.append(_Wanted(request, item, num_tokens, frozenset(before)))
        return True

    def lack_room(self) -> None:
        """There is no room for an input that the step was to encode."""
        self._lacks_room = True

    def begin_step(self) -> None:
        """Nothing is asked for yet in the step that is planned."""
        self._wanted, self._lacks_room = [], False

    def plan(
        self, tokens: Collection[Request], step_id: int, num_encoded: int, most: int
    ) -> Ahead | None:
        """What a step does ahead that runs these requests and encodes `num_encoded` tokens: what is
        left of the chunk, or else one token, but at most `most`.
        """
        self._last = tokens
        self._make_room()
        if not self._wanted or most <= 0:
            return None
        if not any(self.is_begun(wanted.item) for wanted in self._wanted) and not self._begin():
            return None
        assert self._item is not None, "begun"
        assert self._owner is not None, "begun with it"
        item, owner, before = self._item, self._owner, self._done
        num_tokens = min(max(self.chunk - num_encoded, 1), most)
        self._done = min(before + num_tokens, item.num_tokens)
        self._told = step_id, item
        token_ids = owner.token_ids[item.position : item.end]
        if self._done == item.num_tokens:
            self._item = None
            self._cache.release(_NOBODY, item)
        return Ahead(item, token_ids, before, self._done)

    def skip(self) -> None:
        """A step without tokens: there is nothing that could be delayed."""
        self._last = ()
        self._make_room()

    def _make_room(self) -> None:
        """Drop what is begun if it takes room, and the step did not come as far as to ask for it:
        its own request may need that room before.
        """
        if self._lacks_room and not any(self.is_begun(wanted.item) for wanted in self._wanted):
            self.drop()

    def leave(self, request: Request) -> None:
        """The request has ended: what was begun for it is dropped."""
        if self._owner is request:
            self.drop()
            self._owner = None

    def drop(self) -> None:
        """Give up what is begun and not done."""
        if self._item is not None:
            self._cache.drop(self._item)
            self._item = None

    def distrust(self, last_step_id: int) -> None:
        """What steps after that one did ahead is not there: the runner may not have them."""
        self.drop()
        if self._told is not None and self._told[0] > last_step_id:
            self._cache.drop(self._told[1])
        self._told = None

    def _is_beside_others(self, request: Request) -> bool:
        if self._last is None:
            return self._pool.num_used_blocks > len(request.block_ids)
        return any(r is not request and not r.status.is_finished for r in self._last)

    def _begin(self) -> bool:
        """Make room for the first that is wanted; False if there is none."""
        self.drop()
        for owner, item, num_tokens, before in self._wanted:
            if item.content_hash not in self._cache and not owner.status.is_finished:
                if not self._cache.can_allocate(num_tokens, before):
                    return False
                self._owner, self._item, self._done = owner, item, 0
                self._cache.hold_ahead(_NOBODY, item)
                return True
        return False
