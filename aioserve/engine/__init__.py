"""The engine: one asyncio task that schedules, and the streams that its callers read.

Its names are imported when they are asked for: the step loop needs none of them.
"""

from typing import TYPE_CHECKING

from aioserve.support import late_names

if TYPE_CHECKING:
    from aioserve.engine.async_engine import AsyncEngine
    from aioserve.engine.client import EngineClient
    from aioserve.engine.input_processor import Prompt
    from aioserve.engine.prompt import Conversation
    from aioserve.engine.snapshot import EngineSnapshot
    from aioserve.engine.stream import RequestStream

_MODULES = {
    "AsyncEngine": "async_engine",
    "Conversation": "prompt",
    "EngineClient": "client",
    "EngineSnapshot": "snapshot",
    "Prompt": "input_processor",
    "RequestStream": "stream",
}

__all__ = [
    "AsyncEngine",
    "Conversation",
    "EngineClient",
    "EngineSnapshot",
    "Prompt",
    "RequestStream",
]

__getattr__ = late_names(__name__, _MODULES)
