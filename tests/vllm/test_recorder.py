"""vLLM's own scheduler under aioserve's recorder decides as it does alone, and the log is true."""

import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from aioserve.cli.main import main
from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.records import Finished, Planned
from aioserve.lab.decision_log.replay import replay
from aioserve.lab.what_if import measure, read_traffic
from aioserve.model_source.info import find_model
from aioserve.testing import SchedulerHarness
from aioserve.vllm import Recorder, Scheduler
from aioserve.vllm.foreign import VLLMScheduler
from tests.processes import PATIENCE

PACED_CLOCK = Path(__file__).parents[2] / "examples/recipes/paced_clock.py"

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def parts(given: object, depth: int = 1) -> dict[str, Any]:
    """What vLLM's engine core makes its scheduler of: 12 blocks of 4 tokens, three seats."""
    harness = SchedulerHarness(
        VLLMScheduler, num_blocks=12, max_num_seqs=3, max_model_len=40, pipeline_depth=depth
    )
    own = harness.scheduler
    assert isinstance(own, VLLMScheduler)
    config = own._theirs.vllm_config
    config.additional_config, config.lora_config = given, None
    return {
        "vllm_config": config,
        "kv_cache_config": own._theirs.kv_cache_config,
        "structured_output_manager": own._theirs.structured_output_manager,
        "block_size": 4,
        "log_stats": True,
        "hasher": own._hasher,
    }


def a_request(number: int, hasher: Any, **others: Any) -> Request:
    params = SamplingParams(max_tokens=6 + 5 * number % 11, ignore_eos=True)
    prompt = [7] * (number % 2 * 9) + [number] * (2 + 3 * number % 7)
    return Request(f"r{number}", prompt, params, None, block_hasher=hasher, **others)


def drive(scheduler: Any, hasher: Any, depth: int = 1, count: int = 24) -> list[Any]:
    """A request a step, some of which leave; results come `depth` steps later. Returns the plans,
    as far as a runner is told.
    """
    told: list[Any] = []
    lengths: dict[str, int] = {}  # tokens that are known of each request
    in_flight: deque[Any] = deque()
    step = 0
    while step < count or scheduler.has_requests() or in_flight:
        if step < count:
            request = a_request(step, hasher)
            lengths[request.request_id] = request.num_prompt_tokens
            scheduler.add_request(request)
        if step % 7 == 6:
            scheduler.finish_requests([f"r{step - 3}", "nobody"], RequestStatus.FINISHED_ABORTED)
        if step == 20:
            scheduler.reset_prefix_cache()
        plan = scheduler.schedule()
        told.append(
            (
                dict(plan.num_scheduled_tokens),
                [(new.req_id, new.block_ids) for new in plan.scheduled_new_reqs],
                plan.scheduled_cached_reqs.new_block_ids,
                sorted(plan.preempted_req_ids or ()),
                sorted(plan.finished_req_ids),
            )
        )
        in_flight.append(plan)
        while len(in_flight) >= depth or (in_flight and not plan.num_scheduled_tokens):
            back(scheduler, in_flight.popleft(), lengths)
        step += 1
    return told


