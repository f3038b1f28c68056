"""A workload's requests by OpenAI's Python client: conversations over HTTP, as an agent has them.

What a conversation has said is sent again with each turn: the model's replies as they came, all
else as the user's words. `prompt_cache_key` names the conversation, as Codex and others do; no
request has a field that only aioserve knows but `ignore_eos`, which keeps replies to their length.
"""

import time
from abc import abstractmethod
from typing import Any

import openai

from aioserve.lab.bench.exchange import WORDS, Exchange, ServerError
from aioserve.lab.simulation.run import Clients, Progress
from aioserve.lab.workloads.workload import Workload, WorkloadRequest, text_tokens

#: Seconds that a reply may take in all: a request that takes longer has failed.
PATIENCE = 600.0


class OpenAIClients(Clients):
    """The clients of a workload, each request sent by `openai`; `exchanges` hold what came back."""

    def __init__(
        self, url: str, model: str, workload: Workload, progress: Progress = lambda count: None
    ) -> None:
        super().__init__(workload, time.perf_counter, progress)
        self.exchanges = [Exchange() for _ in workload.requests]
        self.texts: dict[int, str] = {}  # replies, by the place of their request
        self.url, self.model = url, model
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )

    async def run(self) -> None:
        """Send the workload; returns when its last request has been answered or has failed."""
        async with self._client:
            self.start = self.clock()
            await self.come()

    async def ask(self, i: int, due: float) -> list[int]:
        """Send request `i`. Its tokens are not told over HTTP: what later turns repeat is its text,
        in `texts`, so that none are returned.
        """
        exchange = self.exchanges[i]
        exchange.is_sent, exchange.arrival = True, self.clock() - self.start
        exchange.lateness = exchange.arrival + self.start - due
        try:
            await self.send(i, self.workload.requests[i], exchange)
        except (openai.OpenAIError, ServerError) as error:
            exchange.error = type(error).__name__, str(error)
        exchange.end = self.clock() - self.start
        return []

    @abstractmethod
    async def send(self, i: int, request: WorkloadRequest, exchange: Exchange) -> None:
        """Read the reply to a request as it streams. Raises `openai.OpenAIError`, or `ServerError`
        where another client asks.
        """

    def messages(self, request: WorkloadRequest) -> Any:
        """The prompt of a request: a system prompt if two texts begin it, then turns."""
        found: list[dict[str, str]] = []
        for number, piece in enumerate(request.pieces):
            if piece.reply_of >= 0:
                found.append({"role": "assistant", "content": self.texts.get(piece.reply_of, "")})
                continue
            tokens = text_tokens(piece.text, piece.length, 1 << 16)
            is_system = number == 0 and [piece.reply_of for piece in request.pieces[1:2]] == [-1]
            role = "system" if is_system else "user"
            content = " ".join(WORDS[token % len(WORDS)] for token in tokens)
            found.append({"role": role, "content": content})
        return found

    def labels(self, request: WorkloadRequest) -> dict[str, Any]:
        """What names the conversation of a request, if it has one."""
        if request.session < 0:
            return {}
        return {"prompt_cache_key": f"{self.workload.seed}-{request.session}"}


class ResponsesClients(OpenAIClients):
    """By `/v1/responses`, as Codex and the newer packages for agents ask."""

    async def send(self, i: int, request: WorkloadRequest, exchange: Exchange) -> None:
        text = ""
        stream: Any = await self._client.responses.create(
            model=self.model,
            input=self.messages(request),
            stream=True,
            store=False,
            max_output_tokens=request.output_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
            **self.labels(request),
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                exchange.token_times.append(self.clock() - self.start)
                text += event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                usage = event.response.usage
                exchange.num_prompt_tokens = usage.input_tokens
                exchange.num_output_tokens = usage.output_tokens
                exchange.num_cached_tokens = usage.input_tokens_details.cached_tokens
                exchange.finish_reason = "length"
        self.texts[i] = text


class ChatClients(OpenAIClients):
    """Sends each turn to `/v1/chat/completions`, by the package `openai`."""

    async def send(self, i: int, request: WorkloadRequest, exchange: Exchange) -> None:
        text = ""
        stream: Any = await self._client.chat.completions.create(
            model=self.model,
            messages=self.messages(request),
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=request.output_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
            **self.labels(request),
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                exchange.token_times.append(self.clock() - self.start)
                text += chunk.choices[0].delta.content
            if chunk.usage is not None:
                exchange.num_prompt_tokens = chunk.usage.prompt_tokens
                exchange.num_output_tokens = chunk.usage.completion_tokens
                details = chunk.usage.prompt_tokens_details
                exchange.num_cached_tokens = (details and details.cached_tokens) or 0
                exchange.finish_reason = "length"
        self.texts[i] = text
