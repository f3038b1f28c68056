"""An operator changes what is logged, and forgets cached prefixes."""

from typing import TYPE_CHECKING

import msgspec

from aioserve.config import LogLevel
from aioserve.log_format import set_log_level
from aioserve.operations.answers import Done
from aioserve.operations.command import Asking, Http, OperatorCommand

if TYPE_CHECKING:
    from aioserve.engine import AsyncEngine


class SetLogLevel(OperatorCommand[None, Done], frozen=True):
    """All processes of the server log what is of that `"level"` or above."""

    level: LogLevel

    http = Http("/admin/log_level", "Log more, or less.", schema="LogLevelRequest")

    async def run_on(self, engine: "AsyncEngine") -> None:
        """Set the level in the engine's process; a server with API workers sets theirs as well."""
        set_log_level(self.level)

    def tell(self, answer: None) -> Done:
        return Done()


class CacheReset(msgspec.Struct):
    """Response of /admin/reset_prefix_cache: whether the KV cache is empty now."""

    empty: bool


class ResetPrefixCache(OperatorCommand[bool, CacheReset], frozen=True):
    """Cached prefixes are forgotten; running requests go on. `"empty"` of the answer says whether
    nothing is in the KV cache now.
    """

    http = Http("/admin/reset_prefix_cache", "Forget cached prefixes.")

    async def run_on(self, engine: "AsyncEngine") -> bool:
        return engine.reset_prefix_cache()

    def tell(self, answer: bool) -> CacheReset:
        return CacheReset(answer)


class UpkeepMethods(Asking):
    """Keep a server in order from Python, as the commands above do over HTTP."""

    async def set_log_level(self, level: LogLevel) -> None:
        """Log more, or less, in all processes of the server."""
        await self.ask(SetLogLevel(level))

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; True if the KV cache is now empty."""
        return (await self.ask(ResetPrefixCache())).empty
