"""Every route: its handler, and what the OpenAPI document says of it. Declared here, once.

Knows nothing about what handlers do, nor how the document is made.
"""

from typing import Any, Literal

from aioserve.engine.questions import EngineState
from aioserve.errors import (
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    RequestIdInUseError,
    RequestTimeoutError,
    UnknownKeyError,
    UnknownModelError,
)
from aioserve.server import adapters, admin, completions, control, embeddings, tokenization
from aioserve.server import protocol as openai
from aioserve.server.abort import Aborted, abort_request
from aioserve.server.abort import decoder as abort_decoder
from aioserve.server.anthropic import protocol as anthropic
from aioserve.server.anthropic import routes as messages
from aioserve.server.chat import routes as chat
from aioserve.server.errors import (
    UnknownAdapterError,
    UnknownFileError,
    UnknownRequestError,
    UnknownResponseError,
)
from aioserve.server.openapi import Route, serve_document
from aioserve.server.page.files import get_file, show_page
from aioserve.server.page.steps import stream_steps
from aioserve.server.page.trial import Trial, get_report, try_policy
from aioserve.server.page.trial import decoder as trial_decoder
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
ADMIN_ROUTES = (
    Route(
        "POST",
        "/admin/policy",
        admin.switch_policy,
        "Change the policy from the next step on.",
        admin.PolicyChange,
        body=admin.policy_decoder,
        raises=_ENDED,
        needs="admin_key",
    ),
    Route(
        "POST",
        "/admin/try_policy",
        try_policy,
        "Record requests, and compare another policy on them.",
        Trial,
        body=trial_decoder,
        raises=(EngineDeadError, EngineOverloadedError),
        needs="admin_key",
    ),
    Route(
        "POST",
        "/admin/pause",
        control.pause,
        "Compute no further step; requests wait, or are ended.",
        EngineState,
        body=control.pause_decoder,
        raises=_ENDED,
        needs="admin_key",
        may_lack_body=True,
    ),
    Route(
        "POST",
        "/admin/resume",
        control.resume,
        "Go on after a pause.",
        EngineState,
        raises=(*_ENDED, RequestError),
        needs="admin_key",
    ),
    Route(
        "POST",
        "/admin/sleep",
        control.sleep,
        "Pause, and give back the memory of the KV cache, or of the weights as well.",
        EngineState,
        body=control.sleep_decoder,
        raises=_ENDED,
        needs="admin_key",
        may_lack_body=True,
    ),
    Route(
        "POST",
        "/admin/wake",
        control.wake,
        "Take it again, and go on.",
        EngineState,
        raises=(*_ENDED, RequestError),
        needs="admin_key",
    ),
    Route(
        "POST",
        "/admin/reload",
        control.reload,
        "Serve other weights of the same model.",
        EngineState,
        body=control.reload_decoder,
        raises=_ENDED,
        needs="admin_key",
    ),
    Route(
        "POST",
        "/admin/shadow",
        control.switch_shadow,
        "Evaluate another policy on the traffic, or none.",
        control.Done,
        body=control.shadow_decoder,
        raises=_ENDED,
        needs="admin_key",
    ),
    Route(
        "POST",
        "/admin/log_level",
        control.set_log_level,
        "Log more, or less.",
        control.Done,
        body=control.log_level_decoder,
        raises=_ENDED,
        needs="admin_key",
    ),
    Route(
        "POST",
        "/v1/load_lora_adapter",
        adapters.load_adapter,
        "Serve an adapter from now on, as vLLM has it.",
        str,
        body=adapters.load_decoder,
        raises=(*_ENDED, UnknownAdapterError),
        needs="admin_key",
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        adapters.unload_adapter,
        "Serve it no more: requests that have it finish.",
        str,
        body=adapters.unload_decoder,
        raises=(*_ENDED, UnknownModelError),
        needs="admin_key",
    ),
    Route(
        "POST",
        "/admin/reset_prefix_cache",
        admin.reset_prefix_cache,
        "Forget cached prefixes.",
        admin.CacheReset,
        raises=_ENDED,
        needs="admin_key",
    ),
)

#: Where they have a port of their own: with what tells how the server is.
OPERATORS_ROUTES = (*(route for route in ROUTES if route.path in PROBES), *ADMIN_ROUTES)
