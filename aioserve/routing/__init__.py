"""All that the author of a router or autoscaler imports, and what asks routers.

Knows no transport: it serves live and simulated senders.
"""

from aioserve.routing.accounts import Assignment
from aioserve.routing.answers import (
    MAX_WAIT_SECONDS,
    MIN_WAIT_SECONDS,
    Migrate,
    Refuse,
    Split,
    Wait,
)
from aioserve.routing.autoscaler import AutoscalerInterface, AutoscalerOptions, FleetView
from aioserve.routing.dispatcher import Dispatcher
from aioserve.routing.errors import RouterError, blamed
from aioserve.routing.interface import (
    Answer,
    BaseRouter,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Replicas,
    RouterInterface,
    RouterOptions,
)
from aioserve.routing.prefix_index import PrefixIndex
from aioserve.routing.prefixes import Prefixes
from aioserve.routing.registry import (
    available_autoscalers,
    available_routers,
    load_autoscaler,
    load_router,
    make_dispatcher,
    short_name,
)
from aioserve.routing.roles import check_roles
from aioserve.routing.step_times import StepTimes
from aioserve.routing.views import (
    REPORTED,
    ROLES,
    ReplicaReport,
    ReplicaView,
    RoutedRequest,
    SentLoad,
)

__all__ = [
    "MAX_WAIT_SECONDS",
    "MIN_WAIT_SECONDS",
    "REPORTED",
    "ROLES",
    "Answer",
    "Assignment",
    "AutoscalerInterface",
    "AutoscalerOptions",
    "BaseRouter",
    "Dispatcher",
    "FleetView",
    "Migrate",
    "NonNegativeFloat",
    "PositiveFloat",
    "PositiveInt",
    "PrefixIndex",
    "Prefixes",
    "Refuse",
    "ReplicaReport",
    "ReplicaView",
    "Replicas",
    "RoutedRequest",
    "RouterError",
    "RouterInterface",
    "RouterOptions",
    "SentLoad",
    "Split",
    "StepTimes",
    "Wait",
    "available_autoscalers",
    "available_routers",
    "blamed",
    "check_roles",
    "load_autoscaler",
    "load_router",
    "make_dispatcher",
    "short_name",
]
