"""LangChain's `ChatOpenAI`, as an application would use it."""

from typing import Literal

import pydantic
import pytest

pytest.importorskip("langchain_openai", reason="make test-clients installs it")

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

FRANCE = "What is the capital of France?"


class Answer(pydantic.BaseModel, extra="forbid"):
    """An answer about a country."""

    is_certain: bool
    continent: Literal["Europe", "Asia", "Africa"]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"rain in {city}"


@pytest.fixture
def model(model_url):
    return ChatOpenAI(
        model="smollm2", base_url=f"{model_url}/v1", api_key="none", temperature=0, max_tokens=60
    )


@pytest.fixture
def caller(calling):
    return ChatOpenAI(model="embedded", base_url=f"{calling}/v1", api_key="none")


@pytest.mark.parametrize("uses_responses", [False, True])
async def test_invoke_and_astream_say_the_same(model, uses_responses):
    model.use_responses_api = uses_responses
    whole = model.invoke(FRANCE)
    assert "Paris" in whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    pieces = [piece async for piece in model.astream(FRANCE)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert len(pieces) > 3


async def test_a_call_by_itself_is_answered(caller):
    bound = caller.bind_tools([weather])
    reply = bound.invoke(FRANCE)
    assert reply.content == "Let me see."
    [call] = reply.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    whole = None
    async for piece in bound.astream(FRANCE):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["args"] == {"city": "Paris"}
    answer = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert bound.invoke([HumanMessage(FRANCE), reply, answer]).tool_calls


@pytest.mark.parametrize("choice", ["weather", "any", "required"])
def test_a_forced_call_fits_its_schema(model, choice):
    reply = model.bind_tools([weather], tool_choice=choice).invoke(FRANCE)
    assert reply.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object(model, method):
    answer = model.with_structured_output(Answer, method=method).invoke(FRANCE)
    assert isinstance(answer, Answer)


async def test_a_batch_and_several_samples(model):
    replies = await model.abatch([FRANCE, "Who are you?"])
    assert len({reply.text for reply in replies}) == 2
    model.n, model.temperature = 2, 0.8
    result = await model.agenerate([[HumanMessage(FRANCE)]])
    assert len(result.generations[0]) == 2
