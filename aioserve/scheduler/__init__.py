"""All that a policy author imports: the base class, its options, and what it hands around."""

from typing import Annotated

from msgspec import Meta

from aioserve.kv_cache import OffloadPrice
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
from aioserve.scheduler.estimates import OnlineStepTime, PeakMemory, RecomputePrice
from aioserve.scheduler.fallback import FAILURES_UNTIL_FALLBACK, FALLBACK_POLICY
from aioserve.scheduler.interface import POLICY_API, Rejection, SchedulerInterface
from aioserve.scheduler.memory import Memory
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from aioserve.scheduler.parts import (
    AdmissionPart,
    BudgetPart,
    OrderPart,
    Part,
    Verdict,
    VictimPart,
    read_part,
)
from aioserve.scheduler.registry import PolicyOptions, available_policies, load_policy
from aioserve.scheduler.step import Step
from aioserve.scheduler.table import RequestQueue

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]

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
