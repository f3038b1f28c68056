"""Guesses by a smaller model with the same vocabulary, for all rows at once.

Its K and V lie in a pool of its own under the block ids of the served model: what shares, keeps or
gives back blocks does so for both. It draws as the served model will, from its own probabilities
with the same random numbers. Knows rows and blocks; its passes are computed by a `DraftRunner`.
Knows nothing about what becomes of guesses. Last, what an EAGLE-3 head and an MTP layer have in
common, which guess from states of the model that they are for.
"""

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.draft_length import (
    FIRST_CHANCE,
    STEP_MEMORY,
    DraftLength,
    Record,
    StepTimes,
)
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import (
    AttentionCall,
    IntArray,
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    StepInputs,
)
from aioserve.runner.batch.drafter import Drafter, DraftPlace, Texts
from aioserve.runner.batch.masks import Masks
from aioserve.runner.batch.sampling_columns import NO_LOGPROBS, SamplingInputs
from aioserve.runner.served_model import ServedModel, Taps
from aioserve.scheduler.output import NewRequestData

if TYPE_CHECKING:
    from aioserve.runner.ranks import Ranks


K = TypeVar("K", bound=Hashable)

# Steps in which the first guesses of a request must repay the reading of its text. A guess.
REPAID_IN = 128
TRIAL_SHARE = 0.01  # of the time of steps, for trials of a draft model that pays for no request

#: Logits [S, V] of the S rows that sample, as `ServedModel.forward` gives them.
Forward = Callable[[ModelInputs, LayerAttention], Tensor]


class ModelDraftLength(DraftLength):
    """The length of drafts that a model makes, for all requests at once, which takes time itself.

    How often it is right is a property of the model: what is seen of one request is what is
    believed of the next.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._draft_times = StepTimes()
        self._seconds_since_trial = 0.0  # of steps
        self._all = Record()

    def forget_times(self) -> None:
        super().forget_times()
        self._draft_times, self._seconds_since_trial = StepTimes(), 0.0

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """Record a pass of the draft model over this many tokens."""
        self._draft_times.add(num_tokens, max(seconds, 1e-6))

    def _settle(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A pass of the drafting model makes one guess for each row."""
        self._seconds_since_trial += seconds
        self._making = self._draft_times.seconds(num_rows) / num_rows

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        super().verified(request, num_drafts, num_right)
        self._all.note(num_drafts, num_right, STEP_MEMORY)

    def limits(self, requests: Mapping[K, int]) -> dict[K, int]:
        """`requests`: by request, the tokens that the model has to read first. If drafts pay for
        none, now and then one token for the request of which it has to read fewest.
        """
        asked = {r: min(self.asked[r], self.max_tokens) for r in requests if r in self.asked}
        unread = {request: own for request, own in requests.items() if request not in asked}
        found = {r: self._found(r, own) for r, own in unread.items() if self._repays(r, own)}
        limits = {request: limit for request, limit in asked.items() if limit}
        limits |= self._paying(found, sum(limits.values()))
        if limits or not unread or self.compares:
            return limits
        request = min(unread, key=unread.__getitem__)
        if self._draft_times.seconds(unread[request]) > TRIAL_SHARE * self._seconds_since_trial:
            return {}
        self._seconds_since_trial = 0.0
        return {request: 1}

    def _repays(self, request: Hashable, num_unread: int) -> bool:
        """Return whether guesses for it are worth reading its text first."""
        if num_unread <= self.max_tokens + 1:  # what was said since the last guess
            return True
        gain = self._record(request).chance(self._first_chance()) - self.price
        of_row = self._times.seconds(self._num_rows) / self._num_rows or math.inf
        return gain * of_row * REPAID_IN >= self._draft_times.seconds(num_unread)

    def _first_chance(self) -> float:
        return self._all.chance(FIRST_CHANCE)


class DraftRunner(ABC):
    """The side on which a drafting model computes: its KV cache, and how a token is drawn."""

    num_blocks: int  # of the KV cache, as many as the served model has
    num_slots: int  # of it, those that requests never have included
    caches: Sequence[Tensor] = ()  # K and V of each layer, [num_blocks or more, ...]

    @abstractmethod
    def draw(
        self, step: StepInputs, forward: Forward, columns: SamplingInputs, masks: Masks | None
    ) -> list[int]:
        """Compute the tokens of `step`, whose rows of one token come first, by `forward`. Returns
        what is drawn for its S rows, as `columns` and `masks` say, in their order.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back the memory of the drafter. Idempotent."""


