"""An engine in a process of its own, for programs whose code blocks."""

from aioserve.fleet.child.engine_process import EngineProcess

__all__ = ["EngineProcess"]
