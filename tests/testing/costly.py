"""Schedulers with a planted bug that costs others time, memory or place, or forbids a replay.

As those of `broken`, with the same register.
"""

import asyncio
import gc
import random
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any, ClassVar

from aioserve.errors import EngineOverloadedError
from aioserve.request import Request
from aioserve.scheduler import SchedulerOutput
from tests.testing.broken import CAUGHT_BY, SoundScheduler, caught_by

__all__ = ["CAUGHT_BY"]  # those of `broken`, too

# Time and chance.


@caught_by(r"the policy calls time.monotonic\(\) \(costly.py:\d+\): a replay decides otherwise")
class OrdersByTheWallClock(SoundScheduler):
    """Ranks requests by the time of the process: the same order each time, but for a replay."""

    def order(self, request: Request) -> float:
        return time.monotonic()


@caught_by(
    r"the policy calls random.shuffle\(\) \(costly.py:\d+\)|gave another plan the second time"
    "|but the plan tells how long they will be"  # by chance
)
class ShufflesByGlobalDice(SoundScheduler):
    """Admits in an order of chance if there is more than one that fits."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        line = list(self.waiting)
        random.shuffle(line)
        for request in line:
            if not step.admit(request):
                break
        return step.output()


@caught_by(r"gave another plan where strings have other hashes: .* walk through a set of strings")
class WalksThroughASet(SoundScheduler):
    """Serves one request of each client in turn, and keeps the clients in a set."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in sorted(self.running, key=lambda r: r.is_prefill):
            step.run(request)
        for user in {request.user for request in self.waiting}:
            if (request := self.waiting.head(user)) is not None and not step.admit(request):
                break
        return step.output()


# What is not a policy's to see.


@caught_by(r"the policy calls gc.get_objects\(\) \(costly.py:\d+\): what it finds there no server")
class WalksTheHeap(SoundScheduler):
    """Looks among all objects of its process for lengths of replies."""

    def order(self, request: Request) -> float:
        lengths = [one for one in gc.get_objects() if type(one) is _LengthsOfReplies]
        return len(lengths) + request.arrival_time


class _LengthsOfReplies(dict[str, int]):
    """What it looks for."""


@caught_by(r"the policy calls asyncio.all_tasks\(\) \(costly.py:\d+\): what it finds there")
class WalksTheTasks(SoundScheduler):
    """Looks for the clients of its process among the tasks."""

    def order(self, request: Request) -> float:
        with suppress(RuntimeError):
            return len(asyncio.all_tasks()) + request.arrival_time
        return request.arrival_time


@caught_by(r"the policy reads .tb_frame \(costly.py:\d+\): what it finds there no server tells it")
class WalksBack(SoundScheduler):
    """Looks at the callers of its callers, from an error of its own."""

    def order(self, request: Request) -> float:
        try:
            raise ValueError
        except ValueError as error:
            frame = error.__traceback__ and error.__traceback__.tb_frame.f_back
            return (frame is None) + request.arrival_time


# What is not a policy's to write.


@caught_by(r"the policy has changed step.token_budget from 8 to \d+ \(costly.py:\d+\)")
class OverwritesTheBudget(SoundScheduler):
    """Begins a small step and widens it by hand."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(8)
        for request in self.running:
            step.run(request)
        step.token_budget = self.max_num_batched_tokens - sum(map(step.run, self.running)) - 8
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


@caught_by(r"the policy has changed num_preemptions of \w+ from \d+ to \d+ \(costly.py:\d+\)")
class CountsInTheRequest(SoundScheduler):
    """Counts in a field of the scheduler's how often the request was passed over."""

    def schedule(self) -> SchedulerOutput:
        for request in self.waiting:
            request.num_preemptions += 1
        return super().schedule()


@caught_by(r"the policy has changed self.max_num_seqs from \d+ to \d+")
class TakesSeatsAway(SoundScheduler):
    """Runs fewer requests than the operator allows, for ever."""

    def schedule(self) -> SchedulerOutput:
        if len(self.running) == self.max_num_seqs > 1:
            self.max_num_seqs -= 1
        return super().schedule()


# What others wait for.


@caught_by(
    r"the policy calls time.sleep\(\) \(costly.py:\d+\): every request waits while it sleeps"
)
class Sleeps(SoundScheduler):
    """Gives other threads a chance, on the event loop."""

    def schedule(self) -> SchedulerOutput:
        time.sleep(0.0001)
        return super().schedule()


@caught_by(r"schedule\(\) runs [\d,]+ lines with .*: \d+ times as many for 4 times the requests")
class ComparesEveryPair(SoundScheduler):
    """Looks for a running request of the same client, for each that waits."""

    def schedule(self) -> SchedulerOutput:
        self.num_pairs = 0
        for request in self.waiting:
            for other in self.running:
                is_same = other.user == request.user
                is_urgent = request.priority < other.priority
                self.num_pairs += is_same and is_urgent
        return super().schedule()


