"""POST /v1/chat/completions: a conversation in, the assistant's reply out.

Knows the shape of that endpoint; the chat template is the engine's, admission and streaming
are in `generation`.
"""

from collections.abc import Sequence

from aiohttp import web

from aioserve.errors import RequestError
from aioserve.outputs import RequestOutput
from aioserve.sampling_params import MAX_LOGPROBS, SamplingParams
from aioserve.server.generation import Reply, read_body, respond
from aioserve.server.logprobs import chat_logprobs
from aioserve.server.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReplyMessage,
    RequestPart,
    Usage,
)
from aioserve.server.sse import event
from aioserve.server.unserved import NOT_ON_CHAT
from aioserve.server.validation import BodyDecoder

_decoder = BodyDecoder(ChatCompletionRequest, NOT_ON_CHAT)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """The handler. Raises what `add_request` raises, before anything is sent."""
    body = await read_body(request, _decoder)
    params = sampling_params(body)
    if not body.messages:
        raise RequestError("messages must not be empty", param="messages")
    messages = [template_message(i, message) for i, message in enumerate(body.messages)]
    try:
        return await respond(request, body, [messages], params, ChatReply(request, body))
    except RequestError as error:
        if error.param == "prompt":  # what the engine calls the rendered messages
            error.param = "messages"
        raise


def sampling_params(body: ChatCompletionRequest) -> SamplingParams:
    """As `GenerationRequest.sampling_params`, from the names that chat uses."""
    limit = body.max_completion_tokens
    if limit is None:
        return body.sampling_params(body.max_tokens, _logprobs(body))
    if body.max_tokens not in (None, limit):
        raise RequestError(
            "max_tokens and max_completion_tokens are two names of one limit; they differ",
            param="max_completion_tokens",
        )
    if limit < 1:
        raise RequestError(
            f"max_completion_tokens must be at least 1, got {limit}", param="max_completion_tokens"
        )
    return body.sampling_params(limit, _logprobs(body))


def _logprobs(body: ChatCompletionRequest) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return top if body.logprobs else None


def template_message(i: int, message: ChatMessage) -> dict[str, str]:
    """What the chat template gets to see. Raises `RequestError` for anything but text."""
    _refuse_all_but(("role", "content", "name"), message, f"messages[{i}]")
    role = "system" if message.role == "developer" else message.role
    rendered = {"role": role, "content": _text(i, message)}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _text(i: int, message: ChatMessage) -> str:
    path = f"messages[{i}].content"
    if message.content is None:
        raise RequestError(f"{path} is missing", param=path)
    if isinstance(message.content, str):
        return message.content
    texts = []
    for j, part in enumerate(message.content):
        if part.type != "text":
            raise RequestError(
                f"content parts of type {part.type!r} are not supported, only 'text'",
                param=f"{path}[{j}]",
            )
        _refuse_all_but(("type", "text"), part, f"{path}[{j}]")
        if part.text is None:
            raise RequestError(f"{path}[{j}].text is missing", param=f"{path}[{j}].text")
        texts.append(part.text)
    return "".join(texts)


def _refuse_all_but(names: tuple[str, ...], part: RequestPart, path: str) -> None:
    """What is known but not served must be empty."""
    for name in part.__struct_fields__:
        if name not in names and getattr(part, name):
            raise RequestError(
                f"{name} in messages is not supported by this server", param=f"{path}.{name}"
            )


class ChatReply(Reply):
    """Chunks carry deltas of a message; the first one of a choice says its role."""

    id_prefix = "chatcmpl"
    text_field = "content"

    def __init__(self, request: web.Request, body: ChatCompletionRequest) -> None:
        super().__init__(request, body)
        self._opened: set[int] = set()  # choices whose role was said

    def make_chunk(self, index: int, output: RequestOutput) -> bytes:
        delta = ChatDelta(content=output.text) if output.text else ChatDelta()
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            finish_reason=output.finish_reason,
            logprobs=self._logprobs(output),
        )
        self.extend(choice, output)
        chunk = self._envelope([choice])
        self.add_usage(chunk, output)
        return self._opening(index) + event(chunk)

    def _opening(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        delta = ChatDelta(role="assistant", content="")
        chunk = self._envelope([ChatChunkChoice(index=index, delta=delta)])
        if self.include_usage:
            chunk.usage = None
        return event(chunk)

    def usage_chunk(self, usage: Usage) -> bytes:
        chunk = self._envelope([])
        chunk.usage = usage
        return event(chunk)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(i, output) for i, output in enumerate(outputs)],
            usage=usage,
        )

    def _envelope(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, created=self.created, model=self.model, choices=choices
        )

    def _choice(self, index: int, output: RequestOutput) -> ChatChoice:
        choice = ChatChoice(
            index=index,
            message=ChatReplyMessage(content=output.text),
            finish_reason=output.finish_reason,
            logprobs=self._logprobs(output),
        )
        self.extend(choice, output)
        return choice

    def _logprobs(self, output: RequestOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        return chat_logprobs(self.texts, output.token_ids, output.logprobs)
