"""vLLM's own scheduler in the lab: the same steps as in a bare loop, and what its contract is."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from aioserve.cli.main import main
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, RequestError
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import simulate, simulated
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, build_prompt
from aioserve.outputs import FinishReason
from aioserve.runner.step_times import load_profile
from aioserve.scheduler import available_policies, load_policy
from aioserve.scheduler.output import StepFeatures
from aioserve.testing import ContractViolation, SchedulerHarness
from aioserve.vllm.foreign import VLLMScheduler

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK_SIZE, VOCAB_SIZE = 16, 2048


def workload(count: int) -> Workload:
    """Prompts of 5 to 300 tokens, every other one of which begins with the same 64; replies of 3
    to 50; more at once than the KV cache holds.
    """
    requests = []
    for i in range(count):
        common = [Piece(1, 64)] if i % 2 else []
        pieces = (*common, Piece(100 + i, 5 + 37 * i % 296))
        requests.append(WorkloadRequest(0.004 * i, pieces, 3 + 11 * i % 48))
    return Workload("crowd", tuple(requests))


def settings(num_blocks: int, **others: object) -> EngineConfig:
    given = {
        "scheduler.policy": "vllm",
        "scheduler.max_num_seqs": 12,
        "scheduler.max_num_batched_tokens": 128,
        "cache.num_kv_blocks": num_blocks,
        "model.max_model_len": 400,
        **others,
    }
    return simulated(EngineConfig.load(None, list(given.items())))


def bare_loop(
    work: Workload, outcome: RunOutcome, config: EngineConfig
) -> tuple[dict[int, list[float]], int]:
    """When tokens came by request, and how often one was preempted: vLLM's scheduler in a loop of
    a few lines, with its own ids, its own results and the seconds of the profile.
    """
    kv_cache = SchedulerHarness(
        VLLMScheduler, num_blocks=config.cache.num_kv_blocks or 0, block_size=BLOCK_SIZE
    ).kv_cache
    made = VLLMScheduler(config.scheduler, kv_cache, max_model_len=400, clock=lambda: 0.0)
    scheduler, hasher = made._theirs, made._hasher
    profile = load_profile("example")
    coming = [(request.arrival, i) for i, request in enumerate(work.requests)]
    times: dict[int, list[float]] = {i: [] for _, i in coming}
    now, num_ended, num_preempted = 0.0, 0, 0
    while num_ended < len(times):
        while coming and coming[0][0] <= now:
            arrival, i = coming.pop(0)
            reply = outcome.requests[i].num_output_tokens
            params = SamplingParams(max_tokens=reply, ignore_eos=True)
            prompt = build_prompt(work.requests[i], VOCAB_SIZE, {})
            scheduler.add_request(
                Request(str(i), list(prompt), params, None, 0, arrival, block_hasher=hasher)
            )
        if not scheduler.has_requests():
            now = coming[0][0]
            continue
        plan = scheduler.schedule()
        num_preempted += len(plan.preempted_req_ids or ())
        ids = list(plan.num_scheduled_tokens)
        if not ids:
            continue
        rows = [
            (n, scheduler.requests[r].num_computed_tokens)
            for r, n in plan.num_scheduled_tokens.items()
        ]
        features = StepFeatures.of(
            sum(n == 1 for n, _ in rows), sum(e for _, e in rows), [r for r in rows if r[0] > 1]
        )
        now += profile.seconds(features)
        sampled = []
        for request_id in ids:
            request = scheduler.requests[request_id]
            is_due = request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if is_due else [])
            if is_due:
                times[int(request_id)].append(now)
        result = ModelRunnerOutput(ids, {r: row for row, r in enumerate(ids)}, sampled)
        for batch in scheduler.update_from_output(plan, result).values():
            num_ended += sum(output.finish_reason is not None for output in batch.outputs)
    return times, num_preempted


@pytest.mark.parametrize("num_blocks", [400, 60])
def test_the_lab_takes_the_steps_of_a_bare_loop_around_vllms_scheduler(num_blocks: int) -> None:
    work, config = workload(60), settings(num_blocks)
    outcome = simulate(config, work)
    times, num_preempted = bare_loop(work, outcome, config)
    assert (num_preempted > 0) == (num_blocks == 60), "the small pool is there to run out"
    assert outcome.num_preemptions == num_preempted
    for i, request in enumerate(outcome.requests):
        assert list(request.token_times) == pytest.approx(times[i], abs=1e-9)


def test_replies_do_not_depend_on_who_schedules() -> None:
    work = workload(30)
    ours, theirs = (
        simulate(settings(60, **{"scheduler.policy": policy}), work)
        for policy in ("chunked_prefill", "vllm")
    )
    for mine, other in zip(ours.requests, theirs.requests, strict=True):
        assert other.num_output_tokens == mine.num_output_tokens
        assert other.finish_reason == mine.finish_reason == "stop"


def test_compare_takes_vllm_by_name_and_repeats_itself_byte_by_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "vllm", "fcfs", "--workload", "mixed", "--limit", "40", "--seeds", "1"]
    for name in ("one", "two"):
        path = tmp_path / f"{name}.json"
        assert main([*words, "--jobs", "1", "--json", str(path)]) == 0
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    document = json.loads((tmp_path / "one.json").read_bytes())
    assert [result["policy"] for result in document["results"]] == ["vllm", "fcfs"]
    assert "vllm" in capsys.readouterr().out


def test_no_list_of_policies_shows_vllm() -> None:
    assert "vllm" not in available_policies()
    assert load_policy("vllm") is VLLMScheduler


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"options": {"policy": "newest"}}, "policy"),
        ({"options": {"chunk": 3}}, "reserve_full_isl"),
        ({"victim": "newest"}, "victim=newest"),
        ({"num_lookahead_tokens": 2}, "num_lookahead_tokens=2"),
        ({"num_state_slots": 4}, "layers with states"),
        ({"window": 8}, "layers with sliding windows"),
        ({"max_num_batched_tokens": 3}, "vLLM refuses these settings: .*max_num_batched_tokens"),
    ],
)
def test_what_vllms_scheduler_would_pass_over_is_refused(
    changed: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        SchedulerHarness(VLLMScheduler, **changed)


def test_a_request_that_is_not_translated_is_refused() -> None:
    from aioserve.params import PoolingParams

    harness = SchedulerHarness(VLLMScheduler)
    with pytest.raises(RequestError, match="embeddings"):
        harness.add_request("r0", [1], pooling_params=PoolingParams())


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_crowd_with_preemption_gets_the_tokens_that_each_would_get_alone(
    pipeline_depth: int,
) -> None:
    """Each block is looked into by the harness: what stands in it, and whose it is."""
    harness = SchedulerHarness(
        VLLMScheduler,
        num_blocks=8,
        max_num_seqs=3,
        max_model_len=32,
        pipeline_depth=pipeline_depth,
    )
    for i in range(16):
        common = [7] * (i % 3 * 5)
        adapter = "" if i % 4 else "a1"
        harness.add_request(f"r{i}", [*common, i, i], max_tokens=9 + i % 9, adapter_id=adapter)
        harness.step()
    harness.run_until_idle()
    assert set(harness.finished.values()) == {FinishReason.LENGTH}
    assert any(step.preempted_req_ids for step in harness.steps)


def test_priorities_order_admissions_under_vllms_policy_of_that_name() -> None:
    harness = SchedulerHarness(VLLMScheduler, options={"policy": "priority"}, max_num_seqs=1)
    for i in range(4):
        harness.add_request(f"r{i}", [i], max_tokens=2, priority=3 - i)
    harness.run_until_idle()
    order = [new.request_id for step in harness.steps for new in step.scheduled_new_reqs]
    assert order == ["r3", "r2", "r1", "r0"]


# What of aioserve's contract vLLM's scheduler does not hold, as docs/vllm.md says. A change of
# these is news of a version of vLLM's.


def test_the_limit_of_a_long_prompt_is_not_vllms_while_the_request_is_alone() -> None:
    harness = SchedulerHarness(VLLMScheduler, long_prefill_token_threshold=3)
    harness.add_request("r0", [7] * 4)
    with pytest.raises(ContractViolation, match="long_prefill_token_threshold is 3"):
        harness.step()


def test_vllm_leaves_min_tokens_to_what_samples() -> None:
    harness = SchedulerHarness(VLLMScheduler)
    harness.add_request("r0", [2], stop_token_ids=[*range(50)], min_tokens=3)
    with pytest.raises(ContractViolation, match="finish and stop reason 'stop'"):
        harness.run_until_idle()


def test_with_two_steps_in_flight_vllm_hands_on_blocks_that_the_older_one_writes() -> None:
    harness = SchedulerHarness(
        VLLMScheduler, num_blocks=12, max_num_seqs=2, max_model_len=40, pipeline_depth=2
    )
    for i in range(4):
        reply = [5] * (2 + 4 * i) + [2]
        harness.add_request(f"r{i}", [9 + i] * 6, reply=reply, eos_token_ids=(2,))
    with pytest.raises(ContractViolation, match="a step in flight writes"):
        harness.run_until_idle()


def test_vllm_forgets_no_prefix_while_a_request_holds_a_block() -> None:
    harness = SchedulerHarness(VLLMScheduler)
    harness.add_request("r0", [7] * 9, max_tokens=9)
    harness.step()
    assert harness.scheduler.reset_prefix_cache() is False
    harness.finish("r0")
    harness.add_request("r1", [7] * 9, max_tokens=2)
    harness.run_until_idle()
    assert harness.requests["r1"].num_cached_tokens == 8
