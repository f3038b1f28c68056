"""The encoder inputs (images, audio) of requests: which must run before which tokens may.

`EncoderOutputs` is the resource that the manager asks; `EncoderCacheManager` knows where outputs
wait until the decoder has read them, `EncodingAhead` which input is encoded over several steps
while others decode. Knows content hashes, positions and sizes, counted in tokens that get a vector
of the encoder. No tensors: the runner keeps those, is told what to drop, and decides how a part of
an encoder's work is done. Last, `ImageMemory` limits what prepared images take.
"""

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from aioserve.errors import EngineOverloadedError, RequestError
from aioserve.kv_cache.block_pool import BlockPool
from aioserve.kv_cache.resource import Ahead, EncoderLimits, Resource
from aioserve.request import EncoderInput, Request, RequestSpec, WaitReason


class EncoderCacheManager:
    """Encoder outputs by content, shared by all requests that need them.

    An output is held while a request needs it; afterwards it stays until its room is wanted,
    least recently released first.
    """

    def __init__(self, num_slots: int) -> None:
        """`num_slots` is the room, in tokens."""
        self.num_slots = num_slots
        self.num_inputs = 0  # that were to be computed; what was planned and taken back is not
        self.num_tokens = 0  # tokens of the inputs in `num_inputs`
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
        """Return whether there is room, or can be made by dropping unused outputs, except
        `keep`.
        """
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
            self.num_tokens += item.size
            while self._num_free_slots < item.size:
                evicted, _ = self._released.popitem(last=False)
                self._num_free_slots += self._sizes.pop(evicted)
                self._evicted.append(evicted)
                self._unread.discard(evicted)
            self._sizes[content_hash] = item.size
            self._num_free_slots -= item.size
            if content_hash in self._evicted:
                self._evicted.remove(content_hash)  # it comes again before the runner was told
        self._released.pop(content_hash, None)
        self._holders.setdefault(content_hash, set()).add(request_id)

    def hold_ahead(self, holder: str, item: EncoderInput) -> None:
        """Hold, as `hold`, an output that is computed before a request takes it."""
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
        """Whether live requests hold outputs of the encoder."""
        return bool(self._holders)

    def take_evicted(self) -> list[str]:
        """Contents that the runner may drop, told once."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def return_evicted(self, content_hashes: Iterable[str]) -> None:
        """The runner was not told of these after all."""
        self._evicted += [h for h in content_hashes if h not in self._sizes]


_NOBODY = "\0encoding ahead"  # holds room for what is being encoded: the id of no request


class _Wanted(NamedTuple):
    """An input that a request asks for, and what it needs before that one."""

    request: Request
    item: EncoderInput
    num_tokens: int  # to be encoded for the request, up to this input
    before: Collection[str]  # contents


class EncodingAhead:
    """The input that is encoded ahead, one at a time: the first that a policy asks for in a step,
    and then until it is done, or no request needs it, or a step asks for another one alone, or for
    its room and not for it. What was begun for nothing is dropped.
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
        """Return whether the cache has room for the output, and it is not there yet."""
        return self._item is not None and item.content_hash == self._item.content_hash

    def delays(
        self, request: Request, item: EncoderInput, num_tokens: int, before: Collection[str]
    ) -> bool:
        """Return whether the tokens of `item`, whose output is missing, have to wait until it is
        encoded beside others. With it, a step would encode `num_tokens` for the request, which
        reads the contents `before` first.
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
        """Note that there is no room for an input that the step was to encode."""
        self._lacks_room = True

    def begin_step(self) -> None:
        """Nothing is asked for yet in the step that is planned."""
        self._wanted, self._lacks_room = [], False

    def plan(
        self, tokens: Collection[Request], step_id: int, num_encoded: int, most: int
    ) -> Ahead | None:
        """Return what a step does ahead that runs these requests and encodes `num_encoded` tokens:
        what is left of the chunk, or else one token, but at most `most`.
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
        self._done = min(before + num_tokens, item.size)
        self._told = step_id, item
        token_ids = owner.token_ids[item.position : item.end]
        if self._done == item.size:
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
        """Give up an encoding that has begun and is not done."""
        if self._item is not None:
            self._cache.drop(self._item)
            self._item = None

    def distrust(self, last_step_id: int) -> None:
        """Forget what later steps did ahead: the runner may not have it."""
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


