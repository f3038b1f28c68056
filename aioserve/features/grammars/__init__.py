"""Compiles structured outputs to matchers, which say which tokens may come next.

`GrammarCompiler` is all that the engine and the runner see. It is imported when it is asked for:
the rules for schemas are asked for without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioserve.features.grammars.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aioserve.features.grammars.compiler import GrammarCompiler

    return GrammarCompiler
