"""Schedulers with a planted bug in what they make of hints, and in which requests they turn away.

As those of `broken`, with the same register.
"""

from aioserve.errors import EngineOverloadedError
from aioserve.request import Request
from aioserve.scheduler import SchedulerOutput, hinted_flag, hinted_number
from tests.testing.broken import SoundScheduler, caught_by
from tests.testing.costly import CAUGHT_BY

__all__ = ["CAUGHT_BY"]  # those of `broken` and `costly`, too

AWAY = r"was turned away \d times by an idle engine|all \d+ requests were rejected"

# Hints.


@caught_by(r"no request was scheduled for 30 s although \['\w+'")
class NeverServesOffline(SoundScheduler):
    """Leaves offline requests for a time without others, and then does not ask for them."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if not hinted_flag(request, "offline"):
                step.admit(request)
        return step.output()


@caught_by(r"no request was scheduled for 30 s although \['\w+'")
class NeverServesThePatient(SoundScheduler):
    """Leaves requests that can wait for more than a minute to the next minute, for ever."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if hinted_number(request, "slo_ttft", 1.0) in (61.0, 90.0, 600.0):
                continue
            step.admit(request)
        return step.output()


@caught_by(r"DividesByTheSpeed raised ZeroDivisionError\(.*\) in order\(\)")
class DividesByTheSpeed(SoundScheduler):
    """Takes the reader's speed for a number above 0."""

    def order(self, request: Request) -> float:
        return request.arrival_time + 1 / hinted_number(request, "reading_speed", 5.0)


@caught_by(r"CountsOnNumbers raised (TypeError|ValueError)\(.*\) in order\(\)")
class CountsOnNumbers(SoundScheduler):
    """Adds up a hint that may be a text."""

    def order(self, request: Request) -> float:
        return request.arrival_time + float(request.hints.get("slo_ttft", 1.0))


@caught_by(r"SlicesTheLength raised (OverflowError|MemoryError)\(.*\) in schedule\(\)")
class SlicesTheLength(SoundScheduler):
    """Makes a row of boxes for the tokens of each reply that a client has predicted."""

    def schedule(self) -> SchedulerOutput:
        for request in self.waiting:
            length = hinted_number(request, "predicted_output_tokens", 10.0)
            self.boxes = [0] * int(length)
        return super().schedule()


@caught_by(r"keys change by reorder\(\) alone|order\(\) returned .*, which cannot be compared")
class MixesKinds(SoundScheduler):
    """Orders by what the client calls its program, which may be a number."""

    def order(self, request: Request) -> object:
        return request.hints.get("program", "")


# Rejection.


@caught_by(AWAY)
class RejectsOnceFitted(SoundScheduler):
    """Rejects all that wait as soon as it knows what a prompt token costs."""

    uses_step_time = True

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if not (self.step_time.is_fitted and step.reject(request, "too late")):
                step.admit(request)
        return step.output()


@caught_by(AWAY)
class RejectsOffline(SoundScheduler):
    """Rejects offline requests, and has them come again for ever."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if not (hinted_flag(request, "offline") and step.reject(request, "online only")):
                step.admit(request)
        return step.output()


@caught_by(AWAY)
class RejectsTheSecondTime(SoundScheduler):
    """Counts what each client has had, and never forgives a debt."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.debts: dict[str, int] = {}

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            has_debt = self.debts.get(request.user, 0) > 6
            if not (has_debt and step.reject(request, "over the quota", retry_after=0.5)):
                granted = step.admit(request)
                self.debts[request.user] = self.debts.get(request.user, 0) + granted
        return step.output()


@caught_by(r"\w+ was rejected with retry_after=1e\+18: a client that is to ask again in more than")
class RejectsForAges(SoundScheduler):
    """Tells a client to come back when its request, due long ago, would no longer be late."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            is_late = hinted_number(request, "slo_ttft", 9.0) < 0
            if not (is_late and step.reject(request, "late", retry_after=1e18)):
                step.admit(request)
        return step.output()


@caught_by(AWAY)
class RefusesOnceBusy(SoundScheduler):
    """Closes its door when many have come, and never opens it again."""

    def add_request(self, request: Request) -> None:
        if self.num_steps > 40:
            raise EngineOverloadedError("too busy")
        super().add_request(request)
