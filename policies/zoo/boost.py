"""Arrival, less a boost that shrinks with the work of a request (UniBoost, ICML'26).

Paper: Li et al., "Beyond Prediction: Tail-Aware Scheduling for LLM Inference", ICML'26, arXiv
2606.18431, and the authors' code for SGLang; Yu and Scully, "Strongly Tail-Optimal Scheduling in
the Light-Tailed M/G/1", SIGMETRICS'24, arXiv 2404.08826.

Aim: a low 99th percentile of the time to the last token, without predictions.

Says: requests go by arrival, less a boost of ln(1 / (1 - exp(-gamma w))) / gamma seconds, where w
is the larger of the work that the request has had and that of its uncached prompt. So short
requests pass those that came a little earlier. A waiting request that is ahead by more than a
hysteresis takes the place of a running one, whose work counts in powers of two: it keeps its place
until its work has doubled. `gamma` is the slope of the logarithm of the tail of latencies, from the
95th to the 99th percentile. The paper reports a 99th percentile of the time to the last token that
is 35 to 50% below that of the shortest remaining first with perfect predictions.

Simplified: the boost is that of the authors' code, which orders prompts alone; the rest is that of
a summary by others. Decodes run in every step, where the paper has one order for all. A request
that loses its place is computed again, where the paper weighs the cost of swapping it.

Cost: O(log n) for each request that enters a queue of n; O(r log r) of r running ones, if any wait.

Needs: nothing.
"""

from collections import deque
from collections.abc import Iterator
from math import expm1, log
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
)

LATENCIES, NEW = 500, 100  # latencies that count; ends between two fits of `gamma`
LEAST, MOST = 1e-3, 200.0  # `gamma`


class BoostScheduler(BaseScheduler):
    """Decodes, then prompts by arrival less boost, in the place of what has run for long."""

    admits_in_order = "all"
    keeps_decoding = True

    class Options(PolicyOptions):
        gamma: PositiveFloat = 10.0  # per second, at least 0.001, until 100 requests have ended
        token: PositiveFloat = 64e-6  # seconds of work of a token of a prompt
        reply_token: PositiveFloat = 512e-6  # seconds of work of a token of a reply
        doubling: PositiveInt = 32  # tokens of a reply from which its work counts in powers of two
        hysteresis: NonNegativeFloat = 0.5  # seconds by which others have to be ahead
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gamma = max(self.options.gamma, LEAST)
        self.num_ended = 0
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self.admitted_at: dict[Request, int] = {}  # by running request, its doublings by then

    def doublings(self, request: Request) -> int:
        """Return how often the reply has doubled since it had `doubling` tokens."""
        return (request.num_output_tokens // self.options.doubling).bit_length()

    def place(self, request: Request) -> float:
        """Return the arrival less the boost, in seconds; the smallest goes first."""
        options, prompt = self.options, request.num_prompt_tokens - request.num_cached_tokens
        if request.status is RequestStatus.WAITING:
            prompt = request.num_tokens - self.kv_cache.estimate_cached_tokens(request)
        work = max(prompt, 1) * options.token
        if doublings := self.doublings(request):
            reply = options.doubling << (doublings - 1)
            work = max(work, reply * options.reply_token)
        return request.arrival_time + log(-expm1(-self.gamma * work)) / self.gamma

    def order(self, request: Request) -> float:
        self.admitted_at.pop(request, None)
        return self.place(request)

    def victim(self) -> Request | None:
        return max(self.running, key=self.place, default=None)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        old: list[Request] | None = None
        for request in self.waiting:
            if old is None:
                old = sorted(filter(self.may_lose, self.running), key=self.place)
            if not step.admit(request, displacing=self.behind(request, old)):
                break
            self.admitted_at[request] = self.doublings(request)
        return step.output()

    def may_lose(self, request: Request) -> bool:  # if it has doubled since it was admitted
        return self.doublings(request) > max(self.admitted_at.get(request, 0), 1)

    def behind(self, request: Request, old: list[Request]) -> Iterator[Request]:
        """Yield those of `old` that the waiting request may displace, the last in order first."""
        limit = self.place(request) + self.options.hysteresis
        return (other for other in reversed(old) if self.place(other) > limit)

    def on_finish(self, request: Request, reason: str) -> None:
        self.admitted_at.pop(request, None)
        if reason in ("stop", "length"):
            self.num_ended += 1
            self.latencies.append(self.clock() - request.arrival_time)
            if self.num_ended % NEW == 0:
                ordered = sorted(self.latencies)
                p95, p99 = (ordered[len(ordered) * percent // 100] for percent in (95, 99))
                self.gamma = log(5) / max(p99 - p95, log(5) / MOST)  # 5% of the requests to 1%
