"""Serve a language model from one asyncio process, with scheduler policies that anyone can write.

Importing this package loads no torch; the names below are imported when they are first used.
"""

from typing import TYPE_CHECKING

from aioserve.support import __version__, late_names
from aioserve.support.old_names import find_old_names

if TYPE_CHECKING:
    from aioserve.client import AsyncClient
    from aioserve.config import EngineConfig
    from aioserve.engine import AsyncEngine, EngineSnapshot, RequestStream
    from aioserve.engine.language_model import ChatOutput, FinishedChat, LanguageModel, ToolCall
    from aioserve.engine.prompt import MultimodalPrompt, Video
    from aioserve.fleet.child import EngineProcess
    from aioserve.outputs import (
        EmbeddingOutput,
        FinishedOutput,
        FinishReason,
        RequestOutput,
        RequestTimes,
    )
    from aioserve.params import PoolingParams, SamplingParams

_HOMES = {
    "AsyncClient": "aioserve.client",
    "AsyncEngine": "aioserve.engine",
    "ChatOutput": "aioserve.engine.language_model",
    "EmbeddingOutput": "aioserve.outputs",
    "EngineConfig": "aioserve.config",
    "EngineProcess": "aioserve.fleet.child",
    "EngineSnapshot": "aioserve.engine",
    "FinishReason": "aioserve.outputs",
    "FinishedChat": "aioserve.engine.language_model",
    "FinishedOutput": "aioserve.outputs",
    "LanguageModel": "aioserve.engine.language_model",
    "MultimodalPrompt": "aioserve.engine.prompt",
    "PoolingParams": "aioserve.params",
    "RequestOutput": "aioserve.outputs",
    "RequestStream": "aioserve.engine",
    "RequestTimes": "aioserve.outputs",
    "SamplingParams": "aioserve.params",
    "ToolCall": "aioserve.engine.language_model",
    "Video": "aioserve.engine.prompt",
}

__all__ = [
    "AsyncClient",
    "AsyncEngine",
    "ChatOutput",
    "EmbeddingOutput",
    "EngineConfig",
    "EngineProcess",
    "EngineSnapshot",
    "FinishReason",
    "FinishedChat",
    "FinishedOutput",
    "LanguageModel",
    "MultimodalPrompt",
    "PoolingParams",
    "RequestOutput",
    "RequestStream",
    "RequestTimes",
    "SamplingParams",
    "ToolCall",
    "Video",
    "__version__",
]

find_old_names()

__getattr__ = late_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
