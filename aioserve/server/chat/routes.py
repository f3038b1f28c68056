"""POST /v1/chat/completions: a conversation in, the assistant's reply out.

Knows the shape of that endpoint; the chat template is the engine's, admission and streaming are in
`generation`.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aioserve.engine import Conversation
from aioserve.engine.chat.tools import (
    NamedToolChoice,
    Names,
    ToolUse,
    before_tools,
    bind_off_loop,
    blame,
    leaves_room_for_reasoning,
    tool_use,
)
from aioserve.errors import RequestError
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.params import (
    MAX_LOGPROBS,
    NO_DEFAULTS,
    SamplingDefaults,
    SamplingParams,
    ThinkingBudget,
)
from aioserve.server.body import GENERATION_ERRORS, BodyDecoder, Route, convert_part
from aioserve.server.chat.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatReplyMessage,
    Tool,
    template_messages,
)
from aioserve.server.fields import is_vendors, note_ttl, pass_over_tools
from aioserve.server.generation import Answer, Reply, event, read_body, respond
from aioserve.server.images import IMAGES, ImageParts
from aioserve.server.protocol import (
    ChatLogprobs,
    CompletionTokensDetails,
    ErrorResponse,
    PromptLogprobs,
    Usage,
)
from aioserve.server.running import CHAT_FORMAT, ENGINE

if TYPE_CHECKING:
    from aioserve.server.chat.message_reader import MessageReader

decoder = BodyDecoder(ChatCompletionRequest, "chat")
# What the engine calls the rendered messages, and other fields.
_NAMES = {"prompt": "messages", "thinking_budget": "thinking_token_budget"}


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer the request. Raises what `add_request` raises, before anything is sent."""
    return await answer_chat(request, await read_body(request, decoder), ChatReply)


class MakesReply(Protocol):
    """A maker of the answer of a chat, in the words of its protocol."""

    def __call__(
        self,
        request: web.Request,
        body: ChatCompletionRequest,
        use: ToolUse | None,
        *,
        separates_reasoning: bool,
    ) -> Answer: ...


async def answer_chat(
    request: web.Request, body: ChatCompletionRequest, make_reply: MakesReply
) -> web.StreamResponse:
    """Answer a decoded body, in whatever words. Raises what `add_request` raises, before anything
    is sent.
    """
    app = request.app
    engine, chat_format = app[ENGINE], app[CHAT_FORMAT]
    if body.tools:
        pass_over_tools(request, body.tools)
        await before_tools(body.tools)
    use = chat_tool_use(body, ignore_unknown=engine.config.server.ignore_unknown_fields)
    if use is not None:
        chat_format.call_parser  # noqa: B018 - refuses tools that no reply could call
    params = sampling_params(
        body,
        engine.model_info.sampling_defaults,
        engine.config.server.default_chat_tokens,
        chat_format.kept_special_tokens,
    )
    images = ImageParts.of(engine)
    conversation = Conversation(
        template_messages(body.messages, images),
        use.tools if use else (),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        reasoning_effort=body.effort,
        verbosity=body.verbosity,
    )
    note_ttl(request, body.cache_controls())
    body.messages.clear()  # images that they hold would stay as long as the stream
    has_reasoning = leaves_room_for_reasoning(params, use)
    try:
        params = await bind_off_loop(params, use, chat_format, conversation, body.bound_by)
        if has_reasoning:
            params = with_budget(request, params, *body.most_reasoning)
        reply = make_reply(request, body, use, separates_reasoning=has_reasoning)
        with images.named():
            prompt = app[IMAGES].shown(conversation, images)
            return await respond(request, body, [prompt], params, reply)
    except RequestError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        blame(error, use, body.bound_by)
        raise


def chat_tool_use(body: ChatCompletionRequest, *, ignore_unknown: bool = False) -> ToolUse | None:
    """Return what a chat request asks for, without the tools of vendors."""
    if not body.tools and body.tool_choice in (None, "auto", "none"):
        return None
    tools = {
        i: convert_part(entry, Tool, f"tools[{i}]", ignore_unknown=ignore_unknown)
        for i, entry in enumerate(body.tools or ())
        if not is_vendors(entry.get("type"))
    }
    offered = {f"tools[{i}].function": tool.function for i, tool in tools.items()}
    ask = partial(tool_use, offered, names=Names(chosen="tool_choice.function.name"))
    if not isinstance(body.tool_choice, NamedToolChoice):
        return ask(body.tool_choice or "auto", is_parallel=body.parallel_tool_calls is not False)
    name = body.tool_choice.function.name
    return ask("required", only=[name], is_parallel=False)


