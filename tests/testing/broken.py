"""Schedulers with one planted bug each: what the contract must catch, and how it says so.

`SoundScheduler` is what they would be without it. Every docstring names the bug; `CAUGHT_BY` holds
what the message must say. They write in the book, which no policy may: that is how they break
things.
"""

import random
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from aioserve.features.kv_connector import OffloadingConnector
from aioserve.features.lora import AdapterSlots
from aioserve.features.multimodal.encoder_cache import EncoderOutputs
from aioserve.kv_cache import StateSlots
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerOutput, Step
from aioserve.scheduler.estimates import LengthHistory
from aioserve.testing import SchedulerHarness
from aioserve.testing.ledger import Masked

CAUGHT_BY: dict[type[BaseScheduler], str] = {}  # a regular expression of the message


def caught_by(message: str) -> Any:
    """Register a broken scheduler with what its violation says."""

    def register(broken: type[BaseScheduler]) -> type[BaseScheduler]:
        CAUGHT_BY[broken] = message
        return broken

    return register


def force(request: Request, **values: Any) -> None:
    """Set attributes of a request unseen by the kit, as a fault of aioserve itself would."""
    for name, value in values.items():
        object.__setattr__(request, name, value)


class SoundScheduler(BaseScheduler):
    """Decodes first, then prompts in pieces, in order of arrival. Nothing is wrong with it."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in sorted(self.running, key=lambda r: r.is_prefill):
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


# Rejection.


@caught_by(r"all \d+ requests were rejected")
class RejectsEverybody(SoundScheduler):
    """Turns every request away before it has run."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if not step.reject(request, "no"):
                step.admit(request)
        return step.output()


@caught_by(r"reject\(\) takes a reason of up to 200 characters, got ''")
class RejectsWithoutAReason(SoundScheduler):
    """Turns the second request in line away, and does not say why."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for i, request in enumerate(list(self.waiting)):
            if i == 1:
                step.reject(request, "")
            elif not step.admit(request):
                break
        return step.output()


# Gauges.


@caught_by(r"gauge 'share' must be a finite number, got nan")
class ShowsNoNumber(SoundScheduler):
    """Shows a share of nothing."""

    def gauges(self) -> dict[str, float]:
        share = 1.0 if self.running else float("nan")
        return {"share": share}


@caught_by(r"gauges\(\) names a gauge 'tokens of \w*': names have up to 48 characters of a-z, 0-9")
class ShowsTenants(SoundScheduler):
    """Has a gauge for every client, by its name."""

    def gauges(self) -> dict[str, float]:
        return {f"tokens of {request.user}": request.num_tokens for request in self.running}


@caught_by(r"step \d+: the same events gave another plan the second time|ended differently")
class CountsItsReaders(SoundScheduler):
    """Does something else once its gauges were read."""

    was_read = False

    def gauges(self) -> dict[str, float]:
        self.was_read = True
        return {}

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in sorted(self.running, key=self.rank):
            step.run(request)
        for request in sorted(self.waiting, key=self.rank):
            step.admit(request)
        return step.output()

    def rank(self, request: Request) -> int:
        return request.priority if self.was_read else 0


# Pauses.


class PausesInTurn(SoundScheduler):
    """Pauses half of the running requests every third step. Nothing is wrong with it."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        if step.step_id % 3 == 0:
            for request in self.running[::2]:
                self.set_aside(step, request)
        for request in self.waiting:
            if self.is_due(request) and not self.take_in(step, request):
                break
        return step.output()

    def set_aside(self, step: Step, request: Request) -> None:
        step.pause(request)

    def is_due(self, request: Request) -> bool:
        return True

    def take_in(self, step: Step, request: Request) -> int:
        return step.admit(request)


@caught_by(r"no request was scheduled for 30 s|not finished after \d+ steps")
class ForgetsThePaused(PausesInTurn):
    """Never lets a request go on that it has paused."""

    def is_due(self, request: Request) -> bool:
        return request not in self.paused_requests


@caught_by(r"reference counts of blocks \[\d.*\] are \[0\b.*\], should be \[1")
class FreesThePaused(PausesInTurn):
    """Lets others have the first block of a request that is paused."""

    def set_aside(self, step: Step, request: Request) -> None:
        if step.pause(request):
            self.kv_cache.pool.free(request.block_ids[:1])


@caught_by(r"\w+ is new, but it is in the batch")
class PausesInSecret(PausesInTurn):
    """Does not tell the runner which requests are paused."""

    def set_aside(self, step: Step, request: Request) -> None:
        if step.pause(request):
            step.preempted_req_ids.remove(request.request_id)