class EncoderOutputs(Resource):
    """A token of an encoder input is never scheduled unless the input's output is there, or is
    computed by the same step. Beside other requests, large ones are encoded ahead of their tokens.
    """

    name = "encoder"
    unfit = WaitReason.ENCODER_BUDGET

    def __init__(self, limits: EncoderLimits, pool: BlockPool) -> None:
        """`pool` has the KV blocks of requests."""
        self._limits = limits
        self._cache = EncoderCacheManager(limits.num_slots)
        self._ahead = EncodingAhead(self._cache, limits.chunk, pool)
        self._discard_plan()
        self._told: tuple[int, list[str]] = 0, []  # by the last step: contents to be dropped

    def check_alone(self, request: Request) -> None:
        """Each input must be in the prompt, and fit a step and the cache; all together, if prompts
        run whole. One that runs whole itself must fit what a full house leaves of a step: else it
        would wait as long as others come.
        """
        limits = self._limits
        room, num_tokens = min(limits.step_tokens, limits.num_slots), 0
        for i, item in enumerate(request.encoder_inputs):
            num_tokens = item.size + (num_tokens if limits.runs_whole_prompts else 0)
            if item.end > request.num_prompt_tokens:
                raise RequestError(
                    f"encoder_inputs[{i}] ends at {item.end}, but the prompt has "
                    f"{request.num_prompt_tokens} tokens",
                    param=f"encoder_inputs[{i}]",
                )
            if item.whole and item.num_tokens > limits.max_whole:
                raise RequestError(
                    f"encoder_inputs[{i}] does not fit: its {item.num_tokens} tokens have to run "
                    "in one step, and max_num_batched_tokens, less a decode with drafts of each of "
                    "max_num_seqs, or long_prefill_token_threshold is "
                    f"{max(limits.max_whole, 0)}",
                    param=f"encoder_inputs[{i}]",
                )
            if num_tokens > room:
                together = limits.runs_whole_prompts and i
                what = "it has, with those before it," if together else "it has"
                raise RequestError(
                    f"encoder_inputs[{i}] does not fit: {what} {num_tokens} tokens, and the "
                    f"smaller of max_encoder_tokens and encoder_cache_tokens is {room}",
                    param=f"encoder_inputs[{i}]",
                )

    def fit(self, request: Request, num_tokens: int, start: int, most: int) -> int:
        """Up to the first input that has no room. If the tokens would end inside one that runs
        whole: up to its end, of at most `most` tokens, else up to its beginning.
        """
        needed, seen = 0, set[str]()
        for _, item in _overlapping(request, start, num_tokens):
            if self._lacks(item) and item.content_hash not in seen:
                needed += item.size
                if self._ahead.delays(request, item, needed, seen):
                    return max(item.position - start, 0)
            # An output that is there is kept for its own tokens only: room for an earlier input
            # may be made of it, or two that do not fit together would wait for each other.
            seen.add(item.content_hash)
            if not self._cache.can_allocate(needed, seen):
                self._ahead.lack_room()
                return max(item.position - start, 0)
            if needed > self._token_budget:
                return max(item.position - start, 0)
        end = start + num_tokens
        if seen and item.whole and item.position < end < item.end:  # the last that they reach
            end = item.end if item.end - start <= most else max(item.position, start)
        return end - start

    def serve(self, request: Request, start: int, num_tokens: int) -> set[Request]:
        """Schedule and hold what these tokens need."""
        missing = self._missing(request, start, num_tokens)
        owners = set()
        for _, item in _overlapping(request, start, num_tokens):
            if not self._lacks(item):  # held before room is made for others
                self._cache.hold(request.request_id, item)
                if self._fresh.get(item.content_hash, request) is not request:
                    owners.add(self._fresh[item.content_hash])
        for index, item in missing:
            self._cache.hold(request.request_id, item)
            self._token_budget -= item.size
            self._fresh[item.content_hash] = request
            self._scheduled.setdefault(request.request_id, []).append(index)
        return owners

    def refund(self, request: Request) -> None:
        """Take back what the request was to compute. `give_back` releases what it holds."""
        for index in self._scheduled.pop(request.request_id, ()):
            item = request.encoder_inputs[index]
            self._token_budget += item.size
            self._fresh.pop(item.content_hash, None)
            self._cache.drop(item)

    def plan(self, tokens: dict[Request, int], step_id: int) -> Mapping[str, Any]:
        """Return the indices of `inputs` to be encoded before the step, by request; what is encoded
        `ahead`; and which outputs the runner may `free`, by content.
        """
        told: dict[str, Any] = {}
        if self._scheduled:
            told["inputs"] = self._scheduled
        num_encoded = self._limits.step_tokens - self._token_budget
        if ahead := self._ahead.plan(tokens, step_id, num_encoded, self._token_budget):
            told["ahead"] = ahead
        if evicted := self._cache.take_evicted():
            told["free"] = evicted
            self._told = step_id, evicted
        if self._cache.has_holders:
            for request in tokens:  # steps run in order: later ones cannot come too early
                self._release(request, request.num_computed_tokens)
        self._discard_plan()
        return told

    def skip(self) -> None:
        self._ahead.skip()
        self._discard_plan()

    @property
    def plans_decodes(self) -> bool:
        return self._cache.has_holders

    def discard_steps(self, last_step_id: int) -> None:
        self._discard_plan()
        self._ahead.distrust(last_step_id)
        if self._told[0] > last_step_id:
            self._cache.return_evicted(self._told[1])

    def leave(self, request: Request) -> None:
        self._ahead.leave(request)
        self._release(request, request.plain_from)

    def give_back(self, request: Request) -> None:
        self._release(request, request.plain_from)

    def forget(self, request: Request, block_hashes: Sequence[bytes]) -> None:
        self._ahead.distrust(0)
        self._cache.forget(request.encoder_inputs)

    def pause(self, request: Request) -> None:
        self.give_back(request)  # what it needs yet is found again, or computed again

    def vacate(self) -> None:
        self._ahead.drop()
        self._cache.forget_released()

    def stats(self) -> dict[str, int]:
        cache = self._cache
        return {
            "num_encoder_inputs": cache.num_inputs,
            "num_encoder_tokens": cache.num_tokens,
            "num_encoder_hits": cache.num_hits,
            "num_used_encoder_tokens": cache.num_used_slots,
        }

    def follow(self, other: "EncoderOutputs") -> None:
        """The room stays: what is kept in it is with the runner."""
        self._limits = msgspec.structs.replace(other._limits, num_slots=self._cache.num_slots)
        self._ahead.drop()
        self._ahead.chunk = self._limits.chunk
        self._discard_plan()

    def _discard_plan(self) -> None:
        """Begin the plan of a step anew."""
        self._scheduled: dict[str, list[int]] = {}  # by request: indices of its encoder inputs
        self._fresh: dict[str, Request] = {}  # contents that only this step computes
        self._token_budget = self._limits.step_tokens
        self._ahead.begin_step()

    def _lacks(self, item: EncoderInput) -> bool:
        """Return whether the output is not there, nor computed by this step or one before it."""
        return item.content_hash not in self._cache or self._ahead.is_begun(item)

    def _release(self, request: Request, computed: int) -> None:
        """The request needs no encoder output before position `computed` any more."""
        for item in request.encoder_inputs:
            if item.end <= computed:
                self._cache.release(request.request_id, item)

    def _missing(
        self, request: Request, start: int, num_tokens: int
    ) -> list[tuple[int, EncoderInput]]:
        """Inputs of these tokens whose outputs are not in the cache; a repeated one counts once."""
        seen: set[str] = set()
        missing = []
        for index, item in _overlapping(request, start, num_tokens):
            if self._lacks(item) and item.content_hash not in seen:
                seen.add(item.content_hash)
                missing.append((index, item))
        return missing


