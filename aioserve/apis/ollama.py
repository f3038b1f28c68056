"""POST /api/chat and /api/generate, GET /api/tags, /api/ps and /api/version, POST /api/show.

Ollama's API: its requests as those of chat completions, whose code serves them, and replies as
lines of JSON. Knows the names that Ollama gives to what chat has: options, thinking, formats,
images, calls without ids.
"""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aioserve.engine.chat.reply_format import Arguments, Call, Content, Event, Reasoning
from aioserve.engine.chat.reply_reader import ReplyReader, read_events
from aioserve.engine.chat.tools import ToolUse
from aioserve.engine.chat_template import template_of
from aioserve.errors import RequestError, UnknownModelError
from aioserve.outputs import RequestOutput
from aioserve.server.admin import model_cards
from aioserve.server.body import (
    GENERATION_ERRORS,
    BodyDecoder,
    Route,
    decode_body,
    json_response,
    model_of,
)
from aioserve.server.chat.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    ImageURL,
    ToolCall,
    ToolEntry,
)
from aioserve.server.chat.routes import answer_chat, sampling_params
from aioserve.server.completions import infilling
from aioserve.server.errors import ApiStyle, to_wire
from aioserve.server.generation import Answer, respond
from aioserve.server.protocol import (
    Capability,
    Empty,
    ErrorInfo,
    Int,
    JsonSchema,
    ModelCard,
    RequestPart,
    ResponseFormat,
    Usage,
)
from aioserve.server.running import CHAT_FORMAT, ENGINE, TOKEN_TEXTS

#: The version of Ollama whose API this follows. Some clients refuse older ones than they know.
API_VERSION = "0.13.0"
TAG = ":latest"  # what Ollama's clients append to names without a tag
NEVER = "9999-12-31T00:00:00Z"  # when the model goes: not while the server runs
_encoder = msgspec.json.Encoder()


# What clients send, and how chat completions have it.


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


# What replies and errors are made of.


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


# The handlers.


chat_decoder = BodyDecoder(OllamaChatRequest, "ollama")
generate_decoder = BodyDecoder(OllamaGenerateRequest, "ollama")
show_decoder = BodyDecoder(ShowRequest, "ollama")


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer /api/chat. Raises what `add_request` raises, before anything is sent."""
    body = await decode_body(request, chat_decoder)
    name = _served(request, body.model)
    if not body.messages:  # asks for the model to be loaded, or to go
        return _loaded(name, is_chat=True)
    asked = body.as_chat()
    asked.model = name
    body.messages.clear()  # images that they hold would stay as long as the stream
    with _own_names():
        return await answer_chat(request, asked, ChatLines)


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer /api/generate. Raises what `add_request` raises, before anything is sent."""
    body = await decode_body(request, generate_decoder)
    name = _served(request, body.model)
    if not body.prompt and not body.images:
        return _loaded(name, is_chat=False)
    asked = body.as_chat()
    asked.model = name
    with _own_names():
        if not body.raw and not body.suffix:
            body.images = None  # `asked` has them; here they would stay as long as the stream
            return await answer_chat(request, asked, GenerateLines)
        if body.system or body.images:
            raise RequestError("raw and suffix take a prompt without system and images", "raw")
        engine = request.app[ENGINE]
        prompt = body.prompt
        if body.suffix:
            prompt = infilling(engine.model_info.tokenizer, prompt, body.suffix)
        params = sampling_params(asked, engine.model_info.sampling_defaults)
        reply = GenerateLines(request, asked, reads=False)
        return await respond(request, asked, [prompt], params, reply)


async def list_tags(request: web.Request) -> web.Response:
    """GET /api/tags: the models that are served, in Ollama's words."""
    return json_response(ModelTags(models=[ModelTag(**tag) for _, tag in await _tags(request)]))


async def list_running(request: web.Request) -> web.Response:
    """GET /api/ps: the same, all of which are in memory."""
    models = [
        RunningModel(**tag, expires_at=NEVER, context_length=card.max_model_len)
        for card, tag in await _tags(request)
    ]
    return json_response(RunningModels(models=models))


