"""Server-sent events: how a struct becomes an event, and a response that starts with the first.

Knows nothing about what the events say.
"""

from typing import Any

import msgspec
from aiohttp import web

from aioserve.server.errors import to_wire

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


def event(struct: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(struct) + b"\n\n"


class EventStream:
    """A response whose headers leave with its first event.

    Until then a failure can still be answered with a status code of its own.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        """Whether the client has seen a status code."""
        return self._response is not None

    async def send(self, events: bytes) -> None:
        """Write whole events; waits while the client's socket is full."""
        if self._response is None:
            self._response = web.StreamResponse(headers=_HEADERS)
            await self._response.prepare(self._request)
        await self._response.write(events)

    async def end(self, events: bytes = DONE) -> web.StreamResponse:
        """Write the last events and close the stream."""
        await self.send(events)
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def fail(self, error: BaseException) -> web.StreamResponse:
        """Tell a client that already reads what went wrong, and close the stream."""
        _status, body = to_wire(error)
        return await self.end(event(body))
