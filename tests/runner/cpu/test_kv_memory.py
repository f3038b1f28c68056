"""Memory of the KV pool: none before it is needed, all of a block before a step writes to it."""

import sys
from collections.abc import Iterator

import pytest
import torch

from aioserve.errors import ConfigError
from aioserve.params import SamplingParams
from aioserve.runner.attention.backend import KVCacheSpec, LayerSpec
from aioserve.runner.batch.input_batch import InputBatch
from aioserve.runner.cpu import kv_memory
from aioserve.runner.cpu.kv_memory import AHEAD_TOKENS, KVMemory, StepMemory
from aioserve.runner.cpu.torch_attention import TorchPagedAttention
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.runner.cpu.resident import address_space, is_resident, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a pool is zeros")

SPEC = KVCacheSpec((LayerSpec(2, 64, 32), LayerSpec(1, 16, 16)), torch.float32)
BLOCK_SIZE = 16
BLOCK_BYTES = SPEC.bytes_per_token * BLOCK_SIZE  # 14,336
HUGE_PAGES = 4 * (2 << 20)  # one may reach beyond what was asked for, in each cache


@pytest.fixture(params=["at once", "page by page"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVMemory]:
    """A gigabyte; the second as on a kernel that does not know how to populate a range."""
    if request.param == "page by page":
        monkeypatch.setattr(kv_memory, "_MADV_POPULATE_WRITE", 9999)
    memory = KVMemory(SPEC, (1 << 30) // BLOCK_BYTES, BLOCK_SIZE)
    yield memory
    memory.close()


def test_a_pool_takes_no_memory_at_first(memory: KVMemory) -> None:
    caches = [*memory.key_caches, *memory.value_caches]
    assert sum(cache.nbytes for cache in caches) == memory.num_blocks * BLOCK_BYTES
    for cache in caches:
        assert not is_resident(cache, [0])
        assert not is_resident(cache, [memory.num_blocks - 1])


def test_committed_blocks_are_in_memory_and_those_far_beyond_are_not(memory: KVMemory) -> None:
    before = resident_bytes()
    for count in (1, 2, 300, 5000):
        memory.commit(count)
        for cache in (*memory.key_caches, *memory.value_caches):
            assert is_resident(cache, range(count))
    memory.close()  # the thread has done its work
    assert 5000 < memory.num_committed_blocks <= 5000 + AHEAD_TOKENS // BLOCK_SIZE
    taken = memory.num_committed_blocks * BLOCK_BYTES + HUGE_PAGES
    assert resident_bytes() - before < taken + (64 << 20)  # and what else the process did


def test_a_thread_commits_what_will_be_needed_soon(memory: KVMemory) -> None:
    memory.commit(1, soon=3000)
    memory.close()
    assert memory.num_committed_blocks > 3000
    for cache in (*memory.key_caches, *memory.value_caches):
        assert is_resident(cache, range(3001))


def test_a_step_without_new_blocks_finds_those_that_it_writes_to_after_a_release() -> None:
    backend = TorchPagedAttention(SPEC, (1 << 30) // BLOCK_BYTES, BLOCK_SIZE)
    batch, memory = InputBatch(1, 64, BLOCK_SIZE), StepMemory(backend, BLOCK_SIZE)
    new = NewRequestData("a", [5] * 20, 20, SamplingParams(), frozenset(), [7, 9000], 0)
    steps = [SchedulerOutput(1, [new], CachedRequestData([], [], {}), {"a": 20}, 20, [], [])]
    for step_id in (2, 3):
        cached = CachedRequestData(["a"], [18 + step_id], {})
        steps.append(SchedulerOutput(step_id, [], cached, {"a": 1}, 1, [], []))
    for step in steps:
        batch.apply(step)
        if step.step_id == 3:
            memory.release()  # as a sleep does
        inputs = batch.prepare(step)
        memory.commit(inputs, step)
        if len(inputs.sampling):
            batch.append(inputs, torch.tensor([1]).numpy())
        for cache in (*backend.key_caches, *backend.value_caches):
            assert is_resident(cache, [7, 9000])
    backend.close()


def test_committing_changes_nothing_that_was_written(memory: KVMemory) -> None:
    caches = [*memory.key_caches, *memory.value_caches]
    for number, cache in enumerate(caches, start=1):
        assert not cache[:200].any()
        cache[:100] = number
    memory.commit(200)
    for number, cache in enumerate(caches, start=1):
        assert bool((cache[:100] == number).all())
        assert not cache[100:200].any()


def test_a_small_pool_is_committed_to_its_end() -> None:
    memory = KVMemory(SPEC, 5, BLOCK_SIZE)
    memory.commit(1)
    memory.close()
    memory.close()
    assert memory.num_committed_blocks == 5


def test_the_address_space_returns_with_the_tensors() -> None:
    memory = KVMemory(SPEC, 1 << 16, BLOCK_SIZE)
    memory.commit(1000)
    memory.close()
    with_pool = address_space()
    size = memory.num_blocks * BLOCK_BYTES
    del memory
    assert with_pool - address_space() >= size


def test_more_than_the_system_gives_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match=r"[0-9,]+ MiB for the KV pool.*cache.num_kv_blocks"):
        KVMemory(SPEC, 1 << 40, BLOCK_SIZE)
