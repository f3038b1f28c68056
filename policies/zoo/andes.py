"""Tokens at the speed at which they are read: quality of experience first (Andes, 2024).

Paper: Liu et al., "Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming
Services", 2024, arXiv 2404.16283.

Aim: first tokens soon, then a steady flow at reading speed, for as many users as possible.

Says: a user gains nothing from tokens faster than they are read. Under pressure the requests are
ranked by the experience that serving them for a while saves, over the KV memory that they hold; the
best ones that fit run. A stream whose reader is far behind gives its place to a request that waits.

Simplified: the gain is the part of the time to come, `horizon`, in which the reader would wait. A
stream gives its place only if its reader has enough to read for that time. It is paused for a seat,
and keeps its KV blocks until memory runs short. For memory it is preempted, `max_preemptions` times
at most, where the paper bounds the preemptions of all requests together.

Cost: O(r log r) of r running requests and O(w log w) of w waiting ones compared, at most `window`,
in steps in which a request waits.

Needs: how fast the reply is read (hint `reading_speed`), else `speed`; and `slo_ttft`.
"""

from collections import deque
from itertools import islice

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    hinted_number,
)


class AndesScheduler(BaseScheduler):
    """Decodes, then prompts by what their users gain; streams that are ahead give their place."""

    keeps_decoding = True

    class Options(PolicyOptions):
        speed: PositiveFloat = 5.0  # tokens a second that a user reads
        ttft: PositiveFloat = 1.0  # seconds after which a user expects to begin
        horizon: PositiveFloat = 5.0  # seconds for which the gain is foreseen
        max_preemptions: PositiveInt = 1  # of one request
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        window: PositiveInt = 256  # waiting requests compared per step, oldest first

    options: Options

    def schedule(self) -> SchedulerOutput:
        step, now = self.new_step(self.options.chunk_size), self.clock()
        prefills = step.run_decodes()
        for request in sorted(prefills, key=lambda r: self.rank(r, now)):
            step.run(request)
        if self.waiting and step.token_budget > 0:
            waiting = list(islice(self.waiting, self.options.window))
            ahead = self.ahead(now)
            for request in sorted(waiting, key=lambda r: self.rank(r, now)):
                places = ahead if self.gain(request, now) > 0 else ()
                while places and len(self.running) >= self.max_num_seqs:
                    step.pause(places.popleft())
                if not step.admit(request, displacing=places):
                    break  # no request passes one that does not fit, or it would never fit
        return step.output()

    def unread_seconds(self, request: Request, now: float) -> float:
        """Return seconds for which the user has something to read; below 0 once it waits."""
        speed = max(hinted_number(request, "reading_speed", self.options.speed), 1e-3)
        begin = request.arrival_time + hinted_number(request, "slo_ttft", self.options.ttft)
        return request.num_output_tokens / speed - max(now - begin, 0.0)

    def gain(self, request: Request, now: float) -> float:
        """Return the share of the horizon in which the user would wait if it were not served."""
        left = self.options.horizon - self.unread_seconds(request, now)
        return max(left / self.options.horizon, 0.0)

    def rank(self, request: Request, now: float) -> tuple[float, float]:
        """Return what serving the request gains for the memory that it takes; the best first."""
        return -self.gain(request, now) / request.num_tokens, request.arrival_time

    def ahead(self, now: float) -> deque[Request]:
        """Return running streams that may give way, those with most to read first."""
        most = self.options.max_preemptions
        streams = (r for r in self.running if not r.is_prefill and r.num_preemptions < most)
        free = [r for r in streams if self.gain(r, now) == 0]
        return deque(sorted(free, key=lambda r: (-self.unread_seconds(r, now), r.order_key)))

    def victim(self) -> Request | None:
        now = self.clock()
        return max(self.running, key=lambda r: (self.rank(r, now), r.order_key), default=None)
