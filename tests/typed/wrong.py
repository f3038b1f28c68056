"""Mistakes that a type checker has to find: of an ignored error that is none, mypy warns."""

from collections.abc import Sequence

from aioserve import AsyncClient, AsyncEngine, LanguageModel, SamplingParams


async def misspelled(model: LanguageModel) -> None:
    SamplingParams(max_tokns=8)  # type: ignore[call-arg]
    model.generate("To be", adaptor="poet")  # type: ignore[call-arg]


def no_model(engine: AsyncEngine, client: AsyncClient) -> Sequence[LanguageModel]:
    return [engine, client, 5]  # type: ignore[list-item]
