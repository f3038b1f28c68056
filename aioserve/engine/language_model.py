"""What a program asks of a served model, wherever it is: the Protocol of engines and clients.

`AsyncEngine` and `AsyncClient` have more methods; code that is typed by this Protocol takes both.
Also what a chat takes and tells: tools, calls of them, and replies of a type. Knows no engine.
"""

import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypedDict,
    get_type_hints,
)

import msgspec

from aioserve.errors import UNREADABLE, AioserveError, EngineDeadError, RequestError, one_line
from aioserve.outputs import (
    EmbeddingOutput,
    FinishedOutput,
    FinishReason,
    RequestOutput,
    RequestTimes,
)
from aioserve.params import PoolingParams, SamplingParams
from aioserve.request import Hints
from aioserve.support.whole_texts import check_one_sample

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=None)
else:
    from typing import TypeVar

    T = TypeVar("T")

#: Messages of a conversation, each with "role" and "content", as OpenAI's API has them.
Messages: TypeAlias = Sequence[Mapping[str, Any]]
#: A text, token ids, or messages.
ModelPrompt: TypeAlias = str | Sequence[int] | Messages


#: A tool as OpenAI's API has it, {"type": "function", "function": {...}}, or a typed function.
Tool: TypeAlias = Mapping[str, Any] | Callable[..., Any]
#: Whether a reply may or must call, or the name of the function that it must call, in a mapping
#: {"type": "function", "function": {"name": ...}}.
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | Mapping[str, Any]


class RequestFields(TypedDict, total=False):
    """Options of a request besides its prompt and its parameters, for an engine and a client."""

    request_id: str | None  # names it in logs and for `abort` (default: one that is unused)
    priority: int  # for the policy: smaller is more urgent
    user: str  # for the policy
    timeout: float | None  # seconds until an unfinished one ends with finish reason `timeout`
    cache_salt: str  # prefixes are shared within one only
    hints: Hints  # for the policy: named values, such as `predicted_output_tokens`
    adapter: str  # the LoRA adapter to use, by its name (default: the model itself)


class EngineFields(RequestFields, total=False):
    """Options of a request that only an engine takes, beside those of `RequestFields`."""

    client: str  # where it comes from, for the log
    trace_headers: Mapping[str, str]  # `traceparent`, `tracestate`: the trace that it belongs to
    key_name: str  # the server's key whose tokens are counted


class ChatOptions(RequestFields, Generic[T], total=False):
    """Options of a chat, and of the request that it is."""

    tools: Sequence[Tool]  # that the reply may call
    tool_choice: ToolChoice  # whether it has to (default: auto)
    response_type: type[T] | None  # of `parsed`: a pydantic model, or a type that msgspec knows
    chat_template_kwargs: Mapping[str, Any] | None  # what else the chat template looks at
    reasoning_effort: str | None  # "none", or how much, in the words of the chat template


class LanguageModel(Protocol):
    """A language model that is served by an engine in this process, or by a server elsewhere.

    async def answer(model: LanguageModel, question: str) -> str:
        return (await model.generate_one(question, SamplingParams(max_tokens=64))).text

    The options of a request are those of `RequestFields`. All methods raise
    `RequestError`, `EngineOverloadedError`, `RequestFailedError` and `EngineDeadError`.
    """

    # The options are spelled out: pyright takes an engine, whose `EngineFields` are more, for no
    # implementation of a method with `Unpack[RequestFields]`.

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

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = "auto",
        response_type: type[T] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,
        cache_salt: str = "",
        hints: Hints = ...,
        adapter: str = "",
    ) -> "AsyncGenerator[ChatOutput[T], None]":
        """Yield what a reply to a conversation says, told apart into text, reasoning and calls of
        `tools`; the last output of a sample has `parsed`, a value of `response_type`.
        """

    async def chat_one(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = "auto",
        response_type: type[T] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of the request, not of this call
        cache_salt: str = "",
        hints: Hints = ...,
        adapter: str = "",
    ) -> "FinishedChat[T]":
        """Return the whole reply to a conversation in one output, as `chat` tells it."""

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
        """Return the text of these tokens, special tokens included."""

    async def abort(self, request_id: str) -> bool:
        """End a request from outside; False if no running request has that id."""


class UnparsedReplyError(AioserveError):
    """A reply is no value of the `response_type` that was asked for: it was cut, or calls tools."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool that a reply makes, with its arguments by name."""

    id: str
    name: str
    arguments: dict[str, Any]

    def answer(self, result: object) -> dict[str, Any]:
        """Return the message that tells the model the result: a text, or a value as JSON."""
        text = result if isinstance(result, str) else msgspec.json.encode(result).decode()
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": text}


