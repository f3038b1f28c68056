"""Compiles structured outputs to matchers, which say which tokens may come next.

`GrammarCompiler` is all that the engine and the runner see. It is imported when it is asked for:
the rules for schemas are asked for without it.
"""

from typing import TYPE_CHECKING

from aioserve.support import late_names

if TYPE_CHECKING:
    from aioserve.features.grammars.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]

__getattr__ = late_names(__name__, dict.fromkeys(__all__, "compiler"))
