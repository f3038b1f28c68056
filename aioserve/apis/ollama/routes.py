"""POST /api/chat and /api/generate, GET /api/tags, /api/ps and /api/version, POST /api/show.

This module contains the HTTP handlers, and writes their replies as lines of JSON. Conversations are
served by the code of chat completions.
"""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from aioserve.apis.ollama.protocol import (
    CallOfReply,
    ChatLine,
    FunctionOfCall,
    GenerateLine,
    ModelDetails,
    ModelTag,
    ModelTags,
    OllamaChatRequest,
    OllamaError,
    OllamaGenerateRequest,
    OllamaLine,
    OllamaVersion,
    ReplyMessage,
    RunningModel,
    RunningModels,
    ShownModel,
    ShowRequest,
    to_ollama_error,
)
from aioserve.engine.chat.reply_format import Arguments, Call, Content, Event, Reasoning
from aioserve.engine.chat.reply_reader import ReplyReader, read_events
from aioserve.engine.chat.tools import ToolUse
from aioserve.engine.chat_template import template_of
from aioserve.errors import RequestError, UnknownModelError
from aioserve.outputs import RequestOutput
from aioserve.server.admin import model_cards
from aioserve.server.body import GENERATION_ERRORS, BodyDecoder, Route, decode_body, model_of
from aioserve.server.chat.protocol import ChatCompletionRequest
from aioserve.server.chat.routes import answer_chat, sampling_params
from aioserve.server.completions import infilling
from aioserve.server.errors import to_wire
from aioserve.server.generation import Answer, respond
from aioserve.server.logprobs import TOKEN_TEXTS
from aioserve.server.protocol import ModelCard, Usage
from aioserve.server.running import CHAT_FORMAT, ENGINE

#: The version of Ollama whose API this follows. Some clients refuse older ones than they know.
API_VERSION = "0.13.0"
TAG = ":latest"  # what Ollama's clients append to names without a tag
NEVER = "9999-12-31T00:00:00Z"  # when the model goes: not while the server runs
_encoder = msgspec.json.Encoder()

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
    return _json(ModelTags(models=[ModelTag(**tag) for _, tag in await _tags(request)]))


async def list_running(request: web.Request) -> web.Response:
    """GET /api/ps: the same, all of which are in memory."""
    models = [
        RunningModel(**tag, expires_at=NEVER, context_length=card.max_model_len)
        for card, tag in await _tags(request)
    ]
    return _json(RunningModels(models=models))


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
    return _json(
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
    return _json(OllamaVersion(version=API_VERSION))


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
    return _json(line)


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


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=_encoder.encode(body), content_type="application/json")


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
