"""Every route: its handler, and what the OpenAPI document says of it. Declared here, once; those
of operators follow from `aioserve.operations`.

Knows nothing about what handlers do, nor how the document is made.
"""

from typing import Any, Literal

from aioserve.errors import (
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    RequestIdInUseError,
    RequestTimeoutError,
    UnknownKeyError,
    UnknownModelError,
)
from aioserve.operations import OPERATOR_COMMANDS
from aioserve.server import admin, completions, embeddings, tokenization
from aioserve.server import protocol as openai
from aioserve.server.abort import Aborted, abort_request
from aioserve.server.abort import decoder as abort_decoder
from aioserve.server.anthropic import protocol as anthropic
from aioserve.server.anthropic import routes as messages
from aioserve.server.chat import routes as chat
from aioserve.server.errors import (
    UnknownFileError,
    UnknownRequestError,
    UnknownResponseError,
)
from aioserve.server.openapi import Route, serve_document
from aioserve.server.operators import route_of
from aioserve.server.page.files import get_file, show_page
from aioserve.server.page.steps import stream_steps
from aioserve.server.page.trial import get_report
from aioserve.server.responses import protocol as responses
from aioserve.server.responses import routes as response
from aioserve.watch.frames import Frame, Snapshot

_ENDED = (EngineDeadError,)
_NOT_NOW = (EngineOverloadedError, EngineDeadError)
_GENERATION = (*_NOT_NOW, RequestIdInUseError, RequestTimeoutError)
#: What is asked by machines that have no key.
PROBES = ("/health", "/ready", "/metrics")

_Done = Literal["[DONE]"]

ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        completions.create_completion,
        "Go on with a text, or with several.",
        openai.Completion,
        body=completions.decoder,
        events=(openai.Completion, openai.ErrorResponse, _Done),
        raises=_GENERATION,
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        chat.create_chat_completion,
        "Answer a conversation.",
        openai.ChatCompletion,
        body=chat.decoder,
        events=(openai.ChatCompletionChunk, openai.ErrorResponse, _Done),
        raises=_GENERATION,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        embeddings.create_embedding,
        "A vector of each input.",
        embeddings.EmbeddingList,
        body=embeddings.decoder,
        raises=_GENERATION,
    ),
    Route(
        "POST",
        "/v1/responses",
        response.create_response,
        "Answer a conversation, as OpenAI's newer protocol has it.",
        responses.Response,
        body=response.decoder,
        events=(
            responses.ResponseEvent,
            responses.ItemEvent,
            responses.PartEvent,
            responses.DeltaEvent,
            responses.DoneEvent,
            responses.ErrorEvent,
        ),
        raises=(*_NOT_NOW, RequestTimeoutError),
    ),
    Route(
        "GET",
        "/v1/responses/{id}",
        response.get_response,
        "A response that is remembered.",
        responses.Response,
        query=responses.Whole,
        raises=(RequestError, UnknownResponseError),
    ),
    Route(
        "GET",
        "/v1/responses/{id}/input_items",
        response.list_input_items,
        "What led to a response.",
        responses.ItemList,
        query=responses.Page,
        raises=(RequestError, UnknownResponseError),
    ),
    Route(
        "DELETE",
        "/v1/responses/{id}",
        response.delete_response,
        "Forget a response.",
        responses.Deleted,
        query=openai.RequestPart,
        raises=(RequestError, UnknownResponseError),
    ),
    Route(
        "POST",
        "/v1/messages",
        messages.create_message,
        "Answer a conversation, as Anthropic's protocol has it.",
        anthropic.Message,
        body=messages.create_decoder,
        events=(
            anthropic.MessageStart,
            anthropic.BlockStart,
            anthropic.Ping,
            anthropic.BlockDelta,
            anthropic.BlockStop,
            anthropic.MessageDelta,
            anthropic.MessageStop,
            anthropic.MessagesError,
        ),
        raises=_GENERATION,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        "Count the tokens that such a conversation has.",
        anthropic.InputTokens,
        body=messages.count_decoder,
        raises=_NOT_NOW,  # with images, which take time
    ),
    Route(
        "POST",
        "/tokenize",
        tokenization.tokenize,
        "The tokens of a text or a conversation.",
        tokenization.Tokenized,
        body=tokenization.tokenize_decoder,
        raises=_NOT_NOW,  # with images, which take time
    ),
    Route(
        "POST",
        "/detokenize",
        tokenization.detokenize,
        "The text of tokens.",
        tokenization.Detokenized,
        body=tokenization.detokenize_decoder,
        raises=_ENDED,
    ),
    Route(
        "POST",
        "/v1/abort",
        abort_request,
        "End a running request.",
        Aborted,
        body=abort_decoder,
        raises=(UnknownRequestError,),
    ),
    Route(
        "GET",
        "/v1/models",
        admin.list_models,
        "The model that is served, and its adapters.",
        openai.ModelList,
    ),
    Route(
        "GET",
        "/v1/models/{id:.+}",
        admin.get_model,
        "One of them by its name, which may hold slashes.",
        openai.ModelCard,
        raises=(UnknownModelError,),
    ),
    Route(
        "GET",
        "/health",
        admin.health,
        "Whether the server lives.",
        admin.Alive,
        statuses=(200, 503),
        needs="nothing",
    ),
    Route(
        "GET",
        "/ready",
        admin.ready,
        "Whether a new request would be served now.",
        admin.Ready,
        statuses=(200, 503),
        needs="nothing",
    ),
    Route(
        "GET",
        "/metrics",
        admin.metrics,
        "Counters in Prometheus' format.",
        str,
        raises=(UnknownKeyError,),
        needs="nothing",  # unless the settings say otherwise
    ),
    Route("GET", "/version", admin.version, "The version of the server.", admin.Version),
    Route("GET", "/openapi.json", serve_document, "This document.", dict[str, Any]),
)

#: Unless the settings say that there is no page.
PAGE_ROUTES = (
    Route(
        "GET",
        "/",
        show_page,
        "A page that shows the scheduler at work.",
        str,
        media_types=("text/html",),
        needs="nothing",
    ),
    Route(
        "GET",
        "/page/{name}",
        get_file,
        "What the page is made of.",
        str,
        raises=(UnknownFileError,),
        media_types=("text/html", "text/css", "text/javascript"),
        needs="nothing",
    ),
    Route(
        "GET",
        "/watch/steps",
        stream_steps,
        "What the scheduler does, as it does it.",
        str,
        events=(Snapshot, Frame, openai.ErrorResponse),
        raises=(RequestError, EngineDeadError),
        media_types=("text/event-stream",),
        needs="looker",  # it tells of all clients' requests
    ),
    Route(
        "GET",
        "/watch/reports/{id}",
        get_report,
        "A comparison of policies that was asked for.",
        str,
        raises=(UnknownFileError, EngineDeadError),
        media_types=("text/html",),
        needs="nothing",
    ),
)

#: Only where the settings enable them.
ADMIN_ROUTES = tuple(map(route_of, OPERATOR_COMMANDS))

#: Where they have a port of their own: with what tells how the server is.
OPERATORS_ROUTES = (*(route for route in ROUTES if route.path in PROBES), *ADMIN_ROUTES)
