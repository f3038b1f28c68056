"""Keeps KV blocks outside the paged cache: in host memory, and in a directory."""

from aioserve.kv_connector.directory import BlockDirectory
from aioserve.kv_connector.interface import (
    BlockStore,
    HostMemoryWorker,
    KVConnectorWorker,
    SlotGroup,
    fingerprint,
)
from aioserve.kv_connector.offloading import OffloadingConnector, Role

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
