"""The persistent batch: what the runner remembers of each request between steps.

Rows of numpy arrays; a step brings only what changed. Knows tokens, blocks and counts; knows
nothing about models, and nothing about scheduling beyond `SchedulerOutput`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioserve.kv_cache import StatePool, WindowPool
from aioserve.outputs import TokenLogprobs
from aioserve.runner.adapter_rows import AdapterRows
from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.drafter import Drafter
from aioserve.runner.grammar_rows import GrammarRows, Masks
from aioserve.runner.image_rows import ImageRows
from aioserve.runner.lost_rows import LostRows
from aioserve.runner.pooling import PooledRows
from aioserve.runner.prompt_logprobs import PromptRows
from aioserve.runner.sampling_columns import SamplingColumns, SamplingInputs
from aioserve.runner.state_rows import StateRows
from aioserve.runner.unsound import step_failed
from aioserve.runner.window_rows import WindowRows
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from aioserve.grammars import GrammarCompiler

logger = logging.getLogger(__name__)

_NONE = np.zeros(0, dtype=np.int64)
NEVER = 2**62  # tokens that a row has computed when it samples, if it is pooled


class InputBatch:
    """Up to `max_num_seqs` requests of up to `max_model_len` tokens."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        *,
        grammars: "GrammarCompiler | None" = None,
        eos_token_ids: Sequence[int] = (),
        drafter: Drafter | None = None,
        has_states: bool = False,
        has_windows: bool = False,
        image_rows: ImageRows | None = None,
    ) -> None:
        """Without `grammars`, no request may ask for structured outputs. `image_rows` are told who
        is where.
        """
        self._block_size = block_size
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._rows: dict[str, int] = {}
        # one column more than a request may have: a step scheduled ahead may sample a token too
        # many. Memory of columns that are never used is never committed.
        num_columns = max_model_len + 1
        self._token_ids = np.zeros((max_num_seqs, num_columns), dtype=np.int32)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._block_table = np.zeros((max_num_seqs, -(-num_columns // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._sampling = SamplingColumns(max_num_seqs, vocab_size)
        self.grammar_rows = GrammarRows(grammars, vocab_size, eos_token_ids)
        self.prompt_rows = PromptRows()
        self.pooled_rows = PooledRows()
        self.adapter_rows = AdapterRows()
        self._image_rows = image_rows
        self._state_rows = StateRows(max_num_seqs) if has_states else None
        self._windows: WindowRows | None = None
        if has_windows:
            self._windows = WindowRows(*self._block_table.shape, block_size)
        self._drafter = drafter
        self._guessed: set[int] = set()  # rows whose drafts are the drafter's
        self.lost = LostRows()
        self.may_lose = False  # whether a request may be given up alone

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, step: SchedulerOutput) -> None:
        """Drop who left, add who came, update who stayed. Ids that are unknown may be dropped."""
        self._drop(step.finished_req_ids, are_finished=True)
        self._drop(step.preempted_req_ids)
        self.lost.end(step.finished_req_ids)
        for request in step.scheduled_new_reqs:
            self.lost.comes_anew(request.request_id)
            try:
                self._add(request)
            except Exception as error:
                if not self.may_lose:
                    raise
                logger.exception("request %s does not get into the batch", request.request_id)
                self.lose(request.request_id, step_failed(error), request.block_ids)
        cached = step.scheduled_cached_reqs
        self._update(self.lost.left_out(cached) if self.lost.why else cached)
        if self._windows is not None:
            for request_id, blocks in step.parts.get(WindowPool.name, {}).items():
                if request_id not in self.lost.why:
                    self._windows.extend(self._rows[request_id], blocks)

    def lose(self, request_id: str, why: str, block_ids: Iterable[int] = ()) -> None:
        """Give a request up, and all that it was to write: `block_ids`, and what it has behind its
        computed tokens.
        """
        if (row := self._rows.get(request_id)) is not None:
            first = int(self._num_computed_tokens[row]) // self._block_size
            block_ids = {*block_ids, *self.blocks(row)[first:].tolist()}
        self._drop([request_id])
        self.lost.add(request_id, why, block_ids)

    def num_computed(self, request_id: str) -> int:
        """How many tokens of a request were computed before the step; 0 of one that is not here."""
        row = self._rows.get(request_id)
        return 0 if row is None else int(self._num_computed_tokens[row])

    def blocks_read(self, request_id: str) -> list[int]:
        """The blocks in which a step finds the computed tokens of a request."""
        row, count = self._rows[request_id], self.num_computed(request_id)
        found: list[int] = self._block_table[row, : -(-count // self._block_size)].tolist()
        return found

    def blocks_begun(self, request_id: str, count: int) -> list[int]:
        """The blocks that are written from their beginning when `count` tokens of it are."""
        row, begin = self._rows[request_id], self.num_computed(request_id)
        first, end = (-(-place // self._block_size) for place in (begin, begin + count))
        found: list[int] = self._block_table[row, first:end].tolist()
        return found

    def may_cut(self, request_id: str, step: SchedulerOutput) -> bool:
        """Whether the tokens of a request in `step` can be computed a part at a time: neither where
        drafts are verified, nor where tokens of an image may see each other.
        """
        if request_id in step.scheduled_spec_decode_tokens:
            return False
        return self._image_rows is None or request_id not in self._image_rows

    def place(self, request_id: str, num_computed: int) -> None:
        """Note how many tokens of a request are computed by now."""
        self._num_computed_tokens[self._rows[request_id]] = num_computed

    def prepare(self, step: SchedulerOutput) -> StepInputs:
        """The packed arrays of a step that was applied. Raises `KeyError` for an unknown id."""
        drafts = self._place_drafts(step) if step.scheduled_spec_decode_tokens else {}
        req_ids = list(step.num_scheduled_tokens)
        num_reqs = len(req_ids)
        rows = np.fromiter(map(self._rows.__getitem__, req_ids), np.int64, num_reqs)
        num_scheduled = np.fromiter(step.num_scheduled_tokens.values(), np.int64, num_reqs)
        begins = self._num_computed_tokens[rows]
        packed = self.pack(rows, begins, begins + num_scheduled)
        # >=, not ==: after a failed step, a step scheduled ahead of it is beyond the known tokens;
        # its requests have failed already, so what it computes for them does not matter
        sampling = np.flatnonzero(packed.seq_lens >= self._num_tokens[rows])
        logits_indices = packed.query_start_loc[1:][sampling] - 1
        if drafts:  # a row samples after each of its drafts as well
            counts = np.array([1 + len(drafts.get(row, ())) for row in rows[sampling].tolist()])
            before_last = [np.arange(count)[::-1] for count in counts.tolist()]
            sampling = np.repeat(sampling, counts)
            logits_indices = np.repeat(logits_indices, counts) - np.concatenate(before_last)
        inputs = replace(
            packed,
            req_ids=req_ids,
            sampling=sampling,
            logits_indices=logits_indices,
            drafts=drafts,
        )
        if self._windows is not None:
            return replace(inputs, windows=self._windows.of(inputs))
        if self._state_rows is None:
            return inputs
        pieces = self._state_rows.pieces(
            req_ids,
            rows,
            packed.positions,
            packed.query_start_loc,
            step.parts.get(StatePool.name, {}),
        )
        return replace(inputs, states=pieces)

    def pack(self, rows: IntArray, begins: IntArray, ends: IntArray) -> StepInputs:
        """As `Texts.pack`."""
        counts = ends - begins
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        token_row = np.repeat(rows, counts)
        positions = np.arange(query_start_loc[-1])
        positions += np.repeat(begins - query_start_loc[:-1], counts)
        block, offset = np.divmod(positions, self._block_size)
        num_columns = -(-int(ends.max(initial=1)) // self._block_size)
        return StepInputs(
            req_ids=[],
            rows=rows,
            input_ids=self._token_ids[token_row, positions].astype(np.int64),
            positions=positions,
            slot_mapping=self._block_table[token_row, block].astype(np.int64) * self._block_size
            + offset,
            query_start_loc=query_start_loc,
            seq_lens=ends,
            block_table=self._block_table[rows, :num_columns],
            sampling=_NONE,
            logits_indices=_NONE,
        )

    def sampling_inputs(self, inputs: StepInputs) -> SamplingInputs:
        """Sampling columns of the S rows of `inputs` that sample."""
        num_tokens = inputs.positions[inputs.logits_indices] + 1
        return self.sampling_of(inputs.rows[inputs.sampling], num_tokens)

    def sampling_of(self, rows: IntArray, num_tokens: IntArray) -> SamplingInputs:
        """As `Texts.sampling_of`."""
        return self._sampling.select(rows, num_tokens)

    def num_tokens(self, rows: Sequence[int] | IntArray) -> IntArray:
        """As `Texts.num_tokens`."""
        return self._num_tokens[rows]

    def num_slots(self, rows: Sequence[int]) -> IntArray:
        """As `Texts.num_slots`; no more than a row has columns for."""
        return np.minimum(self._num_blocks[rows] * self._block_size, self._token_ids.shape[1] - 1)

    def blocks(self, row: int) -> npt.NDArray[np.int32]:
        """As `Texts.blocks`."""
        return self._block_table[row, : self._num_blocks[row]]

    def write(self, row: int, place: int, token_id: int) -> None:
        """As `Texts.write`."""
        self._token_ids[row, place] = token_id

    def begin_masks(self, inputs: StepInputs) -> "Future[Masks] | None":
        """Have the masks of those S rows made that have a grammar; None if none has."""
        return self.grammar_rows.begin(inputs.rows[inputs.sampling], inputs.drafts)

    def append(self, inputs: StepInputs, token_ids: IntArray) -> list[list[int]]:
        """Keep the S sampled tokens, but for those after a draft that turned out wrong.

        Returns what was kept, for each of the R rows.
        """
        kept: list[list[int]] = [[] for _ in inputs.req_ids]
        for index, token_id in zip(inputs.sampling.tolist(), token_ids.tolist(), strict=True):
            kept[index].append(token_id)
        if inputs.drafts:
            for index, row in enumerate(inputs.rows.tolist()):
                if kept[index] and row in inputs.drafts:
                    del kept[index][1 + _num_right(inputs.drafts[row], kept[index]) :]
        if inputs.drafts:
            for index, row in enumerate(inputs.rows.tolist()):
                begin = self._num_tokens[row]
                end = self._num_tokens[row] = begin + len(kept[index])
                self._token_ids[row, begin:end] = kept[index]
        else:
            rows, position = inputs.rows[inputs.sampling], inputs.seq_lens[inputs.sampling]
            self._token_ids[rows, position] = token_ids
            self._num_tokens[rows] = position + 1
        self._sampling.append(inputs.rows, kept)
        self.grammar_rows.append(inputs.rows, kept)
        if self._drafter is not None:
            self._tell_drafter(self._drafter, inputs, kept)
        return kept

    def guesses(self, inputs: StepInputs) -> dict[str, list[int]]:
        """What comes next of the rows of `inputs`, where their grammars leave no choice, or where
        the drafter has a guess.
        """
        found: dict[int, list[int]] = {}
        waiting, sampled = [], set(inputs.sampling.tolist())
        others = []  # who asks in a later step
        for index, row in enumerate(inputs.rows.tolist()):
            if self._sampling.counts_tokens(row) or self._num_tokens[row] == NEVER:
                continue  # penalties count every token before the next: drafts would come too early
            if index not in sampled:
                others.append(row)
            elif token_ids := self.grammar_rows.guesses(row):
                found[row] = token_ids
                others.append(row)
            else:
                waiting.append(row)
        if self._drafter is not None:
            try:
                guesses = self._drafter.guesses(waiting, others, inputs, self)
            except Exception:  # what follows is computed without
                logger.exception("no tokens could be guessed")
                self.grammar_rows.come_back()
                guesses = {}
            self._guessed.update(guesses)
            found |= guesses
        return {
            req_id: found[row]
            for req_id, row in zip(inputs.req_ids, inputs.rows.tolist(), strict=True)
            if row in found
        }

    def failures(self, inputs: StepInputs) -> dict[str, str]:
        """Who of the rows of `inputs` cannot go on, and why."""
        errors = self._sampling.errors | self.grammar_rows.errors
        if not errors:
            return {}
        rows = zip(inputs.req_ids, inputs.rows.tolist(), strict=True)
        return {request_id: errors[row] for request_id, row in rows if row in errors}

    def close(self) -> None:
        """Let its threads end. Idempotent."""
        self.grammar_rows.close()
        if self._drafter is not None:
            self._drafter.close()

    def _place_drafts(self, step: SchedulerOutput) -> dict[int, list[int]]:
        """The drafts of a step by row, behind the known tokens of theirs."""
        drafts = {}
        for request_id, token_ids in step.scheduled_spec_decode_tokens.items():
            row = self._rows[request_id]
            begin = self._num_tokens[row]
            self._token_ids[row, begin : begin + len(token_ids)] = token_ids
            drafts[row] = token_ids
        return drafts

    def _tell_drafter(self, drafter: Drafter, inputs: StepInputs, kept: list[list[int]]) -> None:
        for row, own in zip(inputs.rows.tolist(), kept, strict=True):
            if own:
                drafter.append(row, own)
            if row in self._guessed:
                self._guessed.remove(row)
                if row in inputs.drafts:  # the policy may have sent none of them
                    drafter.length.verified(row, len(inputs.drafts[row]), len(own) - 1)

    def _drop(self, request_ids: Iterable[str], *, are_finished: bool = False) -> None:
        """It never raises: requests that left are told once, and all their rows must come back."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is None:
                continue
            self._guessed.discard(row)
            drops: list[Callable[[], None]] = [
                partial(self._sampling.drop, row),
                partial(self.grammar_rows.drop, row),
                partial(self.prompt_rows.drop, row),
                partial(self.pooled_rows.drop, row),
                partial(self.adapter_rows.drop, row),
            ]
            if self._image_rows is not None:
                drops.append(partial(self._image_rows.drop, request_id))
            if self._drafter is not None:
                drops.append(partial(self._drafter.drop, row, is_finished=are_finished))
            for drop in drops:
                try:
                    drop()
                except Exception:
                    logger.exception("a part of request %s is not dropped", request_id)
            self._free_rows.append(row)

    def _add(self, request: NewRequestData) -> None:
        self._drop([request.request_id])
        row = self._rows[request.request_id] = self._free_rows.pop()
        num_tokens, num_blocks = len(request.token_ids), len(request.block_ids)
        self._token_ids[row, :num_tokens] = request.token_ids
        self._num_tokens[row] = num_tokens if request.pooling_params is None else NEVER
        self._num_computed_tokens[row] = request.num_computed_tokens
        self._block_table[row, :num_blocks] = request.block_ids
        self._num_blocks[row] = num_blocks
        self._sampling.set(row, request)
        self.prompt_rows.set(row, request)
        self.pooled_rows.set(row, request)
        self.adapter_rows.set(row, request)
        if self._image_rows is not None:
            self._image_rows.set(request)
        output = request.token_ids[request.num_prompt_tokens :]
        self.grammar_rows.set(row, request.sampling_params.structured_outputs, output)
        if self._drafter is not None:
            self._drafter.set(row, request)

    def _update(self, cached: CachedRequestData) -> None:
        rows = np.fromiter(
            map(self._rows.__getitem__, cached.req_ids), np.int64, len(cached.req_ids)
        )
        self._num_computed_tokens[rows] = cached.num_computed_tokens
        for request_id, block_ids in cached.new_block_ids.items():
            row = self._rows[request_id]
            begin = self._num_blocks[row]
            self._num_blocks[row] = end = begin + len(block_ids)
            self._block_table[row, begin:end] = block_ids
            if self._drafter is not None:
                self._drafter.take_blocks(block_ids)


def kept_logprobs(
    inputs: StepInputs, sampled: Mapping[int, TokenLogprobs], token_ids: list[list[int]]
) -> dict[str, list[TokenLogprobs]]:
    """Of the `token_ids` that were kept, by request; `sampled` are by their places among the S."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    sampling = inputs.sampling.tolist()
    for place, entry in sampled.items():
        index = sampling[place]
        entries = logprobs.setdefault(inputs.req_ids[index], [])
        if len(entries) < len(token_ids[index]):
            entries.append(entry)
    return logprobs


def _num_right(drafts: list[int], token_ids: list[int]) -> int:
    """How many drafts are what was sampled in their places."""
    pairs = enumerate(zip(drafts, token_ids, strict=False))
    return next((place for place, (draft, own) in pairs if draft != own), len(drafts))
