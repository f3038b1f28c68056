"""Keeps KV blocks outside the paged cache: in host memory, and in a directory.

What a runner needs is here; what keeps blocks is loaded when an engine is to have a connector.
"""

import importlib
from typing import TYPE_CHECKING, Any

from aioserve.features.kv_connector.interface import BlockStore, HostMemoryWorker, fingerprint
from aioserve.runner.interface import KVConnectorWorker, SlotGroup

if TYPE_CHECKING:
    from aioserve.features.kv_connector.directory import BlockDirectory
    from aioserve.features.kv_connector.offloading import OffloadingConnector, Role

__all__ = [
    "BlockDirectory",
    "BlockStore",
    "HostMemoryWorker",
    "KVConnectorWorker",
    "OffloadingConnector",
    "Role",
    "SlotGroup",
    "fingerprint",
]

_LOADED_LATER = {
    "BlockDirectory": "directory",
    "OffloadingConnector": "offloading",
    "Role": "offloading",
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LOADED_LATER[name]}"), name)
