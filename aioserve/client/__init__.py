"""A remote aioserve as an async Python API: its streams work like those of the engine."""

from aioserve.client.async_client import AsyncClient

__all__ = ["AsyncClient"]
