"""Which routes an application has: the core's own, and those that parts bring.

The core's modules declare theirs, once: the handler, and what the OpenAPI document says of it.
Those of operators follow from `aioserve.engine.operations`. Those of a part are known by method and
path; their module is loaded when one of them is first asked for, or when the document is.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler

from aioserve.config import EngineConfig
from aioserve.engine.operations import OPERATOR_COMMANDS
from aioserve.server import admin, completions, embeddings, openapi, operators, tokenization
from aioserve.server.chat import routes as chat
from aioserve.server.openapi import Route
from aioserve.server.operators import route_of
from aioserve.server.running import ENGINE
from aioserve.support.parts import brought, load

_APIS = (completions, chat, embeddings, tokenization, operators, admin, openapi)
_OWN = tuple(route for module in _APIS for route in module.ROUTES)
_OF_PARTS, _OF_THE_PAGE = "routes", "page routes"

#: Only where the settings enable them.
ADMIN_ROUTES = tuple(map(route_of, OPERATOR_COMMANDS))

#: Where they have a port of their own: with what tells how the server is.
OPERATORS_ROUTES = (*admin.PROBES, *ADMIN_ROUTES)


class _Place(NamedTuple):
    """Where the application answers what, before it is known what is to be said about it."""

    method: str
    path: str  # as aiohttp has it
    needs: str
    handler: Handler


class Routes(NamedTuple):
    """The routes of one application."""

    own: Sequence[Route]
    kinds: Sequence[str] = ()  # of what parts bring

    @classmethod
    def of(cls, config: EngineConfig, *, is_for_operators: bool) -> "Routes":
        """Return those that the settings enable; `is_for_operators`: of the application on their
        port.
        """
        is_one_for_all = config.access.admin_port is None
        has_page = config.server.page and (is_one_for_all or is_for_operators)
        page = (_OF_THE_PAGE,) if has_page else ()
        if is_for_operators:
            return cls(OPERATORS_ROUTES, page)
        has_admin = config.server.enable_admin and is_one_for_all
        return cls((*_OWN, *(ADMIN_ROUTES if has_admin else ())), (_OF_PARTS, *page))

    def add_to(self, app: web.Application) -> dict[str, str]:
        """Let the application answer them. Returns which key each documented path needs."""
        places = [_Place(r.method, r.path, r.needs, r.handler) for r in self.own]
        for kind in self.kinds:
            for name in brought(kind):
                method, path, needs = name
                places.append(_Place(method, path, needs, _handler(kind, name)))
        for place in places:
            if place.method == "GET":
                app.router.add_get(place.path, place.handler)  # and HEAD
            else:
                app.router.add_route(place.method, place.path, place.handler)
        return {openapi.documented(place.path): place.needs for place in places}

    def all(self) -> tuple[Route, ...]:
        """Return all of them with what is said about them: loads the modules of all parts."""
        return (*self.own, *(route for kind in self.kinds for route in routes_of_parts(kind)))


@cache
def routes_of_parts(kind: str) -> tuple[Route, ...]:
    """Return what parts bring of that kind, loaded."""
    modules = dict.fromkeys(brought(kind).values())
    loaded = {module: load(kind, name) for name, module in brought(kind).items()}
    return tuple(route for module in modules for route in loaded[module].ROUTES)


def all_routes() -> tuple[Route, ...]:
    """Return every route but those of operators and of the page, loaded."""
    return (*_OWN, *routes_of_parts(_OF_PARTS))


def page_routes() -> tuple[Route, ...]:
    """Return the routes of the page, loaded."""
    return routes_of_parts(_OF_THE_PAGE)


def _handler(kind: str, name: tuple[str, str, str]) -> Handler:
    """Loads what answers when it is first asked, in a thread: others' streams go on meanwhile."""
    found: Handler | None = None

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal found
        if found is None:
            module = await asyncio.to_thread(load, kind, name)
            by_place: Mapping[tuple[str, str], Handler] = {
                (route.method, route.path): route.handler for route in module.ROUTES
            }
            found = by_place[name[:2]]
        return await found(request)

    return answer


def open_apis(app: web.Application, max_bytes: int) -> None:
    """Give an application what APIs keep in it whose settings are stated. `max_bytes` is the limit
    of a body. Raises `ConfigError` for settings that an API cannot have.
    """
    config = app[ENGINE].config
    for section in brought("openers"):
        stated = getattr(config, section)
        if stated != type(stated)():
            load("openers", section)(app, max_bytes)
