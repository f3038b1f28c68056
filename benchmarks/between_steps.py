"""What of a decoding step is not the model: handover, packing, sampling, as shares of the step.

    python benchmarks/between_steps.py 135m              # or 0.6b, 2m, or a model directory
    python benchmarks/between_steps.py 135m --streams 64 --steps 400

As many streams as asked for decode through `AsyncEngine`, without HTTP. Counted are steps that hold
one token of each stream, from the beginning of one to that of the next: *model* is the forward
pass, *packing* the batch and the block tables, *sampling* the choice of tokens, *entering* the rest
of the runner's thread; *handover* is what passes from the end of a step on that thread to the
beginning of the next one: both changes of threads, the scheduler's update and its next plan. Values
are lower quartiles, as others may use the machine; the share is of all but the model. The last line
is JSON.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from make_model import SHAPES, model_path

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine.builder import make_runner
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.cpu.executor import StepExecutor
from aioserve.scheduler import SchedulerOutput

MODEL, PACKING, SAMPLING, ENTERING, HANDOVER = PARTS = (
    "model",
    "packing",
    "sampling",
    "entering",
    "handover",
)
INPUT_TOKENS = 64
GOAL = 0.03


class Clock:
    """Seconds of the parts of steady steps, on the thread of the runner."""

    def __init__(self, executor: StepExecutor, streams: int) -> None:
        self.steps: list[dict[str, float]] = []
        self._streams, self._ended = streams, 0.0
        self._spent: dict[str, float] = defaultdict(float)
        self._execute = executor.execute_model
        vars(executor)["execute_model"] = self._step
        vars(executor)["choose"] = self._timed(SAMPLING, executor.choose)
        for part, owner, name in (
            (MODEL, executor._model, "forward"),
            (PACKING, executor._batch, "apply"),
            (PACKING, executor._batch, "prepare"),
            (PACKING, executor._backend, "prepare"),
        ):
            vars(owner)[name] = self._timed(part, getattr(owner, name))

    def _step(self, output: SchedulerOutput) -> ModelRunnerOutput:
        began = time.perf_counter()
        self._spent.clear()
        result = self._execute(output)
        now = time.perf_counter()
        counts = output.num_scheduled_tokens
        is_steady = len(counts) == self._streams == output.total_num_scheduled_tokens
        if is_steady and self._ended:
            inside = now - began
            rest = inside - sum(self._spent.values())
            handover = {ENTERING: rest, HANDOVER: began - self._ended}
            self.steps.append({**self._spent, **handover})
        self._ended = now if is_steady else 0.0
        return result

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._spent[part] += time.perf_counter() - began

        return call


async def measure(
    path: Path, streams: int, steps: int, threads: int | None, depth: int | None
) -> dict[str, float]:
    """Milliseconds of each part, and the share of all but the model."""
    blocks = streams * -(-(INPUT_TOKENS + steps + 1) // 16)
    config = EngineConfig(
        model=ModelConfig(model=str(path)),
        cache=CacheConfig(num_kv_blocks=2 * blocks),
        runner=RunnerConfig(threads=threads),
        scheduler=SchedulerConfig(pipeline_depth=depth),
    )
    runner: Any = make_runner(config, ModelInfo(config.model))
    params = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)

    async def one(number: int) -> None:
        prompt = [16 + (number * 7919 + i) % 1900 for i in range(INPUT_TOKENS)]
        async for _ in engine.generate(prompt, params):
            pass

    async with AsyncEngine(config, runner=runner) as engine:
        clock = Clock(runner._executor, streams)
        await asyncio.gather(*(one(number) for number in range(streams)))
    found = {
        part: 1e3 * statistics.quantiles((step.get(part, 0.0) for step in clock.steps), n=4)[0]
        for part in PARTS
    }
    return {**found, "share": 1 - found[MODEL] / sum(found.values()), "steps": len(clock.steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help=f"a directory or file, or one of {', '.join(SHAPES)}")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=200, help="tokens of each stream")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument("--pipeline-depth", type=int, help="default: as of python -m aioserve")
    args = parser.parse_args()
    print(f"{'streams':>8}" + "".join(f"{part:>11}" for part in PARTS) + f"{'share':>9}  ms")
    rows = []
    for streams in args.streams:
        path, depth = model_path(args.model), args.pipeline_depth
        found = asyncio.run(measure(path, streams, args.steps, args.threads, depth))
        rows.append({"streams": streams, **found})
        values = "".join(f"{found[part]:11.3f}" for part in PARTS)
        print(f"{streams:8}{values}{found['share']:9.1%}", flush=True)
    print(json.dumps({"rows": rows, "goal": GOAL, "met": all(r["share"] < GOAL for r in rows)}))


if __name__ == "__main__":
    main()
