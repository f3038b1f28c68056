"""What a step costs in vLLM's scheduler interface: aioserve's scheduler and vLLM's own, in turns.

    python benchmarks/vllm_scheduler.py [--running 64 256 1024] [--policy fair] [--rounds 9]

Both are made as vLLM's engine core makes them, of the same settings, and are given the same
requests (200 tokens of prompt, 64 of which a fifth of the others share) and the same results,
without a model. Measured is the processor time of `schedule()` and `update_from_output()`
together, per step. `steady`: decodes alone. `churn`: every step one in 64 of the running requests
ends, and as many come, whose `add_request()` is counted; vLLM's own request, with the hashes of its
blocks, is made before, as another thread of vLLM's engine core does. The two take turns of some
steps in one process, so that what else the machine does falls on both; the ratio is vLLM's time
over aioserve's, the median of the turns, with the least and the most. `log adds` is what
`aioserve.vllm.Recorder` adds to a step of vLLM's own, `parts add` what `PolicyScheduler` does in
the order of the policy `fair`. Needs vLLM. The last line is JSON.
"""

import gc
import logging
import statistics
import tempfile
import time
from collections import deque
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import Args, Program
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as TheirScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from aioserve.config import ModelConfig as OurModelConfig
from aioserve.model_source.info import find_model
from aioserve.vllm import PolicyScheduler, Recorder
from aioserve.vllm import Scheduler as OurScheduler

program = Program(__doc__)

BLOCK_SIZE = 16
PROMPT_TOKENS, SHARED_TOKENS = 200, 64
LIFE = 64  # steps that a request stays, about, in `churn`
MAX_MODEL_LEN = 4096
STEPS_A_TURN = 40
STEP_TOKENS = 8192


