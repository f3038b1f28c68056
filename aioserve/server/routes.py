"""Which routes an application has: the core's own, and those that parts bring.

Modules declare theirs, once: the handler, and what the OpenAPI document says of it. Those of
operators follow from `aioserve.engine.operations`. What few servers are asked is known by method
and path, and so is all that parts bring: the module is loaded when one of its routes is first asked
for, or when the document is.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler

from aioserve.config import EngineConfig
from aioserve.server import admin, completions
from aioserve.server.body import Route, documented
from aioserve.server.chat import routes as chat
from aioserve.server.running import ENGINE
from aioserve.support.parts import brought, load

#: The core's modules that are loaded when they are asked: by method, path and what the path needs.
LATER = {
    ("POST", "/v1/embeddings", "key"): "aioserve.server.embeddings",
    ("POST", "/tokenize", "key"): "aioserve.server.tokenization",
    ("POST", "/detokenize", "key"): "aioserve.server.tokenization",
    ("POST", "/v1/abort", "key"): "aioserve.server.operators",
    ("GET", "/openapi.json", "key"): "aioserve.server.openapi",
}
_AT_ONCE = (completions, chat, admin)
_OF_PARTS, _OF_THE_PAGE = "routes", "page routes"


@cache
def own_routes() -> tuple[Route, ...]:
    """Return the core's own routes, loaded, but for those of operators."""
    modules = (*_AT_ONCE, *map(import_module, dict.fromkeys(LATER.values())))
    return tuple(route for module in modules for route in module.ROUTES)


@cache
def admin_routes() -> tuple[Route, ...]:
    """Return the routes of operators, loaded, which only settings enable."""
    from aioserve.engine.operations import OPERATOR_COMMANDS
    from aioserve.server.operators import route_of

    return tuple(map(route_of, OPERATOR_COMMANDS))


class _Place(NamedTuple):
    """A place at which the application answers, before it is known what is to be said about it."""

    method: str
    path: str  # as aiohttp has it
    needs: str
    handler: Handler


class Routes(NamedTuple):
    """The routes of one application."""

    has_own: bool  # those of the core; else probes alone
    has_admin: bool
    kinds: Sequence[str] = ()  # of what parts bring

    @classmethod
    def of(cls, config: EngineConfig, *, is_for_operators: bool) -> "Routes":
        """Return those that the settings enable; `is_for_operators`: of the application on their
        port, which also tells how the server is.
        """
        is_one_for_all = config.access.admin_port is None
        has_page = config.server.page and (is_one_for_all or is_for_operators)
        page = (_OF_THE_PAGE,) if has_page else ()
        if is_for_operators:
            return cls(False, True, page)
        has_admin = config.server.enable_admin and is_one_for_all
        return cls(True, has_admin, (_OF_PARTS, *page))

    def add_to(self, app: web.Application) -> dict[str, str]:
        """Let the application answer them. Returns which key each documented path needs."""
        places = [*self._places()]
        for place in places:
            if place.method == "GET":
                app.router.add_get(place.path, place.handler)  # and HEAD
            else:
                app.router.add_route(place.method, place.path, place.handler)
        return {documented(place.path): place.needs for place in places}

    def _places(self) -> Iterator[_Place]:
        loaded = admin.PROBES
        if self.has_own:
            loaded = tuple(route for module in _AT_ONCE for route in module.ROUTES)
            for name, module in LATER.items():
                yield _Place(*name, _handler(name, partial(import_module, module)))
        for route in (*loaded, *(admin_routes() if self.has_admin else ())):
            yield _Place(route.method, route.path, route.needs, route.handler)
        for kind in self.kinds:
            for name in brought(kind):
                method, path, needs = name
                yield _Place(method, path, needs, _handler(name, partial(load, kind, name)))

    def all(self) -> tuple[Route, ...]:
        """Return all of them with what is said about them: loads the modules of all parts."""
        return (
            *(own_routes() if self.has_own else admin.PROBES),
            *(admin_routes() if self.has_admin else ()),
            *(route for kind in self.kinds for route in routes_of_parts(kind)),
        )


@cache
def routes_of_parts(kind: str) -> tuple[Route, ...]:
    """Return what parts bring of that kind, loaded."""
    modules = dict.fromkeys(brought(kind).values())
    loaded = {module: load(kind, name) for name, module in brought(kind).items()}
    return tuple(route for module in modules for route in loaded[module].ROUTES)


def all_routes() -> tuple[Route, ...]:
    """Return every route but those of operators and of the page, loaded."""
    return (*own_routes(), *routes_of_parts(_OF_PARTS))


def page_routes() -> tuple[Route, ...]:
    """Return the routes of the page, loaded."""
    return routes_of_parts(_OF_THE_PAGE)


def _handler(name: tuple[str, str, str], load_module: Callable[[], ModuleType]) -> Handler:
    """Return what loads the module of a route when it is first asked, in a thread: others' streams
    go on meanwhile.
    """
    found: Handler | None = None

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal found
        if found is None:
            module = await asyncio.to_thread(load_module)
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