@caught_by(r"\w+ comes back from a pause behind 0 computed tokens, it had \d+")
class ComputesThePausedAgain(PausesInTurn):
    """Lets a paused request begin from the start, in the blocks that it kept."""

    def take_in(self, step: Step, request: Request) -> int:
        if request in self.paused_requests and not self.book.in_flight.carries(request):
            force(request, num_computed_tokens=0)
        return step.admit(request)


@caught_by(r"\w+ has status PAUSED and is not among the paused")
class LosesThePaused(PausesInTurn):
    """Forgets that a request holds blocks, which then give way to no other."""

    def set_aside(self, step: Step, request: Request) -> None:
        if step.pause(request):
            del self.book.paused[request]


@caught_by(r"\w+ runs, but the runner was never given it")
class RunsThePaused(PausesInTurn):
    """Gives a token to a request that it has just paused."""

    def set_aside(self, step: Step, request: Request) -> None:
        if step.pause(request):
            force(request, status=RequestStatus.RUNNING)
            step.run(request)


# Offload.


class Swaps(SoundScheduler):
    """Offloads half of the running requests every third step, and prefetches what comes back next.
    Nothing is wrong with it.
    """

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        if step.step_id % 3 == 0:
            for request in self.running[::2]:
                if request.num_preemptions < 5:
                    self.set_aside(step, request)
        if step.step_id % 3 == 2:
            for request in list(self.waiting)[:1]:
                self.bring_back(step, request)
        else:
            for request in self.waiting:
                if not self.take_in(step, request):
                    break
        return step.output()

    def set_aside(self, step: Step, request: Request) -> None:
        step.offload(request)

    def bring_back(self, step: Step, request: Request) -> None:
        step.prefetch(request)

    def take_in(self, step: Step, request: Request) -> int:
        return step.admit(request)

    @property
    def connector(self) -> OffloadingConnector | None:
        found = self.kv_cache.connector
        return found if isinstance(found, OffloadingConnector) else None


@caught_by(r"\w+ reads position \d+ in block \d+ and finds what")
class OffloadsOthers(Swaps):
    """Has the blocks copied that are beside those of the request."""

    def set_aside(self, step: Step, request: Request) -> None:
        if step.offload(request) and self.connector is not None:
            saves = self.connector._pools.blocks.open.saves
            for block_hash, (block_id, slot) in saves.items():
                saves[block_hash] = (block_id + 1) % self.kv_cache.pool.num_blocks, slot


@caught_by(r"\w+ reads position \d+ in block \d+ and finds what")
class PrefetchesNothing(Swaps):
    """Says that blocks are back, and does not have them loaded."""

    def bring_back(self, step: Step, request: Request) -> None:
        if step.prefetch(request) and self.connector is not None:
            self.connector._pools.blocks.open.loads.clear()


@caught_by(r"\d+ slots of host memory leaked")
class KeepsSlotsForNobody(Swaps):
    """Has the connector keep blocks of a request twice, and forgets the first time."""

    def set_aside(self, step: Step, request: Request) -> None:
        if step.offload(request) and self.connector is not None:
            self.connector._staged.pop(request)


@caught_by(r"reference counts of blocks|\d+ blocks are lost")
class HoldsWhatFailed(Swaps):
    """Trusts prefetched blocks whose step may have failed."""

    def bring_back(self, step: Step, request: Request) -> None:
        if step.prefetch(request):
            self.book.paused[request] = False


# Order.


@caught_by(r"the policy has changed priority of \w+ from -?\d+ to 99")
class WritesToTheRequest(SoundScheduler):
    """Notes in a field of the client's that it has seen the request."""

    def order(self, request: Request) -> Any:
        request.priority = 99
        return request.arrival_time


@caught_by(r"order\(\) returned nan for \w+: NaN has no place in line")
class OrdersByNothing(SoundScheduler):
    """Divides by a count that is 0."""

    def order(self, request: Request) -> Any:
        return float("inf") * request.num_output_tokens


@caught_by(r"r\d+ with key .* waits behind r\d+ with key .*: keys change by reorder\(\) alone")
class MovesByHand(SoundScheduler):
    """Gives the last in line a key that stands before all, and does not have it moved."""

    def schedule(self) -> SchedulerOutput:
        if len(self.waiting) > 2:
            force(list(self.waiting)[-1], order_key=(-1.0, 0))
        return super().schedule()


@caught_by(r"order\(\) returned nan for \w+: NaN has no place in line")
class AgesIntoNothing(SoundScheduler):
    """Ages requests by the time until they are a second old, which is infinite after that."""

    reorder_every = 1.0

    def order(self, request: Request) -> Any:
        age = self.clock() - request.arrival_time
        return request.arrival_time if age < 1 else float("inf") - float("inf")


