"""The arrays of a step against a reference in plain Python, for random batches."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from aioserve.features.states.rows import WindowRows
from aioserve.gpu.cuda.executor import OverlappedBatch
from aioserve.gpu.cuda.plan import Layout, Limits, StepPlan, WindowLimits, plan_step
from aioserve.params import SamplingParams
from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.batch import sampling_columns
from aioserve.runner.batch.sampling_columns import SamplingColumns
from aioserve.scheduler.output import SchedulerOutput
from tests.runner.driver import Driver

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE = 8, 96, 4, 60, 50
LIMITS = Limits(
    num_rows=NUM_ROWS,
    num_tokens=NUM_ROWS * MAX_MODEL_LEN,
    num_row_pages=-(-(MAX_MODEL_LEN + 1) // BLOCK_SIZE),
    page_size=BLOCK_SIZE,
    num_pages=NUM_BLOCKS,
)
WINDOW, NUM_WINDOW_PAGES = 10, 97
LAYOUTS = {
    False: Layout(LIMITS),
    True: Layout(replace(LIMITS, windows=WindowLimits(frozenset({1}), WINDOW, NUM_WINDOW_PAGES))),
}
SIZES = (1, 2, 4, 8)


class Traffic(Driver):
    """Random requests that come, share prefixes, are preempted, come back and leave."""

    def __init__(self, seed: int, *, has_windows: bool = False) -> None:
        super().__init__(None, NUM_BLOCKS, BLOCK_SIZE)  # type: ignore[arg-type]
        self.random = random.Random(seed)
        self.sampling = SamplingColumns(NUM_ROWS, VOCAB_SIZE)
        parts = [self.sampling, WindowRows(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE)]
        parts = parts if has_windows else parts[:1]
        self.batch = OverlappedBatch(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, parts)
        self.layout = LAYOUTS[has_windows]
        self.given: dict[str, int] = {}  # tokens that the runner was told, by request
        self.num_added = 0

    def disturb(self) -> None:
        roll = self.random.random
        while len(self.sequences) < NUM_ROWS and roll() < 0.6:
            name = f"r{self.num_added}"
            self.num_added += 1
            prompt = [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 24))]
            temperature, seed = self.random.choice([0, 0.7]), self.random.randrange(1 << 40)
            params = SamplingParams(temperature=temperature, seed=seed, top_k=3, top_p=0.9)
            others = [n for n, s in self.sequences.items() if len(s.block_ids) > 1]
            if others and roll() < 0.5:
                self.share(name, self.random.choice(others), prompt, params)
            else:
                self.add(name, prompt, params)
        for name in list(self.sequences):
            sequence = self.sequences[name]
            if len(sequence.token_ids) + 3 > MAX_MODEL_LEN or roll() < 0.05:
                self.finish(name)
            elif sequence.is_known_to_runner and sequence.num_scheduled_ahead == 0 and roll() < 0.1:
                self.preempt(name)

    def share(self, name: str, other: str, prompt: list[int], params: SamplingParams) -> None:
        computed = self.sequences[other].num_computed // BLOCK_SIZE
        if computed:
            self.add(
                name, self.sequences[other].token_ids[: computed * BLOCK_SIZE] + prompt, params
            )
            self.share_prefix(name, other, computed)  # given back twice in the end: no harm here

    def plan(self) -> tuple[SchedulerOutput, StepInputs, StepPlan] | None:
        step: dict[str, int] = {}
        names = list(self.sequences)
        self.random.shuffle(names)
        for name in names:
            lacking = self.sequences[name].lacking
            if lacking and self.random.random() < 0.8:
                step[name] = self.random.choice([lacking, self.random.randint(1, lacking)])
        output = self.schedule(step)
        for data in output.scheduled_new_reqs:
            self.given[data.request_id] = len(data.token_ids)
        self.batch.apply(output)
        if not step:
            return None
        inputs = self.batch.prepare(output)
        arena = np.full(self.layout.size, -(1 << 30), dtype=np.int32)
        plan = plan_step(inputs, self.sampling.of(inputs), self.layout, arena, SIZES)
        self.batch.append_unknown(inputs)
        return output, inputs, plan

    def reveal(self) -> None:
        """The result of the step: the scheduler learns the tokens, the batch does not."""
        for sequence in self.sequences.values():
            for _ in range(sequence.num_scheduled_ahead):
                sequence.token_ids.append(self.random.randrange(VOCAB_SIZE))
            sequence.num_scheduled_ahead = 0


def check(traffic: Traffic, output: SchedulerOutput, inputs: StepInputs, plan: StepPlan) -> None:
    """Every array, entry by entry, from what the scheduler knows."""
    step = output.num_scheduled_tokens
    slot_of = dict(zip(inputs.req_ids, inputs.rows.tolist(), strict=True))
    names = [n for n in step if step[n] == 1] + [n for n in step if step[n] > 1]
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    pages: list[int] = []
    seen_slots: list[int] = []
    seen_pages: list[int] = []
    seen_indptr, seen_lens = [0], list[int]()
    samples: list[tuple[str, int]] = []
    qo_indptr, kv_indptr, last_page_len, seq_lens = [0], [0], [], []
    for name in names:
        sequence = traffic.sequences[name]
        end = sequence.num_computed
        for position in range(end - step[name], end):
            known = position < traffic.given[name]
            ids.append(sequence.token_ids[position] if known else -1 - slot_of[name])
            positions.append(position)
            block = sequence.block_ids[position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            (block,) = traffic.window_blocks(0, [block]).block_ids
            seen_slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        used = -(-end // BLOCK_SIZE)
        pages += sequence.block_ids[:used]
        qo_indptr.append(len(ids))
        kv_indptr.append(len(pages))
        last_page_len.append(end - (used - 1) * BLOCK_SIZE)
        seq_lens.append(end)
        first = max(end - step[name] - WINDOW + 1, 0) // BLOCK_SIZE  # that its first token sees
        seen_pages += traffic.window_blocks(0, sequence.block_ids[first:used]).block_ids
        seen_indptr.append(len(seen_pages))
        seen_lens.append(end - first * BLOCK_SIZE)
        if sequence.num_scheduled_ahead:
            samples.append((name, len(ids) - 1))

    assert plan.num_rows == len(names)
    assert plan.num_decodes == sum(count == 1 for count in step.values())
    num_padding = plan.num_padded_rows - plan.num_rows
    if plan.is_decode:
        assert plan.num_padded_rows in SIZES
        assert plan.num_padded_rows < 2 * len(names)
    else:
        assert num_padding == 0
    for _ in range(num_padding):
        ids.append(0)
        positions.append(0)
        slots.append(NUM_BLOCKS * BLOCK_SIZE)
        pages.append(NUM_BLOCKS)
        qo_indptr.append(len(ids))
        kv_indptr.append(len(pages))
        last_page_len.append(1)
        seq_lens.append(1)
        seen_slots.append(NUM_WINDOW_PAGES * BLOCK_SIZE)
        seen_pages.append(NUM_WINDOW_PAGES)
        seen_indptr.append(len(seen_pages))
        seen_lens.append(1)

    host, size = plan.host, plan.num_padded_rows
    assert plan.num_tokens == len(ids)
    assert plan.num_page_entries == len(pages)
    assert host.input_ids[: len(ids)].tolist() == ids
    assert host.positions[: len(ids)].tolist() == positions
    assert host.slots[: len(ids)].tolist() == slots
    assert host.qo_indptr[: size + 1].tolist() == qo_indptr
    assert host.kv_indptr[: size + 1].tolist() == kv_indptr
    assert host.kv_indices[: len(pages)].tolist() == pages
    assert host.last_page_len[:size].tolist() == last_page_len
    assert host.seq_lens[:size].tolist() == seq_lens

    first = plan.num_decodes if not plan.is_decode else size
    assert plan.num_decode_page_entries == kv_indptr[first]
    if not plan.is_decode:
        for found, absolute in (
            (host.prefill_qo_indptr, qo_indptr),
            (host.prefill_kv_indptr, kv_indptr),
        ):
            expected = [entry - absolute[first] for entry in absolute[first:]]
            assert found[: len(expected)].tolist() == expected

    if traffic.layout.limits.windows is not None:
        assert host.window_slots[: len(ids)].tolist() == seen_slots
        assert host.window_kv_indices[: len(seen_pages)].tolist() == seen_pages
        assert host.window_kv_indptr[: size + 1].tolist() == seen_indptr
        assert host.window_seq_lens[:size].tolist() == seen_lens
        assert plan.window_entries == (seen_indptr[first], len(seen_pages))
        if not plan.is_decode:
            expected = [entry - seen_indptr[first] for entry in seen_indptr[first:]]
            assert host.window_prefill_kv_indptr[: len(expected)].tolist() == expected

    count = len(samples)
    assert [inputs.req_ids[row] for row in plan.sampled] == [name for name, _ in samples]
    assert host.logits_rows[:count].tolist() == [row for _, row in samples]
    assert host.token_slots[:count].tolist() == [slot_of[name] for name, _ in samples]
    for place, (name, _) in enumerate(samples):
        sequence = traffic.sequences[name]
        params = sequence.params
        assert host.temperature[place : place + 1].view(np.float32) == np.float32(
            params.temperature
        )
        assert host.top_k[place] == params.top_k
        assert host.top_p[place : place + 1].view(np.float32) == np.float32(params.top_p)
        assert host.min_p_floor[place : place + 1].view(np.float32) == -np.inf
        seeds = np.array([sampling_columns.seed_words(params.seed or 0)], dtype=np.uint32)
        keys = sampling_columns.row_keys(seeds, np.array([sequence.num_computed]))
        words = host.keys[: 2 * count].view(np.uint32).reshape(2, count)[:, place]
        is_drawn = host.temperature[:count].any()  # else noise has no keys
        assert not is_drawn or words.tolist() == keys[0].tolist()


@pytest.mark.parametrize("has_windows", [False, True], ids=["", "windows"])
@pytest.mark.parametrize("seed", range(20))
def test_every_array_is_what_plain_python_says(seed: int, has_windows: bool) -> None:
    traffic = Traffic(seed, has_windows=has_windows)
    num_checked = num_mixed = num_markers = 0
    for _ in range(60):
        traffic.disturb()
        planned = traffic.plan()
        if planned is not None:
            check(traffic, *planned)
            plan = planned[2]
            num_checked += 1
            num_mixed += 0 < plan.num_decodes < plan.num_rows
            num_markers += int((plan.host.input_ids[: plan.num_tokens] < 0).sum())
        traffic.reveal()
    assert num_checked > 40  # the others ran nobody
    assert num_mixed > 5
    assert num_markers > 50


@pytest.mark.parametrize("has_windows", [False, True], ids=["", "windows"])
def test_a_step_fills_no_more_of_the_arena_than_it_says(has_windows: bool) -> None:
    traffic = Traffic(3, has_windows=has_windows)
    for _ in range(30):
        traffic.disturb()
        planned = traffic.plan()
        if planned is not None:
            plan = planned[2]
            arena = plan.host.kv_indices.base
            assert arena is not None
            assert (arena[plan.num_words :] == -(1 << 30)).all()
        traffic.reveal()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=["", "windows"])
def test_sections_do_not_overlap_and_begin_where_vector_loads_may(layout: Layout) -> None:
    arena = np.zeros(layout.size, dtype=np.int32)
    sections = layout.split(arena)
    views = [getattr(sections, name) for name in type(sections).__dataclass_fields__]
    views = [view for view in views if len(view)]
    begins = [(view.ctypes.data - arena.ctypes.data) // 4 for view in views]
    assert all(begin % 32 == 0 for begin in begins)
    assert begins == sorted(begins)
    for (begin, view), (after, _) in pairwise(zip(begins, views, strict=True)):
        assert begin + len(view) <= after
    assert begins[-1] + len(views[-1]) == layout.size


def test_there_is_room_for_the_pages_of_windows_of_any_step() -> None:
    """Where requests stand with their tokens in pages, it is least that nothing is left."""
    rng, least_left = random.Random(0), 1000
    for _ in range(2000):
        rows, size, window = rng.randint(1, 6), rng.choice([1, 2, 4, 16]), rng.randint(1, 40)
        counts = [rng.randint(1, rng.choice([1, 3, 2 * size + 1, 40])) for _ in range(rows)]
        ends = [count + rng.randint(0, 100) for count in counts]
        firsts = [max(end - n - window + 1, 0) // size for end, n in zip(ends, counts, strict=True)]
        num_pages = [-(-end // size) - first for end, first in zip(ends, firsts, strict=True)]
        limits = Limits(rows, sum(counts), -(-max(ends) // size), size, 99)
        limits = replace(limits, windows=WindowLimits(frozenset({0}), window, 99))
        least_left = min(least_left, limits.num_window_entries - sum(num_pages))
    assert least_left == 0
