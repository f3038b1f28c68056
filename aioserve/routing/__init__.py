"""Which replica gets a request: routers, and what they are told of it.

Knows no transport and no clock: it serves live and simulated senders.
"""

from aioserve.routing.interface import Assignment, Choice, Replica, RoutedRequest, Router
from aioserve.routing.prefix_index import PrefixIndex
from aioserve.routing.routers import ROUTERS, make_router

__all__ = [
    "ROUTERS",
    "Assignment",
    "Choice",
    "PrefixIndex",
    "Replica",
    "RoutedRequest",
    "Router",
    "make_router",
]
