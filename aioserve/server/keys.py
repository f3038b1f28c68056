"""The keys under which the application and its requests carry shared objects."""

from aiohttp import web

from aioserve.engine import AsyncEngine
from aioserve.server.logprobs import TokenTexts

ENGINE = web.AppKey("ENGINE", AsyncEngine)
TOKEN_TEXTS = web.AppKey("TOKEN_TEXTS", TokenTexts)
RESPONSE_ID = web.RequestKey("RESPONSE_ID", str)  # on a request: the id of its answer
