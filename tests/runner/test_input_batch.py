"""The packed arrays of a step against a loop over requests and tokens."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from aioserve.params import PoolingParams, SamplingParams
from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.batch.input_batch import FEW_ROWS, BatchPart, InputBatch, LaterPart
from aioserve.runner.batch.prompt_rows import PooledRows
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

BLOCK_SIZE = 4


def make_step(
    num_scheduled: dict[str, int],
    new: list[NewRequestData] | None = None,
    cached: dict[str, tuple[int, list[int]]] | None = None,
    finished: list[str] | None = None,
) -> SchedulerOutput:
    """`cached` maps a request to its computed tokens and its new blocks."""
    cached = cached or {}
    return SchedulerOutput(
        step_id=0,
        scheduled_new_reqs=new or [],
        scheduled_cached_reqs=CachedRequestData(
            list(cached),
            [computed for computed, _ in cached.values()],
            {name: blocks for name, (_, blocks) in cached.items() if blocks},
        ),
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        preempted_req_ids=[],
        finished_req_ids=finished or [],
    )


def make_request(
    name: str, token_ids: list[int], block_ids: list[int], num_computed: int = 0
) -> NewRequestData:
    params = SamplingParams(temperature=0)
    return NewRequestData(
        name, token_ids, len(token_ids), params, frozenset(), block_ids, num_computed
    )


class Counted(BatchPart[int]):
    """It counts the tokens of the requests that have a salt."""

    name = "counted"
    asked_by = "cache_salt"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def set(self, row: int, request: NewRequestData) -> None:
        self.rows[row] = 0
        self.calls.append(f"set {request.request_id}")

    def drop(self, row: int, *, is_finished: bool = False) -> None:
        super().drop(row)
        self.calls.append(f"drop {is_finished}")

    def extend(self, row: int, block_ids: Sequence[int]) -> None:
        self.calls.append(f"extend by {block_ids}")

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        self.calls.append("prepare")
        for row, count in zip(inputs.rows.tolist(), np.diff(inputs.query_start_loc), strict=True):
            if row in self.rows:
                self.rows[row] += int(count)
        inputs.parts[self.name] = sum(self.rows.values())
        return inputs

    def append(
        self, rows: IntArray, token_ids: list[list[int]], drafts: Mapping[int, Sequence[int]]
    ) -> None:
        self.calls.append(f"append {token_ids}")

    def may_cut(self, row: int) -> bool:
        return False


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(max_num_seqs=3, max_model_len=30, block_size=BLOCK_SIZE)


def test_arrays_of_a_step_equal_the_loop(batch: InputBatch) -> None:
    requests = {
        "a": ([10, 11, 12, 13, 14, 15], [7, 3], 0, 6),  # tokens, blocks, computed, scheduled
        "b": (list(range(20, 33)), [9, 1, 5, 2], 8, 3),
        "c": ([40] * 5, [6, 4], 4, 1),
    }
    step = make_step(
        {name: scheduled for name, (_, _, _, scheduled) in requests.items()},
        [make_request(name, t, b, computed) for name, (t, b, computed, _) in requests.items()],
    )
    batch.apply(step)
    inputs = batch.prepare(step)
    ids, positions, slots, ends = [], [], [], []
    for token_ids, block_ids, computed, scheduled in requests.values():
        for position in range(computed, computed + scheduled):
            ids.append(token_ids[position])
            positions.append(position)
            slots.append(block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        ends.append(len(ids))
    assert inputs.req_ids == ["a", "b", "c"]
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == slots
    assert inputs.query_start_loc.tolist() == [0, *ends]
    assert inputs.seq_lens.tolist() == [6, 11, 5]
    assert inputs.sampling.tolist() == [0, 2]  # b still lacks two tokens of its prompt
    assert inputs.logits_indices.tolist() == [5, 9]
    assert inputs.block_table[1, :3].tolist() == [9, 1, 5]


def test_a_request_that_gets_no_token_is_not_computed_beside_one_that_gets_two(
    batch: InputBatch,
) -> None:
    new = [make_request("a", [1, 2, 3, 4], [0, 1]), make_request("b", [5, 6], [2])]
    step = make_step({"a": 2, "b": 0}, new)
    batch.apply(step)
    inputs = batch.prepare(step)
    assert inputs.input_ids.tolist() == [1, 2]
    assert inputs.query_start_loc.tolist() == [0, 2, 2]
    assert inputs.seq_lens.tolist() == [2, 0]
    assert inputs.sampling.tolist() == []


def test_sampled_tokens_are_the_next_inputs(batch: InputBatch) -> None:
    first = make_step({"a": 3}, [make_request("a", [1, 2, 3], [0])])
    batch.apply(first)
    batch.append(batch.prepare(first), np.array([77]))
    second = make_step({"a": 1}, cached={"a": (3, [])})
    batch.apply(second)
    inputs = batch.prepare(second)
    assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([77], [3])
    assert inputs.sampling.tolist() == [0]


def test_the_scheduler_may_set_computed_tokens_back(batch: InputBatch) -> None:
    first = make_step({"a": 6}, [make_request("a", [1, 2, 3, 4, 5, 6], [0, 1])])
    batch.apply(first)
    batch.append(batch.prepare(first), np.array([7]))
    again = make_step({"a": 3}, cached={"a": (4, [])})
    batch.apply(again)
    inputs = batch.prepare(again)
    assert inputs.input_ids.tolist() == [5, 6, 7]
    assert inputs.sampling.tolist() == [0]


def test_a_step_planned_behind_a_token_that_did_not_come_samples_nothing_for_its_drafts(
    batch: InputBatch,
) -> None:
    batch.apply(make_step({"a": 3}, [make_request("a", [1] * 3, [0])]))
    step = make_step({"a": 2}, cached={"a": (3, [1])})
    step = msgspec.structs.replace(step, scheduled_spec_decode_tokens={"a": [8]})
    batch.apply(step)
    inputs = batch.prepare(step)
    assert inputs.sampling.tolist() == inputs.logits_indices.tolist() == []
    assert batch.append(inputs, np.array([], np.int64)) == [[]]


def test_new_blocks_are_appended(batch: InputBatch) -> None:
    batch.apply(make_step({"a": 4}, [make_request("a", [1] * 12, [5])]))
    step = make_step({"a": 8}, cached={"a": (4, [9, 2])})
    batch.apply(step)
    assert batch.prepare(step).block_table.tolist() == [[5, 9, 2]]


def test_a_request_that_comes_again_replaces_itself(batch: InputBatch) -> None:
    batch.apply(make_step({"a": 4}, [make_request("a", [1] * 4, [5])]))
    again = make_step({"a": 2}, [make_request("a", [2, 3], [6])])
    batch.apply(again)
    assert len(batch) == 1
    assert batch.prepare(again).input_ids.tolist() == [2, 3]


def test_an_unknown_request_is_an_error_that_leaves_the_others_alone(batch: InputBatch) -> None:
    batch.apply(make_step({"a": 4}, [make_request("a", [1] * 4, [5])]))
    with pytest.raises(KeyError, match="ghost"):
        batch.apply(make_step({"ghost": 1}, cached={"ghost": (3, [])}))
    step = make_step({"a": 4}, cached={"a": (0, [])})
    batch.apply(step)
    assert batch.prepare(step).input_ids.tolist() == [1] * 4


def test_rows_are_never_shared_or_lost(batch: InputBatch) -> None:
    chance = random.Random(0)
    alive: dict[str, int] = {}
    for number in range(200):
        finished = chance.sample(list(alive), chance.randint(0, len(alive)))
        for name in finished:
            del alive[name]
        new = []
        for index in range(chance.randint(0, 3 - len(alive))):
            name = f"{number}.{index}"
            alive[name] = chance.randrange(100)
            new.append(make_request(name, [alive[name]], [0]))
        known = {name: (0, []) for name in alive if all(r.request_id != name for r in new)}
        step = make_step(dict.fromkeys(alive, 1), new, known, finished)
        batch.apply(step)
        assert len(batch) == len(alive)
        assert batch.prepare(step).input_ids.tolist() == list(alive.values())


def plan(chance: random.Random, running: dict[str, list[int]], next_block: int) -> SchedulerOutput:
    """Plan one token for each of `running`, by whose names are how many tokens are known and how
    many blocks there are; now and then a token is not there yet, or more blocks come than needed.
    """
    cached = {}
    for name, (num_tokens, num_blocks) in running.items():
        computed = num_tokens - 1 if chance.random() < 0.95 else num_tokens - 2
        num_new = max(-(-num_tokens // BLOCK_SIZE) - num_blocks, 0)
        if num_new and chance.random() < 0.1:
            num_new += 20
        running[name][1] += num_new
        cached[name] = (computed, list(range(next_block, next_block + num_new)))
        next_block += num_new
    return make_step(dict.fromkeys(running, 1), cached=cached)


@pytest.mark.parametrize(("seed", "most"), [*((seed, 5) for seed in range(5)), (5, FEW_ROWS + 4)])
def test_a_step_with_the_arrays_of_the_last_one_has_the_numbers_of_a_new_one(
    seed: int, most: int
) -> None:
    chance, length = random.Random(seed), 1000
    reusing = InputBatch(most, length, BLOCK_SIZE, overwrites=True)
    making = InputBatch(most, length, BLOCK_SIZE)
    running: dict[str, list[int]] = {}
    last, num_reused, num_other = make_step({}), 0, 0
    inputs: StepInputs | None = None
    for number in range(120 * most):
        if not running or chance.random() < 0.05:
            new, finished = [], [name for name in running if chance.random() < 0.5]
            for name in finished:
                del running[name]
            for index in range(most - len(running)):
                name, count = f"{number}.{index}", chance.randint(2, 9)
                tokens = [chance.randrange(100) for _ in range(count)]
                blocks = [chance.randrange(1000) for _ in range(-(-count // BLOCK_SIZE))]
                running[name] = [count, len(blocks)]
                new.append(make_request(name, tokens, blocks))
            known = {name: (count - 1, []) for name, (count, _) in running.items()}
            for request in new:
                del known[request.request_id]
            counts = dict.fromkeys(known, 1) | {r.request_id: len(r.token_ids) for r in new}
            step = make_step(counts, new, known, finished)
        else:
            step = plan(chance, running, next_block=chance.randrange(1000))
            if list(step.num_scheduled_tokens) == list(last.num_scheduled_tokens):
                step = msgspec.structs.replace(  # as a scheduler does
                    step, num_scheduled_tokens=last.num_scheduled_tokens
                )
        found = []
        for batch in (reusing, making):
            batch.apply(step)
            if number % 7 == 0:  # a step may be prepared again
                batch.prepare(step)
            found.append(batch.prepare(step))
        num_reused += found[0] is inputs
        num_other += found[0] is not inputs
        inputs, expected = found
        for name in ("rows", "input_ids", "positions", "slot_mapping", "query_start_loc"):
            assert getattr(inputs, name).tolist() == getattr(expected, name).tolist(), name
        for name in ("seq_lens", "sampling", "logits_indices", "req_ids"):
            assert list(getattr(inputs, name)) == list(getattr(expected, name)), name
        width = expected.block_table.shape[1]
        for row, end in enumerate(expected.seq_lens.tolist()):
            used = min(-(-end // BLOCK_SIZE), width)
            assert (inputs.block_table[row, :used] == expected.block_table[row, :used]).all()
        sampled = np.array([chance.randrange(100) for _ in inputs.sampling], dtype=np.int64)
        if number % 11 == 0:  # what was run again has arrays of its own
            found[0] = replace(inputs)
        kept = [
            batch.append(own, sampled) for batch, own in zip((reusing, making), found, strict=True)
        ]
        assert kept[0] == kept[1]
        for name, tokens in zip(inputs.req_ids, kept[0], strict=True):
            running[name][0] += len(tokens)
        last = step
    assert num_reused > 100
    assert num_other > 50


def test_only_a_batch_that_is_told_so_overwrites_the_arrays_of_a_step(batch: InputBatch) -> None:
    first = make_step({"a": 3}, [make_request("a", [1, 2, 3], [0, 1, 2])])
    batch.apply(first)
    batch.append(batch.prepare(first), np.array([7]))
    second = make_step({"a": 1}, cached={"a": (3, [])})
    batch.apply(second)
    kept = batch.prepare(second)
    batch.append(kept, np.array([8]))
    third = msgspec.structs.replace(
        make_step({"a": 1}, cached={"a": (4, [])}),
        num_scheduled_tokens=second.num_scheduled_tokens,
    )
    batch.apply(third)
    assert batch.prepare(third).positions.tolist() == [4]
    assert kept.positions.tolist() == [3]


def test_a_part_is_called_from_the_first_request_that_asks_for_it_to_the_last() -> None:
    part = Counted()
    batch = InputBatch(3, 30, BLOCK_SIZE, [part])
    first = make_step({"plain": 3}, [make_request("plain", [1, 2, 3], [0])])
    batch.apply(first)
    inputs = batch.prepare(first)
    batch.append(inputs, np.array([4]))
    assert (part.calls, inputs.parts) == ([], {})
    asks = msgspec.structs.replace(make_request("asks", [1, 2], [1]), cache_salt="mine")
    second = make_step({"plain": 1, "asks": 2}, [asks], {"plain": (3, [2])})
    batch.apply(second)
    assert (batch.may_cut("plain", second), batch.may_cut("asks", second)) == (True, False)
    inputs = batch.prepare(second)
    batch.append(inputs, np.array([5, 6]))
    assert inputs.parts == {"counted": 2}
    part.errors[inputs.rows[1]] = "it has counted enough"
    assert batch.failures(inputs) == {"asks": "it has counted enough"}
    batch.apply(make_step({}, cached={"asks": (3, [3])}))
    third = make_step({"plain": 1}, cached={"plain": (4, [])}, finished=["asks"])
    batch.apply(third)
    batch.append(batch.prepare(third), np.array([7]))
    steps = ["set asks", "prepare", "append [[5], [6]]", "extend by [3]", "drop True"]
    assert part.calls == steps
    assert (part.rows, part.errors) == ({}, {})


@pytest.mark.parametrize("num_steps", [1, 2])
def test_what_is_kept_of_a_pooled_prompt_holds_none_of_the_others_of_its_step(
    num_steps: int,
) -> None:
    pooled, hidden, counts = PooledRows(), 8, dict.fromkeys("ab", 4 // num_steps)
    batch = InputBatch(3, 30, BLOCK_SIZE, [pooled])
    params = PoolingParams(pooling="mean" if num_steps == 2 else "last", normalize=False)
    new = [
        msgspec.structs.replace(
            make_request(name, [1, 2, 3, 4], [index]), pooling_params=params, sampling_params=None
        )
        for index, name in enumerate(counts)
    ]
    step = make_step(counts, new)
    batch.apply(step)
    wanted = batch.prepare(step).parts[pooled.name]
    totals = wanted.totals(torch.ones(len(wanted.places), hidden))
    vectors = wanted.keep(totals, {})
    kept = [prompt.total for prompt in pooled.rows.values() if prompt.total is not None]
    held = [each.untyped_storage().nbytes() for each in kept]
    assert held == [4 * hidden] * len(kept) != []
    assert len(vectors) == (2 if num_steps == 1 else 0)


def test_a_later_part_is_made_once_by_the_first_request_that_asks_and_keeps_its_place() -> None:
    made: list[Counted] = []

    def make() -> Counted:
        made.append(Counted())
        return made[-1]

    before, behind = Counted(), Counted()
    batch = InputBatch(
        4, 30, BLOCK_SIZE, [before, LaterPart(("adapter_id", "cache_salt"), make), behind]
    )
    first = make_step({"plain": 3}, [make_request("plain", [1, 2, 3], [0])])
    batch.apply(first)
    batch.append(batch.prepare(first), np.array([4]))
    assert (made, batch.parts) == ([], (before, behind))
    new = [
        msgspec.structs.replace(make_request(name, [1, 2], [block]), cache_salt="mine")
        for name, block in (("asks", 1), ("asks too", 2))
    ]
    second = make_step({"plain": 1, "asks": 2, "asks too": 2}, new, {"plain": (3, [3])})
    batch.apply(second)
    batch.append(batch.prepare(second), np.array([5, 6, 7]))
    assert batch.parts == (before, *made, behind)
    assert [part.calls for part in made] == [before.calls]
    assert sorted(made[0].rows) == sorted(before.rows)


def test_another_field_makes_a_later_part_that_it_is_not_set_in() -> None:
    part = Counted()
    batch = InputBatch(3, 30, BLOCK_SIZE, [LaterPart(("adapter_id", "cache_salt"), lambda: part)])
    asks = msgspec.structs.replace(make_request("asks", [1, 2], [1]), adapter_id="some")
    batch.apply(make_step({"asks": 2}, [asks]))
    assert (batch.parts, part.rows) == ((part,), {})
