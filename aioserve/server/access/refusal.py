"""The answer to bytes that never become a request: bad HTTP, a head too long, too many clients.

Knows how it is written to a socket, as no handler hears of it.
"""

from http import HTTPStatus
from typing import NamedTuple

import msgspec

from aioserve.server.protocol import ErrorInfo, ErrorResponse

_encoder = msgspec.json.Encoder()


class Refusal(NamedTuple):
    """What a client is told that no handler hears of."""

    status: HTTPStatus
    message: str
    code: str
    request_id: str  # in the log, but for connections that are too many

    @property
    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        info = ErrorInfo(message=self.message, type=kind, code=self.code)
        return _encoder.encode(ErrorResponse(error=info))

    def whole(self, headers: str = "") -> bytes:
        """The answer as it is sent, with its head."""
        body = self.body
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}"
            f"X-Request-Id: {self.request_id}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body