def sampling_params(
    body: ChatCompletionRequest,
    defaults: SamplingDefaults = NO_DEFAULTS,
    default_max_tokens: int | None = None,
    kept_special_tokens: tuple[int, ...] = (),
) -> SamplingParams:
    """Return `GenerationRequest.sampling_params`, from the names that chat uses."""
    make = partial(
        body.sampling_params,
        logprobs=_logprobs(body),
        defaults=defaults,
        default_max_tokens=default_max_tokens,
        kept_special_tokens=kept_special_tokens,
    )
    limit = body.max_completion_tokens
    if limit is None:
        return make(body.max_tokens)
    if body.max_tokens not in (None, limit):
        raise RequestError(
            "max_tokens and max_completion_tokens are two names of one limit; they differ",
            param="max_completion_tokens",
        )
    if limit < (1 if body.prompt_logprobs is None else 0):
        raise RequestError(
            f"max_completion_tokens must be at least 1, got {limit}", param="max_completion_tokens"
        )
    return make(limit)


def _logprobs(body: ChatCompletionRequest) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return top if body.logprobs else None


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation.",
        ChatCompletion,
        body=decoder,
        example={"messages": [{"role": "user", "content": "Who's there?"}], "max_tokens": 8},
        events=(ChatCompletionChunk, ErrorResponse, Literal["[DONE]"]),
        raises=GENERATION_ERRORS,
    ),
)


# A chat reply on the wire: its text told apart into content, reasoning and tool calls. Knows the
# shapes of OpenAI's messages and deltas. How a model writes them is known in `formats`.


