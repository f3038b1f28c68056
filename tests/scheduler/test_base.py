"""BaseScheduler and the verbs of Step, one rule at a time, on the harness."""

from typing import Any, ClassVar

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.policies.priority import PriorityScheduler

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError, EngineOverloadedError, PolicyError, RequestError
from aioserve.outputs import FinishReason
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.scheduler.fallback import FallbackScheduler
from aioserve.testing import SchedulerHarness


class Scripted(BaseScheduler):
    """Does in each step what the test says."""

    script = staticmethod(lambda scheduler, step: None)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        type(self).script(self, step)
        return step.output()


def scripted(script: object) -> type[Scripted]:
    return type("Scripted", (Scripted,), {"script": staticmethod(script)})


def test_a_request_runs_from_prompt_to_its_length_limit() -> None:
    harness = SchedulerHarness(FCFSScheduler)
    harness.add_request("a", [1, 2, 3], max_tokens=3)
    (first,) = harness.step()
    assert first.num_scheduled_tokens == {"a": 3}
    (second,) = harness.step()
    assert second.scheduled_cached_reqs.req_ids == ["a"]
    harness.run_until_idle()
    assert harness.finished == {"a": FinishReason.LENGTH}
    assert len(harness.tokens["a"]) == 3
    # The last token is never computed: three prompt tokens and two decodes.
    assert sum(step.total_num_scheduled_tokens for step in harness.steps) == 5


def test_a_stop_token_ends_a_request_but_not_before_min_tokens() -> None:
    free = SchedulerHarness(FCFSScheduler)
    free.add_request("a", [1, 2, 3], max_tokens=8)
    free.run_until_idle()
    tokens = free.tokens["a"]
    for min_tokens in (0, 2):
        harness = SchedulerHarness(FCFSScheduler)
        harness.add_request(
            "a", [1, 2, 3], max_tokens=8, min_tokens=min_tokens, eos_token_ids=(tokens[1],)
        )
        harness.run_until_idle()
        if min_tokens == 0:
            assert harness.tokens["a"] == tokens[:2]
            assert harness.finished["a"] is FinishReason.STOP
            assert harness.requests["a"].stop_reason is None  # it was EOS, nobody asked for it
        else:
            assert len(harness.tokens["a"]) > 2


@pytest.mark.parametrize("depth", [1, 2])
def test_finish_requests_at_every_moment_returns_what_really_ended(depth: int) -> None:
    harness = SchedulerHarness(FCFSScheduler, max_num_seqs=1, pipeline_depth=depth)
    harness.add_request("running", [1] * 9, max_tokens=9)
    harness.add_request("queued", [2] * 9, max_tokens=9)
    assert harness.finish("unknown") == []
    assert harness.finish("queued") == ["queued"]
    harness.schedule()
    assert harness.finish(["running", "running", "queued"]) == ["running"]
    # Its step is in flight and may write its blocks: they are still held.
    assert harness.kv_cache.pool.num_used_blocks == 3
    harness.receive()
    assert harness.kv_cache.pool.num_used_blocks == 0
    assert harness.tokens["running"] == []  # the surplus token was dropped
    assert harness.scheduler.has_finished_requests()
    assert not harness.scheduler.has_unfinished_requests()
    assert harness.scheduler.has_requests()
    output = harness.schedule()  # a token-less step tells the runner
    assert output.total_num_scheduled_tokens == 0
    assert output.finished_req_ids == ["running"]  # it never heard of the other
    assert not harness.scheduler.has_requests()


def test_finishing_none_means_all() -> None:
    harness = SchedulerHarness(FCFSScheduler, max_num_seqs=2)
    for name in "abc":
        harness.add_request(name, [1] * 5)
    harness.step()
    assert sorted(harness.finish(None)) == ["a", "b", "c"]
    assert harness.scheduler.get_request_counts() == (0, 0)


