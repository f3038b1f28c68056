"""Runs in virtual time: exact times, conversations, deadlines, refusals, and the live runner."""

import asyncio
from typing import Any

import msgspec
import pytest

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import ConfigError
from aioserve.lab.simulation.outcome import ObservedRunner, RunOutcome
from aioserve.lab.simulation.run import (
    VirtualClockEventLoop,
    check_fits,
    run_live,
    simulate,
    simulated,
)
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.model_source.info import ModelInfo
from aioserve.runner.interface import RunnerInfo
from aioserve.runner.simulated import SimulatedRunner

# 4 ms a step, 50 us a prompt token, 100 us a decode: no other cost, so that times can be computed.
EXACT = RunnerConfig(runner="simulated", step_context_token_us=0.0)


def config(
    policy: str = "fcfs", num_kv_blocks: int | None = None, **scheduler: Any
) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(num_kv_blocks=num_kv_blocks),
        runner=EXACT,
        scheduler=SchedulerConfig(policy=policy, **scheduler),
    )


def workload(*requests: WorkloadRequest) -> Workload:
    return Workload("test", requests)


def request(arrival: float, prompt: int, output: int, **fields: Any) -> WorkloadRequest:
    text = fields.pop("text", int(1000 * arrival) + prompt)
    return WorkloadRequest(arrival, (Piece(text, prompt),), output, **fields)


def test_times_of_one_request_are_those_of_the_step_time_model() -> None:
    outcome = simulate(config(), workload(request(1.0, 100, 4)))
    (only,) = outcome.requests
    assert only.arrival == 1.0
    assert list(only.token_times) == pytest.approx([1.009, 1.0131, 1.0172, 1.0213])
    assert only.end == pytest.approx(1.0213)
    assert only.finish_reason == "stop"
    assert list(outcome.steps.start) == pytest.approx([1.0, 1.009, 1.0131, 1.0172])
    assert list(outcome.steps.seconds) == pytest.approx([0.009, 0.0041, 0.0041, 0.0041])
    assert list(outcome.steps.num_prefill_tokens) == [100, 0, 0, 0]
    assert list(outcome.steps.num_decodes) == [0, 1, 1, 1]
    assert outcome.num_scheduled_tokens == 103


def test_a_request_waits_for_the_last_of_several_others_and_its_pause() -> None:
    asked = workload(
        request(0.0, 100, 4),
        request(0.5, 10, 9, follows=0),
        request(1.5, 10, 2, follows=0),
        request(2.0, 10, 2, follows=1, after=(2, 0)),
    )
    first, one, two, join = simulate(config(), asked).requests
    assert one.arrival == pytest.approx(first.end + 0.5)
    assert two.arrival == pytest.approx(first.end + 1.5)
    assert join.arrival == pytest.approx(two.end + 2.0)
    assert join.is_finished


def illustrated(arrival: float, image: int, text: int = 100) -> WorkloadRequest:
    """A picture of that name, 80 tokens large, before the tokens of a text of its own."""
    pieces = (Piece(image, 80, is_image=True), Piece(int(1000 * arrival) + 7, text))
    return WorkloadRequest(arrival, pieces, 2)


def test_an_image_takes_its_time_once() -> None:
    """20 us for each of its tokens, on top of those of the prompt."""
    outcome = simulate(
        msgspec.structs.replace(config(), cache=CacheConfig(enable_prefix_caching=False)),
        workload(illustrated(1.0, 1), illustrated(2.0, 1), illustrated(3.0, 2), request(4, 180, 2)),
    )
    seconds = [r.token_times[0] - r.arrival for r in outcome.requests]
    plain = 0.004 + 180 * 50e-6
    assert seconds == pytest.approx([plain + 80 * 20e-6, plain, plain + 80 * 20e-6, plain])


