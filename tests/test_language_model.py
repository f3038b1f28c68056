"""Engine and client are one `LanguageModel`: the same answers and refusals from both."""

import asyncio

import numpy as np
import pytest

from aioserve import AsyncEngine, EngineConfig, PoolingParams, SamplingParams
from aioserve.config import RunnerConfig
from aioserve.errors import RequestError, UnknownModelError
from aioserve.outputs import FinishReason
from tests.test_whole import ENDLESS, asked_by

MESSAGES = [{"role": "user", "content": "Who's there?"}]


@pytest.fixture(params=["engine", "client"])
async def pair(request):
    config = EngineConfig(runner=RunnerConfig(threads=1))
    async with asked_by(request.param, config) as pair:
        yield pair


@pytest.mark.parametrize("prompt", ["Who's there?", [5, 6, 7], MESSAGES])
async def test_a_vector_is_that_of_the_engine(pair, prompt):
    engine: AsyncEngine
    engine, asked = pair
    params = PoolingParams(pooling="mean", normalize=False)
    expected = await engine.embed(prompt, params)
    found = await asked.embed(prompt, params, user="ann", request_id="mine")
    assert found.request_id == "mine"
    assert found.embedding.dtype == np.float32
    np.testing.assert_allclose(found.embedding, expected.embedding, rtol=1e-3, atol=1e-4)
    assert found.num_prompt_tokens == expected.num_prompt_tokens


async def test_tokens_are_those_of_the_engine(pair):
    engine, asked = pair
    for prompt in ("Who's there?", MESSAGES, [5, 6, 7]):
        assert await asked.tokenize(prompt) == await engine.tokenize(prompt)
    plain = await asked.tokenize("Hello", add_special_tokens=False)
    assert plain == await engine.tokenize("Hello", add_special_tokens=False)
    assert await asked.detokenize(plain) == "Hello"
    with pytest.raises(RequestError):
        await asked.detokenize([10**6])


async def test_a_request_is_ended_by_its_id(pair):
    _, asked = pair
    assert not await asked.abort("mine")
    reading = asyncio.create_task(asked.generate_one("Hello", ENDLESS, request_id="mine"))
    while not await asked.abort("mine"):  # noqa: ASYNC110 - nothing tells that it has arrived
        await asyncio.sleep(0.01)
    assert (await reading).finish_reason is FinishReason.ABORT


async def test_an_adapter_that_is_not_there_is_refused_by_its_name(pair):
    _, asked = pair
    with pytest.raises(UnknownModelError, match="'poet' does not exist"):
        await asked.generate_one("Hello", adapter="poet")
    with pytest.raises(UnknownModelError, match="'poet' does not exist"):
        await asked.embed("Hello", adapter="poet")


async def test_what_is_no_prompt_is_refused_in_words(pair):
    _, asked = pair
    for prompt in (None, 5, b"Hello", {"role": "user", "content": "hi"}, {"Hello"}):
        words = f"the prompt must be a text, token ids or .*messages, got {type(prompt).__name__}"
        with pytest.raises(RequestError, match=words) as caught:
            await asked.generate_one(prompt)
        assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="messages"):
        await asked.generate_one([{"role": "user", "content": "hi"}, "bye"])


async def test_parameters_of_another_type_are_refused_in_words(pair):
    _, asked = pair
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams, got dict"):
        await asked.generate_one("Hello", {"max_tokens": 4})
    with pytest.raises(RequestError, match=r"params must be SamplingParams, got dict"):
        await anext(asked.generate("Hello", {"max_tokens": 4}))
    with pytest.raises(RequestError) as caught:
        await asked.generate_one("Hello", timeout="soon")
    assert caught.value.param == "timeout"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("max_tokens", 2.5, "max_tokens must be a whole number or None, got 2.5"),
        ("n", True, "n must be a whole number, got True"),
        ("stop", 5, "stop must be a text or a list, got 5"),
        ("stop_token_ids", ["a"], "stop_token_ids must be a list of whole numbers, got ['a']"),
        ("logit_bias", [1], "logit_bias must be a mapping or None, got [1]"),
    ],
)
def test_a_sampling_parameter_of_another_type_is_refused_by_its_name(field, value, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value) == words
    assert caught.value.param == field