@caught_by(r"FindsNoAge raised KeyError\(True\) in \w+\(\)")
class FindsNoAge(SoundScheduler):
    """Has a place in line for the young alone when all are asked again."""

    def schedule(self) -> SchedulerOutput:
        self.reorder_all()
        return super().schedule()

    def order(self, request: Request) -> Any:
        is_old = self.clock() - request.arrival_time > 2
        return {False: request.arrival_time}[is_old]


@caught_by(r"group_by\(\) must return a str, got \d+")
class GroupsByNumber(SoundScheduler):
    """Names groups by numbers."""

    def group_by(self, request: Request) -> str:
        return request.priority  # type: ignore[return-value]


@caught_by(r"step \d+: \w+ is admitted, but \w+ stands before it and waits")
class TakesTheLastOfAGroup(SoundScheduler):
    """Promises order among requests of one priority, and takes the last of each first."""

    admits_in_order = "group"

    def group_by(self, request: Request) -> str:
        return str(request.priority)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for head in self.waiting.heads():
            for request in reversed(self.waiting.group(self.group_by(head))):
                step.admit(request)
        return step.output()


@caught_by(r"new_step\(\) takes max_requests as an int of 0 or more, got 1\.5")
class ServesHalfARequest(SoundScheduler):
    """Bounds the requests of a step by half the seats."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(max_requests=3 / 2)  # type: ignore[arg-type]
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            step.admit(request)
        return step.output()


@caught_by(r"a request gets a whole number of tokens, not one of \[1\.5")
class RunsHalfAToken(SoundScheduler):
    """Divides a chunk by a number of requests, and does not round."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request, 3 / 2)  # type: ignore[arg-type]
        for request in self.waiting:
            step.admit(request, 3 / 2)  # type: ignore[arg-type]
        return step.output()


# Retention.


@caught_by(r"the retention of a request is a number, got None for '\w+'")
class ForgetsTheRank(SoundScheduler):
    """Works out a rank and does not return it."""

    def retention(self, request: Request) -> float:
        self.newest = request.arrival_time
        return None  # type: ignore[return-value]


@caught_by(r"the retention of a request is a number, got nan for '\w+'")
class RanksByNothing(SoundScheduler):
    """Divides reuses by requests of a class that has had none."""

    def retention(self, request: Request) -> float:
        return float("inf") * len(request.hints)


@caught_by(r"the retention of a request is a number, got 'high' for '\w+'")
class RanksInWords(SoundScheduler):
    """Gives a running request a rank in words, in the place of a number."""

    def schedule(self) -> SchedulerOutput:
        for request in self.running:
            self.retain(request, "high")  # type: ignore[arg-type]
        return super().schedule()


@caught_by(r"RanksTheUnknown raised KeyError\('reuse'\) in retention\(\)")
class RanksTheUnknown(SoundScheduler):
    """Reads a hint that not every client states."""

    def retention(self, request: Request) -> float:
        return float(request.hints["reuse"])


@caught_by(
    r"the policy calls random.random\(\) \(broken.py:\d+\)|gave another plan the second time"
)
class RanksByDice(SoundScheduler):
    """Evicts in an order that depends on the process' random numbers."""

    def retention(self, request: Request) -> float:
        return random.random()


@caught_by(r"the policy has changed priority of \w+ from -?\d+ to 7")
class NotesTheRankInTheRequest(SoundScheduler):
    """Keeps its rank in a field of the client's."""

    def retention(self, request: Request) -> float:
        request.priority = 7
        return request.priority


@caught_by(r"the block before block \d+, which is cached and free, was evicted first: a prefix has")
class PutsHolesInPrefixes(SoundScheduler):
    """Ranks the ends of prefixes above their heads, and forgets which block stands before which."""

    def retention(self, request: Request) -> float:
        return 1.0

    def new_step(self, token_budget: int | None = None) -> Step:
        step = super().new_step(token_budget)
        if self.kv_cache.retention is not None:
            ranking = self.kv_cache.retention.ranking
            for place, request in enumerate(self.running):
                for content in request.block_hashes:
                    ranking.rank([content], float(place))
            ranking._before.clear()
            ranking._behind.clear()
        return step


# What `schedule` returns.


@caught_by(r"schedule\(\) must return the output\(\) of a new step, got None")
class ReturnsNothing(SoundScheduler):
    """Forgets `return`."""

    def schedule(self) -> SchedulerOutput:
        super().schedule()
        return None  # type: ignore[return-value]