def test_images_that_no_step_has_room_for_are_refused_before_the_run() -> None:
    load = workload(illustrated(0.0, 1))
    check_fits(config(max_encoder_tokens=80), load)
    with pytest.raises(ConfigError, match=r"an image has 80 tokens, .* is 79"):
        check_fits(config(encoder_cache_tokens=79), load)


def test_a_model_is_not_shown_what_is_no_image() -> None:
    real = msgspec.structs.replace(config(), runner=RunnerConfig())
    with pytest.raises(ConfigError, match="test: it has images, and a model would have to see"):
        run_live(real, workload(illustrated(0.0, 1)))


def test_a_turn_begins_after_the_pause_and_finds_the_conversation_cached() -> None:
    first = Piece(1, 160)
    turns = (
        WorkloadRequest(0.0, (first,), 33),
        WorkloadRequest(5.0, (first, Piece(2, 33, reply_of=0), Piece(3, 20)), 4, follows=0),
    )
    outcome = simulate(config(), workload(*turns))
    opening, turn = outcome.requests
    assert turn.arrival == pytest.approx(opening.end + 5.0)
    assert turn.num_cached_tokens > 160  # the reply was found, too, not the first prompt alone


def test_deadlines_end_requests_and_refusals_are_noted() -> None:
    outcome = simulate(
        config(max_num_seqs=1, max_waiting_requests=1),
        workload(
            request(0.0, 10, 500, timeout=0.5),
            request(0.1, 11, 5),
            request(0.2, 12, 5),
        ),
    )
    late, served, refused = outcome.requests
    assert late.finish_reason == "timeout"
    assert late.end == pytest.approx(0.5, abs=0.01)
    assert late.token_times[-1] <= late.end
    assert served.finish_reason == "stop"
    assert refused.finish_reason == "refused"
    assert not refused.token_times


def test_preemptions_are_counted_by_request() -> None:
    requests = [request(0.001 * i, 60, 100, text=i) for i in range(6)]
    outcome = simulate(config("chunked_prefill", num_kv_blocks=24), workload(*requests))
    assert outcome.num_preemptions == sum(r.num_preemptions for r in outcome.requests) > 0
    assert all(len(r.token_times) == 100 for r in outcome.requests)


def test_states_are_sampled_over_the_run() -> None:
    requests = [request(0.01 * i, 100, 20) for i in range(100)]
    states = simulate(config(max_num_seqs=4), workload(*requests)).states
    assert 100 < len(states.time) <= 2000
    assert max(states.num_running) == 4
    assert max(states.num_waiting) > 10
    assert 0 < max(states.kv_usage) <= 1


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_two_runs_are_equal_to_the_last_bit(pipeline_depth: int) -> None:
    requests = [request(0.01 * i, 50 + 7 * i % 300, 20) for i in range(60)]

    def run() -> RunOutcome:
        return simulate(
            config("chunked_prefill", 64, pipeline_depth=pipeline_depth), workload(*requests)
        )

    first, second = run(), run()
    assert [r.token_times for r in first.requests] == [r.token_times for r in second.requests]
    assert first.steps.start == second.steps.start


def test_progress_hears_of_every_request() -> None:
    heard: list[int] = []
    simulate(config(), workload(request(0.0, 10, 2), request(0.1, 10, 2)), heard.append)
    assert heard == [1, 1]


def test_a_simulated_model_may_be_longer_than_its_positions_if_nothing_is_said() -> None:
    assert simulated(config(), longest=9000).model.max_model_len == 9000
    assert simulated(config(), longest=100).model.max_model_len is None
    stated = EngineConfig(model=ModelConfig(max_model_len=512))
    assert simulated(stated, longest=9000).model.max_model_len == 512
    assert simulated(EngineConfig()).runner.runner == "simulated"


