"""The encoder inputs (images, audio) of requests: which must run before which tokens may.

Knows positions, sizes and the step under construction. Does not know what an image is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aioserve.errors import RequestError
from aioserve.kv_cache.block_pool import BlockPool
from aioserve.kv_cache.encoder_cache import EncoderCacheManager
from aioserve.kv_cache.encoding_ahead import EncodingAhead
from aioserve.kv_cache.resources.base import Resource
from aioserve.request import EncoderInput, Request, WaitReason


class EncoderLimits(msgspec.Struct, frozen=True):
    """Limits in tokens: of the cache for encoder outputs, and of what steps may do."""

    num_slots: int  # room for outputs
    step_tokens: int  # most that the encoder computes in one step
    max_whole: int  # most of an input that runs whole: what a full house leaves of a step
    runs_whole_prompts: bool  # then all inputs of a prompt run in one step
    chunk: int = 0  # most that it computes beside other requests; 0: no limit


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

    def concerns(self, request: Request) -> bool:
        return bool(request.encoder_inputs)

    def check_alone(self, request: Request) -> None:
        """Each input must be in the prompt, and fit a step and the cache; all together, if prompts
        run whole. One that runs whole itself must fit what a full house leaves of a step: else it
        would wait as long as others come.
        """
        limits = self._limits
        room, num_tokens = min(limits.step_tokens, limits.num_slots), 0
        for i, item in enumerate(request.encoder_inputs):
            num_tokens = item.num_tokens + (num_tokens if limits.runs_whole_prompts else 0)
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
                needed += item.num_tokens
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
            self._token_budget -= item.num_tokens
            self._fresh[item.content_hash] = request
            self._scheduled.setdefault(request.request_id, []).append(index)
        return owners

    def refund(self, request: Request) -> None:
        """Take back what the request was to compute. `give_back` releases what it holds."""
        for index in self._scheduled.pop(request.request_id, ()):
            item = request.encoder_inputs[index]
            self._token_budget += item.num_tokens
            self._fresh.pop(item.content_hash, None)
            self._cache.drop(item)

    def plan(self, tokens: dict[Request, int], step_id: int) -> Mapping[str, Any]:
        """The indices of `inputs` to be encoded before the step, by request; what is encoded
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
        """Whether the output is not there, nor computed by this step or one before it."""
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