class Engine:
    """One scheduler with what vLLM's engine core does around it, but for the model."""

    def __init__(self, kind: Any, running: int, stated: dict[str, Any], *, is_churn: bool) -> None:
        """`stated` is what `--additional-config` has for aioserve."""
        self.is_churn, self.num_running = is_churn, running
        settings = make_settings(running, stated)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
        )
        blocks = KVCacheConfig(
            num_blocks=settings.cache_config.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.scheduler = kind(
            vllm_config=settings,
            kv_cache_config=blocks,
            structured_output_manager=StructuredOutputManager(settings),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        digest = get_hash_fn_by_name(settings.cache_config.prefix_caching_hash_algo)
        init_none_hash(digest)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, digest)
        self._num_made = 0
        self._made: deque[Request] = deque()  # and not added
        self.num_tokens = 0  # that were given out
        for _ in range(running):
            self.scheduler.add_request(self._make())
        while not self._is_full:
            self.step()

    #: Whether the last step had a row for each seat, and none of them split a prompt.
    _is_full = False

    def _make(self) -> Request:
        self._num_made += 1
        number = self._num_made
        shared = [number % 5] * SHARED_TOKENS
        own = [(number * 31 + i) % 2048 for i in range(PROMPT_TOKENS - SHARED_TOKENS)]
        most = LIFE if self.is_churn else MAX_MODEL_LEN - PROMPT_TOKENS
        # In `churn` those that are there at first end one after the other, not at once.
        if self.is_churn and number <= self.num_running:
            most = 1 + number * LIFE // self.num_running
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        return Request(f"r{number}", [*shared, *own], params, None, block_hasher=self._hasher)

    def step(self) -> None:
        """One step, and as many new requests as have ended in it."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        rows = list(plan.num_scheduled_tokens)
        computed = dict(
            zip(
                plan.scheduled_cached_reqs.req_ids,
                plan.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        computed.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
        sampled = [
            [7] if computed[name] + count >= PROMPT_TOKENS else []
            for name, count in plan.num_scheduled_tokens.items()
        ]
        self._is_full = len(rows) == self.num_running and all(sampled)
        result = ModelRunnerOutput(rows, {name: i for i, name in enumerate(rows)}, sampled)
        num_ended = 0
        for batch in scheduler.update_from_output(plan, result).values():
            self.num_tokens += len(batch.outputs)
            num_ended += sum(output.finish_reason is not None for output in batch.outputs)
        for _ in range(num_ended):
            scheduler.add_request(self._made.popleft() if self._made else self._make())

    def turn(self, num_steps: int) -> float:
        """Microseconds of processor time per step, of some steps."""
        most = 2 * num_steps * self.num_running // LIFE + 1 if self.is_churn else 0
        while len(self._made) < most:
            self._made.append(self._make())
        began = time.process_time()
        for _ in range(num_steps):
            self.step()
        return 1e6 * (time.process_time() - began) / num_steps


def make_settings(running: int, stated: dict[str, Any]) -> VllmConfig:
    """vLLM's settings, with seats for all, and KV blocks for all of what they may grow to."""
    model = ModelConfig(
        model=str(find_model(OurModelConfig()).path), skip_tokenizer_init=True, dtype="float32"
    )
    settings = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            max_num_seqs=running,
            max_num_batched_tokens=STEP_TOKENS,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig(device="cpu"),
        additional_config={"aioserve": stated},
    )
    most = PROMPT_TOKENS + 800  # of 15 turns and the steps before them
    settings.cache_config.num_gpu_blocks = running * (most // BLOCK_SIZE + 1) + 2
    return settings


def loop_cost(running: int, num_steps: int) -> float:
    """Microseconds per step that this file's own loop takes beside the scheduler, about."""
    rows = [f"r{i}" for i in range(running)]
    began = time.process_time()
    for _ in range(num_steps):
        computed = dict(zip(rows, range(300, 300 + running), strict=True))
        sampled = [[7] if computed[name] + 1 >= PROMPT_TOKENS else [] for name in rows]
        ModelRunnerOutput(list(rows), {name: i for i, name in enumerate(rows)}, sampled)
    return 1e6 * (time.process_time() - began) / num_steps


def measure(running: int, kind: str, policy: str, rounds: int, log: Path) -> dict[str, Any]:
    """The medians of all, and the ratio of each turn."""
    ours_stated: dict[str, Any] = {"policy": policy}
    if policy == "chunked_prefill":  # else the many prompts take hundreds of steps to begin with
        ours_stated["options"] = {"chunk_size": STEP_TOKENS}
    stated: dict[str, tuple[Any, dict[str, Any]]] = {
        "aioserve": (OurScheduler, ours_stated),
        "vllm": (TheirScheduler, {}),
        "recorded": (Recorder, {"decision_log": str(log)}),
        "parts": (PolicyScheduler, {"order": "fair"}),
    }
    engines = {
        name: Engine(maker, running, given, is_churn=kind == "churn")
        for name, (maker, given) in stated.items()
    }
    gc.collect()
    gc.freeze()  # as vLLM's engine core does
    beside = loop_cost(running, STEPS_A_TURN)
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        if number == 1:
            for engine in engines.values():
                engine.num_tokens = 0
        for name in sorted(engines, reverse=bool(number % 2)):
            took = engines[name].turn(STEPS_A_TURN) - beside
            if number:  # the first turn warms up
                found[name].append(took)
    gc.unfreeze()
    for engine in engines.values():
        engine.scheduler.shutdown()
    ours, theirs = (statistics.median(found[name]) for name in ("aioserve", "vllm"))
    ratios = [b / a for a, b in zip(found["aioserve"], found["vllm"], strict=True)]
    adds, parts_add = (
        statistics.median(b - a for a, b in zip(found["vllm"], found[name], strict=True))
        for name in ("recorded", "parts")
    )
    return {
        "running": running,
        "kind": kind,
        "aioserve_us": round(ours, 1),
        "vllm_us": round(theirs, 1),
        "ratio": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "log_adds_us": round(adds, 1),
        "parts_add_us": round(parts_add, 1),
        "loop_us": round(beside, 1),
        "tokens": {name: engine.num_tokens for name, engine in engines.items()},
    }


@program.command(
    running=[64, 256, 1024], kind=["steady", "churn"], policy="chunked_prefill", rounds=9
)
def main(args: Args) -> dict[str, Any]:
    """Measure each kind of load at each number of running requests."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    print(f"microseconds per step of processor time; aioserve under {args.policy}")
    head = ("", "running", "aioserve", "vLLM", "ratio", "least", "most", "log adds", "parts add")
    print("{:8}{:>8}{:>10}{:>10}{:>8}{:>8}{:>8}{:>10}{:>10}".format(*head))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, running in product(args.kind, args.running):
            log = Path(folder, f"{kind}-{running}.log")
            row = measure(running, kind, args.policy, args.rounds, log)
            results.append(row)
            print(
                f"{kind:8}{running:8}{row['aioserve_us']:10.1f}{row['vllm_us']:10.1f}"
                f"{row['ratio']:8.2f}{row['least']:8.2f}{row['most']:8.2f}"
                f"{row['log_adds_us']:10.1f}{row['parts_add_us']:10.1f}",
                flush=True,
            )
    return {"results": results}


if __name__ == "__main__":
    program.main()
