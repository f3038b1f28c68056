"""How a model of embeddings pools, as sentence-transformers has written it beside the weights.

Reads two files of a model directory. Judges nothing.
"""

from pathlib import Path
from typing import Any

import msgspec

from aioserve.model_source.source import read_json

# How sentence-transformers calls what is served, and its modules that are.
_POOLINGS = {"mean_tokens": "mean", "lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Normalize")


class _Module(msgspec.Struct):
    """What is read of an entry of modules.json."""

    type: str


def stated_pooling(directory: Path) -> str | None:
    """What the directory states: `mean`, `last` or a name that is not served, and the modules
    behind it that are not; None if it states nothing.
    """
    path = directory / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    config = read_json(path, dict[str, Any])
    modes = [
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    stated = config.get("pooling_mode") or " and ".join(modes)  # of newer versions, of older
    pooling = _POOLINGS.get(str(stated), str(stated))
    modules = directory / "modules.json"
    kinds = [m.type for m in read_json(modules, list[_Module])] if modules.is_file() else []
    more = [kind for kind in (k.rpartition(".")[2] for k in kinds) if kind not in _MODULES]
    return ", then ".join([pooling, *more])
