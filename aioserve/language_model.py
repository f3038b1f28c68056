"""What a program asks of a served model, wherever it is: the Protocol of engines and clients.

`AsyncEngine` and `AsyncClient` have more methods; code that is typed by this Protocol takes both.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from aioserve.outputs import EmbeddingOutput, FinishedOutput, RequestOutput
from aioserve.params import PoolingParams, SamplingParams
from aioserve.request import Hints

#: Messages of a conversation, each with "role" and "content", as OpenAI's API has them.
Messages: TypeAlias = Sequence[Mapping[str, Any]]
#: A text, token ids, or messages.
ModelPrompt: TypeAlias = str | Sequence[int] | Messages


class LanguageModel(Protocol):
    """A language model that is served by an engine in this process, or by a server elsewhere.

    async def answer(model: LanguageModel, question: str) -> str:
        return (await model.generate_one(question, SamplingParams(max_tokens=64))).text

    The options of a request are those of `aioserve.request.RequestFields`. All methods raise
    `RequestError`, `EngineOverloadedError`, `RequestFailedError` and `EngineDeadError`.
    """

    def generate(
        self,
        prompt: ModelPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,
        cache_salt: str = "",
        hints: Hints = ...,
        adapter: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the deltas of one request. Leaving the loop, or cancelling the task, aborts it."""

    async def generate_one(
        self,
        prompt: ModelPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of the request, not of this call
        cache_salt: str = "",
        hints: Hints = ...,
        adapter: str = "",
    ) -> FinishedOutput:
        """Return the whole reply to a prompt in one output."""

    async def generate_all(
        self,
        prompts: Iterable[ModelPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_concurrency: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of the request, not of this call
        cache_salt: str = "",
        hints: Hints = ...,
        adapter: str = "",
    ) -> list[FinishedOutput]:
        """Return the whole replies to many prompts, in their order. Raises `PromptsFailedError`
        after all have ended, if some got an error.
        """

    async def embed(
        self,
        prompt: ModelPrompt,
        pooling_params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of the request, not of this call
        cache_salt: str = "",
        hints: Hints = ...,
        adapter: str = "",
    ) -> EmbeddingOutput:
        """Return the vector of a prompt: its pooled hidden states."""

    async def tokenize(self, prompt: ModelPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids that a request of this prompt would have."""

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, with the special ones."""

    async def abort(self, request_id: str) -> bool:
        """End a request from outside; False if no running request has that id."""
