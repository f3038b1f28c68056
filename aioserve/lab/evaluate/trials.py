"""What is tried with a candidate, where the candidate is not: rules, runs, foresight, cost.

Each trial takes a `Guest`, the candidate in a process of its own, and returns plain data, or raises
`Failed` with a story. Workloads, seeds and lengths of replies are here alone, and all measures are
made of what this process did and timed itself.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, cast

import msgspec
import numpy as np

from aioserve.config import EngineConfig
from aioserve.errors import AioserveError
from aioserve.lab.evaluate import jobs
from aioserve.lab.evaluate.enclosure import Channel, Failed, Gone, Guest
from aioserve.lab.evaluate.evaluator import read_policy
from aioserve.lab.evaluate.plans import SITTING, GuestScheduler, greet, name_of
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Workload, WorkloadRequest
from aioserve.lab.zoo.cost import REFERENCE, CostLoad, measure_in_turns, processor
from aioserve.lab.zoo.standing import load_policies, load_workload, measure_run, prepared
from aioserve.scheduler import BaseScheduler, load_policy

RUSH = 0.25  # times the time between arrivals, where foresight is looked for
TRUSTED = "fcfs"  # with which a process is warmed up
LEAST_US = 1.0  # what is measured is a difference: no step costs less


def warm_up() -> None:
    """Import all that trials and jobs import, by doing some of them with a policy that ships."""
    from aioserve.testing.harness import sound_policies

    policy = load_policy(TRUSTED)
    assert issubclass(policy, BaseScheduler)
    jobs.one_rule(policy)
    jobs.random_traffic(policy, 1)
    sound_policies()
    processor()  # which asks another program
    workload = load_workload("chat", 1).cut(limit=20)
    [candidate] = load_policies([TRUSTED])
    measure_run(simulate(prepared(candidate, workload).config, workload), workload)


def prepare(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trial with its workload made, for which files are read."""
    if "workload" not in arguments:
        return arguments
    others = {n: v for n, v in arguments.items() if n not in ("workload", "seed", "requests")}
    workload = load_workload(arguments["workload"], arguments["seed"])
    if (limit := arguments.get("requests")) is not None:
        workload = workload.cut(limit=limit)
    return {**others, "workload": workload}


def first_rules(guest: Guest) -> int:
    """Return how many rules of the contract were tried, those that fail soonest. Raises `Failed`
    for the first rule that is broken, with the story of it.
    """
    guest.do("first_rules")
    return len(jobs.FIRST_RULES)


def other_rules(guest: Guest) -> int:
    """Return how many other rules of the contract were tried. Raises `Failed` as `first_rules`."""
    guest.do("other_rules")
    return len(jobs.rules()) - len(jobs.FIRST_RULES)


def random_traffic(guest: Guest, days: int) -> int:
    """Return how many random days were tried at each pipeline depth. Raises `Failed` for the first
    rule that is broken, with its story.
    """
    guest.do("random_traffic", days=days)
    return days


# Runs on the standard machine of the zoo.


def run(guest: Guest, workload: Workload) -> dict[str, float]:
    """Return the measures of the zoo of one run, by their keys."""
    return measure_run(outcome_of(guest, workload), workload)


def foresight(guest: Guest, workload: Workload) -> float:
    """Return the second of a run up to which it went as another run, which is the same up to there
    and whose future is another one. Raises `Failed` if the plans differ before: the policy has seen
    what is still to come. Requests come four times as fast as the workload says, so that many
    wait: what a policy knows of requests shows where it has to choose.
    """
    workload = workload.scaled(RUSH)
    outcome = outcome_of(guest, workload)
    moment = _fullest_moment(outcome)
    again = outcome_of(guest, with_another_future(workload, outcome, moment), workload)
    if differs := _difference(outcome, again, moment):
        raise Failed(
            "foresight",
            f"{workload.name}, seed {workload.seed}: two runs are the same up to second "
            f"{moment:.3f}; after it, replies have other lengths and nothing long comes any more. "
            f"Before it {differs}: the policy has seen what is still to come.",
        )
    return moment


def outcome_of(guest: Guest, workload: Workload, fitted_to: Workload | None = None) -> RunOutcome:
    """Return the outcome of a run that is planned in the candidate's process, with limits that fit
    the longest request of the workload, or of the one that is named. Raises `Failed`.
    """
    where = f"{workload.name}, seed {workload.seed}"
    key = blake2b(where.encode(), digest_size=32).digest()
    with guest.started(jobs.PLANNING) as (line, _), _seated(line, key) as policy:
        [candidate] = load_policies([policy])
        try:
            return simulate(prepared(candidate, fitted_to or workload).config, workload)
        except Exception as error:  # of the engine, in whose words the failure is told
            failure = SITTING.get().failure
            if failure is None and not isinstance(error, AioserveError):
                raise
            if isinstance(failure, Gone):
                raise failure from error
            told = failure or Failed("failed", str(error))
            raise Failed(told.failure, f"{where}: {told}") from error
    raise AssertionError("a line is given up for a failure alone")


@contextmanager
def _seated(line: Channel, key: bytes) -> Iterator[str]:
    """Let the policy at the other end of a line plan for schedulers that are made in the block by
    this name.
    """
    sitting = greet(line, key)
    token = SITTING.set(sitting)
    try:
        yield name_of(sitting.hello)
    finally:
        SITTING.reset(token)


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


def cost(guest: Guest, waiting: int = 1000) -> dict[str, float]:
    """Return microseconds of CPU per schedule() with 1,000 requests running and `waiting` ones, and
    how many times that of `chunked_prefill` this is. The kernel's clock of the candidate's process
    is read from here; what the line takes of it is known from `chunked_prefill`, which is measured
    in a process beside it and in this one as well, all three in turns. Raises `Failed`.
    """
    here = CostLoad(EngineConfig.load(REFERENCE), waiting)
    reference = guest.beside(read_policy(REFERENCE), REFERENCE)
    with _load_of(reference, waiting) as there, _load_of(guest, waiting) as own:
        measure_in_turns([here, there, own])
    us = max(own.us - (there.us - here.us), LEAST_US)
    return {"us": round(us, 1), "ratio": us / here.us}


@contextmanager
def _load_of(guest: Guest, waiting: int) -> Iterator[CostLoad]:
    """Make a load whose policy plans in the candidate's process, which ends with the block. Raises
    `Failed`, also for what the candidate does in the block.
    """
    with guest.started(jobs.PLANNING) as (line, pid), _seated(line, bytes(16)) as policy:
        sitting = SITTING.get()
        [candidate] = load_policies([policy])
        try:
            yield CostLoad(
                candidate.config,
                waiting,
                options=sitting.hello.options,
                clock=lambda: _cpu_seconds(pid),
                settle=lambda scheduler: cast(GuestScheduler, scheduler).settle(),
            )
        except (AioserveError, Failed) as error:
            if sitting.failure is not None:
                raise sitting.failure from error
            if isinstance(error, Failed):  # of the candidate beside this one
                raise
            raise Failed("failed", f"cost of a step: {error}") from error


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, by the clock that Linux has for each (clock_getcpuclockid);
    elsewhere the time that passes.
    """
    return time.clock_gettime((~pid << 3) | 2) if sys.platform == "linux" else time.perf_counter()
