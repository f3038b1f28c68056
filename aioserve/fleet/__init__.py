"""Several engines as one: child processes, workers, routers, autoscalers, Ray Serve.

Says which routers and autoscalers there are without loading any, nor what asks them.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

_ROUTERS = "aioserve.fleet.routers"
_AUTOSCALERS = "aioserve.fleet.autoscalers"

BRINGS: Mapping[str, Mapping[Any, str]] = {
    "routers": {
        "conserve": f"{_ROUTERS}.disaggregated:ConServe",
        "least_requests": f"{_ROUTERS}.simple:LeastRequests",
        "least_work": f"{_ROUTERS}.simple:LeastWork",
        "llumnix": f"{_ROUTERS}.llumnix:Llumnix",
        "lmetric": f"{_ROUTERS}.prefixes:LMetric",
        "polyserve": f"{_ROUTERS}.service_levels:PolyServe",
        "power_of_two": f"{_ROUTERS}.simple:PowerOfTwo",
        "preble": f"{_ROUTERS}.prefixes:Preble",
        "predicted_latency": f"{_ROUTERS}.service_levels:PredictedLatency",
        "prefill_decode": f"{_ROUTERS}.disaggregated:PrefillDecode",
        "prefix": f"{_ROUTERS}.prefixes:PrefixAware",
        "program_las": f"{_ROUTERS}.program_las:ProgramLAS",
        "round_robin": f"{_ROUTERS}.simple:RoundRobin",
        "scorers": f"{_ROUTERS}.prefixes:Scorers",
        "session": f"{_ROUTERS}.simple:SessionSticky",
        "two_choices": f"{_ROUTERS}.simple:TwoChoices",
    },
    "autoscalers": {
        "queue_tokens": f"{_AUTOSCALERS}:QueueTokens",
        "slo_attainment": f"{_AUTOSCALERS}:SloAttainment",
        "target_utilization": f"{_AUTOSCALERS}:TargetUtilization",
    },
}


def available_routers() -> dict[str, EntryPoint]:
    """Return the routers by name, those of other packages included: theirs are entry points of the
    group `aioserve.routers`. Raises `ConfigError` if two packages claim one name.
    """
    return _available("routers", "router")


def available_autoscalers() -> dict[str, EntryPoint]:
    """Return the autoscalers by name, those of other packages included: theirs are entry points of
    the group `aioserve.autoscalers`. Raises `ConfigError` if two packages claim one name.
    """
    return _available("autoscalers", "autoscaler")


def _available(kind: str, word: str) -> dict[str, EntryPoint]:
    from aioserve.support.plugins import installed

    group = f"aioserve.{kind}"
    own = [EntryPoint(name, path, group) for name, path in BRINGS[kind].items()]
    return installed(group, word, own)