@caught_by(r"schedule\(\) runs [\d,]+ lines with .*: \d+ times as many for 4 times the requests")
class CountsInC(SoundScheduler):
    """Counts the requests of each client that waits by `list.count`."""

    def schedule(self) -> SchedulerOutput:
        users = [request.user for request in self.waiting]
        self.crowds = [users.count(request.user) for request in self.waiting]
        return super().schedule()


@caught_by(r"schedule\(\) runs [\d,]+ lines with .*: \d+ times as many for 4 times the requests")
class LooksForItInAList(SoundScheduler):
    """Asks for each request whether it stands in a list of those that wait."""

    def schedule(self) -> SchedulerOutput:
        line = list(self.waiting)
        self.num_waiting = sum(request in line for request in line[::-1])
        return super().schedule()


@caught_by(r"schedule\(\) runs costly.py:\d+ in <genexpr>\(\) [\d,]+ times with .* times as often")
class AddsUpForEachAdmitted(SoundScheduler):
    """Adds up what the running requests hold, anew for each one that it admits."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            self.num_held = sum(other.num_computed_tokens for other in self.running)
            if not step.admit(request):
                break
        return step.output()


@caught_by(r"KeepsInTheClass.served has changed from .* all engines of a process share it")
class KeepsInTheClass(SoundScheduler):
    """Counts the requests of each client in a dictionary of its class."""

    served: ClassVar[dict[str, int]] = {}

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        for new in output.scheduled_new_reqs:
            request = self.get_request(new.request_id)
            user = "" if request is None else request.user[:1]
            self.served[user] = self.served.get(user, 0) + 1
        return output


@caught_by(r"requests whose ids were those of ended ones, .* an id may come again")
class RemembersIds(SoundScheduler):
    """Keeps the first key of a request by its id, of the last hundred requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def order(self, request: Request) -> tuple[float, int]:
        found = self.keys.setdefault(request.request_id, (request.arrival_time, request.priority))
        while len(self.keys) > 100:
            self.keys.popitem(last=False)
        return found


@caught_by(r"self.debts grows with clients that have ended: it takes [\d,]+ bytes after 14,000")
class RemembersEveryClient(SoundScheduler):
    """Keeps what each client had, and forgets none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.debts: dict[str, int] = {}

    def on_finish(self, request: Request, reason: str) -> None:
        self.debts[request.user] = self.debts.get(request.user, 0) + request.num_tokens


@caught_by(
    r"where requests lie elsewhere in memory: .* order by id\(\)"
    "|the same events gave another plan the second time"  # by chance
)
class OrdersByAddress(SoundScheduler):
    """Breaks ties by where a request lies in memory."""

    def order(self, request: Request) -> tuple[float, int]:
        return (request.arrival_time, id(request))


@caught_by(
    r"self.seen grows with requests that have ended: it takes [\d,]+ bytes after 14,000 of them"
)
class RemembersEverybody(SoundScheduler):
    """Keeps when each request came, and forgets none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[str, float] = {}

    def order(self, request: Request) -> float:
        return self.seen.setdefault(request.request_id, request.arrival_time)


@caught_by(r"\w+ got no token in 8 steps, .* it sits on \d+ blocks")
class SitsOnHalfPrompts(SoundScheduler):
    """Goes on with half prompts only when nothing decodes."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            if not any(not other.is_prefill for other in self.running):
                step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


@caught_by(r"step \d+: \w+ was preempted in vain: no request was admitted and none got a block")
class PreemptsInVain(SoundScheduler):
    """Throws the least urgent out for one that does not fit all the same."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in sorted(self.running, key=lambda r: r.is_prefill):
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                worse = [r for r in self.running if r.priority > request.priority]
                if worse and self.num_steps % 7 == 0:
                    step.preempt(worse[-1])
                break
        return step.output()


# Leases.


@caught_by(r"pin\(\) takes a time of the clock in seconds, got inf")
class PinsForEver(SoundScheduler):
    """Pins what each request has computed, until a time that never comes."""

    def on_finish(self, request: Request, reason: str) -> None:
        self.pin(request, float("inf"))


@caught_by(r"pin\(\) keeps the prefix of .* for [\d.e+]+ s: a lease has to end")
class PinsForAges(SoundScheduler):
    """Pins each conversation until its next turn, and trusts that there is one."""

    def on_finish(self, request: Request, reason: str) -> None:
        self.pin(request, self.clock() + 1e9)


@caught_by(r"pin\(\) keeps the prefix of .* for 82800 s: a lease has to end")
class PinsUntilTomorrow(SoundScheduler):
    """Pins what each request has computed for 23 hours."""

    def on_finish(self, request: Request, reason: str) -> None:
        self.pin(request, self.clock() + 23 * 3600)


# At the door.


@caught_by(r"add_request\(\) has refused all \d+ requests")
class RefusesEverybody(SoundScheduler):
    """Lets no request in."""

    def add_request(self, request: Request) -> None:
        raise EngineOverloadedError("come back later")
