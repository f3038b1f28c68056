"""POST /v1/completions: text or token ids in, text out.

Knows the shape of that endpoint; admission and streaming are in `generation`.
"""

from collections.abc import Sequence

from aiohttp import web

from aioserve.errors import RequestError
from aioserve.outputs import RequestOutput
from aioserve.server.generation import Reply, read_body, respond
from aioserve.server.logprobs import completion_logprobs
from aioserve.server.protocol import Completion, CompletionChoice, CompletionRequest, Usage
from aioserve.server.sse import event
from aioserve.server.unserved import NOT_ON_COMPLETIONS
from aioserve.server.validation import BodyDecoder

# Each prompt is a request of its own; more than this is a batch job, not a request.
MAX_PROMPTS = 1024

_decoder = BodyDecoder(CompletionRequest, NOT_ON_COMPLETIONS)


async def create_completion(request: web.Request) -> web.StreamResponse:
    """The handler. Raises what `add_request` raises, before anything is sent."""
    body = await read_body(request, _decoder)
    params = body.sampling_params(body.max_tokens, body.logprobs)
    if body.best_of not in (None, 1, params.n):
        raise RequestError("best_of is not supported unless it equals n", param="best_of")
    prompts = body.prompts()
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt"
        )
    return await respond(request, body, prompts, params, CompletionReply(request, body))


class CompletionReply(Reply):
    """Completions and their chunks have the same shape."""

    id_prefix = "cmpl"
    text_field = "text"

    def __init__(self, request: web.Request, body: CompletionRequest) -> None:
        super().__init__(request, body)
        self._offsets: dict[int, int] = {}  # by choice: where its next token's text begins

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
        choice = CompletionChoice(index=index, text=output.text, finish_reason=output.finish_reason)
        if output.logprobs is not None:
            offset = self._offsets.get(index, 0)
            choice.logprobs = logprobs = completion_logprobs(
                self.texts, output.token_ids, output.logprobs, offset
            )
            self._offsets[index] = offset + sum(map(len, logprobs.tokens))
        self.extend(choice, output)
        return choice
