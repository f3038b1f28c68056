"""Steps of the real model runner, planned by hand: so many decodes at such a context, prompts.

A decode at a context starts as if all but its last token were in the prefix cache, so a case
costs its own steps only. The KV pool holds zeros then; no kernel is faster for that.
"""

import math
import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

from floors import Floors, Time, samples, summary

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.scheduler import CachedRequestData, NewRequestData, SchedulerOutput

BLOCK_SIZE = 16
MAX_STEPS = 100  # of one case: contexts grow by one with each
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class Case(NamedTuple):
    """One kind of step: `decodes` at `context` beside `prompt` tokens of a new request. The first
    `shared` tokens of the decodes, whole blocks, are in the same ones.
    """

    decodes: int
    context: int
    prompt: int = 0
    shared: int = 0

    @property
    def name(self) -> str:
        """For people."""
        parts = [f"decode {self.decodes} at {self.context}"] if self.decodes else []
        parts += [f"prefill {self.prompt}"] if self.prompt else []
        parts += [f"{self.shared} shared"] if self.shared else []
        return " + ".join(parts)

    @property
    def num_kv_tokens(self) -> int:
        """What it needs of the KV pool."""
        return self.decodes * (self.context + MAX_STEPS + BLOCK_SIZE) + self.prompt + BLOCK_SIZE


CASES = [
    *(Case(decodes, context) for context in (512, 2048) for decodes in (1, 4, 16, 64)),
    Case(16, 8192),
    *(Case(0, 0, prompt) for prompt in (512, 2048, 8192)),
    Case(16, 512, 256),
    Case(8, 1088),
    Case(8, 1088, shared=1024),
]


class StepBench:
    """A loaded runner and the steps of one case after the other."""

    def __init__(
        self,
        path: Path,
        *,
        threads: int | None,
        dtype: Any = "auto",
        fused: bool = True,
        quantization: Any = None,
        activations: Any = None,
        num_kv_tokens: int,
        kv_bytes_per_token: int,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(
                model=str(path),
                dtype=dtype,
                fused=fused,
                quantization=quantization,
                activations=activations,
            ),
            cache=CacheConfig(num_kv_blocks=-(-num_kv_tokens // BLOCK_SIZE), block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_seqs=128),
            runner=RunnerConfig(threads=threads),
        )
        self._info = ModelInfo(config.model)
        self.runner = load_on_cpu(config, self._info)
        self.runner._backend.memory.commit(self.runner.info.num_kv_blocks)
        if _resident_bytes() < self.runner.info.num_kv_blocks * BLOCK_SIZE * kv_bytes_per_token:
            # All its pages would be one page of zeros, which never leaves the cache.
            raise SystemExit("the KV pool is not in memory yet: reading it would look too fast")
        self._blocks = list(range(self.runner.info.num_kv_blocks))
        random.Random(0).shuffle(self._blocks)
        self._num_steps = 0

    def measure(self, case: Case, chunk: int, min_seconds: float) -> Time:
        """One step of the case; for a prompt alone, all the steps of `chunk` tokens it takes."""
        steps = self.begin(case, chunk)
        began = time.perf_counter()
        steps.step()
        repeats = 5 if time.perf_counter() - began < 1 else 2  # what is long is steady
        seconds = samples(steps.step, repeats, min_seconds, at_most=MAX_STEPS - 2)
        steps.end()
        return summary(seconds)

    def begin(self, case: Case, chunk: int) -> "CaseSteps":
        """Let the decodes of the case enter the batch."""
        return CaseSteps(self, case, chunk, self._blocks, self._info.vocab_size)

    def execute(
        self,
        new: list[NewRequestData],
        cached: dict[str, int],
        num_scheduled: dict[str, int],
        finished: list[str],
    ) -> None:
        """One step; `cached` says how many tokens of those in the batch are computed."""
        self._num_steps += 1
        self.runner.execute_model(
            SchedulerOutput(
                step_id=self._num_steps,
                scheduled_new_reqs=new,
                scheduled_cached_reqs=CachedRequestData(list(cached), list(cached.values()), {}),
                num_scheduled_tokens=num_scheduled,
                total_num_scheduled_tokens=sum(num_scheduled.values()),
                preempted_req_ids=[],
                finished_req_ids=finished,
            )
        )


class CaseSteps:
    """The steps of one case; every call of `step` computes the same amount."""

    def __init__(
        self, bench: StepBench, case: Case, chunk: int, blocks: list[int], vocab_size: int
    ) -> None:
        self._bench, self._case, self._chunk = bench, case, chunk
        rng = random.Random(1)
        self._prompt = [
            rng.randrange(16, vocab_size) for _ in range(max(case.prompt, case.context))
        ]
        blocks_each = -(-(case.context + MAX_STEPS) // BLOCK_SIZE)
        num_shared = case.shared // BLOCK_SIZE
        tables = [
            blocks[:num_shared] + blocks[i * blocks_each + num_shared : (i + 1) * blocks_each]
            for i in range(case.decodes)
        ]
        self._prompt_blocks = blocks[case.decodes * blocks_each :][: -(-case.prompt // BLOCK_SIZE)]
        self._num_computed = {f"decode-{i}": case.context for i in range(case.decodes)}
        self._num_steps = 0
        if case.decodes:
            # each ends with another token, as experts are chosen by tokens
            contexts = [self._prompt[i:] + self._prompt[:i] for i in range(case.decodes)]
            bench.execute(
                [
                    _new(f"decode-{i}", contexts[i][: case.context], case.context - 1, table)
                    for i, table in enumerate(tables)
                ],
                {},
                dict.fromkeys(self._num_computed, 1),
                [],
            )

    def step(self) -> None:
        """One more token for each decode, and a whole prompt."""
        self._num_steps += 1
        assert self._num_steps < MAX_STEPS or not self._case.decodes, "more steps than blocks"
        done = 0
        while done < self._case.prompt or not done:
            size = min(self._chunk, self._case.prompt - done)
            scheduled = dict.fromkeys(self._num_computed, 1)
            cached, new = dict(self._num_computed), []
            if size and not done:
                new = [_new("prompt", self._prompt[: self._case.prompt], 0, self._prompt_blocks)]
            elif size:
                cached["prompt"] = done
            if size:
                scheduled["prompt"] = size
            # A new request of the same name replaces the last step's.
            self._bench.execute(new, cached, scheduled, [])
            for name in self._num_computed:
                self._num_computed[name] += 1
            done += max(size, 1)

    def end(self) -> None:
        """Empty the batch."""
        self._bench.execute([], {}, {}, [*self._num_computed, "prompt"])


def _resident_bytes() -> float:
    statm = Path("/proc/self/statm")  # Linux; elsewhere nobody knows
    if not statm.exists():
        return math.inf
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _new(name: str, tokens: list[int], num_computed: int, block_ids: list[int]) -> NewRequestData:
    return NewRequestData(name, tokens, len(tokens), GREEDY, frozenset(), block_ids, num_computed)


def floor(case: Case, chunk: int, floors: Floors) -> tuple[float, float]:
    """Seconds of the case's products, and of its attention."""
    decodes = [(1, case.context - case.shared)] * case.decodes + [(1, case.shared)]
    if not case.prompt:
        return floors.linear(case.decodes, case.decodes).median, floors.attention(decodes)
    linear = attention = 0.0
    for done in range(0, case.prompt, chunk):
        size = min(chunk, case.prompt - done)
        sampled = case.decodes + (done + size == case.prompt)
        linear += floors.linear(case.decodes + size, sampled).median
        attention += floors.attention([*decodes, (size, done + size)])
    return linear, attention