async def show(request: web.Request) -> web.Response:
    """Answer /api/show. Raises `UnknownModelError`."""
    body = await decode_body(request, show_decoder)
    asked = body.model or body.name
    if not asked:
        raise RequestError("model is missing", param="model")
    name = _served(request, asked)
    card = next(card for card in _cards(request) if card.id == name)
    details, info = _details(request), request.app[ENGINE].model_info
    sampling = "\n".join(f"{key} {value}" for key, value in card.sampling.recommended.items())
    family = details.family or "unknown"
    return json_response(
        ShownModel(
            details=details,
            model_info={
                "general.architecture": family,
                f"{family}.context_length": card.max_model_len,
            },
            capabilities=card.capabilities,
            template=template_of(info.tokenizer),
            parameters=sampling,
            modified_at=_date(card.created),
        )
    )


async def show_version(request: web.Request) -> web.Response:
    """GET /api/version: the version of Ollama whose API this is, not aioserve's."""
    return json_response(OllamaVersion(version=API_VERSION))


def _served(request: web.Request, name: str) -> str:
    """Return the name of what serves `name`, of which Ollama's clients may have made `name:latest`.
    Raises `UnknownModelError`.
    """
    engine, bare = request.app[ENGINE], name.removesuffix(TAG)
    known = {card.id for card in _cards(request)}
    return model_of(engine, bare if bare in known and name not in known else name)


#: What chat completions call fields that have other names here.
_NAMES = {
    **{
        name: f"options.{name}"
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty")
    },
    "frequency_penalty": "options.frequency_penalty",
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    "max_completion_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "structured_outputs": "format",
    "structured_outputs.json": "format",
    "response_format": "format",
    "response_format.json_schema.schema": "format",
}


@contextmanager
def _own_names() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


def _loaded(name: str, *, is_chat: bool) -> web.Response:
    shared: dict[str, Any] = {"model": name, "created_at": _date(time.time()), "done": True}
    shared["done_reason"] = "load"
    line = ChatLine(message=ReplyMessage(), **shared) if is_chat else GenerateLine(**shared)
    return json_response(line)


def _cards(request: web.Request) -> list[ModelCard]:
    return model_cards(request.app[ENGINE], request.app.get(CHAT_FORMAT))


async def _tags(request: web.Request) -> list[tuple[ModelCard, dict[str, Any]]]:
    """Return each model's card and what lists of models say of it."""
    cards, path = _cards(request), request.app[ENGINE].model_info.source.path
    paths = [path if card.parent is None else Path(card.root) for card in cards]
    sizes = await asyncio.to_thread(lambda: [_size(path) for path in paths])
    details = _details(request)
    return [
        (
            card,
            {
                "name": card.id,
                "model": card.id,
                "modified_at": _date(card.created),
                "size": size,
                "details": details,
            },
        )
        for card, size in zip(cards, sizes, strict=True)
    ]


def _size(path: Path) -> int:
    """Return the bytes of a model's files; 0 if they cannot be looked at."""
    try:
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def _details(request: web.Request) -> ModelDetails:
    info = request.app[ENGINE].model_info
    source = info.source
    family = source.model_type or str(getattr(info.hf_config, "model_type", ""))
    return ModelDetails(
        format="gguf" if source.path.suffix == ".gguf" else "safetensors",
        family=family,
        families=[family] if family else [],
    )


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# A reply as lines of JSON: its text told apart into content, thinking and calls, which are whole.


