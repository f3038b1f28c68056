"""Chats with tools and typed replies, of an engine and of a client."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from aioserve import AsyncClient, AsyncEngine, ChatOutput, FinishedChat, LanguageModel, ToolCall


@dataclass
class Advice:
    umbrella: bool


def weather(city: str) -> str:
    return f"It rains in {city}."


async def advise(model: LanguageModel, question: str) -> bool:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    reply = await model.chat_one(messages, tools=[weather], tool_choice="required")
    calls: list[ToolCall] = reply.tool_calls
    messages += [reply.message, *(call.answer(weather(**call.arguments)) for call in calls)]
    advice = await model.chat_one(messages, response_type=Advice, reasoning_effort="low")
    return advice.parsed.umbrella


async def last(outputs: AsyncGenerator[ChatOutput[Advice], None]) -> Advice:
    return [output async for output in outputs][-1].parsed


async def own(engine: AsyncEngine, client: AsyncClient) -> FinishedChat[None]:
    messages = [{"role": "user", "content": "Hello"}]
    await last(engine.chat(messages, response_type=Advice, adapter="poet"))
    await last(client.chat(messages, response_type=Advice, chat_template_kwargs={"a": 1}))
    print(await advise(engine, "Rome?"), await advise(client, "Oslo?"))
    print((await client.chat_one(messages, response_type=Advice)).parsed.umbrella)
    return await engine.chat_one(messages)
