"""Brings `user`, hints and headers of OpenAI's API to the policy inside vLLM: ASGI middleware.

    vllm serve MODEL --scheduler-cls aioserve.vllm.Scheduler \\
        --middleware aioserve.vllm.HintsMiddleware

vLLM's API server drops what its engine has no field for. Only `vllm_xargs` reaches a scheduler, so
what a client says elsewhere is written there, under the names that aioserve's own server knows.
What the body states in `vllm_xargs` itself counts more. Replies are not touched.
"""

import math
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import msgspec

from aioserve.server.errors import TIMEOUT_HEADER
from aioserve.server.fields import HEADERS, HEADERS_IN_MS
from aioserve.vllm.requests import DEADLINE, USER

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

#: Routes whose bodies have a field `vllm_xargs`, behind whatever prefix the server has.
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
#: Bytes up to which a body is read; a longer one goes on as it came.
MAX_BODY = 64 * 2**20
XARGS = "vllm_xargs"


class HintsMiddleware:
    """The middleware of one server: it reads bodies for routes that generate, and no others."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI says."""
        if not (
            scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(ROUTES)
        ):
            await self._app(scope, receive, send)
            return
        came = [await receive()]
        size = _size(came[0])
        while came[-1].get("more_body") and size <= MAX_BODY:
            came.append(await receive())
            size += _size(came[-1])
        if came[-1]["type"] == "http.request" and not came[-1].get("more_body"):
            body = b"".join(message.get("body", b"") for message in came)
            written = with_hints(body, scope["headers"])
            if written is not body:
                came = [{"type": "http.request", "body": written, "more_body": False}]
                scope = {**scope, "headers": _resized(scope["headers"], len(written))}
        read = iter(came)

        async def receive_again() -> Message:
            message = next(read, None)
            return message if message is not None else await receive()

        await self._app(scope, receive_again, send)


def with_hints(body: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return a JSON body whose `vllm_xargs` say what body and headers say elsewhere; the same bytes
    if there is nothing to add, or if the body is one that vLLM will refuse.
    """
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    if not isinstance(tree, dict):
        return body
    stated = tree.get(XARGS)
    if not isinstance(stated, dict | None):
        return body
    by_name = {name.lower(): value for name, value in headers}
    found = dict([*_of_headers(by_name), *_of_body(tree)]) | (stated or {})
    if found == (stated or {}):
        return body
    return msgspec.json.encode(tree | {XARGS: found})


def _of_body(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a body says outside `vllm_xargs`: of two under one name, the last one counts."""
    metadata = tree.get("metadata")
    if isinstance(metadata, dict) and isinstance(user := metadata.get("user_id"), str) and user:
        yield USER, user  # of Anthropic's API
    if isinstance(user := tree.get("user"), str) and user:
        yield USER, user
    hints = tree.get("hints")
    if isinstance(hints, dict):
        yield from hints.items()


def _of_headers(headers: dict[bytes, bytes]) -> Iterator[tuple[str, str | float]]:
    """Yield the hints of a request's headers, whose names are lower-case."""

    def text(name: str) -> str:
        return headers.get(name.lower().encode(), b"").decode("latin-1").strip()

    for hint, names in HEADERS.items():
        if value := next(filter(None, map(text, names)), ""):
            yield hint, value
    for hint, name in HEADERS_IN_MS.items():
        if (number := _number(text(name))) is not None:
            yield hint, number / 1000
    if value := text(TIMEOUT_HEADER):
        number = _number(value)
        yield DEADLINE, value if number is None else number  # a text is refused by its name


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None  # JSON has no other numbers


def _size(message: Message) -> int:
    return len(message.get("body", b""))


def _resized(headers: list[tuple[bytes, bytes]], size: int) -> list[tuple[bytes, bytes]]:
    """Return the headers of a body that has `size` bytes."""
    others = [pair for pair in headers if pair[0].lower() != b"content-length"]
    return [*others, (b"content-length", b"%d" % size)]
