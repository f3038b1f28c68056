"""The persistent batch: what the runner remembers of each request between steps.

First the seam between it and a feature that keeps something of its rows: `batch_parts` registers
the parts; `InputBatch` calls them and knows none of them by name. While `rows` of a part is empty,
a step calls nothing of it. Then requests that were given up, then the batch.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from aioserve.errors import GrammarLimitError
from aioserve.outputs import TokenLogprobs
from aioserve.runner.attention.backend import GivenRows, IntArray, StepInputs
from aioserve.runner.interface import step_failed
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

T = TypeVar("T")


class BatchPart(ABC, Generic[T]):
    """A part of the batch: the values that one feature keeps of the rows whose requests ask for it.

    A method that raises in `set` fails the request alone; one that raises in `prepare` fails the
    step, which may be prepared again. `append` does not raise: a row that cannot go on is noted in
    `errors`.
    """

    #: The key under which `prepare` leaves a result in `StepInputs.parts`, if it has one.
    name = ""
    #: The field of `NewRequestData` by which a request asks for the part, with dots between names;
    #: "" if each request has it. `set` is called where the field is neither None nor empty.
    asked_by = ""

    def __init__(self) -> None:
        self.rows: dict[int, T] = {}
        self.errors: dict[int, str] = {}  # by row, why its request cannot go on

    @abstractmethod
    def set(self, row: int, request: NewRequestData) -> None:
        """A request that asks for the part enters the row, which is added to `rows` if there is
        anything to do for it.
        """

    def drop(self, row: int, *, is_finished: bool = False) -> None:
        """The request leaves a row of `rows`; `is_finished`: it has all the tokens that it will."""
        del is_finished
        self.rows.pop(row, None)
        self.errors.pop(row, None)

    def extend(self, row: int, block_ids: Sequence[int]) -> None:
        """A row gets more blocks of the KV cache, and overwrites what they held."""

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        """Return the inputs of a step with what this part adds to them. A step may be prepared
        again.
        """
        del step
        return inputs

    def append(
        self, rows: IntArray, token_ids: list[list[int]], drafts: Mapping[int, Sequence[int]]
    ) -> None:
        """Note the tokens that are kept of each of `rows`, some of which had `drafts`."""

    def keeps_inputs(self, step: SchedulerOutput) -> bool:
        """Return whether `prepare` adds nothing to a step without drafts, and keeps none, so that
        the step may have the arrays of the last one.
        """
        del step
        return type(self).prepare is BatchPart.prepare

    def may_cut(self, row: int) -> bool:
        """Return whether the tokens of a row in a step can be computed a part at a time."""
        del row
        return True

    def close(self) -> None:
        """Give back what the part holds besides memory. Idempotent."""


class EncoderPart(BatchPart[Any]):
    """The part of a model that encodes inputs of requests, such as images, to rows of its own."""

    num_parameters: int
    has_axes: bool  # whether the model turns tokens of such inputs by three axes

    @abstractmethod
    def run(self, step: SchedulerOutput) -> None:
        """Drop and encode what the step says, before it is prepared."""

    @abstractmethod
    def use_thread(self, begin: Callable[[], None]) -> None:
        """Call `begin` first on each thread that encodes beside the one that calls `run`."""

    @abstractmethod
    def blank(self, num_tokens: int) -> GivenRows:
        """Return rows of zeros for all tokens of a step, as large as those of images: for
        measuring.
        """


class LaterPart(NamedTuple):
    """A part that is made when the first request asks for it, so that nothing of it is loaded
    before.
    """

    asked_by: tuple[str, ...]  # fields of `NewRequestData`, any of which asks for it
    make: Callable[[], BatchPart[Any]]


# Requests that a runner has given up, and what they have left unwritten. A step may be on its way
# that was planned before the scheduler heard of it: such a request gets no place in it, nor does
# one that shares blocks with it. Knows ids and blocks; free of torch.


#: Of a request that shares blocks with one that was given up before it had written them.
SHARED = "the step that served this request failed: it reads what a failed request was to compute"


class LostRows(dict[str, set[int]]):
    """The blocks that a given-up request was to write and has not, by request. While it is empty,
    no method need be called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.why: dict[str, str] = {}  # by request, until it has ended or comes anew

    def add(self, request_id: str, why: str, block_ids: Iterable[int]) -> None:
        """A request is given up, which was to write `block_ids`."""
        self.why[request_id] = why
        self.setdefault(request_id, set()).update(block_ids)

    def come_anew(self, request_ids: Iterable[str]) -> None:
        """The scheduler sends requests of these ids as new ones. Their old blocks are unwritten."""
        for request_id in request_ids:
            self.why.pop(request_id, None)

    def end(self, request_ids: Iterable[str]) -> None:
        """The scheduler says that these have ended: it plans no step any more that reads what they
        have not written.
        """
        for request_id in request_ids:
            self.why.pop(request_id, None)
            self.pop(request_id, None)

    def left_out(self, cached: CachedRequestData) -> CachedRequestData:
        """Without those that were given up; blocks that these get now stay unwritten as well."""
        kept = [
            (request_id, num_computed)
            for request_id, num_computed in zip(
                cached.req_ids, cached.num_computed_tokens, strict=True
            )
            if request_id not in self.why
        ]
        for request_id, block_ids in cached.new_block_ids.items():
            if request_id in self.why:
                self.setdefault(request_id, set()).update(block_ids)
        return CachedRequestData(
            [request_id for request_id, _ in kept],
            [num_computed for _, num_computed in kept],
            {key: own for key, own in cached.new_block_ids.items() if key not in self.why},
        )

    def are_unwritten(self, block_ids: Collection[int]) -> bool:
        """Return whether a request was to write one of them, and has not."""
        return any(not own.isdisjoint(block_ids) for own in self.values())

    def note_written(self, block_ids: Collection[int]) -> None:
        """Note that these blocks have been written from their beginning."""
        for request_id, own in list(self.items()):
            own.difference_update(block_ids)
            if not own and request_id not in self.why:
                del self[request_id]


