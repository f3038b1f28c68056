"""HTTP APIs beside OpenAI's completions and chat: each folder is one of them."""

from collections.abc import Mapping
from typing import Any

_ANTHROPIC = "aioserve.apis.anthropic"
_BATCHES = "aioserve.apis.batches.routes"
_OLLAMA = "aioserve.apis.ollama"
_PAGE = "aioserve.apis.page"
_RESPONSES = "aioserve.apis.responses"
_SCORING = "aioserve.apis.scoring.routes"

#: Routes are named by method, path, and what the path needs; they are in `ROUTES` of the module.
BRINGS: Mapping[str, Mapping[Any, str]] = {
    "routes": {
        ("POST", "/v1/responses/input_tokens", "key"): _RESPONSES,
        ("POST", "/v1/responses", "key"): _RESPONSES,
        ("GET", "/v1/responses/{id}", "key"): _RESPONSES,
        ("GET", "/v1/responses/{id}/input_items", "key"): _RESPONSES,
        ("DELETE", "/v1/responses/{id}", "key"): _RESPONSES,
        ("POST", "/v1/messages", "key"): _ANTHROPIC,
        ("POST", "/v1/messages/count_tokens", "key"): _ANTHROPIC,
        ("POST", "/api/chat", "key"): _OLLAMA,
        ("POST", "/api/generate", "key"): _OLLAMA,
        ("GET", "/api/tags", "key"): _OLLAMA,
        ("GET", "/api/ps", "key"): _OLLAMA,
        ("POST", "/api/show", "key"): _OLLAMA,
        ("GET", "/api/version", "key"): _OLLAMA,
        ("POST", "/v1/files", "key"): _BATCHES,
        ("GET", "/v1/files", "key"): _BATCHES,
        ("GET", "/v1/files/{id}", "key"): _BATCHES,
        ("GET", "/v1/files/{id}/content", "key"): _BATCHES,
        ("DELETE", "/v1/files/{id}", "key"): _BATCHES,
        ("POST", "/v1/batches", "key"): _BATCHES,
        ("GET", "/v1/batches", "key"): _BATCHES,
        ("GET", "/v1/batches/{id}", "key"): _BATCHES,
        ("POST", "/v1/batches/{id}/cancel", "key"): _BATCHES,
        ("POST", "/v1/score", "key"): _SCORING,
        ("POST", "/score", "key"): _SCORING,
        ("POST", "/v1/rerank", "key"): _SCORING,
        ("POST", "/rerank", "key"): _SCORING,
        ("POST", "/v2/rerank", "key"): _SCORING,
    },
    # Not there if the settings say that there is no page.
    "page routes": {
        ("GET", "/", "nothing"): _PAGE,
        ("GET", "/page/{name}", "nothing"): _PAGE,
        ("GET", "/watch/steps", "looker"): _PAGE,
        ("GET", "/watch/reports/{id}", "nothing"): _PAGE,
    },
    # By the beginning of its paths, how an API that is not OpenAI's writes errors and headers.
    "styles": {
        "/v1/messages": "aioserve.apis.anthropic.protocol:STYLE",
        "/api/": "aioserve.apis.ollama:STYLE",
    },
    # By the section of settings: called with an application whose settings state any of it.
    "openers": {
        "batches": "aioserve.apis.batches.runner:open_batches",
        "scoring": "aioserve.apis.scoring.routes:open_scoring",
    },
}
