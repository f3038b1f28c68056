"""The check before every handler: which key a request has, which fields and hints it may set.

Knows requests and keys; `access` counts, in its `accounts`.
"""

import contextlib
import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from aioserve.engine.prompt import Conversation
from aioserve.errors import ForbiddenError, RequestError, UnknownKeyError
from aioserve.server.access.access import ACCESS
from aioserve.server.access.keys import Claim, Key, Leave
from aioserve.server.access.origins import check_page, is_near
from aioserve.server.body import values_of
from aioserve.server.errors import TIMEOUT_HEADER, FarLookerError, style_of
from aioserve.server.fields import CACHED_FOR, HEADERS, HEADERS_IN_MS, LABELS, MAPS
from aioserve.server.images import Shown
from aioserve.server.running import CHAIN, ENGINE, KEY, NEEDS, OWN_HINTS

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
        if (style := style_of(request.path)) is not None and style.key_header:
            way = f"'{style.key_header}: KEY' or {way}"
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
    noted = frozenset(request)  # asking it for what is not there takes a microsecond each
    key = request[KEY] if KEY in noted else None
    stated = fields.pop("hints", None)
    if stated or may_hint(request, body, noted):
        from aioserve.server.access.hints import hints_of

        if hints := hints_of(request, body, stated, key):
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
    request: web.Request, make_claim: Callable[[], Claim] = Claim
) -> contextlib.AbstractAsyncContextManager[Leave]:
    """Inside the block what is asked for counts for its key, whatever it is. `make_claim` is called
    for a key with limits, by default for one sequence. Raises `KeyLimitError`, or `ForbiddenError`
    for more than the key may ever have.
    """
    key = request.get(KEY)
    if key is None or not key.is_counted:
        return _UNCOUNTED
    return request.app[ACCESS].entrance.entered(key.name, make_claim())


def num_at_once(request: web.Request, num_prompts: int) -> int:
    """Return how many prompts of a body run at once that could bring any number: as many as there
    are seats, or half of what its key may have beside them.
    """
    num_seats = request.app[ENGINE].config.scheduler.max_num_seqs
    key = request.get(KEY)
    if key is not None and key.max_requests is not None:
        num_seats = min(num_seats, max(1, key.max_requests // 2))
    return min(num_prompts, num_seats)


def estimated_tokens(prompt: object) -> int:
    """Return tokens of a prompt that is not tokenized yet, for the limits of its key: a token for
    four bytes of text, and nothing for images.
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
    """Return the owner of what the request makes: the name of its key, or "" where none is
    needed.
    """
    key = request.get(KEY)
    return "" if key is None else key.name


def reach_of(request: web.Request) -> str:
    """Return the owner whose requests and responses this one may see and end: the name of its key,
    or "" for all owners, with an admin key or on a server without keys.
    """
    key = request.get(KEY)
    return "" if key is None or key.admin else key.name


async def _leave_nothing() -> None:
    pass


_UNCOUNTED = contextlib.nullcontext(_leave_nothing)


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _shown(request: web.Request) -> str | None:
    style = style_of(request.path)
    if style is not None and style.key_header and style.key_header in request.headers:
        return request.headers[style.key_header]
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


# The places of hints besides a body's `hints`. What reads them, `access.hints`, is loaded for a
# request that has some.


_ALL_HEADERS = frozenset(map(str.lower, (*sum(HEADERS.values(), ()), *HEADERS_IN_MS.values())))
_NOTED = frozenset((CHAIN, CACHED_FOR, OWN_HINTS))


def may_hint(request: web.Request, body: Any, noted: Collection[object]) -> bool:
    """Return whether a request may have a hint that is not in its body's `hints`; `noted` are the
    keys of what is noted on it.
    """
    kind: Any = type(body)
    get_values, nothing = _hint_values(kind)
    says_none = get_values(body) == nothing and _NOTED.isdisjoint(noted)
    return not (says_none and _ALL_HEADERS.isdisjoint(map(str.lower, request.headers)))


@cache
def _hint_values(kind: Any) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[None, ...]]:
    names = [*MAPS, "nvext", "metadata", *sum(LABELS.values(), ())]
    known = [name for name in names if hasattr(kind, name)]
    return values_of(*known), (None,) * len(known)
