"""How likely label tokens are to follow prompts: from the engine's logprobs of one token.

A request is greedy among the labels: its token is the likeliest of them, and the alternatives tell
of the others. A label that is not among the alternatives is asked for alone, with the same prompt
in the prefix cache. Knows nothing about templates or wire structs.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from aiohttp import web

from aioserve.engine import EngineClient
from aioserve.errors import (
    AioserveError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
)
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.params import MAX_LOGPROBS, SamplingParams
from aioserve.server.access.gate import entered, num_at_once, owner_of
from aioserve.server.access.keys import Claim
from aioserve.server.generation import run_all
from aioserve.server.keys import ENGINE, RESPONSE_ID, RUNNING
from aioserve.server.running import check_id

MAX_LABELS = 128


class Likelihoods(NamedTuple):
    """The logprobs of the labels behind one prompt, and how long the prompt is."""

    logprobs: list[float]  # in the order of labels
    num_prompt_tokens: int
    num_cached_tokens: int  # tokens of the prompt that the prefix cache had


async def label_logprobs(
    request: web.Request,
    own_id: str,
    places: Sequence[str],
    prompt_of: Callable[[int], Awaitable[Sequence[int]]],
    labels: Sequence[int],
    fields: Mapping[str, Any],
) -> list[Likelihoods]:
    """How likely `labels` are behind each prompt. `places` are where the prompts come from in the
    body; `prompt_of` makes the token ids of one.

    At most as many prompts as there are seats are with the engine at a time. Leaving aborts what is
    unfinished. Raises what `add_request` raises, with the place.
    """
    check_id(own_id)
    request[RESPONSE_ID] = own_id
    engine = request.app[ENGINE]
    ids = [f"{own_id}-{i}" for i in range(len(places))]
    todo = iter(range(len(places)))
    found: dict[int, Likelihoods] = {}
    tokenizing = asyncio.Lock()

    async def work() -> None:
        for index in todo:
            with _at(places[index]):
                # One prompt per turn of the loop: short ones are tokenized on it.
                async with tokenizing:
                    prompt = await prompt_of(index)
                    await asyncio.sleep(0)
                if is_aborted.is_set():
                    raise RequestAbortedError(f"request {own_id} was aborted")
                found[index] = await _likelihoods(engine, prompt, labels, ids[index], fields)

    num_workers = num_at_once(request, len(places))
    async with entered(request, Claim(num_workers, request_id=own_id)):
        with request.app[RUNNING].enter(own_id, ids, owner_of(request)) as is_aborted:
            await run_all([work() for _ in range(num_workers)])
    return [found[index] for index in range(len(places))]


async def _likelihoods(
    engine: EngineClient,
    prompt: Sequence[int],
    labels: Sequence[int],
    request_id: str,
    fields: Mapping[str, Any],
) -> Likelihoods:
    found: dict[int, float] = {}
    missing, num_cached = list(labels), 0
    while missing:
        # All of them first; then those that the alternatives did not tell, one by one.
        asked = missing[:1] if found else missing
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            allowed_token_ids=tuple(asked),
            logprobs=0 if len(labels) == 1 else MAX_LOGPROBS,
            detokenize=False,
            ignore_eos=True,
        )
        output = await engine.generate_one(prompt, params, request_id=request_id, **fields)
        if not output.logprobs:
            raise _unfinished(output)
        [own] = output.logprobs
        if not found:
            num_cached = output.num_cached_tokens
        told = dict(zip(own.top_token_ids, own.top_logprobs, strict=True))
        told[output.token_ids[0]] = own.logprob
        if len(asked) == 1:
            told.setdefault(asked[0], own.logprob)  # a simulated runner says any token
        found |= {label: told[label] for label in asked if label in told}
        if not found:
            found[asked[0]] = own.logprob
        missing = [label for label in labels if label not in found]
    return Likelihoods([found[label] for label in labels], len(prompt), num_cached)


def _unfinished(output: RequestOutput) -> AioserveError:
    if output.finish_reason is FinishReason.TIMEOUT:
        return RequestTimeoutError("the request timed out before all prompts were scored")
    return RequestAbortedError(f"request {output.request_id} was aborted")


def probabilities(logprobs: Sequence[float]) -> list[float]:
    """The probabilities of labels among all tokens, from their logprobs."""
    return [math.exp(value) for value in logprobs]


def among(logprobs: Sequence[float]) -> list[float]:
    """The probabilities of labels, given that one of the labels follows, from their logprobs."""
    best = max(logprobs)
    if not math.isfinite(best):
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(value - best) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Name the place in the body of what is wrong with a prompt."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt":
            raise RequestError(f"{place}: {error}", param=place) from error
        raise
