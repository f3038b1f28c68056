"""The official `openai` package against a running server: nothing of ours on the client's side."""

import asyncio
from typing import Literal

import openai
import pydantic
import pytest

from aioserve.config import EngineConfig, RunnerConfig
from tests.processes import PATIENCE
from tests.server.serving import running

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

MESSAGES = [{"role": "user", "content": "Speak, I charge thee, speak!"}]


@pytest.fixture
async def url():
    # One thread: on a busy machine two of them mostly wait for each other.
    async with running(EngineConfig(runner=RunnerConfig(threads=1))) as server:
        yield server.url + "/v1"


@pytest.fixture
async def client(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_async_chat_whole_and_streamed_agree(client):
    fields = {"model": "embedded", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = await client.chat.completions.create(**fields)
    stream = await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_async_completions_whole_and_streamed_agree(client):
    fields = {"model": "embedded", "prompt": ["Once", "Twice"], "temperature": 0, "max_tokens": 12}
    whole = await client.completions.create(**fields)
    texts = ["", ""]
    async for chunk in await client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def use_sync_client(url):
    """Runs in a thread: the loop serves meanwhile."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["embedded"]
        chat = {"model": "embedded", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
        whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        with client.chat.completions.create(**chat, stream=True) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole.choices[0].message.content
        completion = {"model": "embedded", "prompt": "Once", "temperature": 0, "logprobs": 1}
        whole = client.completions.create(**completion)
        assert whole.choices[0].logprobs.tokens
        with client.completions.create(**completion, stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


async def test_the_sync_client_works(url):
    await asyncio.to_thread(use_sync_client, url)


async def test_sampling_extensions_travel_in_extra_body(client):
    reply = await client.chat.completions.create(
        model="embedded",
        messages=MESSAGES,
        max_tokens=8,
        seed=5,
        n=2,
        extra_body={"top_k": 20, "min_p": 0.01, "ignore_eos": True, "repetition_penalty": 1.1},
    )
    assert len(reply.choices) == 2
    assert reply.usage.completion_tokens == 16


async def test_errors_arrive_as_the_packages_own_exceptions(client):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="embedded", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt-4o", prompt="x")
    assert missing.value.code == "model_not_found"


async def test_leaving_a_stream_aborts_it(server):
    body = {"prompt": "x", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = await client.completions.create(model="embedded", stream=True, **body)
        async with stream:
            async for _ in stream:
                break
        async with asyncio.timeout(PATIENCE):
            while any((await server.gauges()).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    metrics = (await server.get("/metrics")).body
    assert b'aioserve_requests_finished_total{reason="abort"} 1.0' in metrics


class Sighting(pydantic.BaseModel):
    """What a caller of `parse` wants to get."""

    kind: Literal["ghost", "king", "player"]
    hour: int = pydantic.Field(ge=0, le=23)
    seen_by: list[Literal["Horatio", "Marcellus"]] = pydantic.Field(max_length=2)


async def test_parse_returns_what_the_model_class_says():
    async with (
        running(EngineConfig(runner=RunnerConfig(threads=1))) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        fields = {"model": "embedded", "messages": MESSAGES, "max_tokens": 200, "seed": 1}
        whole = await client.chat.completions.parse(**fields, response_format=Sighting)
        async with client.chat.completions.stream(**fields, response_format=Sighting) as stream:
            streamed = await stream.get_final_completion()
        choice = await client.completions.create(
            model="embedded",
            prompt="Who's there?",
            extra_body={"structured_outputs": {"choice": ["Nay", "answer me"]}},
        )
        impossible = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as refused:
            await client.chat.completions.create(**fields, response_format=impossible)
    assert isinstance(whole.choices[0].message.parsed, Sighting)
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert choice.choices[0].text in ("Nay", "answer me")
    assert refused.value.param == "response_format.json_schema.schema"


async def test_embeddings_are_the_same_as_numbers_and_as_bytes(client):
    """The package asks for base64 unless it is told otherwise."""
    fields = {"model": "embedded", "input": ["Who's there?", "Stand, and unfold yourself."]}
    as_bytes = await client.embeddings.create(**fields)
    as_numbers = await client.embeddings.create(**fields, encoding_format="float")
    assert as_bytes.usage == as_numbers.usage
    for ours, theirs in zip(as_bytes.data, as_numbers.data, strict=True):
        assert ours.index == theirs.index
        assert ours.embedding == pytest.approx(theirs.embedding, rel=1e-6)
        assert sum(x * x for x in ours.embedding) == pytest.approx(1, rel=1e-4)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(**fields, dimensions=32)
    assert caught.value.param == "dimensions"