def back(scheduler: Any, plan: Any, lengths: dict[str, int]) -> None:
    """The result of a step: a token for each request all of whose tokens it has computed."""
    cached, counts = plan.scheduled_cached_reqs, plan.num_scheduled_tokens
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
    due = [name for name, count in counts.items() if starts[name] + count >= lengths[name]]
    for name in due:
        lengths[name] += 1
    sampled = [[len(name)] if name in due else [] for name in counts]
    rows = {name: row for row, name in enumerate(counts)}
    scheduler.update_from_output(plan, ModelRunnerOutput(list(counts), rows, sampled))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recorded_scheduler_plans_what_it_plans_alone_and_its_log_replays(
    depth: int, tmp_path: Path
) -> None:
    path = tmp_path / "traffic.log"
    given = parts({"aioserve": {"decision_log": str(path)}}, depth)
    hasher = given.pop("hasher")
    recorder = Recorder(**given)
    alone = type(recorder.live)(**given)
    assert drive(recorder, hasher, depth) == drive(alone, hasher, depth)
    recorder.shutdown()
    log = DecisionLog(path)
    records = list(log)
    assert log.is_complete
    assert any(isinstance(record, Planned) and record.preempted for record in records)
    assert any(isinstance(record, Finished) for record in records)
    result = replay(log)
    assert result.divergence is None
    assert result.num_requests == 24
    assert result.policies == "vllm"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_inside_vllm_writes_the_same_kind_of_log(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "traffic.log"
    own = {"policy": "fair", "options": {"quantum": 8}}
    given = parts({"aioserve": own}, depth)
    hasher = given.pop("hasher")
    alone = Scheduler(**given)
    given["vllm_config"].additional_config = {"aioserve": own | {"decision_log": str(path)}}
    recorded = Scheduler(**given)
    assert drive(recorded, hasher, depth) == drive(alone, hasher, depth)
    recorded.shutdown()
    log = DecisionLog(path)
    result = replay(log)
    assert result.divergence is None
    assert log.is_complete
    assert (result.policies, result.num_requests) == ("fair", 24)


def test_a_log_of_vllm_says_when_and_how_long(tmp_path: Path) -> None:
    path = tmp_path / "traffic.log"
    given = parts({"aioserve": {"decision_log": str(path)}})
    hasher = given.pop("hasher")
    recorder = Recorder(**given)
    drive(recorder, hasher)
    recorder.shutdown()
    traffic = read_traffic(DecisionLog(path))
    measured = measure(traffic.chronicle, traffic.lives)
    assert measured["requests served"] >= 20
    assert measured["TTFT mean ms"] > 0
    assert [life.prompt.tolist() for life in traffic.lives if life.prompt][1] == [7] * 9 + [1] * 5
    assert {life.finish_reason for life in traffic.lives} == {"length", "abort"}


def test_what_is_not_translated_ends_the_log_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "traffic.log"
    given = parts({"aioserve": {"decision_log": str(path)}})
    hasher = given.pop("hasher")
    recorder = Recorder(**given)
    recorder.add_request(a_request(0, hasher))
    recorder.add_request(a_request(1, hasher, resumable=True))
    assert "ends here" in caplog.text
    assert "streaming input" in caplog.text
    plan = recorder.schedule()
    assert set(plan.num_scheduled_tokens) == {"r0", "r1"}
    back(recorder, plan, {"r0": 2, "r1": 14})
    recorder.shutdown()
    assert len(list(DecisionLog(path))) == 1  # the request before


def test_a_deadline_that_is_none_ends_no_log(tmp_path: Path) -> None:
    """Any client may state one, and under vLLM's own scheduler it means nothing."""
    path = tmp_path / "traffic.log"
    given = parts({"aioserve": {"decision_log": str(path)}})
    hasher = given.pop("hasher")
    recorder = Recorder(**given)
    params = SamplingParams(max_tokens=2, ignore_eos=True, extra_args={"deadline": "soon"})
    recorder.add_request(Request("odd", [3, 4], params, None, block_hasher=hasher))
    back(recorder, recorder.schedule(), {"odd": 2})
    recorder.shutdown()
    kinds = [type(record).__name__ for record in DecisionLog(path)]
    assert kinds == ["Added", "Planned", "Updated", "Closed"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs the file that it is to write"),
        ({"aioserve": {}}, "needs the file that it is to write"),
        ({"aioserve": {"decision_log": 7}}, "needs the file that it is to write"),
        ({"aioserve": {"decision_log": "x", "policy": "fair"}}, "and not policy"),
        ({"aioserve": {"decision_log": "/nowhere/at/all"}}, "/nowhere/at/all"),
    ],
)
def test_a_recorder_without_a_file_or_with_a_policy_is_refused(given: Any, words: str) -> None:
    others = parts(given)
    del others["hasher"]
    with pytest.raises(ConfigError, match=words):
        Recorder(**others)


SERVE = """
import json, random, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, path = sys.argv[1:]
    llm = LLM(
        model, dtype="float32", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256,
        block_size=32, num_gpu_blocks_override=24, enforce_eager=True, skip_tokenizer_init=True,
        scheduler_cls="aioserve.vllm.Recorder",
        additional_config={"aioserve": {"decision_log": path}},
    )
    rng, prompts, params = random.Random(1), [], []
    for i in range(20):
        own = rng.choices(range(2048), k=5 + 9 * i % 100)
        prompts.append({"prompt_token_ids": [5] * (64 * (i % 2)) + own})
        params.append(SamplingParams(
            temperature=0, max_tokens=1 + 7 * i % 40, ignore_eos=True, detokenize=False
        ))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
    llm.llm_engine.engine_core.shutdown()
"""


