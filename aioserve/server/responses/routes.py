"""POST /v1/responses: OpenAI's Responses API, for text.

Knows the shape of that endpoint; the chat template is the engine's, admission and streaming are in
`generation`, what is remembered in `store`.
"""

import time
import uuid
from collections.abc import Sequence

import msgspec
from aiohttp import web

from aioserve.engine import Conversation
from aioserve.errors import RequestError
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.server.body import decode_body
from aioserve.server.chat.reply_reader import ReplyReader
from aioserve.server.errors import to_wire
from aioserve.server.formats.events import Content
from aioserve.server.generation import Answer, respond
from aioserve.server.keys import CHAT_FORMAT, RESPONSES
from aioserve.server.protocol import Usage
from aioserve.server.responses.protocol import (
    ErrorEvent,
    Incomplete,
    InputItem,
    ItemEvent,
    OutputMessage,
    OutputText,
    PartEvent,
    Response,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
    TextDone,
    TextEvent,
)
from aioserve.server.responses.store import Turn
from aioserve.server.sse import typed_event
from aioserve.server.unserved import HINTS_ON_RESPONSES, NOT_ON_RESPONSES
from aioserve.server.validation import BodyDecoder

decoder = BodyDecoder(ResponsesRequest, {}, shared=NOT_ON_RESPONSES, hints=HINTS_ON_RESPONSES)

_NAMES = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}


async def create_response(request: web.Request) -> web.StreamResponse:
    """The handler. Raises what `add_request` raises, before anything is sent."""
    body = await decode_body(request, decoder)
    try:
        params = msgspec.structs.replace(
            body.sampling_params(),
            kept_special_tokens=request.app[CHAT_FORMAT].kept_special_tokens,
        )
        turns = [*_previous(request, body), *_turns(body)]
        told = list(turns)
        if body.instructions:
            told.insert(0, {"role": "system", "content": body.instructions})
        answer = ResponseAnswer(request, body, turns)
        return await respond(request, body, [Conversation(told)], params, answer)
    except RequestError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


def _previous(request: web.Request, body: ResponsesRequest) -> Sequence[Turn]:
    if body.previous_response_id is None:
        return ()
    turns = request.app[RESPONSES].get(body.previous_response_id)
    if turns is None:
        raise RequestError(
            f"no response {body.previous_response_id[:128]!r} is stored here: it never was, was "
            "not to be, or is forgotten for newer ones",
            param="previous_response_id",
        )
    return turns


def _turns(body: ResponsesRequest) -> list[Turn]:
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("input must not be empty", param="input")
    return [_turn(item, f"input[{i}]") for i, item in enumerate(body.input)]


def _turn(item: InputItem, path: str) -> Turn:
    if item.type != "message":
        raise RequestError(
            f"{path}: items of type {item.type[:64]!r} are not supported by this server, only "
            "'message'",
            param=path,
        )
    for name in ("role", "content"):
        if getattr(item, name) is None:
            raise RequestError(f"{path}.{name} is missing", param=f"{path}.{name}")
    role = "system" if item.role == "developer" else str(item.role)
    return {"role": role, "content": _text(item, f"{path}.content")}


def _text(item: InputItem, path: str) -> str:
    if isinstance(item.content, str):
        return item.content
    texts = []
    for i, part in enumerate(item.content or ()):
        place = f"{path}[{i}]"
        if part.type not in ("input_text", "output_text"):
            raise RequestError(
                f"{place}: parts of type {part.type[:64]!r} are not supported by this server, only "
                "'input_text' and 'output_text'",
                param=place,
            )
        for name in part.__struct_fields__:
            if name not in ("type", "text") and getattr(part, name):
                raise RequestError(
                    f"{place}.{name} is not supported by this server", param=f"{place}.{name}"
                )
        if part.text is None:
            raise RequestError(f"{place}.text is missing", param=f"{place}.text")
        texts.append(part.text)
    return "".join(texts)


