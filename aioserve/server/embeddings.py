"""POST /v1/embeddings: texts or token ids in, a vector of each out.

Knows the shape of that endpoint. Every input is a request of its own to the engine, which pools.
"""

import base64
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aioserve.engine import Prompt
from aioserve.errors import RequestAbortedError, RequestError
from aioserve.outputs import Vector
from aioserve.params import Pooling, PoolingParams
from aioserve.server.access.gate import (
    allowed_fields,
    entered,
    estimated_tokens,
    num_at_once,
    owner_of,
)
from aioserve.server.access.keys import Claim
from aioserve.server.body import GENERATION_ERRORS, BodyDecoder, Route, decode_body, json_response
from aioserve.server.generation import run_all
from aioserve.server.protocol import EngineRequest, Int, PromptTokensDetails
from aioserve.server.running import ENGINE, RESPONSE_ID, RUNNING, check_id

MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingRequest(EngineRequest, kw_only=True, omit_defaults=True):
    """The JSON body of POST /v1/embeddings: texts or token ids, and how to pool them."""

    input: str | list[str | Int | list[Int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    # Extensions; `normalize` as in vLLM.
    pooling: Pooling | None = None
    normalize: bool | None = None

    def prompts(self) -> dict[str, Prompt]:
        """Return every input by its place. Raises `RequestError` for one that is empty, and for
        texts and token ids that are mixed.
        """
        given = self.input
        kinds = {type(item) for item in given}
        if isinstance(given, str) or kinds == {int}:
            prompts: dict[str, Any] = {"input": given}
        elif len(kinds) > 1:
            raise RequestError(
                "input must not mix texts, token ids and lists of token ids", param="input"
            )
        else:
            prompts = {f"input[{i}]": item for i, item in enumerate(given)}
        if len(prompts) > MAX_INPUTS:
            raise RequestError(
                f"input must hold at most {MAX_INPUTS} inputs, got {len(prompts)}", param="input"
            )
        for place, prompt in prompts.items() or [("input", "")]:
            if not prompt:
                raise RequestError(f"{place} must not be empty", param=place)
        return prompts

    def pooling_params(self) -> PoolingParams:
        """Return how vectors are made. Raises `RequestError` that names the field."""
        given = {name: getattr(self, name) for name in PoolingParams.__struct_fields__}
        return PoolingParams(**{k: v for k, v in given.items() if v is not None})


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one input, as numbers or in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # numbers, or float32 in base64, little-endian


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Token counts of a request for embeddings, which has no output."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # extension: some were cached


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The response of POST /v1/embeddings: a vector per text, and the tokens used."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


decoder = BodyDecoder(EmbeddingRequest, "embeddings")
_encoder = msgspec.json.Encoder()


async def create_embedding(request: web.Request) -> web.Response:
    """Answer the request. Raises what `run_each` raises."""
    body = await decode_body(request, decoder)
    prompts, params = body.prompts(), body.pooling_params()
    fields = allowed_fields(request, body) | {"adapter": body.model or ""}
    own_id = f"embd-{uuid.uuid4().hex}" if body.request_id is None else body.request_id
    engine, inputs = request.app[ENGINE], list(prompts.values())
    found: dict[int, Embedding] = {}
    num_tokens = num_cached = 0

    async def embed(index: int, request_id: str, check: Callable[[], None]) -> None:
        nonlocal num_tokens, num_cached
        check()
        output = await engine.embed(inputs[index], params, request_id=request_id, **fields)
        # Written now: all of them at once could keep the loop from others for long.
        written: Any = _write(output.embedding, body.encoding_format)
        found[index] = Embedding(index=index, embedding=written)
        num_tokens += output.num_prompt_tokens
        num_cached += output.num_cached_tokens

    await run_each(
        request, own_id, list(prompts), lambda: sum(map(estimated_tokens, inputs)), embed
    )
    answer = EmbeddingList(
        data=[found[index] for index in range(len(prompts))],
        model=body.model or engine.config.model.served_name,
        usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )
    if num_cached:
        details = PromptTokensDetails(cached_tokens=num_cached)
        answer.usage.prompt_tokens_details = details
    return json_response(answer)


async def run_each(
    request: web.Request,
    own_id: str,
    places: Sequence[str],
    count_tokens: Callable[[], int],
    run_one: Callable[[int, str, Callable[[], None]], Awaitable[None]],
) -> None:
    """Run the prompts of a body, which come from `places` in it and have about `count_tokens()`
    tokens: `run_one` is called with the index of each, its request id, and a check to call before
    the engine is asked, which raises `RequestAbortedError`. Errors name the place of the prompt.

    At most as many prompts as there are seats are with the engine at a time, so that one body does
    not fill the queue. Leaving, by an error or because the client went away, aborts what is
    unfinished.
    """
    check_id(own_id)
    request[RESPONSE_ID] = own_id
    ids = [own_id] if len(places) == 1 else [f"{own_id}-{i}" for i in range(len(places))]
    todo = iter(enumerate(zip(ids, places, strict=True)))
    num_workers = num_at_once(request, len(places))

    def check() -> None:
        if response.is_aborted:
            raise RequestAbortedError(f"request {own_id} was aborted")

    async def work() -> None:
        for index, (request_id, place) in todo:
            try:
                await run_one(index, request_id, check)
            except RequestError as error:
                if error.param != "prompt":
                    raise
                raise RequestError(f"{place}: {error}", param=place) from error

    def claim() -> Claim:
        return Claim(num_workers, count_tokens(), len(places) == 1, own_id)

    async with entered(request, claim):
        with request.app[RUNNING].enter(own_id, ids, owner_of(request)) as response:
            await run_all([work() for _ in range(num_workers)])


def _write(vector: Vector, encoding: str | None) -> msgspec.Raw:
    """Return the vector as JSON: a list of numbers, or base64 of its float32 bytes."""
    if encoding == "base64":
        return msgspec.Raw(b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes()))
    return msgspec.Raw(_encoder.encode(vector.tolist()))


ROUTES = (
    Route(
        "POST",
        "/v1/embeddings",
        create_embedding,
        "A vector of each input.",
        EmbeddingList,
        body=decoder,
        example={"input": "Who's there?"},
        raises=GENERATION_ERRORS,
    ),
)
