"""One step as the arrays that kernels want, in one int32 buffer: the plan of a step.

Knows rows, pages and markers. Knows nothing about models, devices or scheduling.
"""

from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aioserve.runner.attention.backend import IntArray, ModelInputs, StepInputs
from aioserve.runner.batch import sampling_columns
from aioserve.runner.batch.sampling_columns import SamplingColumns, SamplingInputs

Words = npt.NDArray[np.int32]
A = TypeVar("A", Words, Tensor)

_NO_FLOOR = np.float32(-np.inf).view(np.int32)


@dataclass(frozen=True, slots=True)
class Pages(Generic[A]):
    """The numbers by which the layers of one pool write and read KV pages: parts of `Sections`."""

    slots: A  # T, page * page_size + offset: where K and V of a token go
    kv_indptr: A  # B + 1, first entry of each row in kv_indices
    prefill_kv_indptr: A  # P + 1, of the P rows that are no decodes, from 0
    seq_lens: A  # B, tokens in the pages of a row once this step has written its own
    kv_indices: A  # pages of all rows


@dataclass(frozen=True, slots=True)
class Sections(Generic[A]):
    """Views of an arena, as long as they can get; a step uses the beginning of each.

    B rows, those with one token first; T tokens; S rows that sample, in the order of the B: once,
    and once more for each draft token to verify. What begins with `window_` is for layers with a
    sliding window that have pages of their own: of a row those pages alone that its tokens see.
    """

    input_ids: A  # T; -1 - slot: the last token sampled for that slot
    positions: A  # T, by which heads turn
    slots: A  # T, page * page_size + offset: where K and V of a token go
    qo_indptr: A  # B + 1, first token of each row
    kv_indptr: A  # B + 1, first entry of each row in kv_indices
    prefill_qo_indptr: A  # P + 1, of the P rows that are no decodes, from 0
    prefill_kv_indptr: A  # P + 1, of these P rows, from 0
    last_page_len: A  # B, tokens in the last page of a row: 1 to page_size
    seq_lens: A  # B, tokens whose K and V exist once this step has written its own
    logits_rows: A  # S, the token (of T) whose logits are sampled from
    token_slots: A  # S, where the sampled token is kept for the next step
    temperature: A  # S, float bits; 0 = greedy
    top_k: A  # S, 0 = all
    top_p: A  # S, float bits
    min_p_floor: A  # S, float bits: log(min_p)
    keys: A  # 2 * S, of the noise, if any row is drawn: all first words, then all second ones
    window_slots: A  # T
    window_kv_indptr: A  # B + 1
    window_prefill_kv_indptr: A  # P + 1
    window_seq_lens: A  # B
    window_kv_indices: A  # few, so that they are copied whole
    kv_indices: A  # pages of all rows; last, as only what is used of it is copied

    def pages(self, *, in_windows: bool) -> Pages[A]:
        """Return where layers have K and V, with pages of their own for windows or without."""
        if in_windows:
            return Pages(
                self.window_slots,
                self.window_kv_indptr,
                self.window_prefill_kv_indptr,
                self.window_seq_lens,
                self.window_kv_indices,
            )
        return Pages(
            self.slots, self.kv_indptr, self.prefill_kv_indptr, self.seq_lens, self.kv_indices
        )