@caught_by(r"schedule\(\) must return the output\(\) of a new step, got SchedulerOutput")
class ReturnsAnOldStep(SoundScheduler):
    """Returns the same plan again, as if nothing had changed."""

    def schedule(self) -> SchedulerOutput:
        if self.book.last_output is None:
            return super().schedule()
        return self.book.last_output


@caught_by(r"RaisesNowAndThen raised IndexError\('list index out of range'\) in schedule\(\)")
class RaisesNowAndThen(SoundScheduler):
    """Takes the first waiting request without asking whether there is one."""

    def schedule(self) -> SchedulerOutput:
        list(self.waiting)[0]  # noqa: RUF015 - the bug
        return super().schedule()


@caught_by(r"(?s)policy ForgetsOutput: a new step was begun, but output\(\) .* was not returned")
class ForgetsOutput(SoundScheduler):
    """Begins a step and then another one."""

    def schedule(self) -> SchedulerOutput:
        self.new_step()
        return super().schedule()


@caught_by(r"step \d+: \d+ tokens are more than max_num_batched_tokens \(\d+\)")
class ExceedsTheBudget(SoundScheduler):
    """Raises the budget of steps by hand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_batched_tokens = 10_000


@caught_by(
    r"step \d+: \d+ requests are more than max_num_seqs \(\d+\)"
    r"|\d+ requests run, max_num_seqs is \d+"
)
class ExceedsTheSeats(SoundScheduler):
    """Takes more requests than there are seats."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_seqs = 100


@caught_by(r"step \d+: \w+ is served twice in one step")
class ServesTwice(SoundScheduler):
    """Lists a running request twice."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        output.scheduled_cached_reqs.req_ids.extend(output.scheduled_cached_reqs.req_ids[:1])
        return output


@caught_by(r"step \d+: \w+ is scheduled, but has ended")
class ServesTheEnded(SoundScheduler):
    """Goes on with a request after its end."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        if not output.num_scheduled_tokens:
            output.num_scheduled_tokens.update(dict.fromkeys(output.finished_req_ids[:1], 1))
        total = sum(output.num_scheduled_tokens.values())
        msgspec.structs.force_setattr(output, "total_num_scheduled_tokens", total)
        return output


@caught_by(r"step \d+: \w+ continues after \d+ computed tokens, but \d+ are computed")
class CountsTooFar(SoundScheduler):
    """Tells the runner one computed token too many."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        counts = output.scheduled_cached_reqs.num_computed_tokens
        counts[:] = [count + (count % 5 == 4) for count in counts]
        return output


@caught_by(r"the runner was not told of the end of|runner was never told of the end of")
class ForgetsTheFinished(SoundScheduler):
    """Never tells the runner who has ended."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        output.finished_req_ids.clear()
        return output


@caught_by(r"\w+ (gets block|is new, but it is in the batch)|reference counts of blocks")
class PreemptsInSecret(SoundScheduler):
    """Does not tell the runner who was preempted."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        output.preempted_req_ids.clear()
        return output


@caught_by(
    r"the policy calls random.random\(\) \(broken.py:\d+\)"
    r"|the same events gave another plan the second time|ended differently"
    r"|tells how long they will be"
)
class RollsGlobalDice(SoundScheduler):
    """Serves in an order that depends on the process' random numbers."""

    def order(self, request: Request) -> float:
        return random.random()


@caught_by(r"step \d+: no reply has ended, but the plan tells how long they will be")
class ForeseesEnds(SoundScheduler):
    """Serves the shortest reply first, as it found the replies in the memory of its caller."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in sorted(self.waiting, key=_foreseen_length):
            if not step.admit(request):
                break
        return step.output()


def _foreseen_length(request: Request) -> int:
    """How many tokens the reply will have, by the memory of whoever calls."""
    frame = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, SchedulerHarness):
            life = caller.ledger.lives.get(request.request_id)
            return 0 if life is None or isinstance(life.reply, Masked) else len(life.reply)
        frame = frame.f_back
    return 0


# Who is served.


@caught_by(r"schedule\(\) has ended \d+ requests: it plans, and the engine ends them")
class LosesARequest(SoundScheduler):
    """Takes a request out of the line and does not keep it anywhere else."""

    def schedule(self) -> SchedulerOutput:
        if len(self.waiting) > 2:
            request = list(self.waiting)[-1]
            self.waiting.remove(request)
            del self.book.requests[request.request_id]
        return super().schedule()


@caught_by(r"no request was scheduled for 30 s although \['\w+'")
class StarvesTheShort(SoundScheduler):
    """Never admits a request of one or two tokens."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if request.num_tokens > 2:
                step.admit(request)
        return step.output()


