"""Models as they lie on disk: what can be asked of one, whichever its format.

A module for each format behind the same face, and one that fetches models by name. Knows nothing of
settings beyond what reading needs, and nothing of requests.
"""

import importlib
from typing import TYPE_CHECKING, Any

from aioserve.model_source.source import ModelSource

if TYPE_CHECKING:
    from aioserve.features.gguf.file import GgufFile
    from aioserve.model_source.directory import Directory

_HOMES = {
    "Directory": "aioserve.model_source.directory",
    "GgufFile": "aioserve.features.gguf.file",
}  # loaded when a model is such

__all__ = ["Directory", "GgufFile", "ModelSource"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
