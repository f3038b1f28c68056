"""A loop with a tool and a typed answer, in an engine or at a server: `answer` takes both.

Run it: python examples/tool_loop.py. The embedded model knows no tools, so the format in which it
writes calls is named, and the first call is forced; its words are bound to schemas.
"""

import asyncio
from typing import Literal

import msgspec

from aioserve import AsyncEngine, EngineConfig, LanguageModel, SamplingParams

PARAMS = SamplingParams(max_tokens=100, temperature=0)


class Advice(msgspec.Struct):
    """The answer, as a value."""

    umbrella: bool


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather in a city."""
    return f"It rains in {city}."


async def answer(model: LanguageModel, question: str) -> Advice:
    """Return what the model advises once it has called the tool."""
    messages: list[dict[str, object]] = [{"role": "user", "content": question}]
    reply = await model.chat_one(messages, PARAMS, tools=[weather], tool_choice="required")
    messages.append(reply.message)
    for call in reply.tool_calls:
        messages.append(call.answer(weather(**call.arguments)))
    return (await model.chat_one(messages, PARAMS, response_type=Advice)).parsed


async def main() -> None:
    """Ask an engine in this process."""
    config = EngineConfig(server={"tool_call_parser": "hermes"})
    async with AsyncEngine(config) as engine:
        print(await answer(engine, "Do I need an umbrella in Rome?"))


if __name__ == "__main__":
    asyncio.run(main())
