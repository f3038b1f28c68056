"""Online requests first; offline ones (hint `offline`) get what a latency budget leaves (HyGen).

As HyGen (NeurIPS'25) and ConServe have it: each step is planned for the online requests alone, as
`chunked_prefill` would. Offline requests then fill it while its predicted time stays within
`slack` of what it takes without them, or within `target_itl`, whichever is more. They lose their
place first when an online request needs their seat or KV blocks. A lower `slack` gives steadier
online streams and less offline throughput; while online requests leave nothing, offline ones wait.
Without online requests the prompts of a step are bounded by `alone`, which is what an arrival waits
for: where its decodes alone take longer, one prompt gets a few tokens.
"""

from dataclasses import dataclass

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
    Step,
    hinted_flag,
)

LEAST = 16  # tokens of one offline prompt in a step without online requests, or to learn from


@dataclass
class Load:
    """The load of a step so far, as `step_time` counts it."""

    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_context_tokens: int = 0

    def add(self, request: Request, num_tokens: int) -> None:
        if num_tokens == 1:
            self.num_decodes += 1
        else:
            self.num_prefill_tokens += num_tokens
        self.num_context_tokens += request.num_computed_tokens if num_tokens else 0


class OfflineScheduler(BaseScheduler):
    """Online requests as if they were alone, then offline ones in the time that is left."""

    admits_in_order = "all"
    uses_step_time = True

    class Options(PolicyOptions):
        slack: NonNegativeFloat = 0.05  # share by which offline requests may lengthen a step
        target_itl: NonNegativeFloat = 0.0  # seconds that a step may take in any case
        alone: PositiveFloat = 0.1  # seconds that a step without online requests may take
        chunk_size: PositiveInt = 512  # tokens per step, decodes included

    options: Options

    def is_offline(self, request: Request) -> bool:
        return hinted_flag(request, "offline")

    def order(self, request: Request) -> tuple[bool, float]:
        return (self.is_offline(request), request.arrival_time)

    def schedule(self) -> SchedulerOutput:
        step, load = self.new_step(self.options.chunk_size), Load()
        offline = [request for request in self.running if self.is_offline(request)]
        has_online = len(offline) < len(self.running)
        if has_online:
            self.run_online(step, load)
        for request in self.waiting:
            if self.is_offline(request):
                break
            has_online = True
            granted = step.admit(request, displacing=reversed(offline))
            if not granted:
                break
            load.add(request, granted)
        limit = self.options.alone
        if has_online:
            seconds = self.seconds(load)
            limit = max(seconds * (1 + self.options.slack), self.options.target_itl)
        if self.step_time.is_fitted or not has_online:
            self.fill(step, load, offline, limit, 0 if has_online else LEAST)
        else:
            self.learn(step, offline)
        return step.output()

    def run_online(self, step: Step, load: Load) -> None:
        """Decodes, then prompts of the running requests that are online."""
        prompts = []
        for request in self.running:
            if self.is_offline(request):
                continue
            if request.is_prefill:
                prompts.append(request)
            else:
                load.add(request, step.run(request))
        for request in prompts:
            load.add(request, step.run(request))

    def learn(self, step: Step, offline: list[Request]) -> None:
        """Beside online requests while the price of a prompt token is a guess: a few of them."""
        for request in offline:
            if request.is_prefill:
                step.run(request, LEAST)
                return
        head = next(iter(self.waiting), None)
        if head is not None and self.is_offline(head):
            step.admit(head, LEAST)

    def fill(
        self, step: Step, load: Load, offline: list[Request], limit: float, least: int
    ) -> None:
        """Decodes, prompts and admissions of offline requests while the step stays in `limit`
        seconds. If `least` is not 0, all decodes go on in any case, and so does one prompt.
        """
        for request in sorted(offline, key=lambda request: request.is_prefill):
            if request.status is RequestStatus.RUNNING:  # else it was displaced just now
                room = self.room(load, request, limit) or least
                if not room:
                    return
                least = 0 if request.is_prefill else least
                load.add(request, step.run(request, room))
        for request in self.waiting:
            if not self.is_offline(request):
                return
            room, least = self.room(load, request, limit) or least, 0
            granted = step.admit(request, room) if room else 0
            if not granted:
                return
            load.add(request, granted)

    def room(self, load: Load, request: Request, limit: float) -> int:
        """Return tokens of the request for which the step has time: a decode, or part of a
        prompt.
        """
        context = load.num_context_tokens + request.num_computed_tokens
        with_one = Load(load.num_prefill_tokens, load.num_decodes + 1, context + 1)
        if self.seconds(with_one) > limit:
            return 0
        fits = self.step_time.max_prefill_tokens(limit, load.num_decodes, context)
        return max(1, fits - load.num_prefill_tokens)

    def seconds(self, load: Load) -> float:
        return self.step_time.seconds(
            load.num_prefill_tokens, load.num_decodes, load.num_context_tokens
        )
