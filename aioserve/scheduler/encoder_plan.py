"""The encoder inputs (images, audio) of one step: which must run before which tokens may.

Knows positions and sizes. Does not know what an image is.
"""

from aioserve.kv_cache import EncoderCacheManager
from aioserve.request import EncoderInput, Request


class EncoderPlan:
    """A token of an encoder input is never scheduled unless the input's output is there, or is
    computed by the same step.
    """

    def __init__(self, cache: EncoderCacheManager, token_budget: int) -> None:
        self.scheduled: dict[str, list[int]] = {}  # by request: indices of its encoder inputs
        self._cache = cache
        self._token_budget = token_budget
        self._fresh: dict[str, Request] = {}  # contents that only this step computes

    def fit(self, request: Request, num_tokens: int, start: int, most: int) -> int:
        """How many of `num_tokens` tokens may run: up to the first input that has no room. If they
        would end inside one that runs whole: up to its end, of at most `most` tokens, else up to
        its beginning.
        """
        needed, seen = 0, set[str]()
        for _, item in _overlapping(request, start, num_tokens):
            if item.content_hash not in self._cache and item.content_hash not in seen:
                needed += item.num_tokens
            # An output that is there is kept for its own tokens only: room for an earlier input
            # may be made of it, or two that do not fit together would wait for each other.
            seen.add(item.content_hash)
            if needed > self._token_budget or not self._cache.can_allocate(needed, seen):
                return max(item.position - start, 0)
        end = start + num_tokens
        if seen and item.whole and item.position < end < item.end:  # the last that they reach
            end = item.end if item.end - start <= most else max(item.position, start)
        return end - start

    def take(self, request: Request, start: int, num_tokens: int) -> set[Request]:
        """Schedule and hold what these tokens need; return who else computes it in this step."""
        missing = self._missing(request, start, num_tokens)
        owners = set()
        for _, item in _overlapping(request, start, num_tokens):
            if item.content_hash in self._cache:  # held before room is made for others
                self._cache.hold(request.request_id, item)
                if self._fresh.get(item.content_hash, request) is not request:
                    owners.add(self._fresh[item.content_hash])
        for index, item in missing:
            self._cache.hold(request.request_id, item)
            self._token_budget -= item.num_tokens
            self._fresh[item.content_hash] = request
            self.scheduled.setdefault(request.request_id, []).append(index)
        return owners

    def refund(self, request: Request) -> None:
        """Take back what the request was to compute. Its holds are released by its preemption."""
        for index in self.scheduled.pop(request.request_id, ()):
            item = request.encoder_inputs[index]
            self._token_budget += item.num_tokens
            self._fresh.pop(item.content_hash, None)
            self._cache.drop(item)

    def _missing(
        self, request: Request, start: int, num_tokens: int
    ) -> list[tuple[int, EncoderInput]]:
        """Inputs of these tokens whose outputs are not in the cache; a repeated one counts once."""
        seen: set[str] = set()
        missing = []
        for index, item in _overlapping(request, start, num_tokens):
            if item.content_hash not in self._cache and item.content_hash not in seen:
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
