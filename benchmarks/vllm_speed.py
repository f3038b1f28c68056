"""How fast vLLM is with aioserve's scheduler: a step of the scheduler alone, and whole servers.

    python benchmarks/vllm_speed.py scheduler [--running 64 256 1024] [--rounds 9]
    python benchmarks/vllm_speed.py servers [--loads W5 W6]      # a quiet machine, 15 minutes

`scheduler`: aioserve's and vLLM's own are made as vLLM's engine core makes them, of the same
settings, and are given the same requests (200 tokens of prompt, 64 of which a fifth of the others
share) and the same results, without a model. Measured is the processor time of `schedule()` and
`update_from_output()` together, per step. `steady`: decodes alone. `churn`: every step one in 64 of
the running requests ends, and as many come, whose `add_request()` is counted; vLLM's own request,
with the hashes of its blocks, is made before, as another thread of vLLM's engine core does. The two
take turns of some steps in one process; the ratio is vLLM's time over aioserve's, the median of the
turns, with the least and the most. `log adds` is what `aioserve.vllm.Recorder` adds to a step of
vLLM's own, `parts add` what `PolicyScheduler` does in the order of the policy `fair`.

`servers`: two of one model run at once and take turns, so that one of them idles: W5 on SmolLM2, W6
on the embedded model, of which a step takes so little that the scheduler counts. Both have the same
seats, step tokens and KV blocks; aioserve's policy is `chunked_prefill` with all tokens of a step,
which is vLLM's own order. The table is that of `peers.py`; the ratio is to vLLM's own scheduler.
All of it runs in vLLM's environment. The last line is JSON.
"""

import contextlib
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from itertools import product
from pathlib import Path
from typing import Any

import torch
from build_peers import smollm2_directory, vllm
from harness import ROOT, Args, Opt, Program, Table, serving
from peers import compare_running
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


def measure(running: int, kind: str, rounds: int, log: Path) -> dict[str, Any]:
    """The medians of all, and the ratio of each turn."""
    # With fewer tokens a step the many prompts take hundreds of steps to begin with.
    options = {"chunk_size": STEP_TOKENS}
    stated: dict[str, tuple[Any, dict[str, Any]]] = {
        "aioserve": (OurScheduler, {"policy": "chunked_prefill", "options": options}),
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
    ours, theirs = found["aioserve"], found["vllm"]
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    adds = {
        name: statistics.median(b - a for a, b in zip(theirs, found[name], strict=True))
        for name in ("recorded", "parts")
    }
    return {
        "running": running,
        "kind": kind,
        "aioserve_us": statistics.median(ours),
        "vllm_us": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "log_adds_us": adds["recorded"],
        "parts_add_us": adds["parts"],
        "loop_us": beside,
        "tokens": {name: engine.num_tokens for name, engine in engines.items()},
    }


@program.command("scheduler", running=[64, 256, 1024], kind=["steady", "churn"], rounds=9)
def scheduler(args: Args) -> dict[str, Any]:
    """Steps of both schedulers, at each number of running requests."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    print("microseconds per step of processor time")
    ratios = dict.fromkeys(("ratio", "least", "most"), "8.2f")
    times = {"aioserve_us": "13.1f", "vllm_us": "10.1f"}
    adds = {"log_adds_us": "13.1f", "parts_add_us": "14.1f"}
    table = Table({"kind": "<8", "running": "8", **times, **ratios, **adds})
    with tempfile.TemporaryDirectory() as folder:
        for kind, running in product(args.kind, args.running):
            log = Path(folder, f"{kind}-{running}.log")
            table.add(measure(running, kind, args.rounds, log))
    return {"results": table.rows}


# Whole servers.


#: Seats of each load's server: as many as it has streams.
SEATS = {"W5": 64, "W6": 256}
WHOLE_STEPS = 2048  # tokens of a step
OURS = {"policy": "chunked_prefill", "options": {"chunk_size": WHOLE_STEPS}}


def words_of(load: str, *, is_ours: bool) -> list[str]:
    """The command line of one server."""
    model = find_model(OurModelConfig()).path if load == "W6" else smollm2_directory()
    program = str(Path(sys.executable).with_name("vllm"))
    words = [program, "serve", str(model), "--port", "{port}", "--dtype", "bfloat16"]
    words += ["--max-model-len", "1024", "--max-num-seqs", str(SEATS[load])]
    words += ["--max-num-batched-tokens", str(WHOLE_STEPS)]
    if is_ours:
        words += ["--scheduler-cls", "aioserve.vllm.Scheduler"]
        words += ["--additional-config", json.dumps({"aioserve": OURS})]
    return words


@program.command(
    "servers",
    loads=Opt(["W5", "W6"], choices=SEATS),
    rounds=3,
    max_seconds=Opt(300.0, "of one load"),
)
def servers(args: Args) -> tuple[dict[str, Any], int]:
    """Tokens per second of `vllm serve` under its own scheduler and under aioserve's."""
    environment = {**os.environ, **dict(vllm().environment), "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    results: dict[str, Any] = {}
    code = 0
    for load in args.loads:
        with contextlib.ExitStack() as stack:
            running = {
                name: stack.enter_context(
                    serving(
                        program=words_of(load, is_ours=is_ours),
                        ready="/health",
                        env=environment,
                        patience=1800.0,
                    )
                )
                for name, is_ours in (("vLLM", False), ("aioserve", True))
            }
            asked = Args(**vars(args))
            asked.loads = [load]
            asked.peers = [f"{name}={server.url}" for name, server in running.items()]
            found, failed = compare_running(asked)
            results |= found
            code = max(code, failed)
    return results, code


if __name__ == "__main__":
    program.main()
