"""LiteLLM by each provider whose protocol is spoken here."""

from typing import Literal

import pydantic
import pytest

litellm = pytest.importorskip("litellm", reason="make test-clients installs it")

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


class Answer(pydantic.BaseModel, extra="forbid"):
    is_certain: bool
    continent: Literal["Europe", "Asia", "Africa"]


def where(provider, url):
    """The base that each provider wants."""
    return url if provider == "anthropic" else f"{url}/v1"


def options(provider, url, model):
    return {
        "model": f"{provider}/{model}",
        "api_base": where(provider, url),
        "api_key": "none",
        "messages": FRANCE,
    }


PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])


@PROVIDERS
async def test_whole_and_streamed_replies_are_the_same(model_url, provider):
    ask = options(provider, model_url, "smollm2") | {"temperature": 0, "max_tokens": 40}
    whole = litellm.completion(**ask)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.usage.completion_tokens > 0
    pieces = [chunk async for chunk in await litellm.acompletion(**ask, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == text


@PROVIDERS
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_is_read(calling, provider, is_streamed):
    ask = options(provider, calling, "embedded") | {"tools": TOOLS, "stream": is_streamed}
    reply = litellm.completion(**ask)
    if is_streamed:
        reply = litellm.stream_chunk_builder(list(reply), messages=FRANCE)
    message = reply.choices[0].message
    assert message.content == "Let me see."
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert reply.choices[0].finish_reason == "tool_calls"
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    ask["messages"] = [*FRANCE, message.model_dump(exclude_none=True), answer]
    assert litellm.completion(**ask)


@PROVIDERS
def test_a_forced_call_fits_its_schema(model_url, provider):
    ask = options(provider, model_url, "smollm2") | {"tools": TOOLS, "max_tokens": 60}
    choice = {"type": "function", "function": {"name": "weather"}}
    reply = litellm.completion(**ask, tool_choice=choice)
    assert '"city"' in reply.choices[0].message.tool_calls[0].function.arguments


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_schema_is_kept(model_url, provider):
    ask = options(provider, model_url, "smollm2") | {"max_tokens": 60}
    reply = litellm.completion(**ask, response_format=Answer)
    Answer.model_validate_json(reply.choices[0].message.content)


def test_plain_completions_and_responses(model_url):
    ask = {"api_base": f"{model_url}/v1", "api_key": "none"}
    text = litellm.text_completion(
        model="text-completion-openai/smollm2",
        prompt="The capital of France is",
        max_tokens=8,
        **ask,
    )
    assert text.choices[0].text
    response = litellm.responses(
        model="openai/smollm2", input=FRANCE[0]["content"], max_output_tokens=40, **ask
    )
    assert response.output[0].content[0].text


def test_an_error_of_the_server_is_the_client_s_error(model_url):
    with pytest.raises(litellm.BadRequestError, match="max_tokens"):
        litellm.completion(**options("openai", model_url, "smollm2"), max_tokens=0)
