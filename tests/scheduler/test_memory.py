"""What a policy reads of memory agrees with what requests, leases and the cache hold."""

import random

from aioserve.scheduler import BaseScheduler, Request, SchedulerOutput
from aioserve.testing import SchedulerHarness


class Reads(BaseScheduler):
    """First come, first served; pins what has ended, and checks in each step what it reads."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            cached = self.memory.cached(request)
            if not step.admit(request):
                break
            assert request.num_preemptions or request.num_cached_tokens == cached
        memory, size = self.memory, self.kv_cache.block_size
        held = {block_id for request in self.running for block_id in request.block_ids}
        assert memory.held >= len(held) * size  # a step in flight may hold more
        assert memory.free + memory.held + memory.leased == memory.total
        assert memory.evictable <= memory.free
        for request in list(self.running):
            assert memory.own(request) <= len(request.block_ids) * size
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        self.pin(request, self.clock() + 5)


def test_free_held_and_leased_tokens_are_all_there_are() -> None:
    rng = random.Random(3)
    harness = SchedulerHarness(Reads, num_blocks=24, block_size=4, max_num_seqs=4)
    for i in range(40):
        prompt = list(range(rng.choice((0, 100)), 120))[: rng.randrange(1, 24)]
        harness.add_request(f"r{i}", prompt, max_tokens=rng.randrange(1, 12))
        harness.step()
    harness.run_until_idle()


def test_preempting_a_request_frees_the_tokens_that_are_its_own() -> None:
    harness = SchedulerHarness(Reads, num_blocks=24, block_size=4)
    harness.add_request("a", list(range(16)), max_tokens=8)
    harness.step()
    harness.add_request("b", list(range(17)), max_tokens=8)  # shares the first blocks
    harness.step()
    scheduler = harness.scheduler
    assert isinstance(scheduler, BaseScheduler)
    a, b = scheduler.running
    before, own = scheduler.memory.free, scheduler.memory.own(b)
    assert 0 < own < len(b.block_ids) * 4
    step = scheduler.new_step()
    step.preempt(b)
    assert scheduler.memory.free == before + own
    step.run(a)
