"""POST /v1/completions: text or token ids in, text out.

Knows the shape of that endpoint; admission and streaming are in `generation`.
"""

import asyncio
from collections.abc import Sequence

from aiohttp import web

from aioserve.errors import RequestError
from aioserve.outputs import RequestOutput
from aioserve.sampling_params import MAX_N
from aioserve.server.generation import Reply, read_body, respond
from aioserve.server.logprobs import completion_logprobs
from aioserve.server.protocol import Completion, CompletionChoice, CompletionRequest, Usage
from aioserve.server.sse import event
from aioserve.server.unserved import NOT_ON_COMPLETIONS
from aioserve.server.validation import BodyDecoder

# Each prompt is a request of its own; more than this is a batch job, not a request.
MAX_PROMPTS = 1024

decoder = BodyDecoder(CompletionRequest, NOT_ON_COMPLETIONS)


async def create_completion(request: web.Request) -> web.StreamResponse:
    """The handler. Raises what `add_request` raises, before anything is sent."""
    body = await read_body(request, decoder)
    params = body.sampling_params(body.max_tokens, body.logprobs)
    best_of = params.n if body.best_of in (None, 1) else body.best_of
    if not params.n <= best_of <= MAX_N:
        raise RequestError(
            f"best_of must be between n ({params.n}) and {MAX_N}, got {best_of}", param="best_of"
        )
    if best_of > params.n and body.stream:
        raise RequestError(
            "best_of above n cannot be streamed: the best are known at the end", param="best_of"
        )
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "echo with logprobs is not supported by this server: prompts get no logprobs",
            param="echo",
        )
    prompts = body.prompts()
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt"
        )
    reply = CompletionReply(request, body, prompts if body.echo else (), params.n)
    return await respond(request, body, prompts, params, reply, best_of)


class CompletionReply(Reply):
    """Completions and their chunks have the same shape."""

    id_prefix = "cmpl-"
    text_field = "text"

    def __init__(
        self,
        request: web.Request,
        body: CompletionRequest,
        echoed: Sequence[str | list[int]] = (),
        n: int = 1,
    ) -> None:
        """`echoed`: the prompts, if the text of each of their `n` choices begins with them."""
        super().__init__(request, body)
        self._offsets: dict[int, int] = {}  # by choice: where its next token's text begins
        self._echoed = echoed
        self._n = n
        self._echoes: dict[int, str] = {}  # by choice, until it was said

    async def begin(self) -> None:
        texts = [
            prompt if isinstance(prompt, str) else await asyncio.to_thread(self.texts.join, prompt)
            for prompt in self._echoed
        ]
        self._echoes = {
            i * self._n + j: text for i, text in enumerate(texts) for j in range(self._n)
        }

    def make_chunk(self, index: int, output: RequestOutput) -> bytes:
        chunk = self._envelope([self._choice(index, output)])
        self.add_usage(chunk, output)
        return event(chunk)

    def usage_chunk(self, usage: Usage) -> bytes:
        chunk = self._envelope([])
        chunk.usage = usage
        return event(chunk)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Completion:
        completion = self._envelope([self._choice(i, out) for i, out in enumerate(outputs)])
        completion.usage = usage
        return completion

    def _envelope(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices)

    def _choice(self, index: int, output: RequestOutput) -> CompletionChoice:
        text = self._echoes.pop(index, "") + output.text
        choice = CompletionChoice(index=index, text=text, finish_reason=output.finish_reason)
        if output.logprobs is not None:
            offset = self._offsets.get(index, 0)
            choice.logprobs = logprobs = completion_logprobs(
                self.texts, output.token_ids, output.logprobs, offset
            )
            self._offsets[index] = offset + sum(map(len, logprobs.tokens))
        self.extend(choice, output)
        return choice
