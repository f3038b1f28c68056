"""Compiles structured outputs to matchers, which say which tokens may come next.

`GrammarCompiler` is all that the engine and the runner see.
"""

from aioserve.features.grammars.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
