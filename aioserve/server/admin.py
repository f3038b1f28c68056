"""What operators and tools ask: models, health, metrics, version. Nothing here changes anything.

A model's card says what its engine and its format of replies can do.
"""

import asyncio
import sys
from importlib import import_module
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aioserve.engine import EngineClient
from aioserve.engine.chat.chat_format import ChatFormat
from aioserve.engine.operations import HealthCheck, ShowMetrics
from aioserve.engine.operations.command import Health, Readiness
from aioserve.errors import UnknownKeyError, UnknownModelError
from aioserve.params import RANGES, RUNNER_PARAMETERS
from aioserve.server.body import Route, json_response
from aioserve.server.middleware import HTTP_COUNTS
from aioserve.server.protocol import Architecture, Capability, ModelCard, ModelList
from aioserve.server.running import CHAT_FORMAT, ENGINE
from aioserve.support import __version__


class Alive(msgspec.Struct, kw_only=True):
    """The response of GET /livez: whether the process should go on."""

    status: Literal["ok", "silent", "dead"]
    reason: str | UnsetType = UNSET


class Healthy(msgspec.Struct, kw_only=True):
    """The verdict of /ready in the words of llama.cpp and others: `ok`, or why not."""

    status: Literal["ok"] | Readiness
    reason: str | UnsetType = UNSET


class Ready(msgspec.Struct, kw_only=True):
    """Whether a new request would be served now, or why not: the words of `Health`. If it would
    be, `reason` says what an operator should mend nevertheless.
    """

    status: Readiness
    reason: str | UnsetType = UNSET


class Version(msgspec.Struct):
    """Response of GET /version: the version of the aioserve package."""

    version: str


async def list_models(request: web.Request) -> web.Response:
    """Answer GET /v1/models: the model under each of its names, then the LoRA adapters."""
    return json_response(ModelList(data=_cards(request)))


async def get_model(request: web.Request) -> web.Response:
    """Answer GET /v1/models/{id}, where the id may hold slashes. Raises `UnknownModelError`."""
    asked = request.match_info["id"]
    request.app[ENGINE].adapters.check_name(asked)
    return json_response(next(card for card in _cards(request) if card.id == asked))


async def probe(request: web.Request) -> web.Response:
    """GET /livez: 200 if the event loop answers and the engine is not dead. GET /health and /ready:
    200 if a new request would be served now. Else 503, and why not.
    """
    return TELLS[request.path](await request.app[ENGINE].ask(HealthCheck()))


def tell_alive(health: Health) -> web.Response:
    """Return the response of /livez: 503 if the engine is dead or does not answer."""
    if health.status == "dead" or health.status == "silent":
        return json_response(Alive(status=health.status, reason=health.reason), status=503)
    return json_response(Alive(status="ok"))


def tell_health(health: Health) -> web.Response:
    """Return the response of /health: that of /ready, with `ok` for `ready`."""
    if health.status == "ready":
        return json_response(Healthy(status="ok", reason=health.reason or UNSET))
    return json_response(Healthy(status=health.status, reason=health.reason), status=503)


def tell_ready(health: Health) -> web.Response:
    """Return the response of /ready: 503 unless the engine takes requests."""
    if health.status == "ready":
        return json_response(Ready(status="ready", reason=health.reason or UNSET))
    return json_response(Ready(status=health.status, reason=health.reason), status=503)


#: By path, how the engine's word is told to a probe.
TELLS = {"/livez": tell_alive, "/health": tell_health, "/ready": tell_ready}


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    text = await request.app[ENGINE].ask(ShowMetrics(request.app[HTTP_COUNTS].tell()))
    if "prometheus_client" not in sys.modules:  # the engine is elsewhere; streams go on meanwhile
        await asyncio.to_thread(import_module, "prometheus_client")
    from prometheus_client import CONTENT_TYPE_LATEST

    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def version(request: web.Request) -> web.Response:
    """GET /version: the version of the aioserve package."""
    return json_response(Version(__version__))


def _cards(request: web.Request) -> list[ModelCard]:
    return model_cards(request.app[ENGINE], request.app.get(CHAT_FORMAT))


