"""Memory that logits use again."""

import torch

from aioserve.runner.cpu.products import PATIENCE, LogitsMemory


def test_memory_is_used_again_when_no_tensor_shows_it_any_more() -> None:
    memory = LogitsMemory()
    first = memory.take(4, 10)
    address = first.data_ptr()
    del first
    assert memory.take(3, 10).data_ptr() == address


def test_memory_that_a_part_of_a_tensor_still_shows_is_left_alone() -> None:
    memory = LogitsMemory()
    kept = memory.take(4, 10).fill_(1.0)[2:]  # the whole tensor is gone
    memory.take(4, 10).fill_(2.0)
    assert torch.equal(kept, torch.ones(2, 10))


def test_more_rows_and_none_get_tensors_of_their_shape() -> None:
    memory = LogitsMemory()
    for num_rows in (2, 0, 50, 1):
        logits = memory.take(num_rows, 10)
        assert (logits.shape, logits.dtype) == ((num_rows, 10), torch.float32)
        assert logits.data_ptr() % 64 == 0


def test_numbers_behind_are_of_the_same_memory() -> None:
    memory = LogitsMemory()
    address = memory.take(4, 10, 3).data_ptr()
    assert memory.take(4, 13).data_ptr() == address
    shown = memory.take(2, 10, 3)
    assert shown.shape == (2, 10)
    assert memory.take(2, 10, 3).data_ptr() != shown.data_ptr()


def test_memory_of_a_burst_is_given_back_after_many_small_steps() -> None:
    memory = LogitsMemory()
    address = memory.take(400, 10).data_ptr()
    for _ in range(PATIENCE):
        assert memory.take(99, 10).data_ptr() == address
    memory.take(99, 10)
    assert memory._memory.size == 990
