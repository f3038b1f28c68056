"""The wire structs of Ollama's API, and its requests as those of chat completions.

Knows the names that Ollama gives to what chat has: options, thinking, formats, images, calls
without ids. Knows nothing about HTTP.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from aioserve.errors import RequestError
from aioserve.server.chat.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    ImageURL,
    ToolCall,
    ToolEntry,
)
from aioserve.server.errors import ApiStyle
from aioserve.server.protocol import (
    Capability,
    Empty,
    ErrorInfo,
    Int,
    JsonSchema,
    RequestPart,
    ResponseFormat,
)

# Requests


class Options(RequestPart, kw_only=True, omit_defaults=True):
    """The options of sampling. Fields of type Any are hints: the server's settings decide."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    num_predict: Int | None = None  # tokens of the reply; -1 and -2: as if it were absent
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Int | None = None  # -1: the penalty looks at all tokens, as it does here
    num_ctx: Any = None  # hints: --max-model-len holds
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    penalize_newline: Any = None
    mirostat_tau: Any = None  # hints: of mirostat alone
    mirostat_eta: Any = None
    # Served by no field here.
    mirostat: Empty = None
    tfs_z: float | None = None  # 1: off
    typical_p: float | None = None  # 1: off

    def as_chat(self) -> dict[str, Any]:
        """Return the fields of chat completions. Raises `RequestError` for what is not served."""
        if self.mirostat:
            raise _unserved("options.mirostat")
        for name in ("tfs_z", "typical_p"):
            if getattr(self, name) not in (None, 1):
                raise _unserved(f"options.{name}")
        penalty = self.repeat_penalty
        if penalty not in (None, 1) and self.repeat_last_n not in (None, -1):
            raise RequestError(
                "options.repeat_last_n must be -1 or absent: repeat_penalty looks at all tokens "
                "here",
                param="options.repeat_last_n",
            )
        limit = self.num_predict
        same = ("temperature", "top_p", "top_k", "min_p", "seed")
        penalties = ("presence_penalty", "frequency_penalty")
        given = {name: getattr(self, name) for name in (*same, *penalties)}
        given |= {
            "repetition_penalty": penalty,
            "max_tokens": None if limit is not None and limit in (-1, -2) else limit,
            "stop": tuple(self.stop) if isinstance(self.stop, list) else self.stop,
        }
        return given


class FunctionCalled(RequestPart, kw_only=True, omit_defaults=True):
    """A function and its arguments, an object."""

    name: str
    arguments: dict[str, Any] | None = None
    index: Any = None  # a hint: its place among the calls


class Called(RequestPart, kw_only=True, omit_defaults=True):
    """A call that an assistant has made."""

    function: FunctionCalled
    id: str | None = None
    type: Any = None


