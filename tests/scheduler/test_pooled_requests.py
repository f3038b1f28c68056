"""Requests that are pooled: they end with their prompt, in whatever way it is computed."""

import pytest

from aioserve.errors import RequestError
from aioserve.outputs import FinishReason
from aioserve.params import PoolingParams
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.testing import SchedulerHarness

MEAN, LAST = PoolingParams(pooling="mean"), PoolingParams(pooling="last")


class Fickle(BaseScheduler):
    """Throws everybody out again in the step after the next."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(5)
        for request in list(self.running):
            step.preempt(request)
        for request in list(self.waiting):
            step.admit(request)
        return step.output()


def test_one_whose_last_tokens_are_in_flight_ends_though_it_is_preempted() -> None:
    harness = SchedulerHarness(Fickle, pipeline_depth=2)
    harness.add_request("p", range(5), pooling_params=MEAN)
    assert harness.schedule().num_scheduled_tokens == {"p": 5}
    assert harness.schedule().preempted_req_ids == ["p"]
    harness.receive()
    assert harness.finished == {"p": FinishReason.STOP}
    harness.run_until_idle()
    assert harness.scheduler.make_stats().num_prefill_tokens == 5


class Pieces(BaseScheduler):
    def schedule(self) -> SchedulerOutput:
        step = self.new_step(3)
        for request in step.run_decodes():
            step.run(request)
        for request in list(self.waiting):
            step.admit(request)
        return step.output()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_mean_is_computed_whole_and_leaves_its_blocks_to_others(depth: int) -> None:
    harness = SchedulerHarness(Pieces, pipeline_depth=depth, block_size=4)
    for name, params in (("a", LAST), ("b", MEAN), ("c", LAST)):
        harness.add_request(name, range(9), pooling_params=params)
        harness.run_until_idle()
    harness.add_request("d", [*range(9), 30, 31], max_tokens=2)
    harness.run_until_idle()
    cached = {name: request.num_cached_tokens for name, request in harness.requests.items()}
    assert cached == {"a": 0, "b": 0, "c": 8, "d": 8}
    assert harness.kv_cache.num_queried_tokens == 9 + 9 + 11  # nobody looked for b's


def test_a_prompt_as_long_as_the_model_needs_blocks_for_all_of_it() -> None:
    harness = SchedulerHarness(Pieces, max_model_len=16, num_blocks=4, block_size=4)
    harness.add_request("whole", range(16), pooling_params=LAST)
    with pytest.raises(RequestError, match="17 tokens, but max_model_len is"):
        harness.add_request("longer", range(17), pooling_params=LAST)
    harness.run_until_idle()
    small = SchedulerHarness(Pieces, max_model_len=16, num_blocks=15, block_size=1)
    with pytest.raises(RequestError, match="do not fit") as caught:
        small.add_request("whole", range(16), pooling_params=LAST)
    assert caught.value.param == "prompt"