class WindowLimits(NamedTuple):
    """The layers with a sliding window that have a pool of their own."""

    layers: frozenset[int]
    num_tokens: int  # w: a token sees itself and the w - 1 before it; the most of all layers
    num_pages: int  # of their pool; one more is the dummy page


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the largest step."""

    num_rows: int
    num_tokens: int
    num_row_pages: int  # of one row
    page_size: int
    num_pages: int  # of the KV pool; one more, the dummy page, takes what padding rows write
    num_drafts: int = 0  # of one row
    windows: WindowLimits | None = None

    @property
    def num_window_entries(self) -> int:
        """The most pages that the rows of a step have in the pool of windows."""
        if self.windows is None:
            return 0
        # The tokens of all rows, the w - 1 before those of each, and what else pages have at ends.
        per_row = (self.windows.num_tokens - 1) // self.page_size + 3
        most = self.num_rows * per_row + self.num_tokens // self.page_size
        return min(most, self.num_rows * self.num_row_pages)

    @property
    def num_samples(self) -> int:
        """The most tokens that a step samples: per row one, and one for each draft token."""
        return self.num_rows * (1 + self.num_drafts)

    @property
    def dummy_page(self) -> int:
        """Read and written by padding rows only."""
        return self.num_pages


class Layout:
    """The place of each section in an arena: the same in every step, as CUDA graphs demand."""

    def __init__(self, limits: Limits) -> None:
        rows, tokens, samples = limits.num_rows, limits.num_tokens, limits.num_samples
        self.limits = limits
        lengths = dict.fromkeys((field.name for field in fields(Sections)), samples)
        lengths |= dict.fromkeys(("input_ids", "positions", "slots"), tokens)
        lengths |= {name: rows + 1 for name in lengths if name.endswith("indptr")}
        lengths |= dict.fromkeys(("last_page_len", "seq_lens"), rows)
        lengths |= {"keys": 2 * samples, "kv_indices": rows * limits.num_row_pages}
        if limits.windows is None:
            lengths |= {name: 0 for name in lengths if name.startswith("window_")}
        else:
            lengths |= {"window_slots": tokens, "window_seq_lens": rows}
            lengths["window_kv_indices"] = limits.num_window_entries
        self._bounds: dict[str, tuple[int, int]] = {}
        end = 0
        for name, length in lengths.items():
            begin = -(-end // 32) * 32  # 128 bytes: what vector loads and copies like
            end = begin + length
            self._bounds[name] = (begin, end)
        self._slices = [slice(*bounds) for bounds in self._bounds.values()]
        self.size = end  # in int32

    def split(self, buffer: A) -> Sections[A]:
        """Return the sections of `buffer` [size], as views."""
        return Sections(*map(buffer.__getitem__, self._slices))  # in the order of the fields

    def used(self, num_page_entries: int) -> int:
        """Words of an arena that a step with `num_page_entries` entries of kv_indices fills."""
        return self._bounds["kv_indices"][0] + num_page_entries


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step that lies in an arena, for the host. Rows are the B of `Sections`."""

    inputs: StepInputs  # in the scheduler's order
    host: Sections[Words]  # valid until the arena is used again
    num_rows: int  # B without padding
    num_decodes: int  # leading rows with one token, padding not counted; the others are prefills
    num_padded_rows: int  # B; more than num_rows only if all rows are decodes
    num_tokens: int  # T, padding included
    num_page_entries: int
    num_decode_page_entries: int  # of the rows that are decodes; they come first
    window_entries: tuple[int, int]  # pages in windows: of decodes, of all rows
    num_words: int  # of the arena that are used
    tokens: IntArray  # packed tokens of `inputs`, in the order of the T; padding is not among them
    sampled: IntArray  # S, rows of `inputs`
    places: IntArray  # S, where each of them stands in `inputs.sampling`
    sampling: SamplingInputs  # of the S

    @property
    def num_sampling(self) -> int:
        """S: the rows that sample, each counted once more per draft token to verify."""
        return len(self.sampled)

    def model_inputs(self, arrays: Sections[Tensor]) -> ModelInputs:
        """Return what the model reads of the step, which lies in `arrays` on the device."""
        return ModelInputs(
            input_ids=arrays.input_ids[: self.num_tokens].long(),
            positions=arrays.positions[: self.num_tokens].long(),
            slots=arrays.slots[: self.num_tokens].long(),
            logits_rows=arrays.logits_rows[: self.num_sampling].long(),
        )

    def placed(self, tokens: IntArray) -> IntArray:
        """Return where packed tokens of `inputs` stand among the T."""
        places = np.empty(len(self.tokens), dtype=np.int64)
        places[self.tokens] = np.arange(len(self.tokens))
        found: IntArray = places[tokens]
        return found

    def page_entries(self, *, in_windows: bool) -> tuple[int, int]:
        """Return how many entries of `Pages.kv_indices` are of decodes, and how many of all."""
        if in_windows:
            return self.window_entries
        return self.num_decode_page_entries, self.num_page_entries

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token: what a CUDA graph can replay."""
        return self.num_decodes == self.num_rows


def plan_step(
    inputs: StepInputs,
    sampling: SamplingInputs,
    layout: Layout,
    arena: Words,
    padded_sizes: tuple[int, ...] = (),
) -> StepPlan:
    """Write a step with at least one token into `arena` [layout.size].

    `sampling` holds the columns of `inputs.sampling`. A step of decodes alone is padded to the
    smallest of `padded_sizes` (ascending) that holds it; larger ones are left as they are.
    """
    limits, out = layout.limits, layout.split(arena)
    starts, seq_lens, num_rows = inputs.query_start_loc, inputs.seq_lens, len(inputs.seq_lens)
    is_prefill = starts[1:] - starts[:-1] > 1
    num_decodes = num_rows - int(np.count_nonzero(is_prefill))
    num_tokens = int(starts[-1])
    token, order = np.arange(num_tokens), np.arange(num_rows)
    pool = limits.windows
    windows = None if pool is None else inputs.windows
    places, logits_rows = np.arange(len(inputs.sampling)), inputs.logits_indices
    turns = inputs.positions if inputs.turns is None else inputs.turns
    packed: tuple[IntArray, ...] = (inputs.input_ids, turns, inputs.slot_mapping)
    targets: tuple[Words, ...] = (out.input_ids, out.positions, out.slots)
    if windows is not None:
        packed, targets = (*packed, windows.slot_mapping), (*targets, out.window_slots)
    if np.count_nonzero(is_prefill[:num_decodes]):  # a prefill was scheduled before a decode
        order = np.argsort(is_prefill, kind="stable")  # decodes first, else as scheduled
        query_lens = (starts[1:] - starts[:-1])[order]
        moved = starts[order]
        starts = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(query_lens, out=starts[1:])
        token = token + np.repeat(moved - starts[:-1], query_lens)
        packed, seq_lens = tuple(array[token] for array in packed), seq_lens[order]
        places = _in_row_order(order, inputs.sampling)
        planned = np.empty(num_tokens, dtype=np.int64)
        planned[token] = np.arange(num_tokens)
        logits_rows = planned[logits_rows[places]]
        edits = sampling.edits
        if edits:
            edits = {new: edits[old] for new, old in enumerate(places.tolist()) if old in edits}
        sampling = replace(sampling.take(places), edits=edits)
    for target, source in zip(targets, packed, strict=True):
        target[:num_tokens] = source
    out.qo_indptr[: num_rows + 1] = starts
    out.seq_lens[:num_rows] = seq_lens

    size = limits.page_size
    num_pages = (seq_lens + (size - 1)) // size
    width = inputs.block_table.shape[1]
    num_entries = _write_pages(out.kv_indptr, out.kv_indices, inputs, order * width, num_pages)
    out.last_page_len[:num_rows] = seq_lens - (num_pages - 1) * size
    num_in_windows = 0
    if pool is not None:
        assert windows is not None, "of a model with such layers"
        # The first page that the first of a row's tokens sees; what was before may be others'.
        first = np.maximum(seq_lens - np.diff(starts) - (pool.num_tokens - 1), 0) // size
        out.window_seq_lens[:num_rows] = seq_lens - first * size
        begins, indptr, indices = order * width + first, out.window_kv_indptr, out.window_kv_indices
        num_in_windows = _write_pages(indptr, indices, windows, begins, num_pages - first)

    num_padded = num_rows
    decode_entries, decodes_in_windows = int(out.kv_indptr[num_decodes]), 0
    if pool is not None:
        decodes_in_windows = int(out.window_kv_indptr[num_decodes])
    if num_decodes < num_rows:
        bounds = [(out.prefill_qo_indptr, out.qo_indptr), (out.prefill_kv_indptr, out.kv_indptr)]
        if pool is not None:
            bounds.append((out.window_prefill_kv_indptr, out.window_kv_indptr))
        for target, absolute in bounds:
            own = absolute[num_decodes : num_rows + 1]
            target[: num_rows - num_decodes + 1] = own - own[0]
    else:
        place = bisect_left(padded_sizes, num_rows)
        if place < len(padded_sizes) and (num_padded := padded_sizes[place]) > num_rows:
            _pad(out, limits, num_rows, num_padded, num_entries, num_in_windows)
            num_entries += num_padded - num_rows
            num_in_windows += 0 if pool is None else num_padded - num_rows
        num_tokens, decode_entries, decodes_in_windows = num_padded, num_entries, num_in_windows

    sampled = inputs.sampling[places]
    out.logits_rows[: len(sampled)] = logits_rows
    out.token_slots[: len(sampled)] = inputs.rows[sampled]
    _write_sampling(out, sampling)
    return StepPlan(
        inputs=inputs,
        host=out,
        num_rows=num_rows,
        num_decodes=num_decodes,
        num_padded_rows=num_padded,
        num_tokens=num_tokens,
        num_page_entries=num_entries,
        num_decode_page_entries=decode_entries,
        window_entries=(decodes_in_windows, num_in_windows),
        num_words=layout.used(num_entries),
        tokens=token,
        sampled=sampled,
        places=places,
        sampling=sampling,
    )


def plan_padding(layout: Layout, arena: Words, size: int) -> StepPlan:
    """Return a step of `size` padding rows: what a CUDA graph of that size is captured with."""
    out, none = layout.split(arena), np.zeros(0, dtype=np.int64)
    out.qo_indptr[0] = out.kv_indptr[0] = 0
    has_windows = layout.limits.windows is not None
    if has_windows:
        out.window_kv_indptr[0] = 0
    _pad(out, layout.limits, 0, size, 0, 0)
    inputs = StepInputs(
        [], none, none, none, none, none, none, np.zeros((0, 0), np.int32), none, none
    )
    return StepPlan(
        inputs=inputs,
        host=out,
        num_rows=0,
        num_decodes=0,
        num_padded_rows=size,
        num_tokens=size,
        num_page_entries=size,
        num_decode_page_entries=size,
        window_entries=(size, size) if has_windows else (0, 0),
        num_words=layout.used(size),
        tokens=none,
        sampled=none,
        places=none,
        sampling=SamplingColumns(1, 1).select(none, none),
    )


def _in_row_order(order: IntArray, sampling: IntArray) -> IntArray:
    """Places in `sampling` (rows as scheduled, ascending) in the order of the planned rows; those
    of one row stay as they are.
    """
    row = np.empty(len(order), dtype=np.int64)
    row[order] = np.arange(len(order))
    return np.argsort(row[sampling], kind="stable")


def _write_pages(
    indptr: Words, indices: Words, inputs: StepInputs, begins: IntArray, counts: IntArray
) -> int:
    """Write pages of the block table of `inputs`: of each row `counts` pages, from entry `begins`
    of the flattened table on. Returns how many there are in all.
    """
    ends = counts.cumsum()
    num_entries = int(ends[-1])
    entry = np.arange(num_entries)
    entry += np.repeat(begins - (ends - counts), counts)
    # "clip", as "raise" copies once more
    np.take(inputs.block_table.reshape(-1), entry, out=indices[:num_entries], mode="clip")
    indptr[0] = 0
    indptr[1 : len(counts) + 1] = ends
    return num_entries


def _pad(
    out: Sections[Words],
    limits: Limits,
    begin: int,
    end: int,
    num_entries: int,
    num_in_windows: int,
) -> None:
    """Rows that look like requests of one token in the dummy page, so that no kernel meets a row
    without a page (flashinfer reads a last page of length 0 as a full one).
    """
    out.input_ids[begin:end] = 0
    out.positions[begin:end] = 0
    out.qo_indptr[begin + 1 : end + 1] = np.arange(begin + 1, end + 1)
    out.last_page_len[begin:end] = 1
    pools = [(out.pages(in_windows=False), limits.dummy_page, num_entries)]
    if (windows := limits.windows) is not None:
        pools.append((out.pages(in_windows=True), windows.num_pages, num_in_windows))
    for pages, dummy_page, count in pools:
        pages.slots[begin:end] = dummy_page * limits.page_size
        pages.kv_indptr[begin + 1 : end + 1] = count + np.arange(1, end - begin + 1)
        pages.kv_indices[count : count + end - begin] = dummy_page
        pages.seq_lens[begin:end] = 1


def _write_sampling(out: Sections[Words], sampling: SamplingInputs) -> None:
    size = len(sampling.temperature)
    out.temperature[:size] = sampling.temperature.view(np.int32)
    out.top_k[:size] = sampling.top_k
    out.top_p[:size] = sampling.top_p.view(np.int32)
    out.min_p_floor[:size] = _NO_FLOOR
    if np.count_nonzero(sampling.min_p):
        with np.errstate(divide="ignore"):
            out.min_p_floor[:size] = np.log(sampling.min_p).view(np.int32)
    if np.count_nonzero(sampling.temperature):  # else the step draws nothing, and needs no noise
        keys = sampling_columns.row_keys(sampling.seeds, sampling.num_tokens).view(np.int32)
        out.keys[: 2 * size] = keys.T.reshape(-1)