@caught_by(r"not finished after \d+ steps without arrivals: .* preempted again and again")
class ThrowsOutThePrompts(SoundScheduler):
    """Preempts every prompt that is not computed in one piece, and gives it a small one."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            if request.is_prefill:
                step.preempt(request)
            else:
                step.run(request)
        for request in self.waiting:
            step.admit(request, max_tokens=2)
        return step.output()


@caught_by(r"step \d+: \w+ is admitted, but \w+ stands before it and waits")
class LetsNewcomersPass(SoundScheduler):
    """Promises an order, and goes on with the next when one does not fit."""

    admits_in_order = "all"

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            step.admit(request)
        return step.output()


@caught_by(r"ForgetsWhoRan raised KeyError\(.*\) in schedule\(\)")
class ForgetsWhoRan(SoundScheduler):
    """Counts a user's service from admission, so requests taken over from another policy are never
    counted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.served: dict[str, int] = {}

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            self.served[request.user] += step.run(request)
        for request in self.waiting:
            self.served[request.user] = self.served.get(request.user, 0) + step.admit(request)
        return step.output()


@caught_by(r"PreemptsNobody: victim\(\) must return a running request, got None")
class PreemptsNobody(SoundScheduler):
    """Has no victim when blocks run out."""

    def victim(self) -> Request | None:
        return None


@caught_by(r"step \d+: PausesToBreathe promises keeps_decoding, but plans .*: due is one more")
class PausesToBreathe(SoundScheduler):
    """Promises to keep decoding, and lets the last sit out one step in fifty."""

    keeps_decoding = True

    def schedule(self) -> SchedulerOutput:
        if self.waiting or self.num_steps % 50 != 49:
            return super().schedule()
        step = self.new_step()
        for request in self.running[:-1]:
            step.run(request)
        return step.output()


@caught_by(r"step \d+: TiresOfLongSteps promises keeps_decoding, but plans .*: due is one more")
class TiresOfLongSteps(SoundScheduler):
    """Promises to keep decoding, and stops for a step every forty seconds."""

    keeps_decoding = True

    def schedule(self) -> SchedulerOutput:
        if self.waiting or self.clock() % 40 > 4:
            return super().schedule()
        return self.new_step().output()


@caught_by(r"step \d+: RemembersDecodes promises .* it has kept something of them")
class RemembersDecodes(SoundScheduler):
    """Promises to keep decoding, and remembers how much of that each client got."""

    keeps_decoding = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.served: Counter[str] = Counter()

    def order(self, request: Request) -> int:
        return self.served[request.user]

    def schedule(self) -> SchedulerOutput:
        self.served.update(request.user for request in self.running)
        return super().schedule()


# Blocks.


@caught_by(r"reference counts of blocks \[.*\] are \[.*0.*\], should be \[.*1.*\]")
class FreesTheRunning(SoundScheduler):
    """Gives back blocks of a request that still runs."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        if self.num_steps == 3 and self.running:
            self.kv_cache.free(self.running[0])
        return output


@caught_by(r"reference counts of blocks|a step in flight writes|reads position")
class FreesTheInFlight(SoundScheduler):
    """Gives back blocks of an ended request that a step in flight still writes."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in list(self.book.ended):
            del self.book.ended[request]
            self.kv_cache.free(request)
        return finished


@caught_by(r"reference counts of blocks \[\d+\] are \[\d+\], should be \[\d+\]")
class LeaksOnAbort(SoundScheduler):
    """Keeps a block of a running request that is aborted."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if isinstance(request_ids, str):
            request = self.book.requests.get(request_ids)
            if request is not None and request.block_ids:
                self.kv_cache.pool.touch(request.block_ids[:1])
        return super().finish_requests(request_ids, finished_status)


@caught_by(r"\w+ reads position \d+ in block \d+ and finds what .*: not its own token")
class SharesWhatIsNotComputed(SoundScheduler):
    """Lets others find the blocks of a whole prompt when its first piece is computed."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        for request in self.running:
            num_computed = request.num_computed_tokens
            force(request, num_computed_tokens=request.num_tokens)
            self.kv_cache.cache_full_blocks(request)
            force(request, num_computed_tokens=num_computed)
        return output


@caught_by(r"\w+ reads position \d+ in block \d+ and finds what .*: not its own token, .* tenant")
class SharesBetweenTenants(SoundScheduler):
    """Ignores the salt that keeps the prefixes of tenants apart."""

    def add_request(self, request: Request) -> None:
        salt = request.cache_salt
        force(request, cache_salt="")
        self.kv_cache.get_computed_blocks(request)  # hashes the prompt
        force(request, cache_salt=salt)
        super().add_request(request)