def test_what_can_never_run_is_refused_before_the_run() -> None:
    long = workload(request(0.0, 10, 2), request(0.0, 2000, 100))
    with pytest.raises(ConfigError, match=r"request 1 with 2000 prompt \+ 100 output .*KV pool of"):
        check_fits(config(num_kv_blocks=100), long)
    with pytest.raises(ConfigError, match="max_model_len allows 4096"):
        check_fits(config(), workload(request(0.0, 4090, 100)))
    check_fits(config(num_kv_blocks=132), long)  # 2,112 slots for 2,099 tokens to compute


def test_the_real_engine_serves_the_same_requests_in_real_time() -> None:
    requests = [request(0.05 * i, 20, 5) for i in range(4)]
    real = EngineConfig(cache=CacheConfig(num_kv_blocks=64))
    outcome = run_live(real, workload(*requests))
    assert [len(r.token_times) for r in outcome.requests] == [5] * 4
    assert all(r.arrival >= 0.05 * i for i, r in enumerate(outcome.requests))
    assert all(r.token_times[0] > r.arrival for r in outcome.requests)
    assert outcome.end > 0.15


def test_a_live_run_has_as_many_steps_in_flight_as_its_runner_asks_for() -> None:
    class Deep(SimulatedRunner):
        num_compute_threads = 3

        async def load(self) -> RunnerInfo:
            return msgspec.structs.replace(await super().load(), pipeline_depth=2)

    observed = ObservedRunner(Deep(config(), ModelInfo(config().model)))
    assert asyncio.run(observed.load()).pipeline_depth == 2
    assert observed.num_compute_threads == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_a_clock_that_jumps_changes_nothing_but_the_cost(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    requests = [
        request(0.03 * i, 20 + 37 * i % 300, 1 + 11 * i % 40, timeout=0.15 if i % 7 == 0 else None)
        for i in range(40)
    ]
    settings = config(
        "chunked_prefill", num_kv_blocks=40, pipeline_depth=depth, options={"chunk_size": 64}
    )
    times = []
    for jumps in (True, False):
        if not jumps:
            monkeypatch.setattr(VirtualClockEventLoop, "jump_to", lambda self, when: False)
        outcome = simulate(settings, workload(*requests))
        assert outcome.num_preemptions > 0
        assert {r.finish_reason for r in outcome.requests} == {"stop", "timeout"}
        times.append(
            (
                [(list(r.token_times), r.end, r.num_cached_tokens) for r in outcome.requests],
                list(outcome.steps.start),
                list(outcome.steps.seconds),
                list(outcome.states.kv_usage),
            )
        )
    assert times[0] == times[1]


def drafting(num_tokens: int) -> EngineConfig:
    runner = msgspec.structs.replace(EXACT, simulated_draft_tokens=num_tokens)
    return msgspec.structs.replace(config("chunked_prefill"), runner=runner)


def test_each_class_has_drafts_as_good_as_the_workload_says() -> None:
    requests = [
        request(i, 40, 100, text=i, draft_acceptance=(0.1, 0.9, None)[i % 3]) for i in range(60)
    ]
    outcome = simulate(drafting(3), workload(*requests))
    assert all(len(r.token_times) == 100 for r in outcome.requests)
    poor, good, unknown = (sum(r.end - r.arrival for r in outcome.requests[k::3]) for k in range(3))
    assert good < unknown < poor


def test_the_share_of_right_drafts_is_that_which_was_asked_for() -> None:
    for chance in (0.0, 0.6, 1.0):
        requests = [request(i, 40, 100, text=i, draft_acceptance=chance) for i in range(80)]
        outcome = simulate(drafting(1), workload(*requests))
        share = outcome.num_right_drafts / outcome.num_draft_tokens
        deviation = (chance * (1 - chance) / outcome.num_draft_tokens) ** 0.5
        behind_ends = len(requests) / outcome.num_draft_tokens  # guesses of what follows the end
        assert abs(share - chance) <= 4 * deviation + behind_ends
        assert outcome.num_draft_tokens > 500
    plain = simulate(config("chunked_prefill"), workload(*requests))
    assert plain.num_draft_tokens == 0
