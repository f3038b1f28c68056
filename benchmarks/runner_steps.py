"""What a step of the CPU's runner costs in CPU time: decodes of one to many rows, on one thread.

    python benchmarks/runner_steps.py [--running 1 16 64] [--case model batch]
    python benchmarks/runner_steps.py --against HEAD~5    # or a directory: ratios, in turns

`model`: whole steps of the embedded model. `batch`: the same steps with logits that are ready, so
that the batch, its parts and the sampler are left. Of another revision the kernels are not there:
give a directory that has them built. With `--against` a case that is slower by more than
`--tolerance` makes the exit code 1. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import against

BLOCK_SIZE = 16
PROMPT_TOKENS = 32
LIFE = 64  # steps that a request stays


class Case(NamedTuple):
    """What is measured."""

    kind: str
    running: int

    @property
    def name(self) -> str:
        """The words that stand for it in the report."""
        return f"{self.kind} {self.running} run"


class RunnerWork:
    """An executor whose requests decode; each is replaced by the next one after `LIFE` steps."""

    def __init__(self, case: Case) -> None:
        import torch

        from aioserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
        from aioserve.model_source.info import ModelInfo
        from aioserve.runner.cpu.load import load_on_cpu

        blocks_each = -(-(PROMPT_TOKENS + LIFE + 1) // BLOCK_SIZE)
        config = EngineConfig(
            cache=CacheConfig(num_kv_blocks=case.running * blocks_each, block_size=BLOCK_SIZE),
            runner=RunnerConfig(threads=1),
            scheduler=SchedulerConfig(max_num_seqs=case.running),
        )
        info = ModelInfo(config.model)
        self._executor = load_on_cpu(config, info)
        self._blocks_each, self._running = blocks_each, case.running
        self._computed: dict[str, int] = {}  # by request, in the order of admission
        self._num_made = self._num_steps = self._sum = 0
        if case.kind == "batch":
            torch.manual_seed(0)
            logits = torch.rand(case.running, info.vocab_size)
            model: Any = self._executor._model
            model.forward = lambda inputs, attention: logits[: len(inputs.logits_rows)]
        self.round(LIFE)

    def round(self, num_units: int) -> tuple[float, float]:
        """Units are steps."""
        spent = 0.0
        for _ in range(num_units):
            step = self._plan()
            began = time.thread_time()
            output = self._executor.execute_model(step)
            spent += time.thread_time() - began
            self._sum += sum(map(sum, output.sampled_token_ids))
        return spent, self._sum

    def close(self) -> None:
        """Give back the model."""
        self._executor.close()

    def _plan(self) -> Any:
        """Each request one token; one joins in a step as long as rows are free."""
        from aioserve.params import SamplingParams
        from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

        ended = [name for name, count in self._computed.items() if count >= PROMPT_TOKENS + LIFE]
        for name in ended:
            del self._computed[name]
        known = dict(self._computed)
        scheduled = dict.fromkeys(known, 1)
        new_blocks = {
            name: [self._block(name, count // BLOCK_SIZE)]
            for name, count in known.items()
            if count % BLOCK_SIZE == 0
        }
        new = []
        if len(known) < self._running:
            name = str(self._num_made)
            self._num_made += 1
            tokens = [300 + (7 * self._num_made + place) % 1500 for place in range(PROMPT_TOKENS)]
            blocks = [self._block(name, place) for place in range(PROMPT_TOKENS // BLOCK_SIZE)]
            params = SamplingParams(temperature=0, ignore_eos=True)
            new = [NewRequestData(name, tokens, len(tokens), params, frozenset(), blocks, 0)]
            scheduled[name] = PROMPT_TOKENS
        for name, count in scheduled.items():
            self._computed[name] = known.get(name, 0) + count
        self._num_steps += 1
        cached = CachedRequestData(list(known), list(known.values()), new_blocks)
        total = sum(scheduled.values())
        return SchedulerOutput(self._num_steps, new, cached, scheduled, total, [], ended)

    def _block(self, name: str, place: int) -> int:
        return int(name) % self._running * self._blocks_each + place


def make_work(case: Any) -> RunnerWork:
    """From plain data."""
    return RunnerWork(Case(*case))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--case", nargs="+", default=["model", "batch"], choices=["model", "batch"])
    parser.add_argument("--running", nargs="+", type=int, default=[1, 16, 64], help="at once")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--against", metavar="REV_OR_DIR", help="compare with another checkout")
    parser.add_argument("--tolerance", type=float, default=0.03, help="by which one may be slower")
    parser.add_argument("--starts", type=int, default=5, help="of both sides, for each case")
    parser.add_argument("--rounds", type=int, default=40, help="of each start")
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)  # be one side
    args = parser.parse_args()
    if args.turns:
        against.take_turns(make_work)
        return 0
    cases = [Case(kind, running) for kind in args.case for running in args.running]
    if args.against is not None:
        named = [(case.name, list(case)) for case in cases]
        with against.checkout(args.against) as other:
            found = against.compare(
                Path(__file__).resolve(),
                named,
                other,
                num_starts=args.starts,
                num_rounds=args.rounds,
                tolerance=args.tolerance,
            )
            return against.report(found, args.tolerance)
    rows = []
    for case in cases:
        work = RunnerWork(case)
        times = [work.round(1)[0] for _ in range(args.steps)]
        work.close()
        us = round(1e6 * statistics.median(times), 1)
        rows.append({**case._asdict(), "us_per_step": us})
        print(f"{case.name:20}{us:10.1f} us a step{us / case.running:10.2f} us a row", flush=True)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
