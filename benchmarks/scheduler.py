"""What the scheduler costs: `schedule()` and `update_from_output()` in steady decode.

    python benchmarks/scheduler.py [--policy fcfs ...] [--steps 300] [--images 20]

Prefix caching on, blocks of 16 tokens, no model, no event loop. Median over the steps, in
microseconds per step and per running request; once with nobody waiting and once with 10,000. The
aim is at most 2 microseconds per running request. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from typing import Any

from aioserve.config import SchedulerConfig
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import ModelRunnerOutput
from aioserve.request import EncoderInput, Request, RequestSpec
from aioserve.sampling_params import SamplingParams
from aioserve.scheduler import SchedulerInterface, SchedulerOutput, load_policy

BLOCK_SIZE = 16
PROMPT_TOKENS = 200


def fill(
    policy: str, num_running: int, num_waiting: int, num_steps: int, num_images: int = 0
) -> SchedulerInterface:
    """A scheduler with so many requests in decode and so many behind them, each with images."""
    max_model_len = PROMPT_TOKENS + num_steps + 200
    blocks_each = -(-max_model_len // BLOCK_SIZE)
    kv_cache = KVCacheManager(num_running * blocks_each, BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, PROMPT_TOKENS * num_running),
        max_waiting_requests=num_running + num_waiting + 1,
        options={"chunk_size": PROMPT_TOKENS * num_running} if policy == "chunked_prefill" else {},
    )
    make_scheduler: Any = load_policy(policy)
    scheduler: SchedulerInterface = make_scheduler(
        config, kv_cache, max_model_len=max_model_len, clock=time.monotonic
    )
    for i in range(num_running + num_waiting):
        spec = RequestSpec(
            f"request-{i}",
            [i % 997] * (PROMPT_TOKENS - i % BLOCK_SIZE),  # block borders at different steps
            SamplingParams(),
            arrival_time=i * 1e-6,
            eos_token_ids=(1,),
            user=f"user-{i % 100}",
            encoder_inputs=[EncoderInput(8 * k, 4, f"image-{k}") for k in range(num_images)],
        )
        scheduler.add_request(Request(spec))
    return scheduler


def one_step(scheduler: SchedulerInterface) -> tuple[SchedulerOutput, float, float]:
    """Plan a step and take in a result; seconds of each."""
    began = time.perf_counter()
    output = scheduler.schedule()
    planned = time.perf_counter()
    req_ids = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(req_ids, [[7] for _ in req_ids])
    computed = time.perf_counter()
    scheduler.update_from_output(output, result)
    return output, planned - began, time.perf_counter() - computed


def measure(
    policy: str, num_running: int, num_waiting: int, num_steps: int, num_images: int = 0
) -> dict[str, Any]:
    scheduler = fill(policy, num_running, num_waiting, num_steps, num_images)
    for _ in range(100):  # prompts, then some decodes to warm up
        one_step(scheduler)
    times = []
    for _ in range(num_steps):
        output, planned, updated = one_step(scheduler)
        assert output.total_num_scheduled_tokens == num_running, "not in steady decode"
        times.append((planned, updated))
    planned, updated = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
    return {
        "policy": policy,
        "running": num_running,
        "waiting": num_waiting,
        "schedule_us": round(planned, 1),
        "update_us": round(updated, 1),
        "us_per_request": round((planned + updated) / num_running, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--policy", nargs="+", default=["fcfs", "priority", "chunked_prefill"])
    parser.add_argument("--running", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--images", type=int, default=0, help="in every prompt (at most 20)")
    args = parser.parse_args()
    print(
        f"{'policy':16}{'running':>8}{'waiting':>8}{'schedule':>10}{'update':>9}{'us/request':>12}"
    )
    rows = []
    for policy in args.policy:
        for num_running in args.running:
            for num_waiting in (0, 10_000):
                row = measure(policy, num_running, num_waiting, args.steps, args.images)
                rows.append(row)
                print(
                    f"{policy:16}{num_running:8}{num_waiting:8}{row['schedule_us']:10.1f}"
                    f"{row['update_us']:9.1f}{row['us_per_request']:12.3f}",
                    flush=True,
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