# Endings.


@caught_by(r"finish_requests did not return \['\w+'\], which it should have ended")
class IgnoresAborts(SoundScheduler):
    """Goes on although the client has left."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if finished_status is RequestStatus.FINISHED_ABORTED:
            return []
        return super().finish_requests(request_ids, finished_status)


@caught_by(r"finish_requests must return a list of the ids that ended, got None")
class TellsNobody(SoundScheduler):
    """Ends requests and does not say which."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        super().finish_requests(request_ids, finished_status)
        return None  # type: ignore[return-value]


@caught_by(r"finish_requests returned \[.*\], but only \[.*\] ended")
class EndsTheEndedAgain(SoundScheduler):
    """Returns every id that it was given, also unknown ones."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        finished = super().finish_requests(request_ids, finished_status)
        return [request_ids] if isinstance(request_ids, str) else finished


@caught_by(r"\w+ has finish and stop reason none, None; due are 'stop'")
class RunsPastStopTokens(SoundScheduler):
    """Does not look for stop tokens."""

    def add_request(self, request: Request) -> None:
        stop_token_ids = request.stop_token_ids
        force(request, stop_token_ids=frozenset())
        super().add_request(request)
        force(request, stop_token_ids=stop_token_ids)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        alive = list(self.book.requests.values())
        saved = [request.stop_token_ids for request in alive]
        for request in alive:
            force(request, stop_token_ids=frozenset())
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request, stop_token_ids in zip(alive, saved, strict=True):
            force(request, stop_token_ids=stop_token_ids)
        return outputs


@caught_by(r"the time of \['\w+'.*\] is up, but expire_requests returned \[\]")
class IgnoresDeadlines(SoundScheduler):
    """Never looks at the clock."""

    def expire_requests(self) -> list[str]:
        return []


@caught_by(r"\w+ has status FINISHED_LENGTH_CAPPED, should be FINISHED_TIMEOUT")
class DisguisesTimeouts(SoundScheduler):
    """Says that a request whose time was up had reached its length."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if finished_status is RequestStatus.FINISHED_TIMEOUT:
            finished_status = RequestStatus.FINISHED_LENGTH_CAPPED
        return super().finish_requests(request_ids, finished_status)


# Results.


