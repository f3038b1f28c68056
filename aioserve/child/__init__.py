"""An engine in a process of its own, for programs whose code blocks."""

from aioserve.child.engine_process import EngineProcess

__all__ = ["EngineProcess"]
