"""Hints over HTTP: the body's own `hints`, and the names and headers that others have for them.

What says the same to another engine or gateway says it here too. Knows requests and bodies; what a
hint is, `aioserve.request` knows.
"""

import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from aioserve.errors import ForbiddenError, RequestError
from aioserve.request import (
    MAX_HINTS,
    PREDICTED_OUTPUT_TOKENS,
    SESSION,
    SLO_CLASS,
    SLO_TPOT,
    SLO_TTFT,
    Hints,
    check_hints,
)
from aioserve.server.access.keyring import Key
from aioserve.server.keys import CHAIN, OWN_HINTS

#: Headers of routers, gateways and agents, by the hint that each one states; the first that a
#: request has counts. Dynamo's, Claude Code's and Codex's are sessions; those of llm-d and of the
#: gateway API name objectives and flows.
HEADERS: Mapping[str, tuple[str, ...]] = {
    SESSION: (
        *("X-Session-Id", "X-Dynamo-Session-Id", "X-Claude-Code-Session-Id"),
        *("session-id", "session_id"),  # new and old
    ),
    SLO_CLASS: (
        "X-Request-Class",
        "x-gateway-inference-objective",
        "x-llm-d-inference-objective",
    ),
    "fairness_id": ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"),
}
#: Headers of llm-d in milliseconds, by the hint, in seconds.
HEADERS_IN_MS: Mapping[str, str] = {SLO_TTFT: "x-slo-ttft-ms", SLO_TPOT: "x-slo-tpot-ms"}
#: Fields of bodies that are maps of hints: of vLLM, and of its clients.
MAPS = ("vllm_xargs", "kv_hints")
#: Labels of bodies, by the hint that each one states; the first that a body has counts.
LABELS: Mapping[str, tuple[str, ...]] = {SESSION: ("session_id", "prompt_cache_key")}
#: Names of hints in maps of vLLM and Dynamo that are others here.
FOREIGN_NAMES: Mapping[str, str] = {"osl": PREDICTED_OUTPUT_TOKENS}


def hints_of(request: web.Request, body: Any, stated: Hints | None, key: Key | None) -> Hints:
    """All hints of a request. What the body states as hints goes before its labels, those before
    headers, and these before the chain of responses; a label that can be no hint stays a label.

    Raises `RequestError` for what the body states as hints and is none, `ForbiddenError` if `key`
    may not set it. Labels and headers that the key may not set, or for which there is no room,
    are passed over.
    """
    found: Hints = {}
    for name in MAPS:
        found |= _own_names(_checked(name, getattr(body, name, None)))
    found |= _own_names(_agent_hints(body))
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
    """The hints of what a client says for another purpose."""
    return _possible({SESSION: request.get(CHAIN)}) | _headers(request) | _labels(body)


def _labels(body: Any) -> Hints:
    """The hints among what a body says for another purpose."""
    labels: dict[str, Any] = {}
    for name, fields in LABELS.items():
        given = (getattr(body, field, None) for field in fields)
        labels[name] = next((value for value in given if isinstance(value, str) and value), None)
    metadata = getattr(body, "metadata", None)
    if isinstance(metadata, dict):
        labels = metadata | {name: value for name, value in labels.items() if value is not None}
    return _possible(labels)


def _possible(labels: Mapping[str, Any]) -> Hints:
    """Those of the labels that can be hints."""
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
    for name, headers in HEADERS.items():
        for header in headers:
            if text := request.headers.get(header):
                found.setdefault(name, text)
    for name, header in HEADERS_IN_MS.items():
        if (text := request.headers.get(header)) is not None:
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


def _agent_hints(body: Any) -> Hints:
    """Those of Dynamo's `nvext`, of which nothing else is served."""
    nvext = getattr(body, "nvext", None)
    if nvext is None:
        return {}
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
