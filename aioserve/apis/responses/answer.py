"""A reply as OpenAI's response: items of messages, reasoning and calls, and the events of them.

Knows the shapes of items and events. How a model writes calls is known in `formats`.
"""

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from aioserve.apis.responses.prompt import NOTHING_OFFERED, Offered, input_of
from aioserve.apis.responses.protocol import (
    CallItem,
    CustomCallItem,
    DeltaEvent,
    DoneEvent,
    ErrorEvent,
    FunctionCallItem,
    Incomplete,
    InputItem,
    ItemEvent,
    Numbered,
    OfItem,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
    Status,
    SummarizedItem,
    SummaryText,
    TextConfig,
    TextFormat,
)
from aioserve.engine.chat.reply_reader import ReplyReader
from aioserve.features.formats import Arguments, Call, Content, Event, Reasoning
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.params import SamplingParams
from aioserve.server.access.gate import owner_of
from aioserve.server.chat.routes import tell_reasoning
from aioserve.server.errors import to_wire
from aioserve.server.generation import Answer, typed_event
from aioserve.server.logprobs import chat_logprobs
from aioserve.server.protocol import ChatTokenLogprob, Usage
from aioserve.server.running import CHAIN, CHAT_FORMAT, RESPONSES, TOKEN_TEXTS, Kept
from aioserve.support.tokens import TokenTexts

_encoder = msgspec.json.Encoder()


def new_id(prefix: str) -> str:
    """Return an id such as OpenAI gives, of which clients know the prefix."""
    return f"{prefix}{uuid.uuid4().hex}"


