"""The keys of what the application and its requests share."""

from aiohttp import web

from aioserve.engine import EngineClient
from aioserve.server.access.keys import Key
from aioserve.server.running import RunningResponses

ENGINE = web.AppKey("ENGINE", EngineClient)
RUNNING = web.AppKey("RUNNING", RunningResponses)
NEEDS = web.AppKey("NEEDS", dict[str, str])  # by route: which key it needs, as `Route.needs` says
KEY = web.RequestKey("KEY", Key)  # on a request: its key, where keys are required
RESPONSE_ID = web.RequestKey("RESPONSE_ID", str)  # on a request: the id of its answer

MADE_ID = web.RequestKey("MADE_ID", str)  # on one that has no such answer: made for it
OWN_HINTS = web.RequestKey("OWN_HINTS", dict[str, bool])  # on one of the server's own: its hints
CHAIN = web.RequestKey("CHAIN", str)  # on one that goes on with a response: the id of the first one
