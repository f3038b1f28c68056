"""Hints over HTTP: a body's own `hints`, and the names and headers that others have for them.

What says the same to another engine or gateway says it here too. Knows requests and bodies; what a
hint is, `aioserve.request` knows.
"""

import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from aioserve.errors import ForbiddenError, RequestError
from aioserve.request import (
    CACHE_SECONDS,
    MAX_HINTS,
    PREDICTED_OUTPUT_TOKENS,
    SESSION,
    Hints,
    check_hints,
)
from aioserve.server.access.keys import Key
from aioserve.server.fields import CACHED_FOR, HEADERS, HEADERS_IN_MS, LABELS, MAPS
from aioserve.server.running import CHAIN, OWN_HINTS

#: Names of hints in maps of vLLM and Dynamo that are others here.
FOREIGN_NAMES: Mapping[str, str] = {"osl": PREDICTED_OUTPUT_TOKENS}


def hints_of(request: web.Request, body: Any, stated: Hints | None, key: Key | None) -> Hints:
    """Return all hints of a request. What the body states as hints goes before its labels, those
    before headers, and these before the chain of responses; a `ttl` of `cache_control` goes before
    labels. A label that can be no hint stays a label.

    Raises `RequestError` for what the body states as hints and is none, `ForbiddenError` if `key`
    may not set it. Labels and headers that the key may not set, or for which there is no room,
    are passed over.
    """
    found: Hints = {}
    for name in MAPS:
        if (given := getattr(body, name, None)) is not None:
            found |= _own_names(_checked(name, given))
    if (nvext := getattr(body, "nvext", None)) is not None:
        found |= _own_names(_agent_hints(nvext))
    found |= stated or {}
    allowed = None if key is None else key.hints
    if allowed is not None:
        for name in found:
            if name not in allowed:
                raise ForbiddenError(
                    f"hint {name!r} is not one that key {key and key.name!r} may set: "
                    f"{', '.join(allowed) or 'it may set none'}",
                    param=f"hints.{name}",
                )
    if len(found) < MAX_HINTS:
        for name, value in _unstated(request, body).items():
            is_allowed = allowed is None or name in allowed
            if len(found) < MAX_HINTS and name not in found and is_allowed:
                found[name] = value
    if (own := request.get(OWN_HINTS)) is not None:
        found |= own
    return found


def _own_names(given: Hints) -> Hints:
    """Hints of another engine's map by the names that they have here; such a name goes before."""
    return {FOREIGN_NAMES.get(name, name): value for name, value in given.items()} | {
        name: value for name, value in given.items() if name not in FOREIGN_NAMES
    }


def _unstated(request: web.Request, body: Any) -> Hints:
    """Return the hints of what a client says for another purpose."""
    found: Hints = {}
    if (chain := request.get(CHAIN)) is not None:
        found |= _possible({SESSION: chain})
    found |= _headers(request)
    if labels := _labels(body):
        found |= _possible(labels)
    if (seconds := request.get(CACHED_FOR)) is not None:  # a `ttl`, which names no hint by itself
        found |= _possible({CACHE_SECONDS: seconds})
    return found


def _labels(body: Any) -> dict[str, Any]:
    """Return what a body says for another purpose, by names that may be those of hints."""
    labels: dict[str, Any] = {}
    for name, fields in LABELS.items():
        for field in fields:
            value = getattr(body, field, None)
            if isinstance(value, str) and value:
                labels[name] = value
                break
    metadata = getattr(body, "metadata", None)
    return metadata | labels if isinstance(metadata, dict) else labels


def _possible(labels: Mapping[str, Any]) -> Hints:
    """Return the labels that have the name and the type of a hint."""
    found: Hints = {}
    for name, value in labels.items():
        if value is None:
            continue
        try:
            check_hints({name: value})
        except RequestError:
            continue
        found[name] = value
    return found


def _headers(request: web.Request) -> Hints:
    found: dict[str, Any] = {}
    get = request.headers.get
    for name, headers in HEADERS.items():
        for header in headers:
            if text := get(header):
                found.setdefault(name, text)
    for name, header in HEADERS_IN_MS.items():
        if (text := get(header)) is not None:
            try:
                found[name] = float(text) / 1000
            except ValueError:
                found[name] = math.nan
            if not 0 < found[name] < math.inf:
                raise RequestError(
                    f"the header {header} must be a number of milliseconds above 0, got "
                    f"{text[:32]!r}",
                    param=header,
                )
    for name in list(found):
        try:
            check_hints({name: found[name]})
        except RequestError as error:
            raise RequestError(f"the header for the hint {name}: {error}", param=name) from error
    return found


def _agent_hints(nvext: object) -> Hints:
    """Return those of Dynamo's `nvext`, of which nothing else is served."""
    if not isinstance(nvext, dict):
        raise RequestError(f"nvext must be an object, got {nvext!r:.80}", param="nvext")
    for name, value in nvext.items():
        if name != "agent_hints" and value:
            raise RequestError(
                f"nvext.{name!s:.80} is not supported by this server", param=f"nvext.{name!s:.80}"
            )
    return _checked("nvext.agent_hints", nvext.get("agent_hints"))


def _checked(where: str, given: Any) -> Hints:
    if given is None:
        return {}
    try:
        check_hints(given)
    except RequestError as error:
        raise RequestError(f"{where}: {error}", param=where) from error
    return dict(given)
