"""A chat reply read as OpenAI's messages and deltas: content, reasoning and tool calls told apart.

Loaded with the first reply that may be more than text. Knows the shapes of OpenAI's messages and
deltas. How a model writes them is known in `formats`.
"""

from msgspec import UNSET

from aioserve.engine.chat.reply_format import Arguments, Call, Content, Event, Reasoning
from aioserve.engine.chat.reply_reader import ReplyReader
from aioserve.server.chat.protocol import (
    ChatDelta,
    ChatReplyMessage,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)


class MessageReader(ReplyReader):
    """A reader of the outputs of one choice, which tells them in wire structs."""

    _index = -1  # of the last call that was told

    def deltas(self, events: list[Event]) -> list[ChatDelta]:
        """Return one for each event, as OpenAI streams them."""
        return [self._delta(event) for event in events]

    def _delta(self, event: Event) -> ChatDelta:
        match event:
            case Content():
                return ChatDelta(content=event.text)
            case Reasoning():
                return ChatDelta(reasoning_content=event.text)
            case Call():
                self._index += 1
                call = ToolCallDelta(
                    index=self._index,
                    id=event.id or "",
                    type="function",
                    function=FunctionCallDelta(name=event.name, arguments=""),
                )
            case Arguments():
                function = FunctionCallDelta(arguments=event.text)
                call = ToolCallDelta(index=self._index, function=function)
        return ChatDelta(tool_calls=[call])

    def message(self, events: list[Event]) -> ChatReplyMessage:
        """Return all events of a reply as one message."""
        content = "".join(each.text for each in events if isinstance(each, Content))
        reasoning = "".join(each.text for each in events if isinstance(each, Reasoning))
        calls: list[ToolCall] = []
        for each in events:
            if isinstance(each, Call):
                function = FunctionCall(name=each.name, arguments="")
                calls.append(ToolCall(id=each.id or "", function=function))
            elif isinstance(each, Arguments):
                calls[-1].function.arguments += each.text
        return ChatReplyMessage(
            content=content or (None if calls else ""),
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
