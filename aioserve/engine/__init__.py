"""The engine: one asyncio task that schedules, and the streams that its callers read."""

from aioserve.engine.async_engine import AsyncEngine
from aioserve.engine.client import EngineClient
from aioserve.engine.input_processor import Prompt
from aioserve.engine.prompt import Conversation
from aioserve.engine.snapshot import EngineSnapshot
from aioserve.engine.stream import RequestStream

__all__ = [
    "AsyncEngine",
    "Conversation",
    "EngineClient",
    "EngineSnapshot",
    "Prompt",
    "RequestStream",
]