def test_a_request_that_can_never_fit_is_refused_at_the_door() -> None:
    harness = SchedulerHarness(FCFSScheduler, num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(RequestError, match="do not fit the KV cache of 16 tokens"):
        harness.add_request("big", [1] * 10, max_tokens=20)
    harness.add_request("fits", [1] * 10, max_tokens=7)  # the 17th token needs no slot
    with pytest.raises(RequestError, match="in use"):
        harness.add_request("fits", [1])
    harness.run_until_idle()


def test_a_full_queue_refuses() -> None:
    config = SchedulerConfig(max_waiting_requests=1)
    harness = SchedulerHarness(FCFSScheduler)
    scheduler = FCFSScheduler(config, harness.kv_cache, max_model_len=64, clock=lambda: 0.0)
    harness.scheduler = scheduler
    harness.add_request("a", [1])
    with pytest.raises(EngineOverloadedError, match="max_waiting_requests"):
        harness.add_request("b", [1])


def test_a_preempted_request_is_computed_again_and_keeps_its_tokens_and_place() -> None:
    def script(scheduler: BaseScheduler, step: object) -> None:
        if scheduler.num_steps == 3:
            step.preempt(scheduler.running[0])  # type: ignore[attr-defined]
            return
        for request in scheduler.running:
            step.run(request)  # type: ignore[attr-defined]
        for request in scheduler.waiting:
            step.admit(request)  # type: ignore[attr-defined]

    harness = SchedulerHarness(scripted(script), enable_prefix_caching=False)
    harness.add_request("a", [1] * 6, max_tokens=5)
    for _ in range(3):
        harness.step()
    (thrown_out,) = harness.step()
    assert thrown_out.preempted_req_ids == ["a"]
    assert harness.requests["a"].status is RequestStatus.PREEMPTED
    (resumed,) = harness.step()
    (data,) = resumed.scheduled_new_reqs
    assert data.token_ids[6:] == harness.tokens["a"][:3]
    assert data.num_prompt_tokens == 6
    harness.run_until_idle()
    assert harness.requests["a"].num_preemptions == 1


def test_a_request_thrown_out_in_the_step_that_admitted_it_was_never_there() -> None:
    def script(scheduler: BaseScheduler, step: object) -> None:
        budget = step.token_budget  # type: ignore[attr-defined]
        for request in scheduler.waiting:
            step.admit(request)  # type: ignore[attr-defined]
            if scheduler.num_steps == 0:
                step.preempt(request)  # type: ignore[attr-defined]
                assert step.token_budget == budget  # type: ignore[attr-defined]
                assert step.admit(request) == 0  # type: ignore[attr-defined]
        for request in scheduler.running:
            step.run(request)  # type: ignore[attr-defined]

    harness = SchedulerHarness(scripted(script))
    request = harness.add_request("a", [1] * 6, max_tokens=2)
    output = harness.schedule()
    assert output.num_scheduled_tokens == {}
    assert output.preempted_req_ids == []
    assert request.status is RequestStatus.WAITING
    assert request.num_preemptions == 0
    harness.run_until_idle()


def test_equal_prompts_admitted_in_one_step_compute_their_prefix_once() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler)
    for name in "abc":
        harness.add_request(name, [7] * 17, max_tokens=2)
    (output,) = harness.step()
    assert output.num_scheduled_tokens == {"a": 17, "b": 1, "c": 1}
    assert harness.requests["b"].num_cached_tokens == 16
    harness.run_until_idle()


def test_losing_a_prefix_owner_in_the_same_step_takes_its_dependents_along() -> None:
    def script(scheduler: BaseScheduler, step: object) -> None:
        for request in scheduler.running:
            step.run(request)  # type: ignore[attr-defined]
        for request in scheduler.waiting:
            step.admit(request)  # type: ignore[attr-defined]
        if scheduler.num_steps == 0:
            step.preempt(scheduler.running[0])  # type: ignore[attr-defined]

    harness = SchedulerHarness(scripted(script))
    for name in "ab":
        harness.add_request(name, [7] * 17, max_tokens=2)
    assert harness.schedule().num_scheduled_tokens == {}
    harness.run_until_idle()  # the memory would notice if b had read what a never wrote


def test_verbs_return_zero_for_who_cannot_be_served() -> None:
    grants = []

    def script(scheduler: BaseScheduler, step: object) -> None:
        first, second = list(scheduler.waiting)
        grants.append(step.run(first))  # type: ignore[attr-defined]  # not running
        grants.append(step.admit(first, 4))  # type: ignore[attr-defined]
        grants.append(step.admit(first))  # type: ignore[attr-defined]  # has its seat already
        grants.append(step.run(first))  # type: ignore[attr-defined]  # served in this step
        grants.append(step.admit(second, whole=True, max_tokens=3))  # type: ignore[attr-defined]
        grants.append(step.admit(second))  # type: ignore[attr-defined]  # no seat

    harness = SchedulerHarness(scripted(script), max_num_seqs=1)
    harness.add_request("a", [1] * 9)
    harness.add_request("b", [2] * 9)
    harness.schedule()
    assert grants == [0, 4, 0, 0, 0, 0]