class ModelDrafter(Drafter):
    """A drafter that follows the texts of rows for which drafts pay, and catches up where they did
    not.
    """

    length: ModelDraftLength
    num_skipped = 0  # tokens of each text that are not read

    def __init__(
        self,
        runner: DraftRunner,
        length: ModelDraftLength,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_step_tokens: int,
    ) -> None:
        """`max_model_len`: nothing is guessed beyond. `max_step_tokens`: of texts that are read at
        a time.
        """
        self.length = length
        self._runner = runner
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_step_tokens = max_step_tokens
        #: Blocks whose K and V are those of their tokens. A wrong one would cost guesses, no more.
        self._is_filled = np.zeros(runner.num_blocks, dtype=np.bool_)
        self.kept = tuple(runner.caches)
        if self.kept:  # whether a block is filled is kept with it
            self.noted = torch.from_numpy(self._is_filled.view(np.uint8))[:, None]
        self._num_read = np.zeros(max_num_seqs, dtype=np.int64)  # tokens of a row that were read
        self._stops: dict[int, frozenset[int]] = {}
        self._guessed: dict[int, list[int]] = {}  # by row, guesses that were read behind those

    def set(self, row: int, request: NewRequestData) -> None:
        self.length.forget(row)
        self._stops[row] = request.stop_token_ids
        num_cached = request.num_computed_tokens // self._block_size
        self.take_blocks(request.block_ids[num_cached:])
        cached = self._is_filled[request.block_ids[:num_cached]]
        num_filled = num_cached if cached.all() else int(cached.argmin())
        self._num_read[row] = num_filled * self._block_size

    def take_blocks(self, block_ids: Sequence[int]) -> None:
        self._is_filled[block_ids] = False

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        for guess, token_id in zip(self._guessed.pop(row, ()), token_ids, strict=False):
            if guess != token_id:
                break
            self._num_read[row] += 1

    def drop(self, row: int, *, is_finished: bool) -> None:
        del is_finished
        self._guessed.pop(row, None)
        self._stops.pop(row, None)

    def close(self) -> None:
        self._runner.close()

    def guesses(
        self, rows: Sequence[int], others: Sequence[int], inputs: StepInputs, texts: Texts
    ) -> dict[int, list[int]]:
        # Of others as far as they are computed; the drafts of this step may have been wrong.
        computed = np.minimum(inputs.seq_lens, texts.batch.num_tokens(inputs.rows))
        known = dict(zip(inputs.rows.tolist(), computed.tolist(), strict=True))
        known |= zip(rows, texts.batch.num_tokens(rows).tolist(), strict=True)
        num_unread = {row: known[row] - int(self._num_read[row]) for row in (*rows, *others)}
        limits = self.length.limits(num_unread)
        followed = sorted(limits, key=num_unread.__getitem__)
        if not followed:
            return {}
        room = np.minimum(texts.batch.num_slots(followed), self._max_model_len)
        spans: list[_Span] = []
        longest: dict[int, int] = {}  # how much rows guess that have caught up
        budget = self._max_step_tokens
        asking = set(rows)
        for row, num_slots in zip(followed, room.tolist(), strict=True):
            end = min(known[row], num_slots)
            begin = self._num_read[row] = max(self._skip_filled(row, end, texts), self.num_skipped)
            if row in asking and begin == end:  # no guess without a look at the last token
                begin -= 1
            end = min(end, begin + budget)
            if begin >= end:
                continue
            budget -= end - begin
            spans.append(_Span(row, begin, end))
            self._num_read[row] = end
            num_filled = (end - self.num_skipped) // self._block_size
            self._is_filled[texts.batch.blocks(row)[:num_filled]] = True
            if row in asking and end == known[row]:
                longest[row] = min(limits[row], num_slots - end + 1)  # the last needs no room
        spans.sort(key=lambda span: span.end - span.begin > 1)  # as a `DraftRunner` wants them
        return self._guess(spans, longest, texts) if spans else {}

    def _skip_filled(self, row: int, end: int, texts: Texts) -> int:
        """Return how many tokens of a row are read; more than it knew, if others had the same
        blocks.
        """
        num_read, size = int(self._num_read[row]), self._block_size
        if num_read % size:
            return num_read
        ahead = self._is_filled[texts.batch.blocks(row)[num_read // size : end // size]]
        return num_read + size * (len(ahead) if ahead.all() else int(ahead.argmin()))

    def _guess(
        self, spans: "Sequence[_Span]", longest: dict[int, int], texts: Texts
    ) -> dict[int, list[int]]:
        """Read `spans`, then token after token of what is guessed behind them."""
        grammars = texts.grammars
        found: dict[int, list[int]] = {row: [] for row in longest}
        while spans:
            drawn = self._read(spans, longest, texts)
            spans = []
            for row, begin, token_id in drawn:
                found[row].append(token_id)
                if (
                    len(found[row]) < longest[row]
                    and token_id not in self._stops[row]
                    and (grammars is None or grammars.go_ahead(row, token_id))
                ):
                    texts.batch.write(row, begin, token_id)
                    spans.append(_Span(row, begin, begin + 1))
        if grammars is not None:
            grammars.come_back()
        for row, token_ids in found.items():
            self._guessed[row] = token_ids[:-1]  # the last was not read
        return found

    def _read(
        self, spans: "Sequence[_Span]", asking: Collection[int], texts: Texts
    ) -> list[tuple[int, int, int]]:
        """Compute the tokens of `spans`; for each row that asks: itself, the place behind its span,
        and which token is drawn for it.
        """
        began = time.perf_counter()
        rows, begins, ends = (np.array(column) for column in zip(*spans, strict=True))
        sampling = np.flatnonzero([row in asking for row in rows.tolist()])
        packed = self._pack(rows, begins, ends, texts)
        last = packed.query_start_loc[1:][sampling] - 1
        step = replace(packed, sampling=sampling, logits_indices=last)
        own, places = rows[sampling], ends[sampling]
        columns = texts.sampling.select(own, places)
        columns = replace(columns, num_logprobs=np.full(len(own), NO_LOGPROBS))
        masks = None if texts.grammars is None else texts.grammars.masks(own)
        token_ids = self._runner.draw(step, self._forward(rows, sampling), columns, masks)
        self.length.drafted(len(packed.input_ids), time.perf_counter() - began)
        return list(zip(own.tolist(), places.tolist(), token_ids, strict=True))

    @abstractmethod
    def _pack(self, rows: IntArray, begins: IntArray, ends: IntArray, texts: Texts) -> StepInputs:
        """Return the pass that reads the tokens from `begins` to `ends` of R rows; none samples
        yet.
        """

    @abstractmethod
    def _forward(self, rows: IntArray, sampling: IntArray) -> Forward:
        """Return what computes it for these `rows`, of which those at the places `sampling`
        sample.
        """


class DraftModel(ModelDrafter):
    """A whole model of its own. It may know fewer tokens than the served one, or more: they are
    padding.
    """

    def __init__(
        self,
        model: ServedModel,
        known: int,
        vocab_size: int,
        runner: DraftRunner,
        length: ModelDraftLength,
        **limits: int,
    ) -> None:
        """`known`: tokens of `model`; `vocab_size`: those of the served one. `limits`: as
        `ModelDrafter` takes them.
        """
        super().__init__(runner, length, **limits)
        self._model, self._known, self._vocab_size = model, known, vocab_size

    def _pack(self, rows: IntArray, begins: IntArray, ends: IntArray, texts: Texts) -> StepInputs:
        packed = texts.batch.pack(rows, begins, ends)
        if self._known < self._vocab_size:  # a prompt of ids may hold what no text means
            np.minimum(packed.input_ids, self._known - 1, out=packed.input_ids)
        return packed

    def _forward(self, rows: IntArray, sampling: IntArray) -> Forward:
        def forward(inputs: ModelInputs, attention: LayerAttention) -> Tensor:
            return fit_vocabulary(self._model.forward(inputs, attention), self._vocab_size)

        return forward


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [S, `vocab_size`] of others: without those beyond; with the lowest that there are for
    those that are missing.
    """
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return F.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min)
    return logits[:, :vocab_size].contiguous() if missing else logits


class _Span(NamedTuple):
    """Tokens of a row that are read in one pass."""

    row: int
    begin: int
    end: int


# What makes drafts beside a served model: as it lies on disk, and once it is loaded. The seam
# between settings and ways of drafting with a model. Knows sizes; knows nothing about steps.


class Draft(NamedTuple):
    """A drafter that is loaded; its KV cache is not made yet."""

    info: ModelInfo
    target: ServedModel  # the served model, as it is to be run while this drafts for it
    kv_cache_spec: KVCacheSpec
    attention_calls: tuple[AttentionCall, ...]
    state_bytes: int  # for each token of the served model, besides K and V
    forward: Forward  # a pass of the draft model: to see what it takes
    make: Callable[..., ModelDrafter]

    def make_drafter(self, config: EngineConfig, runner: DraftRunner) -> ModelDrafter:
        """`runner` has a KV cache for `kv_cache_spec`."""
        return self.make(
            runner,
            ModelDraftLength(config.speculation.num_speculative_tokens),
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=self.info.max_model_len,
            max_step_tokens=config.scheduler.step_budget(self.info.max_model_len),
        )


class DraftSource(ABC):
    """The source of a draft model, found on disk before weights are read."""

    has_files = True  # whether its weights lie apart from those of the served model
    num_states = 0  # numbers of the served model's states that are kept for each of its tokens

    def __init__(self, info: ModelInfo) -> None:
        """`info`: the model in whose directory it lies."""
        self.info, self.config = info, info.config

    @property
    def hf_config(self) -> Any:
        """The configuration of the layers that draft."""
        return self.info.hf_config

    def meet(self, target: ServedModel, ranks: "Ranks") -> None:  # noqa: B027 - most need nothing
        """On all ranks, before the first one, which drafts, loads what it does so with: get what
        that needs of the others.
        """

    def follow(self, target: ServedModel) -> ServedModel:
        """Return the served model as the ranks run it that do not draft."""
        return target

    @abstractmethod
    def load(self, target: ServedModel, target_info: ModelInfo, place: DraftPlace) -> Draft:
        """Read its weights. Raises `ConfigError` if it does not fit `target`."""


# A smaller model that makes drafts: whether its vocabulary fits, and how it is loaded. Knows
# tokenizers and settings; knows nothing about steps.


logger = logging.getLogger(__name__)


class DraftCheckpoint(DraftSource):
    """A draft model that is a whole model of its own."""

    def __init__(self, info: ModelInfo, target_info: ModelInfo) -> None:
        """Raises `ConfigError` if texts mean other tokens to it."""
        super().__init__(info)
        if (why_not := _difference(target_info, info)) is not None:
            raise ConfigError(
                f"speculation.draft_model {info.config.model} has another vocabulary than "
                f"{target_info.config.model}: {why_not}"
            )

    def load(self, target: ServedModel, target_info: ModelInfo, place: DraftPlace) -> Draft:
        model = place.load(self.info)
        if model.reads_rows or model.states is not None:
            why = "" if model.states is None else ", whose layers have states"
            raise ConfigError(f"{model.name}{why}, cannot make drafts: take another draft model")
        logger.info("drafts by %s, %.1fM parameters", model.name, model.num_parameters / 1e6)
        make = partial(DraftModel, model, self.info.vocab_size, target_info.vocab_size)
        spec, calls = model.kv_cache_spec, model.attention_calls
        return Draft(self.info, target, spec, calls, 0, model.forward, make)


def _difference(info: ModelInfo, draft: ModelInfo) -> str | None:
    """Return why texts mean other tokens to `draft`; None if they do not. One may have more tokens
    than the other as long as neither tokenizer knows these: models are padded to round sizes.
    """
    is_padded = draft.vocab_size != info.vocab_size
    sizes = f"{draft.vocab_size:,} tokens, not {info.vocab_size:,}"
    if info.config.skip_tokenizer_init:
        return f"{sizes}, and without a tokenizer it is unknown which" if is_padded else None
    ours = info.tokenizer.get_vocab()
    try:
        theirs = draft.tokenizer.get_vocab()
    except ConfigError:
        if is_padded:
            return sizes
        raise
    if ours != theirs:
        token = min(ours.items() ^ theirs.items())[0]
        place = f"{token!r} is {theirs.get(token)} in it, and {ours.get(token)} here"
        return f"{sizes}; {place}" if is_padded else place
    if is_padded and max(ours.values()) >= min(draft.vocab_size, info.vocab_size):
        return sizes
    if _merges(info.tokenizer) != _merges(draft.tokenizer):
        return "its tokenizer joins other pieces"
    return None


def _merges(tokenizer: Any) -> object:
    """Return which tokens a tokenizer makes of two, in their order, as far as it does so."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else json.loads(backend.to_str())["model"].get("merges")


# Heads: guesses from states of the model that they are for.


class DraftHead(ABC):
    """A few layers that go on from what the served model thought of its tokens."""

    kv_cache_spec: KVCacheSpec
    attention_calls: tuple[AttentionCall, ...]
    device: torch.device
    num_parameters: int
    state_size: int  # numbers that it reads of the served model for each token

    @abstractmethod
    def combine(self, states: Tensor) -> Tensor:
        """Return one state [T, hidden] of what the served model gave, [T, `state_size`]."""

    @abstractmethod
    def forward(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, attention: LayerAttention
    ) -> Tensor:
        """Return the states [T, hidden] that continue `states` [T, hidden] with `token_ids` [T],
        each the one after its state's own. `attention` is that of the step, on the cache of this
        head.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Logits [N, V] of any of those states."""


# Their drafter. What a head reads at a place is the token there and the state of the token before,
# so its K and V of a place lie in the slot of the place before. States of all tokens are kept, for
# rows that catch up. Knows rows and slots; the rest is `ModelDrafter`'s.


class HeadDrafter(ModelDrafter):
    """Reads again, with the model's own states, what it has guessed and was right."""

    num_skipped = 1  # the first token has none before it

    def __init__(
        self,
        head: DraftHead,
        taps: Taps,
        runner: DraftRunner,
        length: ModelDraftLength,
        **limits: int,
    ) -> None:
        """`taps` tell of what `head` reads. `limits`: as `ModelDrafter` takes them."""
        super().__init__(runner, length, **limits)
        self._head = head
        # Of every slot. On a CPU, pages that were never written are no memory.
        shape, dtype = (runner.num_slots, head.state_size), head.kv_cache_spec.dtype
        self._states = torch.empty(shape, dtype=dtype, device=head.device)
        if self.kept:  # the head reads them where it goes on, or has not read a block yet
            num_blocks = runner.num_slots // limits["block_size"]
            self.kept = (*self.kept, self._states.view(num_blocks, -1))
        self._own: dict[int, Tensor] = {}  # by row, the state behind its last guess
        taps.keep = self._keep

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        del token_ids
        self._guessed.pop(row, None)

    def guesses(
        self, rows: Sequence[int], others: Sequence[int], inputs: StepInputs, texts: Texts
    ) -> dict[int, list[int]]:
        self._own.clear()
        return super().guesses(rows, others, inputs, texts)

    def _keep(self, slots: Tensor, states: Tensor) -> None:
        """Keep hidden states, as `Taps.keep`; it may be recorded in a CUDA graph."""
        self._states.index_copy_(0, slots, states.transpose(0, 1).flatten(1))

    def _pack(self, rows: IntArray, begins: IntArray, ends: IntArray, texts: Texts) -> StepInputs:
        token_ids = texts.batch.pack(rows, begins, ends).input_ids
        return replace(texts.batch.pack(rows, begins - 1, ends - 1), input_ids=token_ids)

    def _forward(self, rows: IntArray, sampling: IntArray) -> Forward:
        before = [self._own[row] for row in rows.tolist()] if self._own else []
        asking = rows[sampling].tolist()

        def forward(inputs: ModelInputs, attention: LayerAttention) -> Tensor:
            if before:  # behind what the model has computed
                states = torch.stack(before)
            else:
                states = self._head.combine(self._states[inputs.slots])
            states = self._head.forward(inputs.input_ids, inputs.positions, states, attention)
            last = states[inputs.logits_rows]
            self._own = dict(zip(asking, last, strict=True))
            return self._head.logits(last)

        return forward


def draft_of_head(info: ModelInfo, head: DraftHead, taps: Taps, target: ServedModel) -> Draft:
    """Return a `head` that is loaded, in the directory of `info`, which `taps` of `target` tell."""
    spec, device = head.kv_cache_spec, head.device

    def forward(inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        shape = (len(inputs.slots), head.state_size)
        states = head.combine(torch.zeros(shape, dtype=spec.dtype, device=device))
        states = head.forward(inputs.input_ids, inputs.positions, states, attention)
        return head.logits(states[inputs.logits_rows])

    make, size = partial(HeadDrafter, head, taps), head.state_size * spec.dtype.itemsize
    return Draft(info, target, spec, head.attention_calls, size, forward, make)
