"""A stream's program: engine and client behind one protocol of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Protocol

from aioserve import AsyncClient, AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from aioserve.params import StructuredOutputs


class Texts(Protocol):
    def generate(
        self, prompt: str, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]: ...


async def first_words(model: Texts, prompt: str) -> str:
    text = ""
    async for output in model.generate(prompt, SamplingParams(max_tokens=8)):
        text += output.text
    return text


async def main() -> None:
    async with AsyncEngine(EngineConfig(scheduler={"policy": "fair"})) as engine:
        await first_words(engine, "To be")
        async with aclosing(engine.generate("To be", SamplingParams(stop=["a", "b"]))) as outputs:
            async for output in outputs:
                print(output.text)
        wanted = StructuredOutputs(choice=["a", "b"])
        one = await engine.generate_one("hi", SamplingParams(structured_outputs=wanted))
        print(one.finish_reason)
    async with AsyncClient("http://127.0.0.1:8000") as client:
        await first_words(client, "To be")
        async for output in client.chat([{"role": "user", "content": "hi"}]):
            print(output.text)


asyncio.run(main())
