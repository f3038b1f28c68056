"""The engine: one asyncio task that schedules, and the streams that its callers read."""

import importlib
from typing import TYPE_CHECKING, Any

from aioserve.engine.async_engine import AsyncEngine
from aioserve.engine.client import EngineClient
from aioserve.engine.input_processor import Prompt
from aioserve.engine.prompt import Conversation
from aioserve.engine.stream import RequestStream

if TYPE_CHECKING:
    from aioserve.engine.snapshot import EngineSnapshot

__all__ = [
    "AsyncEngine",
    "Conversation",
    "EngineClient",
    "EngineSnapshot",
    "Prompt",
    "RequestStream",
]


def __getattr__(name: str) -> Any:
    if name != "EngineSnapshot":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("aioserve.engine.snapshot").EngineSnapshot
