"""Texts without the words that were forbidden, from the real model."""

import re
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig
from aioserve.params import StructuredOutputs

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


async def say(engine: AsyncEngine, **fields: Any) -> str:
    params = SamplingParams(temperature=0, **fields)
    return "".join([o.text async for o in engine.generate("What news, my lord?\n", params)])


async def test_bad_words_are_not_said_unless_a_grammar_leaves_no_choice() -> None:
    config = EngineConfig(
        model=ModelConfig(max_model_len=256, dtype="float32"),
        cache=CacheConfig(num_kv_blocks=16),
        runner=RunnerConfig(threads=1),
    )
    async with AsyncEngine(config) as engine:
        text = await say(engine, max_tokens=60, ignore_eos=True)
        bad = tuple(dict.fromkeys(re.findall(r"\w{2,}", text)))
        spelled = engine.model_info.tokenizer(list(bad), add_special_tokens=False)["input_ids"]
        assert {len(token_ids) > 1 for token_ids in spelled} == {False, True}
        other = await say(engine, max_tokens=60, ignore_eos=True, bad_words=bad)
        assert other
        assert not set(bad) & set(re.findall(r"\w+", other))
        choice = StructuredOutputs(choice=("Nothing", "Nought"))
        bad = ("Noth", "Nothing", "No")
        assert await say(engine, structured_outputs=choice, bad_words=bad) in choice.choice