class ChatReply(Reply):
    """Chunks carry deltas of a message; the first one of a choice says its role."""

    id_prefix = "chatcmpl-"
    text_field = "content"

    def __init__(
        self,
        request: web.Request,
        body: ChatCompletionRequest,
        use: ToolUse | None = None,
        *,
        separates_reasoning: bool = True,
    ) -> None:
        super().__init__(request, body)
        self._num_prompt_logprobs = body.prompt_logprobs or 0
        self._format = request.app[CHAT_FORMAT]
        self._use = use
        self._separates = separates_reasoning and body.separate_reasoning is not False
        self._includes_reasoning = body.include_reasoning is not False
        self._readers: dict[int, MessageReader] = {}  # by choice
        self._opened: set[int] = set()  # choices whose role was said
        # Whether a reply is text and nothing else.
        self._is_plain = use is None and not self._format.tells_apart

    def quick_chunk(self, index: int, output: RequestOutput) -> bytes | None:
        if self._is_plain:
            return super().quick_chunk(index, output)
        if index not in self._opened or output.finish_reason is not None:
            return None
        return self.chunk(index, output)

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        if self._is_plain:
            return super().chunk(index, output)
        if self.is_silent(output):
            self._reader(index).count(output)
            return b""
        return self._read_chunks(index, output)

    def make_chunk(self, index: int, output: RequestOutput) -> bytes:
        delta = ChatDelta(content=output.text) if output.text else ChatDelta()
        return self._opening(index) + event(self._last_chunk(index, delta, output))

    def _read_chunks(self, index: int, output: RequestOutput) -> bytes:
        """Return a chunk for each thing that the text turns out to say; the last one says
        the rest.
        """
        reader = self._reader(index)
        deltas = reader.deltas(reader.read(output))
        says_more = output.logprobs or output.prompt_logprobs or self.return_token_ids
        if not deltas and not (output.finish_reason or says_more):
            return b""
        if not deltas or (output.finish_reason is not None and deltas[-1].tool_calls):
            deltas.append(ChatDelta())  # as OpenAI ends its streams
        *first, last = deltas
        chunks = [self._envelope([ChatChunkChoice(index=index, delta=delta)]) for delta in first]
        for chunk in chunks:
            self.add_usage(chunk, output)
        chunks.append(self._last_chunk(index, last, output, reader.finish_reason(output)))
        return self._opening(index) + b"".join(map(event, chunks))

    def _last_chunk(
        self,
        index: int,
        delta: ChatDelta,
        output: RequestOutput,
        finish_reason: FinishReason | None = None,
    ) -> ChatCompletionChunk:
        """Return a chunk with all that `output` says besides its text."""
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            finish_reason=finish_reason or output.finish_reason,
            logprobs=self._logprobs(output),
        )
        self.extend(choice, output)
        chunk = self._envelope([choice])
        chunk.prompt_logprobs = self._prompt_logprobs(output)
        self.add_usage(chunk, output)
        if chunk.usage and index in self._readers:  # of this choice, so far
            tell_reasoning(chunk.usage, [self._readers[index].num_reasoning_tokens])
        return chunk

    def _opening(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self.kept("opening", index, self._make_opening)

    def _make_opening(self, index: int) -> bytes:
        delta = ChatDelta(role="assistant", content="")
        chunk = self._envelope([ChatChunkChoice(index=index, delta=delta)])
        if self.include_usage:
            chunk.usage = None
        return event(chunk)

    def usage_chunk(self, usage: Usage) -> bytes:
        chunk = self._envelope([])
        chunk.usage = self._with_reasoning(usage)
        return event(chunk)

    def _with_reasoning(self, usage: Usage) -> Usage:
        tell_reasoning(usage, [own.num_reasoning_tokens for own in self._readers.values()])
        return usage

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(i, output) for i, output in enumerate(outputs)],
            usage=self._with_reasoning(usage),
            prompt_logprobs=self._prompt_logprobs(outputs[0]),
        )

    def _envelope(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, created=self.created, model=self.model, choices=choices
        )

    def _choice(self, index: int, output: RequestOutput) -> ChatChoice:
        message, finish_reason = ChatReplyMessage(content=output.text), output.finish_reason
        if not self._is_plain:
            reader = self._reader(index)
            message = reader.message(reader.read(output))
            finish_reason = reader.finish_reason(output)
        choice = ChatChoice(
            index=index,
            message=message,
            finish_reason=finish_reason,
            logprobs=self._logprobs(output),
        )
        self.extend(choice, output)
        return choice

    def _reader(self, index: int) -> "MessageReader":
        reader = self._readers.get(index)
        if reader is None:
            from aioserve.server.chat.message_reader import MessageReader

            reader = self._readers[index] = MessageReader.of(
                self._format,
                self._use,
                self.prompt_end,
                self.texts.bytes,
                separates_reasoning=self._separates,
                includes_reasoning=self._includes_reasoning,
            )
        return reader

    def _logprobs(self, output: RequestOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        from aioserve.server.logprobs import chat_logprobs

        return chat_logprobs(self.texts, output.token_ids, output.logprobs)

    def _prompt_logprobs(self, output: RequestOutput) -> PromptLogprobs | UnsetType:
        found = output.prompt_logprobs
        if found is None:
            return UNSET
        from aioserve.server.logprobs import prompt_logprobs

        return prompt_logprobs(self.texts, self.prompts[0], found, self._num_prompt_logprobs)


# Thinking budgets and reasoning tokens of conversations, for every protocol. Knows the marks of the
# model and what a request may ask of them; which fields ask, the routes know.


UNLIMITED = -1


def with_budget(
    request: web.Request, params: SamplingParams, max_tokens: int | None, field: str
) -> SamplingParams:
    """`params` of a reply that reasons for at most `max_tokens` tokens; None, or -1: any number.

    Raises `RequestError` that names `field` if the model's reasoning is not known, or for fewer.
    """
    if max_tokens is None or max_tokens == UNLIMITED:
        return params
    if max_tokens < UNLIMITED:
        raise RequestError(f"{field} must be at least -1, got {max_tokens}", param=field)
    chat_format = request.app[CHAT_FORMAT]
    marks = chat_format.thinking
    if marks is None:
        raise RequestError(
            f"{field} cannot be enforced: the chat template of this model has no known marks of "
            "reasoning (see --reasoning-parser)",
            param=field,
        )
    message = request.app[ENGINE].config.server.reasoning_budget_message
    budget = ThinkingBudget(
        max_tokens=max_tokens,
        start=marks.start,
        end=marks.end,
        is_implied=marks.is_implied,
        is_repeated=marks.is_repeated,
        forced=message + marks.end + chat_format.after_thinking,
    )
    return msgspec.structs.replace(params, thinking_budget=budget)


def tell_reasoning(usage: Usage, counts: Iterable[int | None]) -> None:
    """Add the reasoning tokens of each choice to `usage`, unless they are not counted."""
    known = [count for count in counts if count is not None]
    details = CompletionTokensDetails(reasoning_tokens=sum(known)) if known else UNSET
    usage.completion_tokens_details = details
