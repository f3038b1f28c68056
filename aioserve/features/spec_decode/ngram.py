"""Guesses of what comes next, from what was said before: prompt lookup, without a model.

If the last tokens of a text stood somewhere earlier, in it or in a recent output of the server,
what came after them there may come again. Knows rows and token ids. Knows nothing about how guesses
are verified, nor how many of them pay.
"""

import time
from array import array
from collections.abc import Iterable, Sequence

from aioserve.config import SpeculationConfig
from aioserve.features.spec_decode.draft_length import TextDraftLength
from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.batch.drafter import Drafter, Texts
from aioserve.scheduler.output import NewRequestData

# Guesses, both: they bound what a look takes, and what they are worth was not measured.
MAX_MATCH = 16  # tokens back to which places are compared: a longer match is not better
MAX_PLACES = 8  # that are looked at, the newest first
STORE_TOKENS = 65_536  # of recent outputs that are searched where nothing else is said
MOST_ENTERED = 4096  # tokens of a text in one search: a long prompt holds up no step for long
MAX_STORES = 8  # of outputs: of the model, and of the adapters that were used last


class NgramText:
    """A growing text, and where each of its n-grams stood last.

    Places of one n-gram are chained from the newest to the oldest, as in zlib's deflate. Tokens are
    entered when something is looked for, so a text without a search costs nothing. A token takes
    106 bytes.
    """

    __slots__ = ("_newest", "_previous", "_size", "token_ids")

    def __init__(self, size: int) -> None:
        self._size = size  # of an n-gram, in tokens
        self.token_ids = array("i")
        self._newest: dict[int, int] = {}  # hash of an n-gram: its last token's place
        self._previous = array("i")  # by place: the one before of the same hash; -1: none

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        self.token_ids.extend(token_ids)

    def find(self, end: Sequence[int]) -> tuple[int, int]:
        """Return where the last tokens of `end` stood before, in how many tokens the two places
        agree (0: nowhere), and the place behind: the longest agreement, and of these the newest.

        What lies at the very end of this text has nothing behind it, and is not found.
        """
        size, text = self._size, self.token_ids
        if len(self._previous) < len(text):
            self._enter()
        best, behind = 0, 0
        if len(end) < size:
            return best, behind
        place = self._newest.get(hash(tuple(end[-size:])), -1)
        if place == len(text) - 1 and place >= 0:
            place = self._previous[place]
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length = _agreement(text, place, end)
            if length >= size and length > best:  # hashes may lie
                best, behind = length, place + 1
                if best == MAX_MATCH:
                    break
            place = self._previous[place]
        return best, behind

    def _enter(self) -> None:
        """Chain the places that came since the last time, or the first of them."""
        text, size, newest, previous = self.token_ids, self._size, self._newest, self._previous
        begin = len(previous)
        if begin < size - 1:
            previous.extend([-1] * (min(len(text), size - 1) - begin))
            begin = size - 1
        if begin == len(text) - 1:  # a quicker way for one
            key = hash(tuple(text[-size:]))
            previous.append(newest.get(key, -1))
            newest[key] = begin
            return
        end = min(len(text), begin + MOST_ENTERED)
        shifted = [text[begin - back : end - back] for back in range(size - 1, -1, -1)]
        grams = zip(*shifted, strict=True)
        for place, gram in enumerate(grams, begin):
            key = hash(gram)
            previous.append(newest.get(key, -1))
            newest[key] = place


class _Store:
    """Recent outputs: half of it is filled; when it is full, the other half is forgotten."""

    def __init__(self, size: int, num_tokens: int) -> None:
        self._size, self._half = size, num_tokens // 2
        self.recent, self.older = NgramText(size), NgramText(size)

    def add(self, token_ids: "array[int]") -> None:
        """Add a complete output to the store."""
        if not self._half:
            return
        self.recent.extend(token_ids[-self._half :])
        if len(self.recent) >= self._half:
            self.older, self.recent = self.recent, NgramText(self._size)


