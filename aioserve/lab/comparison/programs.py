"""Programs of several requests: how long each took, against itself alone, and whether in time.

Knows workloads and outcomes of runs. Each array has one entry per request of the workload: a
program's is that of its first request, all others are NaN.
"""

from collections import defaultdict

import msgspec
import numpy as np

from aioserve.lab.comparison.service import Floats
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.workloads.incidents import Incidents
from aioserve.lab.workloads.workload import Workload, WorkloadRequest

PAUSE = 1.0  # seconds between programs that run alone: the engine has nothing left to do


def programs_of(workload: Workload) -> list[list[int]]:
    """The requests of each program, by their places, in order; programs by their first request."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, request in enumerate(workload.requests):
        if request.program >= 0:
            found[request.program, request.crowd].append(i)
    return list(found.values())


def aborts(workload: Workload, program: list[int]) -> bool:
    """Whether the client of a program leaves before its end."""
    return any(workload.requests[i].aborts for i in program)


def completion_times(outcome: RunOutcome, workload: Workload) -> Floats:
    """Seconds from the first arrival of a program to its last token; NaN where the client left, or
    where some request did not finish.
    """
    found = np.full(len(workload.requests), np.nan)
    for program in programs_of(workload):
        results = [outcome.requests[i] for i in program]
        if all(result.is_finished for result in results) and not aborts(workload, program):
            begin = min(result.arrival for result in results)
            found[program[0]] = max(result.end for result in results) - begin
    return found


def in_time(completion: Floats, workload: Workload, slo: ServiceLevels | None) -> Floats:
    """1 for a program that completed within the limit of its class, 0 for one that did not or that
    failed; NaN where there is no limit, or where the client left.
    """
    found = np.full(len(completion), np.nan)
    for program in programs_of(workload):
        own = None if slo is None else slo.of_class(workload.requests[program[0]].kind)
        if own is not None and own.program is not None and not aborts(workload, program):
            found[program[0]] = float(completion[program[0]] <= own.program)
    return found


def one_by_one(workload: Workload) -> Workload:
    """The programs alone, one after the other: each begins when nothing of the one before is left,
    with texts of its own, so that no cache holds anything for it. Its own pauses stay.
    """
    requests: list[WorkloadRequest] = []
    before: tuple[int, ...] = ()
    for number, program in enumerate(programs_of(workload)):
        parts = [workload.requests[i] for i in program]
        begin = min((r.arrival for r in parts if not _is_inside(r.waits_for, program)), default=0.0)
        places = {place: len(requests) + i for i, place in enumerate(program)}
        for request in parts:
            if _is_inside(request.waits_for, program):
                waits_for = tuple(places[i] for i in request.waits_for if i in places)
                arrival = request.arrival
            else:
                waits_for, arrival = before, request.arrival - begin + (PAUSE if before else 0.0)
            pieces = tuple(
                p if p.reply_of < 0 else p._replace(reply_of=places[p.reply_of])
                for p in request.pieces
            )
            requests.append(
                msgspec.structs.replace(
                    request,
                    arrival=arrival,
                    pieces=pieces,
                    follows=waits_for[0] if waits_for else -1,
                    after=waits_for[1:],
                    crowd=number,
                )
            )
        before = tuple(places.values())
    return msgspec.structs.replace(workload, requests=tuple(requests), incidents=Incidents())


def _is_inside(waits_for: tuple[int, ...], program: list[int]) -> bool:
    return any(place in program for place in waits_for)


def slowdowns(completion: Floats, workload: Workload, alone: RunOutcome) -> Floats:
    """Completion times over those of the same programs `alone`, the outcome of `one_by_one`."""
    times = completion_times(alone, one_by_one(workload))
    found = np.full(len(completion), np.nan)
    firsts, place = [], 0
    for program in programs_of(workload):
        firsts.append((program[0], place))
        place += len(program)
    for first, place in firsts:
        found[first] = completion[first] / times[place]
    return found
