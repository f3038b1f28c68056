"""The modules that have routes, and which of these an application has: the one list of APIs.

Each declares its own, once: its handler, and what the OpenAPI document says of it. Those of
operators follow from `aioserve.engine.operations`. Knows no route.
"""

from aiohttp import web

from aioserve.apis.anthropic import messages as anthropic
from aioserve.apis.batches import files as kept_files
from aioserve.apis.batches import routes as batches
from aioserve.apis.page import routes as page
from aioserve.apis.responses import routes as responses
from aioserve.apis.scoring import routes as scoring
from aioserve.engine.operations import OPERATOR_COMMANDS
from aioserve.server import admin, completions, embeddings, openapi, operators, tokenization
from aioserve.server.chat import routes as chat
from aioserve.server.operators import route_of
from aioserve.server.running import ENGINE

_GENERATING = (completions, chat, embeddings, responses, anthropic, kept_files, batches)
_APIS = (*_GENERATING, scoring, tokenization, operators, admin, openapi)
ROUTES = tuple(route for module in _APIS for route in module.ROUTES)

#: Unless the settings say that there is no page.
PAGE_ROUTES = page.ROUTES

#: Only where the settings enable them.
ADMIN_ROUTES = tuple(map(route_of, OPERATOR_COMMANDS))

#: Where they have a port of their own: with what tells how the server is.
OPERATORS_ROUTES = (*admin.PROBES, *ADMIN_ROUTES)


def open_apis(app: web.Application, max_bytes: int) -> None:
    """Give an application what APIs keep in it: batches and scores. `max_bytes` is the limit of a
    body. Raises `ConfigError` for settings that an API cannot have.
    """
    if app[ENGINE].config.batches.batch_dir is not None:  # what runs them is not loaded otherwise
        from aioserve.apis.batches.runner import open_batches

        open_batches(app, max_bytes)
    scoring.open_scoring(app)
