"""Limits, timeouts, victims, reasons: what holds under every policy."""

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.policies.priority import PriorityScheduler

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError, EngineOverloadedError, RequestError
from aioserve.outputs import FinishReason
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.testing import SchedulerHarness


def make_harness(
    policy: type[BaseScheduler] = ChunkedPrefillScheduler, **config: object
) -> SchedulerHarness:
    """A roomy harness whose scheduler has these settings."""
    harness = SchedulerHarness(policy)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
    harness.config = SchedulerConfig(**settings)  # type: ignore[arg-type]
    harness.scheduler = policy(
        harness.config, harness.kv_cache, max_model_len=64, clock=lambda: harness.now
    )
    return harness


def test_no_prompt_gets_more_than_the_threshold_in_one_step() -> None:
    harness = make_harness(long_prefill_token_threshold=8)
    harness.add_request("long", [1] * 30, max_tokens=2)
    harness.add_request("short", [2] * 5, max_tokens=2)
    (output,) = harness.step()
    assert output.num_scheduled_tokens == {"long": 8, "short": 5}
    harness.run_until_idle()


def test_a_threshold_below_whole_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold \(8\)"):
        make_harness(FCFSScheduler, long_prefill_token_threshold=8)


def test_the_queue_is_bounded_by_prompt_tokens_but_takes_one_of_any_size() -> None:
    harness = make_harness(max_waiting_tokens=40)
    harness.add_request("big", [1] * 50)
    with pytest.raises(EngineOverloadedError, match=r"50 prompt tokens .* max_waiting_tokens"):
        harness.add_request("small", [1] * 2)
    harness.step()  # big runs: the queue is empty again
    harness.add_request("small", [1] * 2)


def test_a_deadline_ends_a_request_wherever_it_is_and_only_then() -> None:
    harness = make_harness(max_num_seqs=1)
    harness.add_request("runs", [1] * 5, deadline=3.5)
    harness.add_request("waits", [1] * 5, deadline=2.5)
    harness.add_request("calm", [1] * 5, max_tokens=3)
    expired = []
    for _ in range(5):
        harness.step()
        expired.append(harness.expire())
    assert expired == [[], [], ["waits"], ["runs"], []]
    assert harness.requests["waits"].status is RequestStatus.FINISHED_TIMEOUT
    assert RequestStatus.FINISHED_TIMEOUT.finish_reason is FinishReason.TIMEOUT
    assert harness.finished["runs"] is FinishReason.TIMEOUT
    harness.run_until_idle()


@pytest.mark.parametrize(
    ("victim", "expected"),
    [
        ("policy", "late"),
        ("newest", "late"),
        ("last_admitted", "late"),
        ("lowest_priority", "calm"),
        ("least_computed", "late"),
        ("most_remaining", "endless"),
    ],
)
def test_the_victim_setting_chooses_who_gives_way(victim: str, expected: str) -> None:
    harness = make_harness(victim=victim)
    harness.add_request("calm", [1] * 9, max_tokens=5, priority=9)
    harness.add_request("endless", [2] * 8, max_tokens=50)
    harness.step()
    harness.add_request("late", [3] * 5, max_tokens=5)
    harness.step()
    chosen = harness.scheduler.choose_victim()  # type: ignore[attr-defined]
    assert chosen.request_id == expected
    harness.run_until_idle()


def test_the_victim_may_be_whoever_would_compute_the_least_again() -> None:
    for victim, expected in (("least_lost", "whole blocks"), ("least_computed", "half a block")):
        harness = make_harness(victim=victim)
        harness.add_request("whole blocks", [1] * 9, max_tokens=3)
        harness.add_request("half a block", [2] * 7, max_tokens=3)
        harness.step()
        chosen = harness.scheduler.choose_victim()  # type: ignore[attr-defined]
        assert chosen.request_id == expected
        harness.run_until_idle()


def test_last_admitted_is_whoever_began_last_not_whoever_came_last() -> None:
    for victim, expected in (("last_admitted", "came first"), ("newest", "came last")):
        harness = make_harness(PriorityScheduler, victim=victim)
        harness.add_request("came first", [1] * 5, max_tokens=9, priority=5)
        harness.now += 1
        harness.add_request("came last", [2] * 5, max_tokens=9, priority=1)
        harness.step()
        chosen = harness.scheduler.choose_victim()  # type: ignore[attr-defined]
        assert chosen.request_id == expected
        harness.run_until_idle()


@pytest.mark.parametrize("may_admit", [True, False])
def test_a_step_that_has_preempted_admits_others_if_the_setting_says_so(may_admit: bool) -> None:
    class ShortestFirst(ChunkedPrefillScheduler):
        def order(self, request: Request) -> int:
            return request.num_tokens

    harness = SchedulerHarness(
        ShortestFirst,
        num_blocks=12,
        watermark=0,
        victim="last_admitted",
        admit_beside_preemption=may_admit,
    )
    for i in range(24):
        harness.add_request(f"r{i}", [i] * (3 + 5 * i % 11), max_tokens=14)
        harness.step()
    harness.run_until_idle()
    steps = [step for step in harness.steps if step.preempted_req_ids]
    assert steps, "the pool is there to run out"
    assert any(step.scheduled_new_reqs for step in steps) == may_admit