# The persistent batch: what the runner remembers of each request between steps. Rows of numpy
# arrays; a step brings only what changed. Knows tokens, blocks and counts; what else is kept of a
# row, its `BatchPart`s know. Knows nothing about models, and nothing about scheduling beyond
# `SchedulerOutput`.


logger = logging.getLogger(__name__)

_NONE = np.zeros(0, dtype=np.int64)

#: Values of a field by which a request does not ask for a `BatchPart`.
NOT_ASKED = (None, "", ())

SPARE_COLUMNS = 8  # of the block table of steps that repeat: blocks that their rows may still get
FEW_ROWS = 16  # that repeat: of more, some begin a block in most steps


class _RepeatedStep:
    """The arrays of a step of one token for each of R rows, which the next step of the same rows
    overwrites. So what a step has been made into, such as tensors and addresses, serves the next.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        inputs: StepInputs,
        bases: Sequence[IntArray],
        parts: Sequence[BatchPart[Any]],
    ) -> None:
        """`bases`: the places of the rows' first numbers in the tables of tokens and of blocks.
        `parts`: those of the batch that have rows.
        """
        self.parts = parts
        self.counts = counts  # of the scheduler: steps of the same rows share them
        self.token_base, self.block_base = bases
        self.num_tokens, self.block, self.offset, self.place = np.empty_like([inputs.rows] * 4)
        #: [3, R], positions, lengths and slots: where each row has one token more, so have these.
        self.numbers = np.stack([inputs.positions, inputs.seq_lens, inputs.slot_mapping])
        positions, ends, slots = self.numbers
        self.inputs = replace(inputs, positions=positions, seq_lens=ends, slot_mapping=slots)
        self.is_entered = False  # whether `input_ids` are what was sampled behind `positions`
        self.num_within = 0  # steps before a row of these few begins a block; 0 if that is unknown


class InputBatch:
    """A batch of up to `max_num_seqs` requests of up to `max_model_len` tokens."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        parts: Sequence[BatchPart[Any] | LaterPart] = (),
        *,
        overwrites: bool = False,
    ) -> None:
        """`parts` are called in this order. `overwrites`: a step may get the very `StepInputs` of
        the last one with other numbers in its arrays, if that has the same rows.
        """
        self._block_size = block_size
        self._overwrites = overwrites
        self._repeated: _RepeatedStep | None = None
        self._last_counts: object = None  # of the last step of one token for each of its rows
        self._known: tuple[object, IntArray] = None, _NONE  # ids as they came, and their rows
        self._take_parts(parts)
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
        self.lost = LostRows()
        self.may_lose = False  # whether a request may be given up alone

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, step: SchedulerOutput) -> None:
        """Drop the requests that left, add those that came, update those that stayed. Ids that are
        unknown may be dropped.
        """
        if step.finished_req_ids:
            self._drop(step.finished_req_ids, are_finished=True)
        if step.preempted_req_ids:
            self._drop(step.preempted_req_ids)
        if self.lost:
            self.lost.end(step.finished_req_ids)
            self.lost.come_anew(request.request_id for request in step.scheduled_new_reqs)
        for request in step.scheduled_new_reqs:
            try:
                self._add(request)
            except Exception as error:
                if not self.may_lose:
                    raise
                logger.exception("request %s does not get into the batch", request.request_id)
                is_known = isinstance(error, GrammarLimitError)
                why = str(error) if is_known else step_failed(error)
                self.lose(request.request_id, why, request.block_ids)
        cached = step.scheduled_cached_reqs
        self._update(self.lost.left_out(cached) if self.lost.why else cached)

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
        """Return how many tokens of a request were computed before the step; 0 of one that is not
        here.
        """
        row = self._rows.get(request_id)
        return 0 if row is None else int(self._num_computed_tokens[row])

    def blocks_read(self, request_id: str) -> list[int]:
        """Return the blocks in which a step finds the computed tokens of a request."""
        row, count = self._rows[request_id], self.num_computed(request_id)
        found: list[int] = self._block_table[row, : -(-count // self._block_size)].tolist()
        return found

    def blocks_begun(self, request_id: str, count: int) -> list[int]:
        """Return the blocks that are written from their beginning when `count` tokens of it are."""
        row, begin = self._rows[request_id], self.num_computed(request_id)
        first, end = (-(-place // self._block_size) for place in (begin, begin + count))
        found: list[int] = self._block_table[row, first:end].tolist()
        return found

    def may_cut(self, request_id: str, step: SchedulerOutput) -> bool:
        """Return whether the tokens of a request in `step` can be computed a part at a time: not
        where drafts are verified, nor where a part needs them together.
        """
        if request_id in step.scheduled_spec_decode_tokens:
            return False
        row = self._rows[request_id]
        return all(part.may_cut(row) for part in self.parts if row in part.rows)

    def place(self, request_id: str, num_computed: int) -> None:
        """Note how many tokens of a request are computed by now."""
        self._num_computed_tokens[self._rows[request_id]] = num_computed

    def prepare(self, step: SchedulerOutput) -> StepInputs:
        """Return the packed arrays of a step that was applied. Raises `KeyError` for an
        unknown id.
        """
        repeated = self._repeated
        if (
            repeated is not None
            and repeated.counts is step.num_scheduled_tokens
            and not step.scheduled_spec_decode_tokens
            and (not repeated.parts or all(part.keeps_inputs(step) for part in repeated.parts))
            and self._repeat(repeated)
        ):
            return repeated.inputs
        self._repeated = None
        drafts = self._place_drafts(step) if step.scheduled_spec_decode_tokens else {}
        req_ids = list(step.num_scheduled_tokens)
        num_reqs = len(req_ids)
        rows = np.fromiter(map(self._rows.__getitem__, req_ids), np.int64, num_reqs)
        begins = self._num_computed_tokens[rows]
        # A step scheduled ahead of one that failed, or that a request sat out, is beyond the known
        # tokens: what it computes for those requests does not matter.
        num_tokens = self._num_tokens[rows]
        counted = step.num_scheduled_tokens.values()
        # a scheduler of one's own may send a request that gets no token
        if step.total_num_scheduled_tokens == num_reqs and 0 not in counted:
            sampling = np.flatnonzero(begins + 1 == num_tokens)
            inputs = self._pack_ones(rows, begins, req_ids, sampling)
            is_same = self._last_counts is step.num_scheduled_tokens
            self._last_counts = step.num_scheduled_tokens
            if (
                self._overwrites
                and is_same
                and len(sampling) == num_reqs
                and not drafts
                and all(part.keeps_inputs(step) or not part.rows for part in self.parts)
            ):
                self._repeated = repeated = self._make_repeated(step, inputs)
                return repeated.inputs
        else:
            counts = np.fromiter(counted, np.int64, num_reqs)
            ends = begins + counts
            sampling = np.flatnonzero((ends >= num_tokens) & (begins < num_tokens))
            inputs = self.pack(rows, begins, ends, req_ids, sampling)
        if drafts:  # a row samples after each of its drafts as well
            num_drafts = (len(drafts.get(row, ())) for row in rows[sampling].tolist())
            counts = 1 + np.fromiter(num_drafts, np.int64, len(sampling))
            last = np.repeat(counts.cumsum() - 1 - inputs.logits_indices, counts)
            inputs = replace(
                inputs,
                sampling=np.repeat(sampling, counts),
                logits_indices=np.arange(len(last)) - last,
                drafts=drafts,
            )
        for part in self.parts:
            if part.rows:
                inputs = part.prepare(inputs, step)
        return inputs

    def _make_repeated(self, step: SchedulerOutput, inputs: StepInputs) -> _RepeatedStep:
        """Return a step with the numbers of `inputs` for the next one to overwrite."""
        rows = inputs.rows
        num_columns = int(self._num_blocks[rows].max(initial=1)) + SPARE_COLUMNS
        table = np.ascontiguousarray(self._block_table[rows, :num_columns])
        bases = [rows * found.shape[1] for found in (self._token_ids, self._block_table)]
        parts = [part for part in self.parts if part.rows]
        inputs = replace(inputs, block_table=table)
        return _RepeatedStep(step.num_scheduled_tokens, inputs, bases, parts)

    def _repeat(self, repeated: _RepeatedStep) -> bool:
        """Write into its arrays where its rows are now. False: they are not those of a step of one
        token that each of them samples from.
        """
        inputs = repeated.inputs
        rows, positions, ends = inputs.rows, inputs.positions, inputs.seq_lens
        block, offset, place = repeated.block, repeated.offset, repeated.place
        # "clip" is quicker than "raise"; no index is outside
        self._num_computed_tokens.take(rows, out=place, mode="clip")
        is_entered, repeated.is_entered = repeated.is_entered, False
        if is_entered and place.tobytes() == ends.tobytes():  # `all` takes ten times as long
            np.add(repeated.numbers, 1, out=repeated.numbers)
            if repeated.num_within:
                repeated.num_within -= 1
                return True
        else:
            positions[:] = place
            np.add(positions, 1, out=ends)
            self._num_tokens.take(rows, out=repeated.num_tokens, mode="clip")
            if ends.tobytes() != repeated.num_tokens.tobytes():
                return False
            np.add(repeated.token_base, positions, out=place)
            inputs.input_ids[:] = self._token_ids.take(place)
        np.divmod(positions, self._block_size, out=(block, offset))
        np.add(repeated.block_base, block, out=place)
        np.multiply(self._block_table.take(place), self._block_size, out=place, dtype=np.int64)
        np.add(place, offset, out=inputs.slot_mapping)
        if len(rows) <= FEW_ROWS:
            repeated.num_within = self._block_size - 1 - max(offset.tolist())
        return True

    def pack(
        self,
        rows: IntArray,
        begins: IntArray,
        ends: IntArray,
        req_ids: Sequence[str] = (),
        sampling: IntArray = _NONE,
    ) -> StepInputs:
        """Return the tokens from `begins` to `ends` of R `rows` as a step, in which the rows at the
        places `sampling` sample behind their last tokens.
        """
        counts = ends - begins
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        token_row = np.repeat(rows, counts)
        positions = np.arange(query_start_loc[-1])
        positions += np.repeat(begins - query_start_loc[:-1], counts)
        block, offset = np.divmod(positions, self._block_size)
        num_columns = -(-int(ends.max(initial=1)) // self._block_size)
        return StepInputs(
            req_ids=list(req_ids),
            rows=rows,
            input_ids=self._token_ids[token_row, positions].astype(np.int64),
            positions=positions,
            slot_mapping=self._block_table[token_row, block].astype(np.int64) * self._block_size
            + offset,
            query_start_loc=query_start_loc,
            seq_lens=ends,
            block_table=self._block_table[rows, :num_columns],
            sampling=sampling,
            logits_indices=query_start_loc[1:][sampling] - 1,
        )

    def _pack_ones(
        self, rows: IntArray, positions: IntArray, req_ids: list[str], sampling: IntArray
    ) -> StepInputs:
        """Return what `pack` returns of one token for each of `rows`, as in most steps."""
        block, offset = np.divmod(positions, self._block_size)
        ends = positions + 1
        num_columns = -(-int(ends.max(initial=1)) // self._block_size)
        block_table = self._block_table[rows, :num_columns]
        places = np.arange(len(rows) + 1)
        return StepInputs(
            req_ids=req_ids,
            rows=rows,
            input_ids=self._token_ids[rows, positions].astype(np.int64),
            positions=positions,
            slot_mapping=block_table[places[:-1], block].astype(np.int64) * self._block_size
            + offset,
            query_start_loc=places,
            seq_lens=ends,
            block_table=block_table,
            sampling=sampling,
            logits_indices=sampling,
        )

    def num_tokens(self, rows: Sequence[int] | IntArray) -> IntArray:
        """Return how many tokens are known of each of `rows`."""
        return self._num_tokens[rows]

    def num_slots(self, rows: Sequence[int]) -> IntArray:
        """Return how many tokens the blocks of each of `rows` can hold, and its columns."""
        return np.minimum(self._num_blocks[rows] * self._block_size, self._token_ids.shape[1] - 1)

    def blocks(self, row: int) -> npt.NDArray[np.int32]:
        """Return the blocks of a row, in the order of its tokens."""
        return self._block_table[row, : self._num_blocks[row]]

    def write(self, row: int, place: int, token_id: int) -> None:
        """Put a guess behind the known tokens of a row."""
        self._token_ids[row, place] = token_id

    def append(self, inputs: StepInputs, token_ids: IntArray) -> list[list[int]]:
        """Keep the S sampled tokens, but for those after a draft that turned out wrong.

        Returns what was kept, for each of the R rows.
        """
        if len(inputs.sampling) == len(inputs.rows) and not inputs.drafts:  # one of each row
            kept = [[token_id] for token_id in token_ids.tolist()]
        else:
            kept = [[] for _ in inputs.req_ids]
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
            rows, position = inputs.rows, inputs.seq_lens
            if len(inputs.sampling) != len(rows):
                rows, position = rows[inputs.sampling], position[inputs.sampling]
            self._token_ids[rows, position] = token_ids
            self._num_tokens[rows] = position + 1
            if self._repeated is not None and self._repeated.inputs is inputs:
                inputs.input_ids[:] = token_ids
                self._repeated.is_entered = True
        for part in self.parts:
            if part.rows:
                part.append(inputs.rows, kept, inputs.drafts)
        return kept

    def failures(self, inputs: StepInputs) -> dict[str, str]:
        """Return which requests of `inputs` cannot go on, and why."""
        errors: dict[int, str] = {}
        for part in self.parts:
            if part.errors:
                errors |= part.errors
        if not errors:
            return {}
        rows = zip(inputs.req_ids, inputs.rows.tolist(), strict=True)
        return {request_id: errors[row] for request_id, row in rows if row in errors}

    def close(self) -> None:
        """Give back what the parts hold. Idempotent."""
        for part in self.parts:
            part.close()

    def _place_drafts(self, step: SchedulerOutput) -> dict[int, list[int]]:
        """Return the drafts of a step by row, behind the known tokens of theirs."""
        drafts = {}
        for request_id, token_ids in step.scheduled_spec_decode_tokens.items():
            row = self._rows[request_id]
            begin = self._num_tokens[row]
            self._token_ids[row, begin : begin + len(token_ids)] = token_ids
            drafts[row] = token_ids
        return drafts

    def _drop(self, request_ids: Iterable[str], *, are_finished: bool = False) -> None:
        """Remove requests. Never raises: leaving is told once, and all rows must come back."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is None:
                continue
            self._forget_rows()
            for part in self.parts:
                if row in part.rows:
                    try:
                        part.drop(row, is_finished=are_finished)
                    except Exception:
                        logger.exception("a part of request %s is not dropped", request_id)
            self._free_rows.append(row)

    def _take_parts(self, parts: Sequence[BatchPart[Any] | LaterPart]) -> None:
        """Call these `parts` from now on, in this order."""
        self._all_parts = list(parts)
        made = self.parts = tuple(part for part in parts if isinstance(part, BatchPart))
        self._for_all = [part for part in made if not part.asked_by]
        self._asked = [(attrgetter(part.asked_by), part) for part in made if part.asked_by]
        self._later = [
            (attrgetter(field), part)
            for part in parts
            if isinstance(part, LaterPart)
            for field in part.asked_by
        ]

    def _make_parts(self, request: NewRequestData) -> None:
        """Make the parts that the request is the first to ask for."""
        for get_field, later in self._later:
            if get_field(request) not in NOT_ASKED and later in self._all_parts:
                self._all_parts[self._all_parts.index(later)] = later.make()
                self._take_parts(self._all_parts)

    def _add(self, request: NewRequestData) -> None:
        self._drop([request.request_id])
        self._make_parts(request)
        self._forget_rows()
        row = self._rows[request.request_id] = self._free_rows.pop()
        num_tokens, num_blocks = len(request.token_ids), len(request.block_ids)
        self._token_ids[row, :num_tokens] = request.token_ids
        self._num_tokens[row] = num_tokens
        self._num_computed_tokens[row] = request.num_computed_tokens
        self._block_table[row, :num_blocks] = request.block_ids
        self._num_blocks[row] = num_blocks
        for part in self._for_all:
            part.set(row, request)
        for get_field, part in self._asked:
            if get_field(request) not in NOT_ASKED:
                part.set(row, request)

    def _forget_rows(self) -> None:
        """Other requests have rows now than those that steps have told of."""
        self._repeated, self._known = None, (None, _NONE)

    def _update(self, cached: CachedRequestData) -> None:
        known, rows = self._known
        if known is not cached.req_ids:
            rows = np.fromiter(
                map(self._rows.__getitem__, cached.req_ids), np.int64, len(cached.req_ids)
            )
            self._known = cached.req_ids, rows
        self._num_computed_tokens[rows] = cached.num_computed_tokens
        for request_id, block_ids in cached.new_block_ids.items():
            row = self._rows[request_id]
            begin = self._num_blocks[row]
            self._num_blocks[row] = end = begin + len(block_ids)
            self._block_table[row, begin:end] = block_ids
            for part in self.parts:
                if row in part.rows:
                    part.extend(row, block_ids)
        if cached.new_block_ids and self._repeated is not None:
            inputs = self._repeated.inputs
            table = inputs.block_table
            if int(self._num_blocks[inputs.rows].max()) > table.shape[1]:
                self._repeated = None
            else:
                table[:] = self._block_table[inputs.rows, : table.shape[1]]


def kept_logprobs(
    inputs: StepInputs, sampled: Mapping[int, TokenLogprobs], token_ids: list[list[int]]
) -> dict[str, list[TokenLogprobs]]:
    """Logprobs of the `token_ids` that were kept, by request; `sampled` are by place in the S."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    if not sampled:
        return logprobs
    sampling = inputs.sampling.tolist()
    for place, entry in sampled.items():
        index = sampling[place]
        entries = logprobs.setdefault(inputs.req_ids[index], [])
        if len(entries) < len(token_ids[index]):
            entries.append(entry)
    return logprobs


def _num_right(drafts: list[int], token_ids: list[int]) -> int:
    """Return how many drafts are what was sampled in their places."""
    pairs = enumerate(zip(drafts, token_ids, strict=False))
    return next((place for place, (draft, own) in pairs if draft != own), len(drafts))
