"""What operators and tools ask: models, health, metrics, version; and the admin routes.

Only the admin routes change anything, and they exist only where the settings enable them.
"""

import time
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from aioserve.engine import AsyncEngine
from aioserve.errors import ConfigError, PolicyError, RequestError
from aioserve.server.errors import UnknownModelError
from aioserve.server.keys import ENGINE
from aioserve.server.protocol import ModelCard, ModelList
from aioserve.version import __version__

_encoder = msgspec.json.Encoder()
_STARTED = int(time.time())


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return _json(ModelList(data=[_card(request.app[ENGINE])]))


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; a name may hold slashes."""
    card = _card(request.app[ENGINE])
    asked = request.match_info["id"]
    if asked != card.id:
        raise UnknownModelError(
            f"model {asked!r} does not exist; this server has {card.id!r}", param="model"
        )
    return _json(card)


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 if a new request would be taken and served, else 503 with the reason.

    `dead`: the engine has stopped. `draining`: the server shuts down. `failing`: the policy did
    something wrong, and has not run a step since, for at most ten seconds after the last time.
    """
    engine = request.app[ENGINE]
    if engine.errored is not None:
        reason = f"{type(engine.errored).__name__}: {engine.errored}"
        return _json({"status": "dead", "reason": reason}, status=503)
    if engine.is_draining:
        return _json({"status": "draining", "reason": "the server is shutting down"}, status=503)
    if engine.policy_error is not None:
        return _json({"status": "failing", "reason": str(engine.policy_error)}, status=503)
    return _json({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    return web.Response(
        body=request.app[ENGINE].metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    return _json({"version": __version__})


class PolicyChange(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /admin/policy."""

    policy: str
    options: dict[str, Any] = {}


async def switch_policy(request: web.Request) -> web.Response:
    """POST /admin/policy: another policy from the next step on; a bad one changes nothing."""
    try:
        change = msgspec.json.decode(await request.read(), type=PolicyChange)
    except msgspec.DecodeError as error:
        raise RequestError(f"the body must be a policy and its options: {error}") from error
    engine = request.app[ENGINE]
    before = engine.config.scheduler
    try:
        engine.switch_policy(change.policy, change.options)
    except (ConfigError, PolicyError) as error:
        raise RequestError(str(error), param="policy") from error
    return _json(
        {
            "policy": change.policy,
            "options": change.options,
            "before": {"policy": before.policy, "options": before.options},
        }
    )


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /admin/reset_prefix_cache: forget cached prefixes; running requests go on."""
    return _json({"empty": request.app[ENGINE].reset_prefix_cache()})


def _card(engine: AsyncEngine) -> ModelCard:
    return ModelCard(
        id=engine.config.model.served_name,
        created=_STARTED,
        max_model_len=engine.max_model_len,
    )


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(body), status=status, content_type="application/json")
