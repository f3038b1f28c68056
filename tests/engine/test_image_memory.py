"""Prepared images are counted while somebody has them, and no longer."""

import gc

import numpy as np
import pytest

from aioserve.errors import EngineOverloadedError
from aioserve.features.multimodal.encoder_cache import ImageMemory
from aioserve.params import SamplingParams
from aioserve.request import EncoderInput, RequestSpec

MIB = 2**20


def spec_of(*sizes: int) -> RequestSpec:
    """A request with images of these sizes in MiB."""
    items = [
        EncoderInput(i, 1, f"{i}", {"pixels": np.zeros(size * MIB, np.uint8)})
        for i, size in enumerate(sizes)
    ]
    return RequestSpec("x", [1], SamplingParams(), encoder_inputs=items)


def test_images_are_counted_until_nobody_has_them() -> None:
    memory = ImageMemory(10 / 1024)
    first, second = spec_of(3, 4), spec_of(2)
    memory.hold(first)
    memory.hold(second)
    assert memory.num_bytes == 9 * MIB
    too_much = spec_of(2)
    with pytest.raises(EngineOverloadedError, match=r"take 9 MiB; 2 MiB more would be over"):
        memory.hold(too_much)
    del first, too_much
    gc.collect()
    assert memory.num_bytes == 2 * MIB
    memory.hold(RequestSpec("text", [1], SamplingParams()))
    del second
    gc.collect()
    assert memory.num_bytes == 0
    large = spec_of(11)
    memory.hold(large)  # alone, it would wait for nobody
    with pytest.raises(EngineOverloadedError):
        memory.hold(spec_of(1))
    memory.hold(RequestSpec("text", [1], SamplingParams()))
