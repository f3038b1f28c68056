"""Says in words what differs between two plans, the field that tells most first.

Knows the fields of `SchedulerOutput`. Knows nothing about why they differ.
"""

from typing import Any

from aioserve.scheduler import SchedulerOutput

MAX_NAMED = 3  # requests of which is said what they get


def differences(plan: SchedulerOutput, other: SchedulerOutput) -> str:
    """What `plan` says where `other` says something else; "" if they are equal."""
    if tokens := _tokens(plan, other):
        return tokens
    pairs: dict[str, tuple[Any, Any]] = {
        "rows": (_rows(plan), _rows(other)),
        "admits": (_admitted(plan), _admitted(other)),
        "preempts": (plan.preempted_req_ids, other.preempted_req_ids),
    }
    for name in SchedulerOutput.__struct_fields__:
        pairs[name] = getattr(plan, name), getattr(other, name)
    for name, (mine, its) in pairs.items():
        if mine != its:
            return f"{name}: {mine!r:.200} instead of {its!r:.200}"
    return ""


def _tokens(plan: SchedulerOutput, other: SchedulerOutput) -> str:
    """Requests that get other numbers of tokens."""
    mine, its = plan.num_scheduled_tokens, other.num_scheduled_tokens
    names = [name for name in {**mine, **its} if mine.get(name) != its.get(name)]
    words = [f"{n} gets {mine.get(n, 0)} instead of {its.get(n, 0)}" for n in names[:MAX_NAMED]]
    if len(names) > MAX_NAMED:
        words.append(f"{len(names) - MAX_NAMED} more differ")
    return f"tokens: {', '.join(words)}" if names else ""


def _rows(plan: SchedulerOutput) -> list[str]:
    return list(plan.num_scheduled_tokens)


def _admitted(plan: SchedulerOutput) -> list[tuple[str, int]]:
    """The requests that enter, each with its cached tokens."""
    return [(data.request_id, data.num_computed_tokens) for data in plan.scheduled_new_reqs]
