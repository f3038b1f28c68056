"""Swapping: a feedback queue in which a displaced request keeps its KV blocks.

The request with the least service goes first, by levels that double in size (FastServe, Wu et al.,
2023). A level waits as if it had arrived `patience` seconds later, so that no request starves. An
upper level takes the seat of a lower one, which is paused and keeps its blocks. When less than the
share `reserve` of the memory is free, paused requests are offloaded to host memory, the last in
order first, if that is cheaper than computing them again; when there is room, the first of them is
prefetched. This needs a KV connector (`--kv-connector memory`): without one, displaced requests are
computed again.
"""

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
    WaitReason,
)


class SwappedLevelsScheduler(BaseScheduler):
    """Upper levels take seats from lower ones, whose blocks stay, or go to host memory and back."""

    class Options(PolicyOptions):
        quantum: PositiveInt = 512  # service in the top level, in prompt tokens; doubles per level
        output_weight: PositiveFloat = 8.0  # of an output token, in prompt tokens
        patience: NonNegativeFloat = 2.0  # seconds by which a level goes behind the one above it
        reserve: PositiveFloat = 0.1  # share of the KV cache that is to be free

    def level(self, request: Request) -> int:
        options = self.options
        served = request.num_prompt_tokens + options.output_weight * request.num_output_tokens
        return int(served / options.quantum).bit_length()

    def order(self, request: Request) -> float:
        behind: float = self.level(request) * self.options.patience
        return self.clock() + behind

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        self.swap_out(step)
        for request in step.run_decodes():
            step.run(request)
        served = sorted(self.running, key=self.level) if self.waiting else []
        for request in self.waiting:
            while not step.admit(request):
                if request.wait_reason is not WaitReason.SEATS or not served:
                    return self.swap_in(step)
                last = served.pop()
                if self.level(last) <= self.level(request) or not self.can_keep(last, request):
                    return self.swap_in(step)
                step.pause(last)
        return step.output()

    def can_keep(self, last: Request, coming: Request) -> bool:
        """Beside the request that comes, or in host memory: what is lost is not displaced."""
        has_room = self.memory.free - coming.num_tokens >= self.reserve
        return has_room or self.estimate_offload(last).num_tokens > 0

    def swap_out(self, step: Step) -> None:
        if not self.paused_requests or self.memory.free >= self.reserve:
            return
        for request in sorted(self.paused_requests, key=lambda r: r.order_key, reverse=True):
            price = self.estimate_offload(request)
            if price.save_seconds + price.load_seconds <= price.compute_seconds:
                step.offload(request)
            if self.memory.free >= self.reserve:
                break

    def swap_in(self, step: Step) -> SchedulerOutput:
        for request in self.waiting:
            if request.status is RequestStatus.PREEMPTED:
                if self.memory.free > 2 * self.reserve + request.num_tokens:
                    step.prefetch(request)
                break
        return step.output()

    @property
    def reserve(self) -> float:
        share: float = self.options.reserve
        return share * self.memory.total