class ResponseAnswer(Answer):
    """One message of text; reasoning is left out. Every event has a number."""

    id_prefix = "resp_"

    def __init__(self, request: web.Request, body: ResponsesRequest, turns: Sequence[Turn]) -> None:
        super().__init__(request, body.model, None)
        self._format, self._store = request.app[CHAT_FORMAT], request.app[RESPONSES]
        self._body, self._turns = body, turns
        self._created = int(time.time())
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._reader: ReplyReader | None = None
        self._texts: list[str] = []
        self._number = 0  # of the next event
        self._last: RequestOutput | None = None

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        return b"" if self.is_silent(output) else self.make_chunk(index, output)

    def quick_chunk(self, index: int, output: RequestOutput) -> bytes | None:
        if self._number == 0 or output.finish_reason is not None:
            return None
        return self.chunk(index, output)

    def make_chunk(self, index: int, output: RequestOutput) -> bytes:
        told = b"" if self._number else self._beginning()
        self._last = output
        text = self._read(output)
        if not text:
            return told
        self._texts.append(text)
        event = TextEvent(sequence_number=self._next(), item_id=self._message_id, delta=text)
        return told + typed_event(event)

    def _beginning(self) -> bytes:
        message = self._message("in_progress", [])
        part = PartEvent(
            type="response.content_part.added",
            sequence_number=3,
            item_id=self._message_id,
            part=OutputText(),
        )
        self._number = 4
        return b"".join(
            map(
                typed_event,
                (
                    self._event("created", 0, self._response("in_progress", [])),
                    self._event("in_progress", 1, self._response("in_progress", [])),
                    ItemEvent(type="response.output_item.added", sequence_number=2, item=message),
                    part,
                ),
            )
        )

    def ending(self, usage: Usage) -> bytes:
        assert self._last is not None, "a stream ends only after its sample has finished"
        response = self._finished(self._last, "".join(self._texts), usage)
        [message] = response.output
        [part] = message.content
        events = (
            TextDone(sequence_number=self._next(), item_id=message.id, text=part.text),
            PartEvent(
                type="response.content_part.done",
                sequence_number=self._next(),
                item_id=message.id,
                part=part,
            ),
            ItemEvent(type="response.output_item.done", sequence_number=self._next(), item=message),
            self._event(response.status, self._next(), response),
        )
        return b"".join(map(typed_event, events))

    def failure(self, error: BaseException) -> bytes:
        info = to_wire(error)[1].error
        return typed_event(
            ErrorEvent(
                sequence_number=self._next(), code=info.code, message=info.message, param=info.param
            )
        )

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Response:
        [output] = outputs
        return self._finished(output, self._read(output), usage)

    def _finished(self, output: RequestOutput, text: str, usage: Usage) -> Response:
        """The whole, which is remembered."""
        status, details = _status(output.finish_reason)
        message = self._message(
            "completed" if status == "completed" else "incomplete", [OutputText(text=text)]
        )
        if self._body.store is not False:
            turn = {"role": "assistant", "content": text}
            self._store.put(self.id, [*self._turns, turn])
        response = self._response(status, [message])
        response.incomplete_details = details
        response.usage = ResponseUsage.of(usage)
        return response

    def _read(self, output: RequestOutput) -> str:
        """The text that is not reasoning."""
        if self._reader is None:
            parser = self._format.make_parser(None, self.prompt_end, with_reasoning=True)
            self._reader = ReplyReader(
                parser, self._format.make_id, max_calls=None, with_reasoning=False
            )
        events = self._reader.read(output)
        return "".join(event.text for event in events if isinstance(event, Content))

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _event(self, name: str, number: int, response: Response) -> ResponseEvent:
        return ResponseEvent(type=f"response.{name}", sequence_number=number, response=response)

    def _message(self, status: str, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self._message_id, status=status, content=content)

    def _response(self, status: str, output: list[OutputMessage]) -> Response:
        body = self._body
        params = body.sampling_params()
        return Response(
            id=self.id,
            created_at=self._created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self.model,
            output=output,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            temperature=params.temperature,
            top_p=params.top_p,
            user=body.user,
        )


def _status(reason: FinishReason | None) -> tuple[str, Incomplete | None]:
    match reason:
        case FinishReason.LENGTH:
            return "incomplete", Incomplete(reason="max_output_tokens")
        case FinishReason.TIMEOUT | FinishReason.ABORT:
            return "incomplete", Incomplete(reason=str(reason))
    return "completed", None
