"""The check before every handler: which key a request has, and which fields that key may set.

Knows requests and keys; what is counted where, `access` knows.
"""

import contextlib
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from aioserve.engine.prompt import Conversation
from aioserve.errors import ForbiddenError, RequestError, UnknownKeyError
from aioserve.server.access.accounts import ONE, Claim, Leave
from aioserve.server.access.hosts import is_near
from aioserve.server.access.keyring import Key
from aioserve.server.access.origins import check_page
from aioserve.server.errors import TIMEOUT_HEADER, FarLookerError, is_for_anthropic
from aioserve.server.hints import hints_of
from aioserve.server.images import Shown
from aioserve.server.keys import ACCESS, ENGINE, KEY, NEEDS

BYTES_PER_TOKEN = 4  # of text; a guess, which holds until the prompt is tokenized

TRACE_HEADERS = ("traceparent", "tracestate")  # the trace of a request, in W3C's format


@web.middleware
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No handler runs, and no body is read, for a client without the key that its route needs; nor,
    where that is an operator's, for pages of others in an operator's browser.

    Raises `UnknownKeyError` or `ForbiddenError`, as `FarLookerError` for a client elsewhere that
    would look on where there are no keys.
    """
    access = request.app[ACCESS]
    needed = request.app[NEEDS].get(_route(request), "key")  # of no route, too: nothing is told
    if needed in ("admin_key", "admin_key_if_any", "looker"):
        check_page(request)
    if not access.keyring.keys:
        if needed == "looker" and not is_near(request) and not access.is_open_to_all:
            raise FarLookerError(
                f"{request.path} shows all clients' requests, and this server has no keys: it "
                "answers clients on this machine alone. Give the server keys, connect by 'ssh -L', "
                "or start it with --without-keys open"
            )
        return await handler(request)
    if needed == "admin_key_if_any":  # else its port is what protects it
        needed = "admin_key" if any(key.admin for key in access.keyring.keys) else "nothing"
    if needed == "nothing":
        return await handler(request)
    shown = _shown(request)
    if shown is None:
        way = "'Authorization: Bearer KEY'"
        if is_for_anthropic(request.path):
            way = f"'x-api-key: KEY' or {way}"
        raise UnknownKeyError(f"{request.path} needs an API key: send {way}")
    key = access.keyring.find(shown)
    if key is None:
        raise UnknownKeyError("this API key is not known here")
    request[KEY] = key
    if needed in ("admin_key", "looker") and not key.admin:
        raise ForbiddenError(f"key {key.name!r} is not an operator's: {request.path} needs one")
    return await handler(request)


def allowed_fields(request: web.Request, body: Any) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngine.add_request` for what a body says, with what headers and
    the key add. Raises `ForbiddenError` for a priority or a hint beyond the key's, `RequestError`
    for a header, or what stands for a hint, that makes no sense.
    """
    fields: dict[str, Any] = body.request_fields()
    fields["client"] = request.remote or ""
    if request.app[ENGINE].config.server.otlp_traces_endpoint is not None:
        headers = {name: request.headers.get(name) for name in TRACE_HEADERS}
        fields["trace_headers"] = {name: text for name, text in headers.items() if text}
    if (text := request.headers.get(TIMEOUT_HEADER)) is not None:
        fields["timeout"] = min(_seconds(text), fields.get("timeout", math.inf))
    key = request.get(KEY)
    if hints := hints_of(request, body, fields.pop("hints", None), key):
        fields["hints"] = hints
    if key is not None:
        fields["key_name"] = key.name
        fields.setdefault("user", key.name)
        _check_priority(key, fields)
        if request.app[ACCESS].settings.cache_per_key:
            # No salt of a key holds a NUL: no client can write itself into another's share.
            shared_with = key.cache_salt or key.name
            fields["cache_salt"] = f"{shared_with}\0{fields.get('cache_salt') or ''}"
    return fields


def entered(
    request: web.Request, claim: Claim = ONE
) -> contextlib.AbstractAsyncContextManager[Leave]:
    """Inside the block what is asked for counts for its key, whatever it is. Raises
    `KeyLimitError`, or `ForbiddenError` for more than the key may ever have.
    """
    key = request.get(KEY)
    if key is None or not key.is_counted:
        return contextlib.nullcontext(_leave_nothing)
    return request.app[ACCESS].entrance.entered(key.name, claim)


def num_at_once(request: web.Request, num_prompts: int) -> int:
    """How many prompts of a body run at once that could bring any number: as many as there are
    seats, or half of what its key may have beside them.
    """
    num_seats = request.app[ENGINE].config.scheduler.max_num_seqs
    key = request.get(KEY)
    if key is not None and key.max_requests is not None:
        num_seats = min(num_seats, max(1, key.max_requests // 2))
    return min(num_prompts, num_seats)


def estimated_tokens(prompt: object) -> int:
    """Tokens of a prompt that is not tokenized yet, for the limits of its key: a token for four
    bytes of text, and nothing for images.
    """
    match prompt:
        case str():
            return -(-len(prompt.encode(errors="surrogatepass")) // BYTES_PER_TOKEN)
        case Shown():
            return estimated_tokens(prompt.conversation)
        case Conversation():
            return estimated_tokens(prompt.messages)
        case Mapping():
            return estimated_tokens(prompt.get("content", prompt.get("text", "")))
        case [int(), *_] | array():
            return len(prompt)
        case Sequence():
            return sum(map(estimated_tokens, prompt))
        case _:
            return len(getattr(prompt, "token_ids", ()))


def owner_of(request: web.Request) -> str:
    """The owner of what the request makes: the name of its key, or "" where none is needed."""
    key = request.get(KEY)
    return "" if key is None else key.name


def reach_of(request: web.Request) -> str:
    """The owner whose requests and responses this one may see and end: the name of its key, or ""
    for all owners, with an admin key or on a server without keys.
    """
    key = request.get(KEY)
    return "" if key is None or key.admin else key.name


async def _leave_nothing() -> None:
    pass


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _shown(request: web.Request) -> str | None:
    if is_for_anthropic(request.path) and "x-api-key" in request.headers:
        return request.headers["x-api-key"]
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _check_priority(key: Key, fields: dict[str, Any]) -> None:
    limit = key.most_urgent_priority
    if limit is None:
        return
    given = fields.get("priority")
    if given is None:
        fields["priority"] = max(0, limit)
    elif given < limit:
        raise ForbiddenError(
            f"priority {given} is more urgent than key {key.name!r} may ask for: {limit} or larger",
            param="priority",
        )


def _seconds(text: str) -> float:
    try:
        seconds = math.nan if "_" in text or not text.isascii() else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(
            f"the header {TIMEOUT_HEADER} must be a number of seconds above 0, got {text[:32]!r}",
            param=TIMEOUT_HEADER,
        )
    return seconds