class OllamaMessage(RequestPart, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None  # of an assistant
    images: list[str] | None = None  # of a user, in base64
    tool_calls: list[Called] | None = None  # of an assistant
    tool_name: str | None = None  # of a tool
    name: str | None = None  # an older name of it
    tool_call_id: str | None = None


class AsksOllama(RequestPart, kw_only=True, omit_defaults=True):
    """The fields that /api/chat and /api/generate share."""

    model: str
    stream: bool | None = None  # true unless it is false
    format: Literal["json", ""] | dict[str, Any] | None = None  # or a JSON schema
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: Any = None  # a hint: the model stays
    logprobs: Empty = None
    top_logprobs: Empty = None

    def shared(self) -> dict[str, Any]:
        """Return what both mean as fields of chat completions. Raises `RequestError`."""
        for name in ("logprobs", "top_logprobs"):
            if getattr(self, name):
                raise _unserved(name)
        given = (self.options or Options()).as_chat()
        given["stream"] = self.stream is not False
        if self.think is not None:
            told = "medium" if self.think is True else self.think or "none"
            given["reasoning_effort"] = told
        if self.format == "json":
            given["response_format"] = ResponseFormat(type="json_object")
        elif self.format:
            schema = JsonSchema(name="format", schema=self.format)
            given["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        return given


class OllamaChatRequest(AsksOllama, kw_only=True, omit_defaults=True):
    """The JSON body of POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[ToolEntry] | None = None

    def as_chat(self) -> ChatCompletionRequest:
        """Return the chat completion that it asks for. Raises `RequestError` that names a field."""
        return ChatCompletionRequest(
            messages=chat_messages(self.messages or ()), tools=self.tools, **self.shared()
        )


class OllamaGenerateRequest(AsksOllama, kw_only=True, omit_defaults=True):
    """The JSON body of POST /api/generate."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None  # the prompt goes to the model as it is, without the chat template
    suffix: str | None = None  # the reply stands between prompt and suffix
    template: Empty = None
    context: Empty = None

    def as_chat(self) -> ChatCompletionRequest:
        """Return the chat of one question that it asks for. Raises `RequestError`."""
        for name in ("template", "context"):
            if getattr(self, name):
                raise _unserved(name)
        said = [OllamaMessage(role="user", content=self.prompt, images=self.images)]
        if self.system:
            said.insert(0, OllamaMessage(role="system", content=self.system))
        return ChatCompletionRequest(messages=chat_messages(said), **self.shared())


class ShowRequest(RequestPart, kw_only=True, omit_defaults=True):
    """The JSON body of POST /api/show."""

    model: str | None = None
    name: str | None = None  # an older name of it
    verbose: Any = None


def _unserved(name: str) -> RequestError:
    return RequestError(f"{name} is not supported by this server", param=name)


def chat_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """Return messages as chat completions have them. Calls that have no ids get some, and the
    results of tools those of the calls that they answer. Raises `RequestError`.
    """
    open_calls: list[ToolCall] = []  # that no result has answered yet
    found = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        calls = [
            ToolCall(
                id=call.id or f"call_{i}_{j}",
                function=FunctionCall(
                    name=call.function.name,
                    arguments=msgspec.json.encode(call.function.arguments or {}).decode(),
                ),
            )
            for j, call in enumerate(message.tool_calls or ())
        ]
        answered = None
        if message.role == "tool":
            answered = _answered(where, message, open_calls)
        text = message.content or ""
        content: str | list[ContentPart] = text
        if message.images:
            shown = [ContentPart(type="image_url", image_url=_image(d)) for d in message.images]
            content = [*([ContentPart(type="text", text=text)] if text else []), *shown]
        found.append(
            ChatMessage(
                role=message.role,
                content=content,
                reasoning_content=message.thinking or None,
                tool_calls=calls or None,
                tool_call_id=None if answered is None else answered.id,
                name=None if answered is None else answered.function.name,
            )
        )
        open_calls += calls
    return found


def _answered(where: str, message: OllamaMessage, open_calls: list[ToolCall]) -> ToolCall:
    """Return the call that a result answers: by its id, else the first open one of its name."""
    name = message.tool_name or message.name
    for call in open_calls:
        if message.tool_call_id == call.id or (
            message.tool_call_id is None and name in (None, call.function.name)
        ):
            open_calls.remove(call)
            return call
    raise RequestError(
        f"{where} answers no call: there is no open one of the name {name!r}",
        param=f"{where}.tool_name",
    )


#: The first bytes of images, in base64.
_KINDS = {"/9j/": "jpeg", "iVBOR": "png", "R0lGOD": "gif", "UklGR": "webp"}


def _image(data: str) -> ImageURL:
    kind = next((kind for begin, kind in _KINDS.items() if data.startswith(begin)), "png")
    return ImageURL(url=data if data.startswith("data:") else f"data:image/{kind};base64,{data}")


# Replies


class FunctionOfCall(msgspec.Struct, kw_only=True):
    """The function that a reply calls, and its arguments, an object."""

    index: int
    name: str
    arguments: Any


class CallOfReply(msgspec.Struct, kw_only=True):
    """A call that a reply makes, whole."""

    id: str
    function: FunctionOfCall


class ReplyMessage(msgspec.Struct, kw_only=True):
    """The assistant's message, or its next piece."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[CallOfReply] | UnsetType = UNSET


class OllamaLine(msgspec.Struct, kw_only=True):
    """The fields of all lines of a stream, and of whole replies. The last line says why the reply
    ended, its tokens, and its times in nanoseconds.
    """

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class ChatLine(OllamaLine, kw_only=True):
    """A reply of /api/chat, or the next piece of one."""

    message: ReplyMessage


class GenerateLine(OllamaLine, kw_only=True):
    """A reply of /api/generate, or the next piece of one."""

    response: str = ""
    thinking: str | UnsetType = UNSET


class ModelDetails(msgspec.Struct, kw_only=True):
    """The kind of a model; empty where it is not known."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class ModelTag(msgspec.Struct, kw_only=True):
    """A model of GET /api/tags. It has no digest: none was computed."""

    name: str
    model: str
    modified_at: str
    size: int  # bytes of its files
    details: ModelDetails


class ModelTags(msgspec.Struct, kw_only=True):
    """The response of GET /api/tags."""

    models: list[ModelTag]


class RunningModel(ModelTag, kw_only=True):
    """A loaded model, as GET /api/ps lists it."""

    expires_at: str
    size_vram: int = 0
    context_length: int


class RunningModels(msgspec.Struct, kw_only=True):
    """The response of GET /api/ps."""

    models: list[RunningModel]


class ShownModel(msgspec.Struct, kw_only=True):
    """The response of POST /api/show."""

    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    template: str  # Jinja's, not Go's
    parameters: str
    modified_at: str
    license: str = ""
    modelfile: str = ""


class OllamaVersion(msgspec.Struct, kw_only=True):
    """The response of GET /api/version: the version of Ollama whose API this is."""

    version: str


# Errors


class OllamaError(msgspec.Struct, kw_only=True):
    """Body of every error, and the last line of a stream that failed."""

    error: str


def to_ollama_error(status: int, info: ErrorInfo) -> tuple[int, OllamaError]:
    """Return the same in Ollama's words: a sentence that names the field."""
    names_field = info.param is None or info.param in info.message
    return status, OllamaError(
        error=info.message if names_field else f"{info.param}: {info.message}"
    )


STYLE = ApiStyle(OllamaError, lambda status, code: status, to_ollama_error)
