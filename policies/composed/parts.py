"""Parts that belong to no other policy: order of arrival, chunks, seats per group."""

from collections import Counter

from aioserve.scheduler import (
    AdmissionPart,
    BudgetPart,
    OrderPart,
    PolicyOptions,
    PositiveInt,
    Request,
    Step,
    Verdict,
    WaitReason,
)


class ArrivalOrder(OrderPart):
    """First come, first served."""


class ChunkBudget(BudgetPart):
    """A fixed number of tokens per step, and of requests."""

    class Options(PolicyOptions):
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        max_requests: PositiveInt | None = None  # requests per step (default: all that run)

    def num_tokens(self) -> int | None:
        chunk_size: int | None = self.options.chunk_size
        return chunk_size

    def max_requests(self) -> int | None:
        max_requests: int | None = self.options.max_requests
        return max_requests


class SeatsAdmission(AdmissionPart):
    """No group of the order, such as a client, has more than a number of requests running."""

    class Options(PolicyOptions):
        seats: PositiveInt = 4  # most requests of one group that run at once

    def begin(self, step: Step, num_tokens: int | None) -> None:
        group = self.policy.group_by
        self.taken = Counter(map(group, self.policy.running)) if self.policy.waiting else Counter()

    def ask(self, request: Request, step: Step) -> Verdict:
        group = self.policy.group_by(request)
        if self.taken[group] >= self.options.seats:
            step.hold(request, WaitReason.POLICY)
            return "hold"
        self.taken[group] += 1  # if it does not fit, none is asked after it
        return "admit"
