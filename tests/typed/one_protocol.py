"""A program for `LanguageModel`, which engine and client are."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from aioserve import AsyncClient, AsyncEngine, FinishedOutput, LanguageModel, SamplingParams
from aioserve.params import PoolingParams


async def seconds(model: LanguageModel, question: str) -> float:
    params = SamplingParams(max_tokens=8)
    async with aclosing(model.generate(question, params, adapter="poet")) as outputs:
        async for output in outputs:
            print(output.text)
    said = await model.generate_one([{"role": "user", "content": question}], user="ann")
    vector = await model.embed(question, PoolingParams(pooling="mean"))
    ids: list[int] = await model.tokenize(question)
    print(await model.abort("x"), await model.detokenize(ids), vector.embedding.shape)
    return said.times.duration


async def slowest(models: Sequence[LanguageModel]) -> FinishedOutput:
    outputs = [one for model in models for one in await model.generate_all(["a"], priority=1)]
    return max(outputs, key=lambda output: output.times.finished)


async def main() -> None:
    async with AsyncEngine() as engine, AsyncClient("http://127.0.0.1:8000") as client:
        print(await seconds(engine, "To be"), await seconds(client, "To be"))
        print((await slowest([engine, client])).finish_reason.value)


asyncio.run(main())