def _overlapping(request: Request, start: int, num_tokens: int) -> list[tuple[int, EncoderInput]]:
    end = start + num_tokens
    return [
        (index, item)
        for index, item in enumerate(request.encoder_inputs)
        if item.position < end and item.end > start
    ]


# The images that wait for their encoder, as its processor has prepared them: what they take of the
# engine's memory. Knows arrays by their bytes.


class ImageMemory:
    """Memory limit for the prepared images of one engine."""

    def __init__(self, limit: float) -> None:
        """`limit`: most memory for prepared images, in GiB."""
        self._limit = limit
        self.num_bytes = 0

    def hold(self, spec: RequestSpec) -> None:
        """Count the images of a request, once for all its samples. Raises `EngineOverloadedError`
        if they would be too much beside those that are there; alone, any are taken.
        """
        arrays = [array for item in spec.encoder_inputs for array in (item.arrays or {}).values()]
        num_bytes = sum(array.nbytes for array in arrays)
        if arrays and self.num_bytes and self.num_bytes + num_bytes > self._limit * 2**30:
            raise EngineOverloadedError(
                f"prepared images of requests take {self.num_bytes / 2**20:.0f} MiB; "
                f"{num_bytes / 2**20:.0f} MiB more would be over image_memory_gib "
                f"({self._limit:g})"
            )
        self.num_bytes += num_bytes
        for array in arrays:
            weakref.finalize(array, self._release, array.nbytes).atexit = False

    def _release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
