"""Server-sent events: how a struct becomes an event, and a response that starts with the first.

Knows nothing about what the events say.
"""

from typing import Any

import msgspec
from aiohttp import hdrs, web

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


def event(struct: Any) -> bytes:
    """A struct as one server-sent event, without a name."""
    return b"data: " + _encoder.encode(struct) + b"\n\n"


def typed_event(struct: Any) -> bytes:
    """One event that is named as its struct's `type` says."""
    name: str = struct.type
    return b"event: " + name.encode() + b"\n" + event(struct)


class EventStream:
    """A streamed response that sends its headers with its first event.

    Until then a failure can still be answered with a status code of its own.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._is_chunked = False  # it has begun, has not ended, and the client knows HTTP/1.1

    @property
    def started(self) -> bool:
        """Whether the client has seen a status code."""
        return self._response is not None

    @property
    def has_room(self) -> bool:
        """Whether something can be written at once."""
        protocol = self._request.protocol
        transport = protocol.transport
        return (
            self._is_chunked
            and not protocol.writing_paused
            and transport is not None
            and not transport.is_closing()
        )

    async def send(self, events: bytes) -> None:
        """Write whole events; waits while the client's socket is full."""
        if self._response is None:
            self._response = web.StreamResponse(headers=_HEADERS)
            await self._response.prepare(self._request)
        await self._response.write(events)
        self._is_chunked = self._response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"

    def write(self, events: bytes) -> None:
        """Write whole events, perhaps none, while it `has_room`.

        The same bytes as `send`, without the five calls and two coroutines of aiohttp's way down.
        """
        transport = self._request.protocol.transport
        if events and transport is not None:
            transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    async def end(self, events: bytes) -> web.StreamResponse:
        """Write the last events and close the stream."""
        await self.send(events)
        assert self._response is not None
        self._is_chunked = False
        await self._response.write_eof()
        return self._response
