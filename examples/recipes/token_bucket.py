"""Charging for tokens: each client may use `rate` tokens a second, and save up `burst` of them.

`admit` and `run` return the tokens granted, which are charged at once. A client in debt waits until
its bucket has filled up again. If no other client has requests, the client with the smallest debt
goes on, because an idle machine helps no client.
"""

from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    Request,
    SchedulerOutput,
    WaitReason,
)


class TokenBucketScheduler(BaseScheduler):
    """Order of arrival among the clients who have tokens left."""

    class Options(PolicyOptions):
        rate: PositiveFloat = 1000.0  # tokens a second, prompts and replies together
        burst: PositiveFloat = 4000.0  # most tokens that a client can have saved

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buckets: dict[str, float] = {}  # of clients whose bucket is not full
        self.filled_at = self.clock()

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        self.fill()
        for request in self.running:
            self.charge(request, step.run(request))
        for request in self.waiting:
            if self.tokens(request) <= 0:
                step.hold(request, WaitReason.POLICY)
            elif granted := step.admit(request):
                self.charge(request, granted)
            else:
                break  # nobody passes one that does not fit, or it would never fit
        if self.waiting and not self.running:
            request = max(self.waiting.heads(), key=self.tokens)
            self.charge(request, step.admit(request))
        return step.output()

    def gauges(self) -> dict[str, float]:
        """Clients whose bucket is not full, and the largest debt: on `/metrics`, without names."""
        debts = [-tokens for tokens in self.buckets.values() if tokens < 0]
        return {"clients": len(self.buckets), "largest_debt": max(debts, default=0.0)}

    def tokens(self, request: Request) -> float:
        """What the client of this request has left; below 0: a debt."""
        return self.buckets.get(request.user, self.options.burst)

    def charge(self, request: Request, num_tokens: int) -> None:
        self.buckets[request.user] = self.tokens(request) - num_tokens

    def fill(self) -> None:
        """Add what the time since the last step is worth; forget who has a full bucket."""
        now = self.clock()
        earned = self.options.rate * (now - self.filled_at)
        self.filled_at = now
        filled = {user: tokens + earned for user, tokens in self.buckets.items()}
        self.buckets = {u: tokens for u, tokens in filled.items() if tokens < self.options.burst}