class _EditsOutputs(SoundScheduler):
    def edit(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """What the client gets instead."""
        raise NotImplementedError

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        return self.edit(super().update_from_output(scheduler_output, model_runner_output))


@caught_by(r"\w+ of client \d was delivered to client 0")
class DeliversToTheFirstClient(_EditsOutputs):
    """Puts everybody's outputs under client 0."""

    def edit(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        merged = [item for batch in outputs.values() for item in batch.outputs]
        return {0: EngineCoreOutputs(merged)}


@caught_by(r"tokens of \['\w+'.*\] were sampled, but not delivered")
class DropsTheLastOutput(_EditsOutputs):
    """Loses an output when there are many."""

    def edit(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        for batch in outputs.values():
            if len(batch.outputs) > 2:
                batch.outputs.pop()
        return outputs


@caught_by(r"\w+ was delivered tokens \[\], due were \[\d+\]")
class SwallowsTheLastToken(_EditsOutputs):
    """Delivers no token with the end of a request."""

    def edit(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        for batch in outputs.values():
            for i, item in enumerate(batch.outputs):
                if item.finish_reason is not None:
                    batch.outputs[i] = msgspec.structs.replace(item, new_token_ids=[])
        return outputs


@caught_by(r"\d adapters are more than max_loras \(\d\)")
class ForgetsMaxLoras(SoundScheduler):
    """Admits any adapter."""

    def new_step(self, token_budget: int | None = None) -> Step:
        for resource in self.kv_cache.resources:
            if isinstance(resource, AdapterSlots):
                resource.max_adapters = 99
        return super().new_step(token_budget)


# Encoder inputs and draft tokens.


@caught_by(r"\w+ computes a token of the encoder input at \d+, whose output is not there")
class ForgetsEncoderInputs(SoundScheduler):
    """Never has an encoder run."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        output.scheduled_encoder_inputs.clear()
        return output


class SplittingPlan(EncoderOutputs):
    """Knows of no input that runs whole."""

    def fit(self, request: Request, num_tokens: int, start: int, most: int) -> int:
        items = [msgspec.structs.replace(i, whole=False) for i in request.encoder_inputs]
        return super().fit(
            Request(msgspec.structs.replace(request.spec, encoder_inputs=items)),
            num_tokens,
            start,
            most,
        )


@caught_by(r"\w+ computes a part of the encoder input at \d+, which runs whole")
class SplitsImages(SoundScheduler):
    """Spends its budget to the last token."""

    def new_step(self, token_budget: int | None = None) -> Step:
        for resource in self.kv_cache.resources:
            if isinstance(resource, EncoderOutputs):
                resource.__class__ = SplittingPlan
                self.kv_cache._use(list(self.kv_cache.resources))
        return super().new_step(token_budget)


@caught_by(r"\w+ verifies drafts \[.*\], but \[.*\] were proposed")
class SendsTheLastDrafts(SoundScheduler):
    """Sends the last of the drafts, and backwards."""

    def schedule(self) -> SchedulerOutput:
        before = {r.request_id: r.draft_token_ids for r in self.running}
        output = super().schedule()
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            drafts[:] = before[request_id][-len(drafts) :][::-1]
        return output


@caught_by(r"\w+ (continues after|is to compute position|computes \d+ tokens)")
class KeepsWrongDrafts(SoundScheduler):
    """Does not roll back what was computed for draft tokens that turned out wrong."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        drafted = [request for request in self.running if request.request_id in drafts]
        computed = [request.num_computed_tokens for request in drafted]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request, num_computed in zip(drafted, computed, strict=True):
            force(request, num_computed_tokens=num_computed)
        return outputs


# Row values.


@caught_by(r"ReadsBeforeTheFirst raised KeyError\('entropy'\) in schedule\(\)")
class ReadsBeforeTheFirst(SoundScheduler):
    """Serves the surest first, also among those of which there is no token yet."""

    wants_row_values = ("entropy",)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in sorted(self.running, key=lambda r: r.row_values["entropy"]):
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


@caught_by(r"ReadsWhatIsNotWanted raised KeyError\('entropy'\) in draft_length\(\)")
class ReadsWhatIsNotWanted(SoundScheduler):
    """Reads values, and has not said that it wants them."""

    def draft_length(self, request: Request) -> Any:
        if not request.num_output_tokens:
            return None
        return int(request.row_values["entropy"] < 1.0)


# Predicted lengths.


@caught_by(r"step \d+: no reply has ended, but the plan tells how long they will be")
class PredictsTheTruth(SoundScheduler):
    """Predicts each length as it will be, which its caller knows."""

    uses_predicted_tokens = True

    def schedule(self) -> SchedulerOutput:
        self.reorder_all()
        return super().schedule()

    def order(self, request: Request) -> Any:
        return self.predicted_tokens(request, 10.0)

    def predicted_tokens(self, request: Request, default: float) -> float:
        return _foreseen_length(request) or default


@caught_by(r"step \d+: no reply has ended, but the plan tells how long they will be")
class LearnsBeforeTheEnd(SoundScheduler):
    """Learns the length of a reply when it has begun."""

    uses_predicted_tokens = True

    def order(self, request: Request) -> Any:
        return self.predicted_tokens(request, 10.0)

    def schedule(self) -> SchedulerOutput:
        history = self.book.reply_lengths = self.book.reply_lengths or LengthHistory()
        for request in self.running:
            group = request.spec.key_name, request.user, request.adapter_id, ""
            history.note(group, _foreseen_length(request))
        self.reorder_all()
        return super().schedule()


@caught_by(r"asks predicted_tokens\(\) without uses_predicted_tokens = True")
class PredictsInSecret(SoundScheduler):
    """Asks for a prediction, and has not said that it does."""

    def order(self, request: Request) -> Any:
        return self.predicted_tokens(request, 10.0)


# Draft lengths.


class _Drafts(SoundScheduler):
    def draft_length(self, request: Request) -> Any:
        raise NotImplementedError


@caught_by(r"draft_length\(\) must return None or a whole number from 0 to \d, got \d+")
class DraftsTooFar(_Drafts):
    """Asks for a draft token more than are ever guessed, now and then."""

    def draft_length(self, request: Request) -> Any:
        return request.num_tokens % (self.max_draft_tokens + 2)


@caught_by(r"draft_length\(\) must return None or a whole number from 0 to \d, got \d\.\d")
class DraftsHalves(_Drafts):
    """Divides the draft tokens that a step has room for among its requests."""

    def draft_length(self, request: Request) -> Any:
        return self.max_draft_tokens / len(self.running)


@caught_by(r"raised KeyError\(.*\) in draft_length\(\)")
class DraftsForTheKnown(_Drafts):
    """Looks up a length that it has noted for those that it has admitted itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lengths: dict[str, int] = {}

    def order(self, request: Request) -> Any:
        self.lengths[request.request_id] = 1
        return request.arrival_time

    def draft_length(self, request: Request) -> Any:
        return self.lengths.pop(request.request_id)


@caught_by(r"step \d+: the same events gave another plan the second time|ended differently")
class DraftsByDice(_Drafts):
    """Asks for as many draft tokens as the process' random numbers say."""

    def draft_length(self, request: Request) -> Any:
        return random.randint(0, self.max_draft_tokens)


@caught_by(r"step \d+: no reply has ended, but the plan tells how long they will be")
class DraftsToTheEnd(_Drafts):
    """Asks for no draft beyond the end of a reply, which it found in the memory of its caller."""

    def draft_length(self, request: Request) -> Any:
        return min(_foreseen_length(request), self.max_draft_tokens)


# States.


@caught_by(r"\w+ runs without a slot for its state|with a state in slot -?\d+ that is not theirs")
class ForgetsStates(SoundScheduler):
    """Does not say where the states of a step are."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        output.parts.pop("states", None)
        return output


@caught_by(r"\d+ slots for states leaked|no request was scheduled for 30 s although")
class KeepsStates(SoundScheduler):
    """Takes the state of whoever ended for one that runs."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if (states := self.kv_cache.states) is not None:
            states.give_back = lambda request: None  # type: ignore[method-assign]
        return super().finish_requests(request_ids, finished_status)


@caught_by(r"begins behind \d+ tokens with a state in slot -?\d+ that is not theirs")
class BeginsWithOldStates(SoundScheduler):
    """Lets a request go on where its prefix ends with whatever is in its slot."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        moves: dict[str, StateSlots] = dict(output.parts.get("states", {}))
        for request_id, own in moves.items():
            if own.source >= 0:
                moves[request_id] = msgspec.structs.replace(own, source=own.slot)
        output.parts["states"] = moves
        return output


# Windows.


@caught_by(r"\w+ has no window block for position \d+")
class ForgetsWindows(SoundScheduler):
    """Does not say which blocks layers with a window have got."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        output.parts.pop("windows", None)
        return output


_MISSING = (
    r"\w+ has no window block for position \d+"
    r"|\w+, behind \d+ tokens, reads position \d+ of its window in block \d+ and finds"
)


@caught_by(_MISSING)
class GivesWindowsBackTooEarly(SoundScheduler):
    """Lets go of the block in which a window begins."""

    def schedule(self) -> SchedulerOutput:
        if (windows := self.kv_cache.windows) is not None:
            size, length = self.kv_cache.block_size, windows.spec.num_tokens
            windows._first_seen = (  # type: ignore[method-assign]
                lambda num_computed: -(-max(num_computed - length + 1, 0) // size)
            )
        return super().schedule()


@caught_by(r"\d+ blocks for windows leaked|no request was scheduled for 30 s although")
class KeepsWindows(SoundScheduler):
    """Takes the window of whoever ended for that of one that runs."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if (windows := self.kv_cache.windows) is not None:
            windows.give_back = lambda request: None  # type: ignore[method-assign]
        return super().finish_requests(request_ids, finished_status)


@caught_by(_MISSING)
class BeginsWithoutItsWindow(SoundScheduler):
    """Trusts any cached prefix, also where its window is gone."""

    def schedule(self) -> SchedulerOutput:
        if (windows := self.kv_cache.windows) is not None:
            windows.num_reached_blocks = (  # type: ignore[method-assign]
                lambda request, num_blocks: num_blocks
            )
        return super().schedule()


# Blocks from outside the KV cache.


@caught_by(r"\w+ reads position \d+ in block \d+ and finds what")
class ForgetsToLoad(SoundScheduler):
    """Admits with blocks that a connector has, and does not have them copied."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        if output.kv_connector_metadata is not None:
            output.kv_connector_metadata.loads.clear()
        return output


@caught_by(r"\w+ has status WAITING and is in neither|\d+ slots of host memory leaked")
class LosesTheLoading(SoundScheduler):
    """Drops who waits for its blocks out of the set of those, and does not put it in line."""

    def schedule(self) -> SchedulerOutput:
        for resource in self.kv_cache.holding:
            resource._aside.clear()  # type: ignore[attr-defined]
        return super().schedule()


@caught_by(r"\d+ slots of host memory leaked|\w+ is scheduled, but has ended")
class KeepsSlotsOfTheEnded(SoundScheduler):
    """Does not tell the connector who has ended."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        self.kv_cache._leaves = ()
        return super().finish_requests(request_ids, finished_status)
