"""Keeps KV blocks outside the paged cache: in host memory, and in a directory.

What a runner needs is here; what keeps blocks is loaded when an engine is to have a connector.
"""

from typing import TYPE_CHECKING

from aioserve.features.kv_connector.interface import BlockStore, HostMemoryWorker, fingerprint
from aioserve.runner.interface import KVConnectorWorker, SlotGroup
from aioserve.support import late_names

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

__getattr__ = late_names(__name__, _LOADED_LATER)