class Lines(Answer):
    """A reply as lines: the common part of both routes."""

    id_prefix = "ollama-"
    text_field = "content"
    says_more = True  # each line has the time at which it was made
    media_type = "application/x-ndjson"

    def __init__(
        self,
        request: web.Request,
        body: ChatCompletionRequest,
        use: ToolUse | None = None,
        *,
        separates_reasoning: bool = True,
        reads: bool = True,
    ) -> None:
        """`reads`: the reply may hold calls and reasoning, which are told apart."""
        super().__init__(request, body.model, body.request_id)
        self._format = request.app[CHAT_FORMAT]
        self._use = use
        self._separates = separates_reasoning
        self._thinks = body.reasoning_effort != "none"
        self._reads = reads and (use is not None or self._format.tells_apart)
        self._pieces = request.app[TOKEN_TEXTS].bytes
        self._reader: ReplyReader | None = None  # None: the reply is text and nothing else
        self._num_calls = 0
        self._last: RequestOutput | None = None

    async def begin(self) -> None:
        if self._reads:
            self._reader = ReplyReader.of(
                self._format,
                self._use,
                self.prompt_end,
                self._pieces,
                separates_reasoning=self._separates,
                includes_reasoning=self._thinks,
                holds_calls=True,
            )

    @abstractmethod
    def line(self, message: ReplyMessage, **ending: Any) -> OllamaLine:
        """Return one line that tells a piece of the message."""

    def make_chunk(self, index: int, output: RequestOutput) -> bytes:
        if output.finish_reason is not None:
            self._last = output
        message = self._message(read_events(self._reader, output))
        if message == ReplyMessage():
            return b""
        return self._told(self.line(message))

    def ending(self, usage: Usage) -> bytes:
        assert self._last is not None
        return self._told(self.line(ReplyMessage(), **self._end(self._last, usage)))

    def failure(self, error: BaseException) -> bytes:
        status, body = to_wire(error)
        return self._told(to_ollama_error(status, body.error)[1])

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> OllamaLine:
        [output] = outputs
        message = self._message(read_events(self._reader, output))
        return self.line(message, **self._end(output, usage))

    def _told(self, line: msgspec.Struct) -> bytes:
        return _encoder.encode(line) + b"\n"

    def _message(self, events: Sequence[Event]) -> ReplyMessage:
        """Return events as one message. A call is told when it is whole, so its arguments are."""
        content = "".join(each.text for each in events if isinstance(each, Content))
        thinking = "".join(each.text for each in events if isinstance(each, Reasoning))
        calls: list[tuple[Call, list[str]]] = []
        for each in events:
            if isinstance(each, Call):
                calls.append((each, []))
            elif isinstance(each, Arguments):
                calls[-1][1].append(each.text)
        made = []
        for call, pieces in calls:
            arguments = msgspec.json.decode("".join(pieces) or "{}")
            function = FunctionOfCall(index=self._num_calls, name=call.name, arguments=arguments)
            made.append(CallOfReply(id=call.id or "", function=function))
            self._num_calls += 1
        return ReplyMessage(content=content, thinking=thinking or UNSET, tool_calls=made or UNSET)

    def _end(self, output: RequestOutput, usage: Usage) -> dict[str, Any]:
        """Return what the last line says beside its message."""
        told: dict[str, Any] = {
            "done": True,
            "done_reason": str(output.finish_reason),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }
        if (times := output.times) is not None:
            told["total_duration"] = round(times.duration * 1e9)
            if (first := times.to_first_token) is not None:
                told["prompt_eval_duration"] = round(first * 1e9)
                told["eval_duration"] = round((times.duration - first) * 1e9)
        return told


class ChatLines(Lines):
    """The reply to /api/chat as lines of JSON."""

    def line(self, message: ReplyMessage, **ending: Any) -> OllamaLine:
        now = _date(time.time())
        return ChatLine(model=self.model, created_at=now, message=message, **ending)


class GenerateLines(Lines):
    """Lines of /api/generate, whose text is called `response`."""

    def line(self, message: ReplyMessage, **ending: Any) -> OllamaLine:
        return GenerateLine(
            model=self.model,
            created_at=_date(time.time()),
            response=message.content,
            thinking=message.thinking,
            **ending,
        )


ROUTES = (
    Route(
        "POST",
        "/api/chat",
        chat,
        "Answer a conversation, as Ollama's protocol has it.",
        ChatLine,
        body=chat_decoder,
        example={
            "model": "embedded",
            "messages": [{"role": "user", "content": "Who's there?"}],
            "stream": False,
            "options": {"num_predict": 8},
        },
        events=(ChatLine, OllamaError),
        stream_type=Lines.media_type,
        raises=(UnknownModelError, *GENERATION_ERRORS),
    ),
    Route(
        "POST",
        "/api/generate",
        generate,
        "Answer a question, or continue a text, as Ollama's protocol has it.",
        GenerateLine,
        body=generate_decoder,
        example={
            "model": "embedded",
            "prompt": "Who's there?",
            "stream": False,
            "options": {"num_predict": 8},
        },
        events=(GenerateLine, OllamaError),
        stream_type=Lines.media_type,
        raises=(UnknownModelError, *GENERATION_ERRORS),
    ),
    Route("GET", "/api/tags", list_tags, "The models, in Ollama's words.", ModelTags),
    Route("GET", "/api/ps", list_running, "The models in memory: all of them.", RunningModels),
    Route(
        "POST",
        "/api/show",
        show,
        "What a model is and can do, in Ollama's words.",
        ShownModel,
        body=show_decoder,
        example={"model": "embedded"},
        raises=(UnknownModelError,),
    ),
    Route("GET", "/api/version", show_version, "The version of Ollama's API.", OllamaVersion),
)
