"""All that a policy author imports: the base class, its options, and what it hands around.

What few policies ask for is imported when it is: estimates, parts, and how policies are found.
"""

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import (
    Request,
    RequestStatus,
    WaitReason,
    hinted_flag,
    hinted_number,
    hinted_text,
)
from aioserve.scheduler.base import BaseScheduler, make_successor
from aioserve.scheduler.interface import (
    POLICY_API,
    PolicyOptions,
    Rejection,
    SchedulerInterface,
)
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from aioserve.scheduler.step import Step
from aioserve.support import late_names

if TYPE_CHECKING:
    from aioserve.kv_cache import OffloadPrice
    from aioserve.scheduler.estimates import OnlineStepTime, PeakMemory, RecomputePrice
    from aioserve.scheduler.fallback import FAILURES_UNTIL_FALLBACK, FALLBACK_POLICY
    from aioserve.scheduler.memory import Memory
    from aioserve.scheduler.parts import (
        AdmissionPart,
        BudgetPart,
        OrderPart,
        Part,
        Verdict,
        VictimPart,
        read_part,
    )
    from aioserve.scheduler.registry import available_policies, load_policy
    from aioserve.scheduler.table import RequestQueue

_HOMES = {
    "AdmissionPart": "aioserve.scheduler.parts",
    "BudgetPart": "aioserve.scheduler.parts",
    "FAILURES_UNTIL_FALLBACK": "aioserve.scheduler.fallback",
    "FALLBACK_POLICY": "aioserve.scheduler.fallback",
    "Memory": "aioserve.scheduler.memory",
    "OffloadPrice": "aioserve.kv_cache",
    "OnlineStepTime": "aioserve.scheduler.estimates",
    "OrderPart": "aioserve.scheduler.parts",
    "Part": "aioserve.scheduler.parts",
    "PeakMemory": "aioserve.scheduler.estimates",
    "RecomputePrice": "aioserve.scheduler.estimates",
    "RequestQueue": "aioserve.scheduler.table",
    "Verdict": "aioserve.scheduler.parts",
    "VictimPart": "aioserve.scheduler.parts",
    "available_policies": "aioserve.scheduler.registry",
    "load_policy": "aioserve.scheduler.registry",
    "read_part": "aioserve.scheduler.parts",
}

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]

__all__ = [
    "FAILURES_UNTIL_FALLBACK",
    "FALLBACK_POLICY",
    "POLICY_API",
    "AdmissionPart",
    "BaseScheduler",
    "BudgetPart",
    "CachedRequestData",
    "EngineCoreOutputs",
    "Memory",
    "ModelRunnerOutput",
    "NewRequestData",
    "NonNegativeFloat",
    "OffloadPrice",
    "OnlineStepTime",
    "OrderPart",
    "Part",
    "PeakMemory",
    "PolicyOptions",
    "PositiveFloat",
    "PositiveInt",
    "RecomputePrice",
    "Rejection",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "SchedulerInterface",
    "SchedulerOutput",
    "Share",
    "Step",
    "Verdict",
    "VictimPart",
    "WaitReason",
    "available_policies",
    "hinted_flag",
    "hinted_number",
    "hinted_text",
    "load_policy",
    "make_successor",
    "read_part",
]

__getattr__ = late_names(__name__, _HOMES)
