"""The package openai-agents has a real Qwen call tools in three turns: `make test-real-models`."""

import json

import pytest

pytest.importorskip("agents", reason="make test-real-models installs it")

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    function_tool,
)
from openai_agents_driver import QUIET

#: What the user asks, the tool for it, and what it is called with.
TURNS = (
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
    ("What is 17 plus 25?", "add", {"a": 17, "b": 25}),
    ("And what is the weather in Oslo?", "get_weather", {"city": "Oslo"}),
)


@function_tool
def get_weather(city: str) -> str:
    """The current weather in a city."""
    return {"Paris": "22 degrees, sunny", "Oslo": "3 degrees, snow"}[city]


@function_tool
def add(a: int, b: int) -> str:
    """The sum of two integers."""
    return str(a + b)


async def loop(url, model_class, choice, *, is_streamed):
    """For each turn the calls that the agent made, and its answer."""
    turns, history = [], []
    for question, tool, _ in TURNS:
        settings = ModelSettings(
            temperature=0,
            max_tokens=128,
            parallel_tool_calls=False,
            tool_choice=tool if choice == "named" else choice,
        )
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        agent = Agent(
            name="helper",
            instructions="You are a helpful assistant. Use the tools for weather and for sums.",
            model=model_class(model="qwen", openai_client=client),
            tools=[get_weather, add],
            model_settings=settings,
        )
        asked = [*history, {"role": "user", "content": question}]
        if is_streamed:
            result = Runner.run_streamed(agent, asked, run_config=QUIET)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, asked, run_config=QUIET)
        history = result.to_input_list()
        calls = [item.raw_item for item in result.new_items if isinstance(item, ToolCallItem)]
        turns.append(([(it.name, json.loads(it.arguments)) for it in calls], result.final_output))
    return turns


@pytest.mark.parametrize("choice", ["required", "named", "auto"])
@pytest.mark.parametrize("model_class", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_qwen_calls_tools_in_three_turns_of_an_agent_streamed_as_whole(
    qwen_url, model_class, choice
):
    """By itself the model calls in the first two; in the third it makes a result up."""
    whole = await loop(qwen_url, model_class, choice, is_streamed=False)
    assert sum(bool(calls) for calls, _ in whole) >= (2 if choice == "auto" else 3)
    for (calls, answer), (_, tool, arguments) in zip(whole, TURNS, strict=True):
        assert calls[:1] in ([(tool, arguments)], [])
        assert answer
    assert await loop(qwen_url, model_class, choice, is_streamed=True) == whole