class ChatOutput(RequestOutput, Generic[T], kw_only=True):
    """New text of one sample of a chat since the last `ChatOutput`, told apart.

    `text` is what is said to the user; a call comes once, when it is whole.
    """

    reasoning: str = ""  # new text of what the model thinks aloud
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)  # those that have become whole
    value: Any = None  # what `parsed` returns
    unparsed: str = ""  # why there is no value; empty if there is one, or none was asked for

    @property
    def parsed(self) -> T:
        """The value of `response_type` that the reply is; None if no type was asked for. Raises
        `UnparsedReplyError` before the last output, and for a reply that was cut or calls tools.
        """
        if self.unparsed:
            raise UnparsedReplyError(self.unparsed)
        value: T = self.value
        return value


class FinishedChat(ChatOutput[T], kw_only=True):
    """The whole reply to a chat: text, reasoning, calls, and its value if a type was asked for."""

    finish_reason: FinishReason
    times: RequestTimes

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, with which the conversation goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": msgspec.json.encode(call.arguments).decode(),
                    },
                }
                for call in self.tool_calls
            ]
        return message


async def whole_chat(
    outputs: "AsyncGenerator[ChatOutput[T], None]", params: SamplingParams | None
) -> "FinishedChat[T]":
    """Return the outputs of one sample of a chat with these parameters as one. Raises
    `RequestError` if they ask for several samples, and what is raised where the outputs come from.
    """
    check_one_sample(params)
    whole: ChatOutput[T] | None = None
    async with aclosing(outputs):
        async for output in outputs:
            if whole is None:
                whole = output
                continue
            whole.merge(output)
            whole.reasoning += output.reasoning
            whole.tool_calls = [*whole.tool_calls, *output.tool_calls]
            whole.value, whole.unparsed = output.value, output.unparsed
    if whole is None or whole.times is None:
        raise EngineDeadError("the stream ended before its last output")
    return FinishedChat(**msgspec.structs.asdict(whole))


# Tools and types of replies, as programs write them, in the words of OpenAI's API.


def tool_of(tool: Tool) -> dict[str, Any]:
    """Return a tool as OpenAI's API has it: a mapping as it is; of a function, its name, the first
    paragraph of its docstring, and the schema of its parameters by their types. Raises
    `RequestError`.
    """
    if isinstance(tool, Mapping):
        return dict(tool)
    name = getattr(tool, "__name__", "")
    if not callable(tool) or not name:
        raise RequestError(f"a tool must be a mapping or a function, got {tool!r:.80}", "tools")
    hints = get_type_hints(tool)
    fields: list[Any] = []
    for each in inspect.signature(tool).parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise RequestError(f"tool {name}: parameter {each.name} cannot be named", "tools")
        field = (each.name, hints.get(each.name, Any))
        fields.append(field if each.default is each.empty else (*field, each.default))
    schema = schema_of(msgspec.defstruct(name, fields, kw_only=True), f"tool {name}", "tools")
    definitions = schema.pop("$defs", {})
    parameters = definitions.pop(schema["$ref"].rpartition("/")[2])
    parameters.pop("title", None)
    if definitions:
        parameters["$defs"] = definitions
    function = {"name": name, "parameters": parameters}
    if words := (inspect.getdoc(tool) or "").partition("\n\n")[0]:
        function["description"] = " ".join(words.split())
    return {"type": "function", "function": function}


def schema_of(kind: Any, what: str = "response_type", param: str = "response_type") -> Any:
    """Return the JSON schema of a type: of a pydantic model, or of what msgspec knows, such as a
    struct, a dataclass, a `TypedDict` or a list of them. Raises `RequestError`.
    """
    try:
        if hasattr(kind, "model_json_schema"):
            return kind.model_json_schema()
        return msgspec.json.schema(kind)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{what} has no JSON schema: {one_line(error)}", param) from error


def parse(output: "ChatOutput[Any]", text: str, kind: Any) -> None:
    """Give the last output of a sample the value of type `kind` that its whole `text` is, or why it
    is none.
    """
    if output.finish_reason is FinishReason.TOOL_CALLS:
        output.unparsed = "the reply calls tools: there is no value of response_type yet"
        return
    if output.finish_reason is not FinishReason.STOP:
        output.unparsed = f"the reply has ended early ({output.finish_reason}): {text!r:.80}"
        return
    try:
        if hasattr(kind, "model_validate_json"):
            output.value = kind.model_validate_json(text)
        else:
            output.value = msgspec.json.decode(text, type=kind)
    except (*UNREADABLE, ValueError) as error:
        output.unparsed = f"the reply is no {kind.__name__}: {one_line(error)}"


#: Of an output before the last one.
NOT_ENDED = "the reply has not ended: only its last output is parsed"
