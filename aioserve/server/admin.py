"""What operators and tools ask: models, health, metrics, version; and the admin routes.

Only the admin routes change anything, and they exist only where the settings enable them.
"""

from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST

from aioserve.engine import EngineClient
from aioserve.engine.questions import (
    Health,
    HowAreYou,
    Readiness,
    ResetPrefixCache,
    ShowMetrics,
    SwitchPolicy,
)
from aioserve.errors import ConfigError, PolicyError, RequestError
from aioserve.server.body import decode_body
from aioserve.server.keys import ENGINE, HTTP_COUNTS
from aioserve.server.protocol import ModelCard, ModelList, RequestPart
from aioserve.server.validation import BodyDecoder
from aioserve.version import __version__

_encoder = msgspec.json.Encoder()


class Alive(msgspec.Struct, kw_only=True):
    """Whether the process should go on."""

    status: Literal["ok", "silent", "dead"]
    reason: str | UnsetType = UNSET


class Ready(msgspec.Struct, kw_only=True):
    """Whether a new request would be served now, or why not: the words of `Health`. If it would
    be, `reason` says what an operator should mend nevertheless.
    """

    status: Readiness
    reason: str | UnsetType = UNSET


class Version(msgspec.Struct):
    """Of the package."""

    version: str


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models: the model first."""
    return _json(ModelList(data=_cards(request.app[ENGINE])))


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; a name may hold slashes."""
    engine, asked = request.app[ENGINE], request.match_info["id"]
    engine.adapters.check_name(asked)
    return _json(next(card for card in _cards(engine) if card.id == asked))


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 if the event loop answers and the engine is not dead, else 503 and why."""
    return tell_alive(await request.app[ENGINE].ask(HowAreYou()))


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 if a new request would be served now, else 503 and why not."""
    return tell_ready(await request.app[ENGINE].ask(HowAreYou()))


def tell_alive(health: Health) -> web.Response:
    """The answer of /health."""
    if health.status == "dead" or health.status == "silent":
        return _json(Alive(status=health.status, reason=health.reason), status=503)
    return _json(Alive(status="ok"))


def tell_ready(health: Health) -> web.Response:
    """The answer of /ready."""
    if health.status == "ready":
        return _json(Ready(status="ready", reason=health.reason or UNSET))
    return _json(Ready(status=health.status, reason=health.reason), status=503)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    text = await request.app[ENGINE].ask(ShowMetrics(request.app[HTTP_COUNTS].tell()))
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    return _json(Version(__version__))


class PolicyRequest(RequestPart, kw_only=True):
    """Body of POST /admin/policy."""

    policy: str
    options: dict[str, Any] | None = None


class PolicyName(msgspec.Struct):
    """A policy and its options."""

    policy: str
    options: dict[str, Any]


class PolicyChange(PolicyName):
    """Response of /admin/policy: what there is, and what there was."""

    before: PolicyName


class CacheReset(msgspec.Struct):
    """Response of /admin/reset_prefix_cache."""

    empty: bool


policy_decoder = BodyDecoder(PolicyRequest, {}, shared={}, hints=())


async def switch_policy(request: web.Request) -> web.Response:
    """POST /admin/policy: another policy from the next step on; a bad one changes nothing."""
    body = await decode_body(request, policy_decoder)
    options = body.options or {}
    try:
        before = await request.app[ENGINE].ask(SwitchPolicy(body.policy, options))
    except (ConfigError, PolicyError) as error:
        raise RequestError(str(error), param="policy") from error
    return _json(PolicyChange(body.policy, options, PolicyName(before.policy, before.options)))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /admin/reset_prefix_cache: forget cached prefixes; running requests go on."""
    return _json(CacheReset(await request.app[ENGINE].ask(ResetPrefixCache())))


def _cards(engine: EngineClient) -> list[ModelCard]:
    model, longest = engine.config.model, engine.max_model_len
    base = ModelCard(
        id=model.served_name,
        created=engine.started_at,
        max_model_len=longest,
        root=model.model,
        sampling=engine.sampling_defaults,
    )
    adapters = engine.adapters.paths.items()
    return [base] + [
        ModelCard(
            id=name,
            created=engine.started_at,
            max_model_len=longest,
            root=str(path),
            parent=base.id,
            sampling=base.sampling,
        )
        for name, path in adapters
    ]


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(body), status=status, content_type="application/json")
