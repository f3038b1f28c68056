"""Whole texts in the place of streams: of one prompt, and of many at a bounded concurrency.

Knows how the outputs of one request become one. Knows no engine and no server.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from aioserve.errors import (
    AioserveError,
    EngineDeadError,
    EngineOverloadedError,
    PromptsFailedError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
)
from aioserve.outputs import EmbeddingOutput, FinishedOutput, FinishReason, RequestOutput
from aioserve.params import SamplingParams

P = TypeVar("P")

#: Parameters of all prompts, or of each: None: as the model recommends.
ParamsOfMany = SamplingParams | Sequence[SamplingParams] | None


def check_params(params: object) -> None:
    """Raises `RequestError` for what is neither `SamplingParams` nor None."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling_params must be SamplingParams, got {type(params).__name__}",
            param="sampling_params",
        )


def check_one_sample(params: SamplingParams | None) -> None:
    """Raises `RequestError` for parameters that ask for several samples of a prompt, and for what
    is no `SamplingParams`.
    """
    check_params(params)
    if params is not None and params.n != 1:
        raise RequestError(
            f"n is {params.n}, and one text comes back: repeat the prompt in generate_all, or tell "
            "the samples of generate apart by their index",
            param="n",
        )


async def whole_output(outputs: AsyncIterator[RequestOutput]) -> FinishedOutput:
    """Return the outputs of one sample as one: its whole text, and the counts of its last
    output.
    """
    whole: RequestOutput | None = None
    async for output in outputs:
        if whole is None:
            whole = output
        else:
            whole.merge(output)
    if whole is None or whole.times is None:  # a stream that its own reader, or a server, closed
        raise EngineDeadError("the stream ended before its last output")
    return FinishedOutput(**msgspec.structs.asdict(whole))


async def read_embedding(request_id: str, outputs: AsyncIterator[RequestOutput]) -> EmbeddingOutput:
    """Return what a stream of a request that is pooled amounts to. Raises where there is no
    vector.
    """
    [output] = [output async for output in outputs]
    if output.finish_reason is FinishReason.TIMEOUT:
        raise RequestTimeoutError(f"request {request_id} has timed out")
    if output.finish_reason is FinishReason.ABORT:
        raise RequestAbortedError(f"request {request_id} was aborted")
    if output.embedding is None:
        raise RequestFailedError("the runner computed the prompt but gave no vector of it")
    return EmbeddingOutput(
        request_id=request_id,
        embedding=output.embedding,
        num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens,
    )


async def generate_all(
    generate_one: Callable[[P, SamplingParams | None, dict[str, Any]], Awaitable[FinishedOutput]],
    prompts: Iterable[P],
    params: ParamsOfMany,
    max_concurrency: int,
    fields: Mapping[str, Any],
) -> list[FinishedOutput]:
    """Return what `generate_one` gives for each of `prompts`, in their order, at most
    `max_concurrency` at a time. A prompt that is refused for lack of room is asked again after the
    time that the error names; after an `EngineDeadError` no other is asked.

    Cancelling it cancels what runs. Raises `RequestError` before any is asked, and after all have
    ended `PromptsFailedError` if some of them got an error.
    """
    if isinstance(prompts, str):
        raise RequestError("prompts is one text, and a list of prompts is expected", "prompts")
    asked = list(prompts)
    if asked and isinstance(asked[0], (int, Mapping)):
        what = "token ids" if isinstance(asked[0], int) else "messages"
        raise RequestError(f"prompts are the {what} of one prompt: put them into a list", "prompts")
    if max_concurrency < 1:
        raise RequestError(f"max_concurrency must be at least 1, got {max_concurrency}")
    if isinstance(params, Sequence) and len(params) != len(asked):
        raise RequestError(f"there are {len(asked)} prompts and {len(params)} parameters of them")
    of_each = params if isinstance(params, Sequence) else [params] * len(asked)
    for one in of_each:
        check_one_sample(one)
    results: dict[int, FinishedOutput | AioserveError] = {}
    numbers = iter(range(len(asked)))
    request_id = fields.get("request_id")

    async def work() -> None:
        for number in numbers:
            own = dict(fields)
            if request_id is not None:
                own["request_id"] = f"{request_id}-{number}"
            while True:
                try:
                    results[number] = await generate_one(asked[number], of_each[number], own)
                except EngineOverloadedError as error:
                    await asyncio.sleep(error.retry_after)
                    continue
                except EngineDeadError as error:
                    results[number] = error
                    for _ in numbers:  # the others find none left
                        pass
                except AioserveError as error:
                    results[number] = error
                break

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(max_concurrency, len(asked))):
                group.create_task(work())
    except ExceptionGroup as errors:  # none of ours: a mistake in a program or in aioserve
        raise errors.exceptions[0] from None
    outputs = [out for i in range(len(asked)) if isinstance(out := results.get(i), FinishedOutput)]
    if len(outputs) < len(asked):
        unasked = EngineDeadError("the engine died before this prompt was asked")
        failure = PromptsFailedError([results.get(i, unasked) for i in range(len(asked))])
        raise failure from next(iter(failure.errors.values()))
    return outputs