def test_an_engine_of_vllm_is_recorded_replayed_and_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, profile = tmp_path / "traffic.log", tmp_path / "mine.yaml"
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    model = find_model(ModelConfig()).path
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    result = subprocess.run(
        [sys.executable, script, model, path],
        env={**os.environ, **quiet, **here},
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    replies = json.loads(result.stdout.strip().splitlines()[-1])
    log = DecisionLog(path)
    lives = read_traffic(log).lives
    recorded = {int(life.request_id.partition("-")[0]): life.tokens.tolist() for life in lives}
    assert [recorded[i] for i in range(20)] == replies
    assert replay(log).divergence is None
    assert main(["compare", "vllm", "fair", "--replay", str(path), "--jobs", "1"]) == 0
    assert "Recorded is what the server measured under vllm" in capsys.readouterr().out
    assert main(["calibrate", "--log", str(path), "-o", str(profile)]) == 0
    assert profile.exists()


# A second policy beside the one that decides.


def metric(path: Path, name: str) -> float:
    """A value of a file of metrics."""
    [value] = re.findall(rf"^{name} (\S+)$", path.read_text(), re.MULTILINE)
    return float(value)


def beside(path: Path, **others: Any) -> dict[str, Any]:
    return {"shadow": {"policy": "fair", "file": str(path), "max_share": 1.0, **others}}


@pytest.mark.parametrize("kind", [Scheduler, Recorder])
def test_a_shadow_follows_the_traffic_and_changes_no_plan(kind: Any, tmp_path: Path) -> None:
    """Beside aioserve's scheduler and beside vLLM's own, with and without a log."""
    path, log = tmp_path / "shadow.prom", tmp_path / "traffic.log"
    given = parts({"aioserve": {"policy": "priority"}})
    hasher = given.pop("hasher")
    alone = Scheduler(**given)
    if kind is Recorder:
        given["vllm_config"].additional_config = {"aioserve": {"decision_log": str(log)}}
        first = Recorder(**given)
        alone = type(first.live)(**given)
        first.shutdown()
    own = {} if kind is Recorder else {"policy": "priority"}
    given["vllm_config"].additional_config = {"aioserve": own | beside(path)}
    watched = kind(**given)
    assert drive(watched, hasher) == drive(alone, hasher)
    shadow = watched._shadow if kind is Scheduler else watched._notes.shadow
    end = time.monotonic() + PATIENCE
    while shadow.shadow.has_work and time.monotonic() < end:  # it lives some seconds behind
        time.sleep(0.05)
    watched.shutdown()
    assert metric(path, "aioserve_shadow_failed") == 0
    live = metric(path, "aioserve_request_latency_seconds_count")
    assert live >= 20
    assert metric(path, "aioserve_time_to_first_token_seconds_count") >= live
    assert metric(path, "aioserve_shadow_request_latency_seconds_count") >= 20
    tokens = metric(path, "aioserve_inter_token_latency_seconds_count")
    assert metric(path, "aioserve_shadow_inter_token_latency_seconds_count") >= 0.8 * tokens > 20


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": "fair"}, "file"),
        ({"policy": "no such", "file": "x"}, "no such"),
        ({"policy": "fair", "file": "x", "options": {"no_such": 1}}, "no_such"),
        ({"policy": "fair", "file": "x", "max_share": 0}, "max_share must be above 0"),
        ({"policy": "fair", "file": "/nowhere/at/all"}, "the shadow's metrics go to /nowhere"),
        ({"policy": str(PACED_CLOCK), "file": "x"}, "sets the card's clock, but the steps of a"),
    ],
)
@pytest.mark.parametrize("kind", [Scheduler, Recorder])
def test_a_shadow_that_cannot_work_is_refused(kind: Any, given: Any, words: str) -> None:
    others = parts({"aioserve": {"shadow": given}})
    del others["hasher"]
    with pytest.raises(ConfigError, match=words):
        kind(**others)
