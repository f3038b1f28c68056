"""Prompts with images, as callers write them, at the door of a model that reads none."""

import msgspec
import numpy as np
import pytest

from aioserve import AsyncEngine, EngineConfig, MultimodalPrompt
from aioserve.config import RunnerConfig
from aioserve.errors import RequestError
from aioserve.request import EncoderInput


async def test_an_image_for_a_text_model_is_refused() -> None:
    picture = np.zeros((8, 8, 3), dtype=np.uint8)
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    prompts = ("<image> What?", [{"role": "user", "content": content}])
    async with AsyncEngine(EngineConfig(runner=RunnerConfig(runner="simulated"))) as engine:
        for prompt in prompts:
            with pytest.raises(RequestError, match="reads no images") as raised:
                await engine.add_request(MultimodalPrompt(prompt, [picture]))
            assert raised.value.param == "images[0]"


def test_inputs_of_one_content_are_equal_whoever_has_the_arrays() -> None:
    item = EncoderInput(3, 4, "abc", {"pixel_values": np.zeros(3)})
    told = msgspec.structs.replace(item, arrays=None)
    assert item == told
    assert hash(item) == hash(told)
    assert item != EncoderInput(3, 4, "abd", item.arrays)
