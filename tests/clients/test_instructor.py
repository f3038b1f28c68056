"""instructor: objects of pydantic from whatever can be bound to a schema."""

from typing import Literal

import pytest

instructor = pytest.importorskip("instructor", reason="make test-clients installs it")

import anthropic  # noqa: E402 - two seconds, which a run that skips this need not wait
import openai  # noqa: E402
import pydantic  # noqa: E402

ASK = [{"role": "user", "content": "Where is France?"}]


class Place(pydantic.BaseModel, extra="forbid"):
    """Where a country lies."""

    continent: Literal["Europe", "Asia", "Africa"]
    is_island: bool


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_openai_s_client_gets_an_object(model_url, mode):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{model_url}/v1", api_key="none"), mode=instructor.Mode[mode]
    )
    place = client.chat.completions.create(
        model="smollm2", messages=ASK, response_model=Place, max_tokens=80, max_retries=0
    )
    assert isinstance(place, Place)


def test_anthropic_s_client_gets_an_object(model_url):
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=model_url, api_key="none"),
        mode=instructor.Mode.ANTHROPIC_TOOLS,
    )
    place = client.messages.create(
        model="smollm2", messages=ASK, response_model=Place, max_tokens=80, max_retries=0
    )
    assert isinstance(place, Place)


async def test_an_object_is_streamed_in_parts(model_url):
    client = instructor.from_openai(
        openai.AsyncOpenAI(base_url=f"{model_url}/v1", api_key="none"),
        mode=instructor.Mode.JSON_SCHEMA,
    )
    parts = client.chat.completions.create_partial(
        model="smollm2", messages=ASK, response_model=Place, max_tokens=80, max_retries=0
    )
    assert [part async for part in parts][-1].continent in ("Europe", "Asia", "Africa")
