"""All that a policy author imports: the base class, its options, and what it hands around."""

from typing import Annotated

from msgspec import Meta

from aioserve.kv_cache import OffloadPrice
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler.base import BaseScheduler
from aioserve.scheduler.fallback import FAILURES_UNTIL_FALLBACK, FALLBACK_POLICY
from aioserve.scheduler.hinted import hinted_flag, hinted_number, hinted_text
from aioserve.scheduler.interface import POLICY_API, SchedulerInterface
from aioserve.scheduler.memory import Memory
from aioserve.scheduler.options import PolicyOptions
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from aioserve.scheduler.part_loader import read_part
from aioserve.scheduler.parts import AdmissionPart, BudgetPart, OrderPart, Part, Verdict, VictimPart
from aioserve.scheduler.peak_memory import PeakMemory
from aioserve.scheduler.queue import RequestQueue
from aioserve.scheduler.recompute_price import RecomputePrice
from aioserve.scheduler.registry import available_policies, load_policy
from aioserve.scheduler.rejection import Rejection
from aioserve.scheduler.step import Step
from aioserve.scheduler.step_time import OnlineStepTime
from aioserve.scheduler.succession import make_successor

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
