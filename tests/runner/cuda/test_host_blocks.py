"""Blocks that cross beside the steps are those that the steps had, whenever anything gets done."""

import random
from collections import deque
from functools import partial

import pytest
import torch

from aioserve.errors import ConfigError
from aioserve.features.kv_connector.host_blocks import KeptTensors
from aioserve.gpu.cuda import host_blocks
from aioserve.gpu.cuda.device import Event
from aioserve.gpu.cuda.host_blocks import Copied, DeviceBlocks
from aioserve.kv_cache import BLOCKS, KVConnectorMetadata
from tests.runner.cuda.fake_device import FakeDevice, TooEarlyError
from tests.slow import examples

NUM_PAGES, NUM_SLOTS, BLOCK_BYTES = 9, 6, 6 * 4 + 8 * 2


def make_caches() -> list[torch.Tensor]:
    shapes = ((NUM_PAGES, 2, 3), torch.float32), ((NUM_PAGES, 2, 4), torch.bfloat16)
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]


def kept(caches: list[torch.Tensor]) -> list[KeptTensors]:
    return [KeptTensors(BLOCKS, caches, 1)]


def write(caches: list[torch.Tensor], pages: list[int], value: int) -> None:
    for cache in caches:
        cache[pages] = value


@pytest.mark.parametrize("num_staged", [1, 2, 4])
@pytest.mark.parametrize("eagerness", [0.0, 0.5, 0.9])
def test_copies_are_done_between_the_steps_around_them(
    num_staged: int, eagerness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overwrite pages; two are in flight, and slots that no step has are read meanwhile."""
    monkeypatch.setattr(host_blocks, "STAGE_BYTES", num_staged * BLOCK_BYTES)
    for seed in range(examples(3, slow=8)):
        rng, device, caches = random.Random(seed), FakeDevice(seed, eagerness), make_caches()
        worker = DeviceBlocks(device, kept(caches), NUM_SLOTS * BLOCK_BYTES + 1, "by hand")
        assert worker.num_slots == NUM_SLOTS
        pages, slots = [0] * NUM_PAGES, dict[int, int]()
        in_flight: deque[tuple[Copied, Event, set[int]]] = deque()
        for step in range(1, 30):
            saves = list(
                zip(
                    rng.sample(range(NUM_PAGES), rng.randint(0, 5)),
                    rng.sample(range(NUM_SLOTS), 5),
                    strict=False,
                )
            )
            slots |= {slot: pages[page] for page, slot in saves}
            loads = list(
                zip(
                    rng.choices(list(slots), k=rng.randint(0, 5)) if slots else (),
                    rng.sample(range(NUM_PAGES), 5),
                    strict=False,
                )
            )
            for slot, page in loads:
                pages[page] = slots[slot]
            copied = worker.transfer(KVConnectorMetadata(saves, loads))
            written = rng.sample(range(NUM_PAGES), 3)
            for page in written:
                pages[page] = step
            device.launch(partial(write, caches, written, step))
            used = {slot for _, slot in saves} | {slot for slot, _ in loads}
            in_flight.append((copied, device.record(), used))
            if len(in_flight) > rng.randint(0, 1):
                copied, event, _ = in_flight.popleft()
                event.wait()
                worker.finish(copied)
            busy = set[int]().union(*(used for *_, used in in_flight))
            for slot, value in slots.items():
                if slot not in busy:
                    content = torch.frombuffer(worker.memory(slot), dtype=torch.uint8)
                    assert (content[:24].view(torch.float32) == value).all()
                    assert (content[24:].view(torch.bfloat16) == value).all()
        while in_flight:
            worker.finish(in_flight.popleft()[0])
        device.advance(device.record().number)
        for cache in caches:
            assert [int(page.flatten()[0]) for page in cache] == pages
        assert worker.num_loaded > 0
        assert worker.load_seconds > 0


def test_bytes_of_a_slot_that_is_still_copied_are_nobodys() -> None:
    worker = DeviceBlocks(FakeDevice(0, 0.0), kept(make_caches()), 3 * BLOCK_BYTES, "by hand")
    copied = worker.transfer(KVConnectorMetadata([(4, 1)], []))
    with pytest.raises(TooEarlyError):
        worker.memory(1)
    assert len(worker.memory(0)) == BLOCK_BYTES
    worker.finish(copied)
    assert bytes(worker.memory(1)) == bytes(BLOCK_BYTES)


def test_what_is_noted_of_a_block_goes_with_it() -> None:
    """Also from one page to another within a step, and to files, which have the bytes of a slot."""
    device, caches = FakeDevice(0, 0.0), make_caches()
    noted = torch.zeros(NUM_PAGES, 1, dtype=torch.uint8)
    worker = DeviceBlocks(device, kept(caches), 3 * (BLOCK_BYTES + 1), "by hand", noted)
    assert worker.block_bytes == BLOCK_BYTES + 1

    def move(saves: list[tuple[int, int]], loads: list[tuple[int, int]]) -> None:
        worker.finish(worker.transfer(KVConnectorMetadata(saves, loads)))

    noted[4], noted[5] = 1, 0
    move([(4, 0), (5, 1)], [])
    assert (worker.memory(0)[-1], worker.memory(1)[-1]) == (1, 0)
    noted[:] = 0
    noted[2] = noted[3] = 1
    move([(2, 2)], [(0, 7), (1, 3), (2, 8)])
    assert noted[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("has_notes", [False, True])
def test_pools_have_slots_and_copies_of_their_own(has_notes: bool) -> None:
    """Blocks and slots of both are numbered from 0; bytes for files count on from pool to pool."""
    device, caches = FakeDevice(0, 0.3), make_caches()
    windows = [torch.zeros(5, 2, 3), torch.zeros(5, 7)]
    noted = torch.zeros(NUM_PAGES, 1, dtype=torch.uint8) if has_notes else None
    pools = [*kept(caches), KeptTensors("windows", windows, 1)]
    each = [BLOCK_BYTES + has_notes, 13 * 4]
    worker = DeviceBlocks(device, pools, 4 * sum(each), "by hand", noted)
    assert [tuple(group) for group in worker.groups] == [
        (BLOCKS, 4, each[0]),
        ("windows", 4, each[1]),
    ]

    def move(own: KVConnectorMetadata) -> None:
        worker.finish(worker.transfer(own))
        device.record().wait()  # the step's own work

    for page in range(5):
        write(caches, [page], page + 1)
        write(windows, [page], page + 101)
    if noted is not None:
        noted[:5, 0] = torch.tensor([0, 1, 0, 1, 1])
    move(KVConnectorMetadata([(1, 0), (2, 3)], [], {"windows": ([(2, 3), (4, 0), (3, 1)], [])}))
    for cache in (*caches, *windows):
        cache.zero_()
    move(KVConnectorMetadata([], [(0, 7), (3, 8)], {"windows": ([], [(0, 3), (3, 0)])}))
    for cache in caches:
        assert [int(page.flatten()[0]) for page in cache] == [0] * 7 + [2, 3]
    for cache in windows:
        assert [int(page.flatten()[0]) for page in cache] == [103, 0, 0, 105, 0]
    assert noted is None or noted[7:, 0].tolist() == [1, 0]
    content = torch.frombuffer(worker.memory(4 + 1), dtype=torch.float32)
    assert content.tolist() == [104.0] * 13
    assert worker.num_bytes_loaded == 2 * sum(each)


def test_host_memory_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, caches = FakeDevice(), kept(make_caches())
    with pytest.raises(ConfigError, match="but a block of the KV cache has 40"):
        DeviceBlocks(device, caches, BLOCK_BYTES - 1, "by hand")

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nand much more")

    monkeypatch.setattr("tests.runner.cuda.fake_device.FakeCopyQueue.slots", refuse)
    with pytest.raises(ConfigError, match=r"to copy to: CUDA error: out of memory \(cache.kv_con"):
        DeviceBlocks(device, caches, 1 << 20, "by hand")
