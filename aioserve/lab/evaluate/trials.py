"""What is tried with a candidate in its own process: the contract, runs, foresight, cost.

Each trial takes the policy's class and returns plain data, or raises `Failed` with a story. What a
trial needs of files is read by `prepare`, before the candidate's code runs.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from aioserve.errors import AioserveError
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.evaluate.enclosure import Failed
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Workload, WorkloadRequest
from aioserve.lab.zoo.cost import measure_costs, processor
from aioserve.lab.zoo.standing import load_policies, load_workload, measure_run, prepared
from aioserve.scheduler import BaseScheduler, load_policy

#: Rules of the contract that are tried first: they take a second together, and most candidates that
#: break a rule break a rule of this list.
FIRST_RULES = (
    "test_every_request_ends_with_the_tokens_it_would_get_alone",
    "test_a_pool_for_exactly_one_request_serves_all",
    "test_stop_tokens_end_a_request_but_not_before_min_tokens",
    "test_a_deadline_ends_a_request_with_a_timeout",
    "test_a_shared_prefix_is_read_only_when_it_is_there",
    "test_a_promise_to_keep_decoding_is_kept",
    "test_no_plan_tells_how_long_a_reply_will_be",
    "test_no_plan_tells_how_long_the_replies_that_run_will_be",
    "test_offline_requests_get_what_others_leave",
    "test_a_request_that_is_turned_away_may_come_again",
    "test_admission_respects_declared_order",
    "test_time_and_chance_are_the_policys_own",
)
RANDOM_RULE = "test_no_rule_is_broken_under_random_traffic"
NOT_HERE = ("test_plans_are_the_same_in_every_process",)  # it starts two processes
RUSH = 0.25  # times the time between arrivals, where foresight is looked for
TRUSTED = "fcfs"  # with which a process is warmed up
MAX_STORY = 6000  # characters


def policy_of(module: str) -> type[BaseScheduler]:
    """Return the only policy of a module. Raises `Failed` if it has none, or cannot be imported."""
    try:
        found = load_policy(module)
    except AioserveError as error:
        raise Failed("failed", str(error)) from error
    if not issubclass(found, BaseScheduler):
        raise Failed("refused", f"{found.__name__} does not derive from BaseScheduler")
    return found


def warm_up() -> None:
    """Import all that trials import, by making some of them with a policy that ships."""
    from aioserve.testing.harness import sound_policies

    policy = load_policy(TRUSTED)
    assert issubclass(policy, BaseScheduler)
    _check(policy, FIRST_RULES[0])
    random_traffic(policy, 1)
    sound_policies()
    processor()  # which asks another program
    run(policy, **prepare("run", {"workload": "chat", "seed": 1, "requests": 20}))


def prepare(trial: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trial with its workload made, for which files are read."""
    if "workload" not in arguments:
        return arguments
    others = {n: v for n, v in arguments.items() if n not in ("workload", "seed", "requests")}
    workload = load_workload(arguments["workload"], arguments["seed"])
    if (limit := arguments.get("requests")) is not None:
        workload = workload.cut(limit=limit)
    return {**others, "workload": workload}


# The contract.


@cache
def rules() -> tuple[str, ...]:
    """Return the rules of the contract without random traffic, those that are tried first first."""
    from aioserve.testing.contract import PolicyContract

    found = [name for kind in PolicyContract.__mro__ for name in vars(kind)]
    apart = (*FIRST_RULES, RANDOM_RULE, *NOT_HERE)
    return (*FIRST_RULES, *(n for n in found if n.startswith("test_") and n not in apart))


def first_rules(policy: type[BaseScheduler]) -> int:
    """Return how many rules of the contract were tried, those that fail soonest. Raises `Failed`
    for the first rule that is broken, with the story of it.
    """
    for name in FIRST_RULES:
        _check(policy, name)
    return len(FIRST_RULES)


def other_rules(policy: type[BaseScheduler]) -> int:
    """Return how many other rules of the contract were tried. Raises `Failed` as `first_rules`."""
    others = rules()[len(FIRST_RULES) :]
    for name in others:
        _check(policy, name)
    return len(others)


def random_traffic(policy: type[BaseScheduler], days: int) -> int:
    """Return how many random days were tried at each pipeline depth. Raises `Failed` for the first
    rule that is broken, with its story.
    """
    _check(policy, RANDOM_RULE, days)
    return days


def _check(policy: type[BaseScheduler], name: str, days: int = 1) -> None:
    from aioserve.testing.contract import PolicyContract, Subject
    from aioserve.testing.violation import ContractViolation

    subject = Subject(policy, max_examples=days, shrink=False)
    for depth in (1, 2):
        try:
            getattr(PolicyContract(), name)(subject, depth)
        except (ContractViolation, AioserveError) as error:
            raise Failed("broken", _story(name, error)) from error


def _story(name: str, error: Exception) -> str:
    lines = "\n".join([str(error), *getattr(error, "__notes__", [])]).splitlines()
    program = lines.index("To reproduce:") if "To reproduce:" in lines else len(lines)
    rule = name.removeprefix("test_").replace("_", " ")
    return "\n".join([f"Broken rule: {rule}", *lines[:program]])[:MAX_STORY]


