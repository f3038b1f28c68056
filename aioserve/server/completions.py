"""POST /v1/completions: text or token ids in, text out.

Knows the shape of that endpoint; admission and streaming are in `generation`.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from aiohttp import web

from aioserve.engine.chat.tools import blame
from aioserve.errors import RequestError
from aioserve.outputs import RequestOutput, TokenLogprobs
from aioserve.params import MAX_N
from aioserve.server.body import GENERATION_ERRORS, BodyDecoder, Route
from aioserve.server.generation import Reply, event, read_body, respond
from aioserve.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    ErrorResponse,
    Usage,
)
from aioserve.server.running import ENGINE

# Each prompt is a request of its own; more than this is a batch job, not a request.
MAX_PROMPTS = 1024

decoder = BodyDecoder(CompletionRequest, "completions")


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Answer the request. Raises what `add_request` raises, before anything is sent."""
    body = await read_body(request, decoder)
    asked = body.prompt_logprobs
    if body.echo and (body.logprobs is not None or body.max_tokens == 0):
        asked = max(asked or 0, body.logprobs or 0)
    defaults = request.app[ENGINE].model_info.sampling_defaults
    params = body.sampling_params(body.max_tokens, body.logprobs, defaults, prompt_logprobs=asked)
    best_of = params.n if body.best_of in (None, 1) else body.best_of
    if not params.n <= best_of <= MAX_N:
        raise RequestError(
            f"best_of must be between n ({params.n}) and {MAX_N}, got {best_of}", param="best_of"
        )
    if best_of > params.n and body.stream:
        raise RequestError(
            "best_of above n cannot be streamed: the best are known at the end", param="best_of"
        )
    if body.echo and body.logprobs is not None and body.stream and params.n > 1:
        raise RequestError(
            "echo with logprobs cannot be streamed with n above 1: only one sample would have it",
            param="echo",
        )
    prompts = body.prompts()
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt"
        )
    if body.suffix:
        if body.echo:
            raise RequestError("echo cannot be with suffix: the prompt has two parts", param="echo")
        if body.truncate_prompt_tokens is not None:
            raise RequestError(
                "truncate_prompt_tokens cannot be with suffix: it would cut the mark at the "
                "beginning",
                param="truncate_prompt_tokens",
            )
        if len(prompts) > 1:  # each would hold a copy of it
            raise RequestError(
                f"suffix takes one prompt, got {len(prompts)}: send a request for each",
                param="suffix",
            )
        prompts = [infilling(request.app[ENGINE].model_info.tokenizer, prompts[0], body.suffix)]
    reply = CompletionReply(request, body, prompts if body.echo else (), params.n)
    try:
        return await respond(request, body, prompts, params, reply, best_of)
    except RequestError as error:
        blame(error, None, body.bound_by)
        raise


#: The tokens before what stands before a gap, before what follows it, and where the reply begins:
#: of Qwen-Coder and CodeGemma, of StarCoder and Granite, of DeepSeek-Coder.
INFILLING = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    tuple(f"<\uff5cfim\u2581{name}\uff5c>" for name in ("begin", "hole", "end")),
)


def infilling(tokenizer: Any, prompt: str | list[int], suffix: str) -> str:
    """Return a prompt for what stands between a text and `suffix` (fill in the middle, Bavarian
    et al., arXiv 2207.14255). Raises `RequestError` for a model without tokens for that.
    """
    known = tokenizer.get_added_vocab().keys()
    marks = next((marks for marks in INFILLING if known >= {*marks}), None)
    if marks is None:
        raise RequestError(
            "suffix needs a model with tokens for infilling (such as <|fim_prefix|>), and this "
            "one has none",
            param="suffix",
        )
    if not isinstance(prompt, str):
        raise RequestError("suffix needs a prompt that is a text, got token ids", param="suffix")
    before, after, begin = marks
    return f"{before}{prompt}{after}{suffix}{begin}"


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
        self._num_logprobs = body.logprobs
        self._num_prompt_logprobs = body.prompt_logprobs
        self._is_cut = body.truncate_prompt_tokens is not None
        self._offsets: dict[int, int] = {}  # by choice: where its next token's text begins
        self._echoed = echoed
        self._n = n
        self._echoes: dict[int, str] = {}  # by choice, until it was said

    async def begin(self) -> None:
        texts = [
            prompt
            if isinstance(prompt, str) and not self._is_cut
            else await asyncio.to_thread(self.texts.join, token_ids)
            for prompt, token_ids in zip(self._echoed, self.prompts, strict=False)
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
        echo = self._echoes.pop(index, "")
        text = echo + output.text
        choice = CompletionChoice(index=index, text=text, finish_reason=output.finish_reason)
        entries: list[TokenLogprobs | None] = list(output.logprobs or ())
        token_ids = output.token_ids if entries else []
        if (of_prompt := output.prompt_logprobs) is not None:
            prompt = self.prompts[index // self._n]
            if (count := self._num_prompt_logprobs) is not None:
                from aioserve.server.logprobs import prompt_logprobs

                choice.prompt_logprobs = prompt_logprobs(self.texts, prompt, of_prompt, count)
            if self._echoed and self._num_logprobs is not None:
                entries, token_ids = [*of_prompt, *entries], [*prompt, *token_ids]
        if entries:
            from aioserve.server.logprobs import completion_logprobs

            choice.logprobs, self._offsets[index] = completion_logprobs(
                self.texts,
                token_ids,
                entries,
                self._num_logprobs or 0,
                self._offsets.get(index, 0),
                text if echo else None,
            )
        self.extend(choice, output)
        return choice


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        create_completion,
        "Go on with a text, or with several.",
        Completion,
        body=decoder,
        example={"prompt": "Who's there?", "max_tokens": 8},
        events=(Completion, ErrorResponse, Literal["[DONE]"]),
        raises=GENERATION_ERRORS,
    ),
)