def test_a_victim_that_does_not_run_is_named_as_the_policys_fault() -> None:
    class Wrong(FCFSScheduler):
        def victim(self) -> Request | None:
            return None

    harness = SchedulerHarness(
        Wrong, num_blocks=4, block_size=4, max_model_len=17, max_num_batched_tokens=17
    )
    for name in "ab":
        harness.add_request(name, [ord(name)] * 7)
    with pytest.raises(PolicyError, match=r"Wrong: victim\(\) must return a running request"):
        harness.run_until_idle()


def test_unknown_or_wrong_options_name_the_policy_and_the_options_it_has() -> None:
    with pytest.raises(ConfigError, match=r"ChunkedPrefillScheduler.*chunk_sise.*chunk_size"):
        SchedulerHarness(ChunkedPrefillScheduler, options={"chunk_sise": 4})
    with pytest.raises(ConfigError, match=r">= 1.*chunk_size"):
        SchedulerHarness(ChunkedPrefillScheduler, options={"chunk_size": 0})
    with pytest.raises(ConfigError, match="options it has: none"):
        SchedulerHarness(FCFSScheduler, options={"chunk_size": 4})


def test_whole_prompts_need_a_step_that_holds_the_longest() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(32\).*max_model_len \(64\)"):
        SchedulerHarness(FCFSScheduler, max_num_batched_tokens=32, max_model_len=64)
    SchedulerHarness(ChunkedPrefillScheduler, max_num_batched_tokens=32, max_model_len=64)


def test_outputs_are_keyed_by_client() -> None:
    harness = SchedulerHarness(FCFSScheduler)
    harness.add_request("a", [1], client_index=0)
    harness.add_request("b", [1], client_index=3)
    output = harness.scheduler.schedule()
    result = harness.runner.execute(output)
    by_client = harness.scheduler.update_from_output(output, result)
    assert {client: [o.request_id for o in outs.outputs] for client, outs in by_client.items()} == {
        0: ["a"],
        3: ["b"],
    }


def test_resetting_the_prefix_cache_forgets_and_says_whether_all_is_free() -> None:
    harness = SchedulerHarness(FCFSScheduler)
    harness.add_request("a", [1] * 9, max_tokens=4)
    harness.step()
    assert harness.scheduler.reset_prefix_cache() is False
    harness.run_until_idle()
    assert harness.scheduler.reset_prefix_cache() is True
    harness.add_request("b", [1] * 9, max_tokens=4)
    harness.run_until_idle()
    assert harness.requests["b"].num_cached_tokens == 0


def test_stats_count_what_happened() -> None:
    harness = SchedulerHarness(PriorityScheduler, max_num_seqs=1)
    harness.add_request("calm", [1] * 9, max_tokens=9, priority=5)
    harness.step()
    harness.add_request("urgent", [1] * 9, max_tokens=9, priority=0)
    harness.step()
    stats = harness.scheduler.make_stats()
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_preemptions) == (1, 1, 1)
    assert stats.num_used_kv_blocks == 3
    assert stats.num_prefix_hit_tokens == 8
    harness.run_until_idle()


class Aging(FallbackScheduler):
    """The order of a table that changes."""

    keys: ClassVar[dict[str, Any]] = {}

    def order(self, request: Request) -> Any:
        return self.keys[request.request_id]


def test_a_waiting_request_is_put_where_its_new_key_says_or_stays_if_that_fails() -> None:
    harness = SchedulerHarness(Aging, max_num_seqs=1)
    scheduler = harness.scheduler
    assert isinstance(scheduler, BaseScheduler)
    Aging.keys |= {"first": 0, "a": 1, "b": 2, "c": 3}
    for name in ("first", "a", "b", "c"):
        harness.add_request(name, [1, 2], max_tokens=3)
    harness.step()
    [a, b, c] = scheduler.waiting
    Aging.keys["a"] = 2.5
    scheduler.reorder(a)
    assert list(scheduler.waiting) == [b, a, c]
    Aging.keys["c"] = "text"
    with pytest.raises(PolicyError, match="cannot be compared"):
        scheduler.reorder(c)
    assert list(scheduler.waiting) == [b, a, c]
    del Aging.keys["b"]
    with pytest.raises(PolicyError, match="KeyError"):
        scheduler.reorder(b)
    assert list(scheduler.waiting) == [b, a, c]
    scheduler.reorder(scheduler.running[0])
    harness.run_until_idle()