def test_the_victim_setting_wins_over_a_policy_that_has_its_own_idea() -> None:
    class First(ChunkedPrefillScheduler):
        def victim(self) -> Request | None:
            return self.running[0]

    for victim, expected in (("policy", "old"), ("newest", "new")):
        harness = make_harness(First, victim=victim)
        for name in ("old", "new"):
            harness.add_request(name, [1] * 5, max_tokens=3)
            harness.step()
        chosen = harness.scheduler.choose_victim()  # type: ignore[attr-defined]
        assert chosen.request_id == expected
        harness.run_until_idle()


def test_each_waiting_request_can_say_why_it_waits() -> None:
    harness = SchedulerHarness(
        ChunkedPrefillScheduler, num_blocks=16, max_num_seqs=3, options={"chunk_size": 12}
    )
    harness.add_request("first", [1] * 5)
    harness.add_request("second", [2] * 5)
    harness.step()
    assert harness.scheduler.get_wait_reasons() == {}
    harness.add_request("too big", [3] * 60, max_tokens=2)
    harness.add_request("behind it", [4] * 5)
    harness.step()
    assert harness.scheduler.get_wait_reasons() == {
        "too big": WaitReason.BLOCKS,
        "behind it": WaitReason.BLOCKS,
    }
    harness.finish("too big")
    harness.step()
    harness.add_request("no seat", [5] * 5)
    harness.step()
    assert harness.scheduler.get_wait_reasons() == {"no seat": WaitReason.SEATS}
    harness.run_until_idle()


def test_a_full_step_is_the_reason_of_who_finds_no_tokens_in_it() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, options={"chunk_size": 4})
    harness.add_request("first", [1] * 9)
    harness.add_request("second", [2] * 9)
    harness.step()
    assert harness.scheduler.get_wait_reasons() == {"second": WaitReason.BUDGET}


class LastFirstScheduler(BaseScheduler):
    """Asks for the last of the line alone, although others could run."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        step.run_decodes()
        for request in list(self.waiting)[-1:]:
            step.admit(request)
        return step.output()


class OnlyRoomScheduler(BaseScheduler):
    """Asks for none where the step is full already."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(3)
        for request in list(self.running):
            step.run(request)
        while step.token_budget and self.waiting:
            if not step.admit(next(iter(self.waiting))):
                break
        return step.output()


def test_those_behind_a_request_for_which_the_step_is_full_wait_for_the_same() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, options={"chunk_size": 8})
    for number in range(6):
        harness.add_request(str(number), [number + 1] * 9)
    harness.step()
    assert harness.scheduler.get_wait_reasons() == dict.fromkeys("12345", WaitReason.BUDGET)
    harness.run_until_idle()


def test_a_step_that_is_full_before_any_is_asked_for_is_the_reason_of_all() -> None:
    harness = SchedulerHarness(OnlyRoomScheduler)
    for number in range(4):
        harness.add_request(str(number), [number + 1] * 9)
    harness.step()
    harness.step()
    assert harness.scheduler.get_wait_reasons() == dict.fromkeys("123", WaitReason.BUDGET)
    harness.run_until_idle()


def test_requests_that_a_policy_passes_over_wait_for_the_policy() -> None:
    harness = SchedulerHarness(LastFirstScheduler, num_blocks=16, max_num_seqs=3)
    harness.add_request("runs", [7] * 5)
    harness.step()
    for number in range(2):
        harness.add_request(str(number), [number + 1] * 5)
    harness.add_request("too big", [9] * 60, max_tokens=2)
    harness.step()
    assert harness.scheduler.get_wait_reasons() == {
        "0": WaitReason.POLICY,
        "1": WaitReason.POLICY,
        "too big": WaitReason.BLOCKS,
    }
    harness.abort_everything()


def test_stats_tell_prompt_tokens_from_decodes_and_the_hit_rate() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler)
    harness.add_request("a", [7] * 17, max_tokens=4)
    harness.run_until_idle()
    harness.add_request("b", [7] * 17, max_tokens=4)
    harness.run_until_idle()
    stats = harness.scheduler.make_stats()
    assert stats is not None
    assert stats.num_prefill_tokens == 17
    assert stats.num_decode_tokens == 1 + 3 + 3  # b's one uncached token counts as a decode
    assert stats.prefix_hit_rate == 16 / 34


@pytest.mark.parametrize("policy", [FCFSScheduler, ChunkedPrefillScheduler])
def test_a_prompt_beyond_the_models_limit_is_refused_at_the_schedulers_door(
    policy: type[BaseScheduler],
) -> None:
    harness = SchedulerHarness(policy, num_blocks=64, max_model_len=64)
    for length in (64, 80):
        with pytest.raises(RequestError, match=f"has {length} tokens, but max_model_len is 64"):
            harness.add_request("long", [1] * length)
    with pytest.raises(RequestError, match="at least one token"):
        harness.add_request("empty", [])
    assert harness.add_request("fits", [1] * 63).max_total_tokens == 64
    assert harness.add_request("wants more", [1] * 60, max_tokens=99).max_total_tokens == 64
    assert harness.add_request("wants less", [1] * 60, max_tokens=2).max_total_tokens == 62
    harness.run_until_idle()
    assert [len(tokens) for tokens in harness.tokens.values()] == [1, 4, 2]
