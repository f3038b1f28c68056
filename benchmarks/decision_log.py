"""What a decision log costs: microseconds and bytes per step, beside the same steps without one.

    python benchmarks/decision_log.py [--running 64 256] [--steps 2000]

Steady decode, and a batch in which every step somebody leaves and somebody comes with a prompt of
200 tokens. No model, no event loop; the file is written by its thread meanwhile. Medians and 99th
percentiles of `schedule()` and `update_from_output()` together, with and without the log taking
turns. Token ids are random out of 150,000, which no compression can do anything about. The last
line is JSON.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from aioserve.config import SchedulerConfig
from aioserve.kv_cache import KVCacheManager
from aioserve.lab.decision_log.recorder import LogWriter, RecordingScheduler
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.scheduler import SchedulerInterface, load_policy

BLOCK_SIZE = 16
PROMPT_TOKENS = 200
VOCAB_SIZE = 150_000


class Load:
    """A scheduler that is kept at so many running requests."""

    def __init__(self, num_running: int, num_steps: int, path: Path | None) -> None:
        self.rng = random.Random(0)
        self.max_model_len = PROMPT_TOKENS + num_steps + 200
        blocks_each = -(-self.max_model_len // BLOCK_SIZE)
        config = SchedulerConfig(
            policy="fcfs",
            max_num_seqs=num_running,
            max_num_batched_tokens=self.max_model_len + PROMPT_TOKENS * num_running,
        )
        make: Any = load_policy("fcfs")
        if path is not None:
            make = partial(RecordingScheduler, make, sink=LogWriter(path))
        self.scheduler: SchedulerInterface = make(
            config,
            KVCacheManager(num_running * blocks_each, BLOCK_SIZE),
            max_model_len=self.max_model_len,
            clock=lambda: 0.0,
        )
        self.num_added = 0
        for _ in range(num_running):
            self.add()

    def add(self) -> None:
        spec = RequestSpec(
            f"req-{self.rng.getrandbits(128):032x}",
            [self.rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)],
            SamplingParams(),
            arrival_time=float(self.num_added),
        )
        self.scheduler.add_request(Request(spec))
        self.num_added += 1

    def step(self, has_churn: bool) -> float:
        """Plan a step and take in a result; seconds of both."""
        began = time.perf_counter()
        self.scheduler.expire_requests()
        output = self.scheduler.schedule()
        seconds = time.perf_counter() - began
        req_ids = list(output.num_scheduled_tokens)
        sampled = [[self.rng.randrange(VOCAB_SIZE)] for _ in req_ids]
        result = ModelRunnerOutput(req_ids, sampled)
        began = time.perf_counter()
        self.scheduler.update_from_output(output, result)
        seconds += time.perf_counter() - began
        if has_churn:
            self.scheduler.finish_requests(req_ids[0], RequestStatus.FINISHED_STOPPED)
            self.add()
        return seconds


def measure(num_running: int, num_steps: int, has_churn: bool, folder: Path) -> dict[str, Any]:
    path = folder / "log"
    plain, logged = Load(num_running, num_steps, None), Load(num_running, num_steps, path)
    for load in (plain, logged):
        for _ in range(50):
            load.step(has_churn)
    logged.scheduler._sink.flush()  # type: ignore[attr-defined]
    time.sleep(0.2)
    size = path.stat().st_size
    times = [(plain.step(has_churn), logged.step(has_churn)) for _ in range(num_steps)]
    logged.scheduler.shutdown()
    without, with_log = (sorted(1e6 * t for t in column) for column in zip(*times, strict=True))
    return {
        "running": num_running,
        "batch": "changing" if has_churn else "steady",
        "without_us": round(statistics.median(without), 1),
        "with_us": round(statistics.median(with_log), 1),
        "cost_us": round(statistics.median(with_log) - statistics.median(without), 1),
        "p99_cost_us": round(with_log[int(0.99 * num_steps)] - without[int(0.99 * num_steps)], 1),
        "bytes_per_step": round((path.stat().st_size - size) / num_steps, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--running", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for num_running in args.running:
            for has_churn in (False, True):
                row = measure(num_running, args.steps, has_churn, Path(folder))
                rows.append(row)
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