# Runs on the standard machine of the zoo.


def run(policy: type[BaseScheduler], workload: Workload) -> dict[str, float]:
    """Return the measures of the zoo of one run, by their keys."""
    return measure_run(_outcome(policy, workload), workload)


def foresight(policy: type[BaseScheduler], workload: Workload) -> float:
    """Return the second of a run up to which it went as another run, which is the same up to there
    and whose future is another one. Raises `Failed` if the plans differ before: the policy has seen
    what is still to come. Requests come four times as fast as the workload says, so that many
    wait: what a policy knows of requests shows where it has to choose.
    """
    workload = workload.scaled(RUSH)
    outcome = _outcome(policy, workload)
    moment = _fullest_moment(outcome)
    again = _outcome(policy, with_another_future(workload, outcome, moment))
    if differs := _difference(outcome, again, moment):
        raise Failed(
            "foresight",
            f"{workload.name}, seed {workload.seed}: two runs are the same up to second "
            f"{moment:.3f}; after it, replies have other lengths and nothing long comes any more. "
            f"Before it {differs}: the policy has seen what is still to come.",
        )
    return moment


def _outcome(policy: type[BaseScheduler], workload: Workload) -> RunOutcome:
    try:
        return simulate(prepared(_on_machine(policy), workload).config, workload)
    except AioserveError as error:
        cause = f": {error.__cause__!r}" if error.__cause__ is not None else ""
        raise Failed("failed", f"{workload.name}, seed {workload.seed}: {error}{cause}") from error


def _on_machine(policy: type[BaseScheduler]) -> Candidate:
    [candidate] = load_policies([f"{policy.__module__}:{policy.__qualname__}"])
    return candidate


def _fullest_moment(outcome: RunOutcome) -> float:
    """Return the second, in the middle half of a run, at which most requests waited."""
    time, waiting = np.frombuffer(outcome.states.time), np.array(outcome.states.num_waiting)
    inside = (time > outcome.end / 4) & (time < 3 * outcome.end / 4)
    if not inside.any():
        return outcome.end / 2
    return float(time[inside][int(np.argmax(waiting[inside]))])


def with_another_future(workload: Workload, outcome: RunOutcome, moment: float) -> Workload:
    """Return the workload with what no policy can know at a `moment` of a run changed: the tokens
    that requests then still had to come are dealt out in reverse, the longest to the one that had
    fewest, and those that had not come get replies of two tokens.
    """
    longest = max(request.output_tokens for request in workload.requests)
    left: dict[int, int] = {}
    changed = list(workload.requests)
    for i, (request, found) in enumerate(zip(workload.requests, outcome.requests, strict=True)):
        if found.arrival > moment or not found.end:
            changed[i] = _with_reply(request, 2)
        elif found.end > moment:
            done = int(np.searchsorted(np.frombuffer(found.token_times), moment, side="right"))
            left[i] = request.output_tokens - done
    order = sorted(left, key=lambda i: (left[i], i))
    for i, other in zip(order, reversed(order), strict=True):
        request = workload.requests[i]
        done = request.output_tokens - left[i]
        # Two more at least: one may be in flight at the moment, which is not to end it.
        most = min(
            longest, request.max_tokens or longest, workload.longest - request.num_prompt_tokens
        )
        changed[i] = _with_reply(request, max(done + 2, min(done + left[other], most)))
    return msgspec.structs.replace(workload, requests=tuple(changed))


def _with_reply(request: WorkloadRequest, num_tokens: int) -> WorkloadRequest:
    return msgspec.structs.replace(request, output_tokens=num_tokens)


def _difference(outcome: RunOutcome, again: RunOutcome, moment: float) -> str:
    """Return what two runs did otherwise before a moment, in words; "" if nothing."""
    columns = ("planned", "start", "seconds", "num_prefill_tokens", "num_decodes")
    num_steps = [int(np.searchsorted(np.array(o.steps.planned), moment)) for o in (outcome, again)]
    for place in range(min(num_steps)):
        mine, its = ([getattr(o.steps, c)[place] for c in columns] for o in (outcome, again))
        if mine != its:
            return (
                f"step {place + 1}, at second {mine[0]:.3f}, has {mine[3]} prompt tokens and "
                f"{mine[4]} decodes in one and {its[3]} and {its[4]} in the other"
            )
    if num_steps[0] != num_steps[1]:
        return f"one has {num_steps[0]} steps and the other {num_steps[1]}"
    for i, (one, other) in enumerate(zip(outcome.requests, again.requests, strict=True)):
        mine, its = (_times_before(each.token_times, moment) for each in (one, other))
        if mine != its:
            return f"request {i} has {len(mine)} tokens in one and {len(its)} in the other"
    return ""


def _times_before(times: "Sequence[float]", moment: float) -> list[float]:
    return [time for time in times if time <= moment]


# What a step costs.


def cost(policy: type[BaseScheduler], waiting: int = 1000) -> dict[str, float]:
    """Return microseconds of CPU per schedule() with 1,000 requests running and `waiting` ones, and
    how many times that of `chunked_prefill` this is, measured just before.
    """
    [found] = measure_costs([_on_machine(policy).config], waiting)
    return {"us": found.us, "ratio": found.ratio}