class ItemWriter:
    """The items of a reply as it is read, and the events that tell them, with their numbers."""

    def __init__(
        self,
        offered: Offered = NOTHING_OFFERED,
        reasoning: type[ReasoningItem] = ReasoningItem,
    ) -> None:
        self.items: list[OutputItem] = []  # those that have ended
        self._offered = offered
        self._reasoning = reasoning
        self._open: OutputItem | None = None  # without its text
        self._pieces: list[str] = []  # of that
        self._logprobs: list[ChatTokenLogprob] = []  # of that, if it is a message
        self._number = 0  # of the next event

    def event(self, kind: type[Numbered], name: str, **fields: Any) -> Numbered:
        """Return an event with the next sequence number of the stream."""
        self._number += 1
        return kind(type=name, sequence_number=self._number - 1, **fields)

    def tell(self, event: Event, logprobs: Sequence[ChatTokenLogprob] = ()) -> list[Numbered]:
        """Return what begins the item of the event, if it is another than the open one, and the
        delta. `logprobs` are those of its tokens, if it is text of a message.
        """
        match event:
            case Content():
                return self._go_on(OutputMessage, "msg_", event.text, logprobs)
            case Reasoning():
                return self._go_on(self._reasoning, "rs_", event.text)
            case Call():
                return self._begin(self._call(event))
            case Arguments() if isinstance(self._open, CustomCallItem):
                self._pieces.append(event.text)  # JSON, which holds the input
                return []
            case Arguments():
                return [self._delta(event.text)]

    def _call(self, event: Call) -> CallItem:
        is_custom = event.name in self._offered.customs
        kind, prefix = (CustomCallItem, "ctc_") if is_custom else (FunctionCallItem, "fc_")
        call = kind(id=new_id(prefix), call_id=event.id or "", name=event.name)
        if event.name in self._offered.names:
            call.namespace, call.name = self._offered.names[event.name]
        return call

    def end(self, *, is_whole: bool) -> list[Numbered]:
        """The ends of all that is open; a reply that says nothing says an empty text."""
        told: list[Numbered] = []
        if self._open is None and not self.items:
            told = self._begin(OutputMessage(id=new_id("msg_")))
        return told + self._end("completed" if is_whole else "incomplete")

    def _go_on(
        self,
        kind: type[OutputMessage] | type[ReasoningItem],
        prefix: str,
        text: str,
        logprobs: Sequence[ChatTokenLogprob] = (),
    ) -> list[Numbered]:
        told = [] if isinstance(self._open, kind) else self._begin(kind(id=new_id(prefix)))
        self._logprobs += logprobs
        return [*told, self._delta(text, logprobs)]

    def _begin(self, item: OutputItem) -> list[Numbered]:
        told = self._end("completed")
        self._open, self._pieces, self._logprobs = item, [], []
        told.append(self._item_event("added", item))
        if parts := text_of(item).parts:
            told.append(self._of_item(PartEvent, f"{parts.events}.added", part=parts.part()))
        return told

    def _end(self, status: Status) -> list[Numbered]:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return []
        name, parts = text_of(item)
        if isinstance(item, FunctionCallItem):
            whole: OutputItem = msgspec.structs.replace(item, status=status, arguments=text)
            told = [self._of_item(DoneEvent, f"{name}.done", arguments=text)]
        elif isinstance(item, CustomCallItem):
            text = input_of(text)
            whole = msgspec.structs.replace(item, status=status, input=text)
            told = [
                self._of_item(DeltaEvent, f"{name}.delta", delta=text),
                self._of_item(DoneEvent, f"{name}.done", input=text),
            ]
        else:
            assert parts is not None, "it is no call"
            logprobs = _told(item, self._logprobs)
            part = parts.part(text=text, **logprobs)
            whole = msgspec.structs.replace(item, status=status, **{parts.field: [part]})
            told = [
                self._of_item(DoneEvent, f"{name}.done", text=text, **logprobs),
                self._of_item(PartEvent, f"{parts.events}.done", part=part),
            ]
        told.append(self._item_event("done", whole))
        self._open = None
        self.items.append(whole)
        return told

    def _delta(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> Numbered:
        assert self._open is not None, "a call comes before its arguments"
        self._pieces.append(text)
        name = f"{text_of(self._open).events}.delta"
        return self._of_item(DeltaEvent, name, delta=text, **_told(self._open, logprobs))

    def _item_event(self, name: str, item: OutputItem) -> Numbered:
        return self.event(
            ItemEvent, f"response.output_item.{name}", output_index=len(self.items), item=item
        )

    def _of_item(self, kind: type[OfItem], name: str, **fields: Any) -> Numbered:
        assert self._open is not None, "only of what is open"
        if parts := text_of(self._open).parts:
            fields[parts.index_field] = 0
        return self.event(
            kind, f"response.{name}", item_id=self._open.id, output_index=len(self.items), **fields
        )


def _told(item: OutputItem, logprobs: Sequence[ChatTokenLogprob]) -> dict[str, Any]:
    return {"logprobs": list(logprobs)} if isinstance(item, OutputMessage) else {}


class ResponseAnswer(Answer):
    """One response, which is remembered when it is whole. Every event has a number."""

    id_prefix = "resp_"

    def __init__(
        self,
        request: web.Request,
        body: ResponsesRequest,
        offered: Offered,
        params: SamplingParams,
        items: Sequence[InputItem],
    ) -> None:
        """`items` are the input of the response, with all that came before it."""
        super().__init__(request, body.model, body.request_id)
        self._format, self._store = request.app[CHAT_FORMAT], request.app[RESPONSES]
        texts = request.app[TOKEN_TEXTS]
        self._pieces = texts.bytes
        self._queue = None if params.logprobs is None else TokenQueue(texts)
        self._owner, self._chain = owner_of(request), request.get(CHAIN)
        self._body, self._use, self._params = body, offered.use, params
        body.input = ""  # with images in it, it would stay as long as the stream
        self._input = items if body.store is not False else ()
        self._created = int(time.time())
        self._reader: ReplyReader | None = None
        self._writer = ItemWriter(offered, reasoning_kind(body))
        self._last: RequestOutput | None = None
        self._kept: Kept | None = None

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        if self.is_silent(output):
            self._get_reader().count(output)
            return b""
        return self.make_chunk(index, output)

    def quick_chunk(self, index: int, output: RequestOutput) -> bytes | None:
        if self._last is None or output.finish_reason is not None:
            return None
        return self.chunk(index, output)

    def make_chunk(self, index: int, output: RequestOutput) -> bytes:
        told: list[Numbered] = []
        if self._last is None:
            response = self._response("in_progress", [])
            told = [self._event("created", response), self._event("in_progress", response)]
        self._last = output
        for event in self._read(output):
            told += self._writer.tell(event, self._logprobs_of(event))
        return b"".join(map(typed_event, told))

    def ending(self, usage: Usage) -> bytes:
        assert self._last is not None, "a stream ends only after its sample has finished"
        told = self._writer.end(is_whole=_incomplete(self._last) is None)
        response = self._finished(self._last, usage)
        told.append(self._event(response.status, response))
        return b"".join(map(typed_event, told))

    def failure(self, error: BaseException) -> bytes:
        info = to_wire(error)[1].error
        told = {"code": info.code, "message": info.message, "param": info.param}
        return typed_event(self._writer.event(ErrorEvent, "error", **told))

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Response:
        [output] = outputs
        for event in self._read(output):
            self._writer.tell(event, self._logprobs_of(event))
        self._writer.end(is_whole=_incomplete(output) is None)
        return self._finished(output, usage)

    settles_elsewhere = True  # in the store, which may be behind workers

    async def settle(self) -> None:
        if self._kept is not None:
            await self._store.put(self.id, self._kept)

    def _finished(self, output: RequestOutput, usage: Usage) -> Response:
        """Return the complete response, noted to be stored."""
        details = _incomplete(output)
        response = self._response(
            "completed" if details is None else "incomplete", self._writer.items
        )
        response.incomplete_details = details
        if self._reader is not None:
            tell_reasoning(usage, [self._reader.num_reasoning_tokens])
        response.usage = ResponseUsage.of(usage)
        if response.store:
            for item in self._input:
                item.type = item.type or "message"
                item.id = item.id or new_id("msg_" if item.type == "message" else "item_")
            encoded = _encoder.encode(self._input), _encoder.encode(response)
            self._kept = Kept(*encoded, self._owner, self._chain or self.id)
        return response

    def _read(self, output: RequestOutput) -> list[Event]:
        if self._queue is not None:
            self._queue.append(output)
        return self._get_reader().read(output)

    def _logprobs_of(self, event: Event) -> Sequence[ChatTokenLogprob]:
        if self._queue is None or not isinstance(event, Content | Reasoning):
            return ()
        return self._queue.take(event.text)

    def _get_reader(self) -> ReplyReader:
        if self._reader is None:
            self._reader = ReplyReader.of(self._format, self._use, self.prompt_end, self._pieces)
        return self._reader

    def _event(self, name: str, response: Response) -> Numbered:
        return self._writer.event(ResponseEvent, f"response.{name}", response=response)

    def _response(self, status: str, output: list[OutputItem]) -> Response:
        body = self._body
        return Response(
            id=self.id,
            created_at=self._created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=self.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning,
            store=body.store is not False,
            temperature=self._params.temperature,
            text=TextConfig(
                format=(body.text and body.text.format) or TextFormat(type="text"),
                verbosity=None if body.text is None else body.text.verbosity,
            ),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=self._params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
        )


def _incomplete(output: RequestOutput) -> Incomplete | None:
    """Return why a response is incomplete; None if it is complete."""
    match output.finish_reason:
        case FinishReason.LENGTH:
            return Incomplete(reason="max_output_tokens")
        case FinishReason.TIMEOUT | FinishReason.ABORT:
            return Incomplete(reason=str(output.finish_reason))
    return None


# How events tell the text of an output item: their names, and the part of the item that it is.
# Reasoning is told as a summary, and whole, to a client that asks for one. Knows no stream.


Part = OutputText | ReasoningText | SummaryText


class Parts(NamedTuple):
    """The list of an item whose one part is its text."""

    field: str  # of the item
    index_field: str  # of events, says which part
    events: str  # the name of events that begin and end a part
    part: type[Part]


class ItemText(NamedTuple):
    """The events that tell the text of an item."""

    events: str  # the name of events with the text, or with pieces of it
    parts: Parts | None  # None: calls have no parts


_TEXTS: Mapping[type[OutputItem], ItemText] = {
    OutputMessage: ItemText(
        "output_text", Parts("content", "content_index", "content_part", OutputText)
    ),
    ReasoningItem: ItemText(
        "reasoning_text", Parts("content", "content_index", "content_part", ReasoningText)
    ),
    SummarizedItem: ItemText(
        "reasoning_summary_text",
        Parts("summary", "summary_index", "reasoning_summary_part", SummaryText),
    ),
    FunctionCallItem: ItemText("function_call_arguments", None),
    CustomCallItem: ItemText("custom_tool_call_input", None),
}


def text_of(item: OutputItem) -> ItemText:
    """Return how the text of this item is told."""
    return _TEXTS[type(item)]


def reasoning_kind(body: ResponsesRequest) -> type[ReasoningItem]:
    """Return the kind of item that reasoning is told in."""
    asked = body.reasoning and (body.reasoning.summary or body.reasoning.generate_summary)
    return SummarizedItem if asked else ReasoningItem


# Log probabilities of a response's messages: which tokens of the reply stand in which text. A
# format reads a reply into reasoning, messages and calls, and holds back what may turn out to be a
# mark: tokens come before the text that they are in, and some are in none. Knows bytes of tokens
# and pieces of text in their order, and no format.


_REPLACEMENT = "\ufffd"  # shown in the place of bytes that are no character
_LEAST_WINDOW = 64  # bytes that are looked at; a guess


class _Pending(NamedTuple):
    """A token of which no text has been told, or only the first bytes of it."""

    entry: ChatTokenLogprob
    size: int  # bytes that are left
    is_told: bool


class TokenQueue:
    """Tokens of a reply whose text is still to come, with their logprobs.

    All calls together take time in proportion to the reply, whatever it says: what was searched is
    taken away, and no more of it is searched than that.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._pending: deque[_Pending] = deque()
        self._raw = bytearray()  # the bytes of all that is pending

    def append(self, output: RequestOutput) -> None:
        """Add the tokens of the next output."""
        if not output.logprobs:
            return
        for entry in chat_logprobs(self._texts, output.token_ids, output.logprobs).content:
            self._pending.append(_Pending(entry, len(entry.bytes), False))
            self._raw += bytes(entry.bytes)

    def take(self, text: str) -> list[ChatTokenLogprob]:
        """Return the tokens that make up `text`, the next piece of the reply that is told. Tokens
        before it are dropped: they are marks. A token in two pieces belongs to the first one. Where
        the text is not what the model wrote, all pending tokens are said to be in it.
        """
        begin, end = _find(text, self._raw) or (0, len(self._raw))
        told: list[ChatTokenLogprob] = []
        position = 0
        while self._pending and position < end:
            token = self._pending.popleft()
            if position + token.size > begin and not token.is_told:
                told.append(token.entry)
            position += token.size
        if position > end:
            self._pending.appendleft(token._replace(size=position - end, is_told=True))
        del self._raw[:end]
        return told


def _find(text: str, raw: bytearray) -> tuple[int, int] | None:
    """Return where in `raw` the first bytes begin and end that are shown as `text`, in which U+FFFD
    stands for bytes that are no character; None if there are none.
    """
    if _REPLACEMENT not in text:
        own = text.encode()
        begin = raw.find(own)
        return None if begin < 0 else (begin, begin + len(own))
    size = 3 * len(text) + _LEAST_WINDOW
    while size < len(raw):
        end = size
        while end > size - 3 and raw[end] & 0xC0 == 0x80:
            end -= 1  # it would stand within a character
        if found := _find_broken(text, bytes(raw[:end]), is_all=False):
            return found
        size *= 2
    return _find_broken(text, bytes(raw), is_all=True)


def _find_broken(text: str, raw: bytes, *, is_all: bool) -> tuple[int, int] | None:
    """Return what `_find` does. Tokenizers differ in how many U+FFFD they show for broken bytes,
    one for each byte or for each character that was begun: so a run of them is a run, and they are
    counted only where the text begins or ends. Without `is_all`, more bytes follow.
    """
    wanted = _with_short_runs(text)
    shown, places, position = [""], list[int](), 0  # where in `raw` each character begins
    for char in raw.decode(errors="surrogateescape"):
        is_byte = "\udc80" <= char <= "\udcff"
        own = _REPLACEMENT if is_byte else char
        if own != _REPLACEMENT or shown[-1] != _REPLACEMENT:
            shown.append(own)
            places.append(position)
        position += 1 if is_byte else len(char.encode())
    places.append(position)
    first = "".join(shown).find(wanted)
    if first < 0:
        return None
    last = first + len(wanted)
    begin, end = places[first], places[last]
    if text.endswith(_REPLACEMENT):
        num_shown = len(text) - len(text.rstrip(_REPLACEMENT))
        start = places[last - 1]
        sizes = _sizes_of_broken(raw[start:end])
        if len(sizes) >= num_shown:
            end = start + sum(sizes[:num_shown])
        elif not is_all and end == len(raw):
            return None
        else:
            end = min(end, start + num_shown)
    if text.startswith(_REPLACEMENT) and len(wanted) > 1:
        num_shown = len(text) - len(text.lstrip(_REPLACEMENT))
        sizes = _sizes_of_broken(raw[begin : places[first + 1]])
        begin += sum(sizes[: max(len(sizes) - num_shown, 0)])
    return begin, end


def _with_short_runs(text: str) -> str:
    """Return the text with one U+FFFD in the place of several in a row."""
    begun = ["", *text][:-1]
    return "".join(
        char
        for before, char in zip(begun, text, strict=True)
        if char != _REPLACEMENT or before != _REPLACEMENT
    )


def _sizes_of_broken(raw: bytes) -> list[int]:
    """Return the bytes that each U+FFFD stands for which a decoder of UTF-8 shows for all
    of these.
    """
    sizes, at = [], 0
    while at < len(raw):
        try:
            raw[at : at + 4].decode()
            size = 3  # U+FFFD itself
        except UnicodeDecodeError as error:
            size = error.end - error.start if error.start == 0 else 3
        sizes.append(size)
        at += size
    return sizes