ROUTES = (
    Route(
        "GET",
        "/v1/models",
        list_models,
        "The model that is served, and its adapters.",
        ModelList,
    ),
    Route(
        "GET",
        "/v1/models/{id:.+}",
        get_model,
        "One of them by its name, which may hold slashes.",
        ModelCard,
        raises=(UnknownModelError,),
    ),
    Route(
        "GET",
        "/livez",
        probe,
        "Whether the process should go on.",
        Alive,
        statuses=(200, 503),
        needs="nothing",
    ),
    Route(
        "GET",
        "/health",
        probe,
        "Whether a new request would be served now, as load balancers ask.",
        Healthy,
        statuses=(200, 503),
        needs="nothing",
    ),
    Route(
        "GET",
        "/ready",
        probe,
        "Whether a new request would be served now.",
        Ready,
        statuses=(200, 503),
        needs="nothing",
    ),
    Route(
        "GET",
        "/metrics",
        metrics,
        "Counters in Prometheus' format.",
        str,
        raises=(UnknownKeyError,),
        needs="nothing",  # unless the settings say otherwise
    ),
    Route("GET", "/version", version, "The version of the server.", Version),
)

#: What is asked by machines that have no key.
PROBES = tuple(route for route in ROUTES if route.needs == "nothing")


# The cards of the models that are served: what the engine and the format of replies can do. Knows
# which fields of chat depend on that. Knows nothing about HTTP.


#: Fields of chat by which replies are sampled: the numbers of `RANGES`, so that a new one is told
#: by itself, but for those that OpenRouter's list leaves out; and those that are no number, or
#: have another name there.
_SAMPLING = frozenset(
    (
        *(RANGES.keys() - {"n", "min_tokens", "truncate_prompt_tokens", "prompt_logprobs"}),
        *("logit_bias", "max_completion_tokens", "stop", "top_logprobs"),
    )
)
_STRUCTURED = ("response_format", "structured_outputs")
_TOOLS = ("parallel_tool_calls", "tool_choice", "tools")
_REASONING = ("include_reasoning", "reasoning_effort")


def model_cards(engine: EngineClient, chat_format: ChatFormat | None) -> list[ModelCard]:
    """Return a card of each name of the model, then one of each adapter; no `chat_format`:
    no chat.
    """
    model, longest = engine.config.model, engine.max_model_len
    sees = not engine.media.refuses_images
    inputs = ("text", *(("image",) if sees else ()))
    inputs += () if engine.media.refuses_videos else ("video",)
    calls = chat_format is not None and chat_format.takes_tools
    thinks = chat_format is not None and chat_format.tells_apart
    capabilities: dict[Capability, bool] = {
        "completion": True,
        "embedding": engine.supports_embeddings,
        "vision": sees,
        "tools": calls,
        "thinking": thinks,
    }
    # The grammars of a reply are masks of logits, which a simulated runner does not have.
    is_bound = engine.config.runner.runner == "model" and bool(engine.model_info.eos_token_ids)
    parameters = [*(_SAMPLING - (RUNNER_PARAMETERS.keys() - engine.runner_parameters))]
    parameters += _STRUCTURED if is_bound else ()
    parameters += [*(_TOOLS if calls else ()), *(_REASONING if thinks else ())]
    if chat_format is not None and chat_format.thinking is not None and is_bound:
        parameters.append("thinking_token_budget")
    base = ModelCard(
        id=model.served_name,
        created=engine.started_at,
        max_model_len=longest,
        context_length=longest,
        root=model.model,
        sampling=engine.model_info.sampling_defaults,
        architecture=Architecture(modality=f"{'+'.join(inputs)}->text", input_modalities=inputs),
        capabilities=[name for name, has in capabilities.items() if has],
        supported_parameters=sorted(parameters),
    )
    change = msgspec.structs.replace
    return [change(base, id=name) for name in model.served_names] + [
        change(base, id=name, root=str(path), parent=base.id)
        for name, path in engine.adapters.paths.items()
    ]