class NgramDrafter(Drafter):
    """Guesses for each row of the persistent batch, as long as `length` says that they pay."""

    length: TextDraftLength
    reads_texts_alone = True

    def __init__(self, size: int, store_tokens: int, length: TextDraftLength) -> None:
        """`size`: tokens that must agree. `store_tokens`: of earlier outputs that are kept,
        apart for each adapter: what one says, another would not.
        """
        self.length = length
        self._size = size
        self._rows: dict[int, NgramText] = {}
        self._output_starts: dict[int, int] = {}  # of rows that share a store
        self._shared: dict[int, _Store] = {}  # by row, which
        self._store_tokens = store_tokens
        self._stores: dict[str, _Store] = {}  # by adapter id, the last used last

    def set(self, row: int, request: NewRequestData) -> None:
        """Enter a request. If it shares nothing, its output is no guess for others, nor theirs."""
        self.length.forget(row)
        text = self._rows[row] = NgramText(self._size)
        text.extend(request.token_ids)
        if not request.cache_salt:
            self._output_starts[row] = request.num_prompt_tokens
            self._shared[row] = self._store_of(request.adapter_id)

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of a row."""
        self._rows[row].extend(token_ids)

    def append_all(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        texts = self._rows
        for row, own in zip(rows, token_ids, strict=True):
            if own:
                texts[row].token_ids.extend(own)

    def drop(self, row: int, *, is_finished: bool) -> None:
        """Forget a row; what it said, if that is all of it, is remembered for others."""
        text, start = self._rows.pop(row, None), self._output_starts.pop(row, None)
        store = self._shared.pop(row, None)
        if is_finished and text is not None and store is not None:
            store.add(text.token_ids[start:])

    def guesses(
        self, rows: Sequence[int], others: Sequence[int], inputs: StepInputs, texts: Texts
    ) -> dict[int, list[int]]:
        del others, inputs, texts
        length, asked = self.length, self.length.asked
        found = self._find(row for row in rows if asked.get(row))
        if not length.is_open:
            return self._limited(found)
        began = time.thread_time()  # while other threads have the interpreter, it costs nothing
        found |= self._find(row for row in rows if row not in asked)
        limited = self._limited(found)
        length.looked(time.thread_time() - began)
        return limited

    def rests(self) -> bool:
        return not self.length.may_look()

    def _find(self, rows: Iterable[int]) -> "dict[int, tuple[int, array[int]]]":
        """Return in how many tokens the ends of texts agree with a place, and what is behind it."""
        found = {}
        for row in rows:
            text, store = self._rows[row], self._shared.get(row)
            end = text.token_ids[-MAX_MATCH:]
            best, behind, place = 0, 0, text
            for source in (text,) if store is None else (text, store.recent, store.older):
                agreed, at = source.find(end)
                if agreed > best:
                    best, behind, place = agreed, at, source
            if best:
                most = self.length.max_tokens
                found[row] = best, place.token_ids[behind : behind + most]
        return found

    def _limited(self, found: "dict[int, tuple[int, array[int]]]") -> dict[int, list[int]]:
        """Return the tokens that are worth sending."""
        known = {row: (agreed, len(token_ids)) for row, (agreed, token_ids) in found.items()}
        limits = self.length.limits(known).items() if known else ()
        return {row: found[row][1][:limit].tolist() for row, limit in limits}

    def _store_of(self, adapter_id: str) -> _Store:
        store = self._stores.pop(adapter_id, None) or _Store(self._size, self._store_tokens)
        self._stores[adapter_id] = store
        if len(self._stores) > MAX_STORES:
            del self._stores[next(iter(self._stores))]
        return store


def ngram_drafter(config: SpeculationConfig) -> NgramDrafter | None:
    """Return the n-gram drafter that the settings ask for; None if they ask for none."""
    if not config.drafts_by_ngrams:
        return None
    length, store = TextDraftLength(config.num_speculative_tokens), config.prompt_lookup_store
    if store is None:  # by default no stream's pace tells what another client was told
        store = 0 if config.speculative_method == "auto" else STORE_TOKENS
    return NgramDrafter(config.prompt_lookup_min, store, length)


def _agreement(text: "array[int]", place: int, end: Sequence[int]) -> int:
    """Return how many tokens up to and with `place` are those at the end of `end`."""
    most = min(place + 1, len(end))
    for length in range(most):
        if text[place - length] != end[-1 - length]:
            return length
    return most
