"""The packed arrays of a step against a loop over requests and tokens."""

import random

import numpy as np
import pytest

from aioserve.runner.input_batch import InputBatch
from aioserve.sampling_params import SamplingParams
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


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(max_num_seqs=3, max_model_len=30, block_size=BLOCK_SIZE, vocab_size=100)


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


def test_sampled_tokens_are_the_next_inputs(batch: InputBatch) -> None:
    first = make_step({"a": 3}, [make_request("a", [1, 2, 3], [0])])
    batch.apply(first)
    batch.append(batch.prepare(first), np.array([77]))
    second = make_step({"a": 1}, cached={"a": (3, [])})
    batch.apply(second)
    inputs = batch.prepare(second)
    assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([77], [3])
    assert inputs.sampling.tolist() == [0]
    assert batch.sampling_inputs(inputs).num_tokens.tolist() == [4]


def test_the_scheduler_may_set_computed_tokens_back(batch: InputBatch) -> None:
    first = make_step({"a": 6}, [make_request("a", [1, 2, 3, 4, 5, 6], [0, 1])])
    batch.apply(first)
    batch.append(batch.prepare(first), np.array([7]))
    again = make_step({"a": 3}, cached={"a": (4, [])})
    batch.apply(again)
    inputs = batch.prepare(again)
    assert inputs.input_ids.tolist() == [5, 6, 7]
    assert inputs.sampling.tolist() == [0]


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
