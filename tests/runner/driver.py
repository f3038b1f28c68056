"""A scheduler for tests: says by hand what each step runs, and hands out shuffled block ids."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.kv_cache import WindowBlocks
from aioserve.outputs import ModelRunnerOutput, TokenLogprobs, Vector
from aioserve.params import PoolingParams, SamplingParams
from aioserve.runner.cpu.executor import StepExecutor
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.models import VOCAB_SIZE
from tests.variants import DTYPE

GREEDY = SamplingParams(temperature=0)
NUM_BLOCKS = 128
BLOCK_SIZE = 8


def make_config(path: Path, **model: Any) -> EngineConfig:
    kv_cache_dtype = model.pop("kv_cache_dtype", "auto")
    return EngineConfig(
        # Each load reads the model's own files, where a test does not ask for another's.
        model=ModelConfig(
            **{"model": str(path), "dtype": DTYPE, "keep_prepared": False, **model},
        ),
        cache=CacheConfig(
            num_kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype
        ),
        scheduler=SchedulerConfig(max_num_seqs=8),
        runner=RunnerConfig(threads=1),  # two would mostly wait for each other on tiny tensors
    )


@dataclass
class Sequence:
    """What a scheduler knows of one request."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_scheduled_ahead: int = 0  # sampled tokens that are not known yet
    is_known_to_runner: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooling: PoolingParams | None = None
    vector: Vector | None = None  # of its prompt, if it is pooled

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def lacking(self) -> int:
        return len(self.token_ids) + self.num_scheduled_ahead - self.num_computed


class Driver:
    """Drives a runner step by step: `schedule({"a": 3, "b": 1})`, then `execute` in order."""

    def __init__(self, runner: StepExecutor, num_blocks: int, block_size: int) -> None:
        self.runner = runner
        self.block_size, self.num_blocks = block_size, num_blocks
        self.free_blocks = list(range(num_blocks))
        random.Random(0).shuffle(self.free_blocks)
        self.sequences: dict[str, Sequence] = {}
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.last_decodes: tuple[list[str], dict[str, int]] = [], {}

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams = GREEDY,
        stop_token_ids: frozenset[int] = frozenset(),
        pooling: PoolingParams | None = None,
    ) -> None:
        self.sequences[request_id] = Sequence(
            list(prompt), len(prompt), params, stop_token_ids, pooling=pooling
        )

    def share_prefix(self, request_id: str, other: str, num_blocks: int) -> None:
        """Let a new request start with the blocks of `other`, as a prefix cache does."""
        sequence = self.sequences[request_id]
        sequence.block_ids = self.sequences[other].block_ids[:num_blocks]
        sequence.num_computed = num_blocks * self.block_size

    def finish(self, request_id: str) -> None:
        self.free_blocks.extend(self.sequences.pop(request_id).block_ids)
        self.finished.append(request_id)

    def preempt(self, request_id: str) -> None:
        sequence = self.sequences[request_id]
        self.free_blocks.extend(sequence.block_ids)
        sequence.block_ids, sequence.num_computed = [], 0
        sequence.is_known_to_runner = False
        self.preempted.append(request_id)

    def schedule(self, num_scheduled: dict[str, int]) -> SchedulerOutput:
        new: list[NewRequestData] = []
        req_ids: list[str] = []
        computed: list[int] = []
        new_blocks: dict[str, list[int]] = {}
        windows: dict[str, WindowBlocks] = {}
        for request_id, count in num_scheduled.items():
            sequence = self.sequences[request_id]
            assert 1 <= count <= sequence.lacking
            block_ids = self.allocate(sequence, count)
            if not sequence.is_known_to_runner:
                windows[request_id] = self.window_blocks(0, sequence.block_ids)
            elif block_ids:
                first = len(sequence.block_ids) - len(block_ids)
                windows[request_id] = self.window_blocks(first, block_ids)
            if sequence.is_known_to_runner:
                req_ids.append(request_id)
                computed.append(sequence.num_computed)
                if block_ids:
                    new_blocks[request_id] = block_ids
            else:
                new.append(self.new_request_data(request_id))
            if count == sequence.lacking and sequence.pooling is None:
                sequence.num_scheduled_ahead += 1
            sequence.num_computed += count
        counts = dict(num_scheduled)
        if not new and set(counts.values()) == {1}:  # as a scheduler: the same rows share these
            if req_ids == self.last_decodes[0]:
                req_ids, counts = self.last_decodes
            self.last_decodes = req_ids, counts
        output = SchedulerOutput(
            step_id=0,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(req_ids, computed, new_blocks),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(num_scheduled.values()),
            preempted_req_ids=self.preempted,
            finished_req_ids=self.finished,
            parts={"windows": windows},
        )
        self.preempted, self.finished = [], []
        return output

    def allocate(self, sequence: Sequence, count: int) -> list[int]:
        needed = -(-(sequence.num_computed + count) // self.block_size) - len(sequence.block_ids)
        block_ids = [self.free_blocks.pop() for _ in range(needed)]
        sequence.block_ids = sequence.block_ids + block_ids
        return block_ids

    def window_blocks(self, first: int, block_ids: list[int]) -> WindowBlocks:
        """For layers that have a pool of their own: all of them, and none twice."""
        return WindowBlocks(first, [self.num_blocks - 1 - block_id for block_id in block_ids])

    def new_request_data(self, request_id: str) -> NewRequestData:
        sequence = self.sequences[request_id]
        sequence.is_known_to_runner = True
        return NewRequestData(
            request_id=request_id,
            token_ids=list(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling_params=sequence.params,
            stop_token_ids=sequence.stop_token_ids,
            block_ids=list(sequence.block_ids),
            num_computed_tokens=sequence.num_computed,
            pooling_params=sequence.pooling,
        )

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = self.runner.execute_model(output)
        assert result.req_ids == list(output.num_scheduled_tokens)
        for request_id, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            sequence = self.sequences.get(request_id)
            if sequence is None:
                continue
            sequence.token_ids += tokens
            sequence.num_scheduled_ahead -= len(tokens)
            sequence.logprobs += result.logprobs.get(request_id, [])
            if request_id in result.pooled:
                assert sequence.vector is None
                sequence.vector = result.pooled[request_id]
        return result

    def step(self, num_scheduled: dict[str, int] | None = None) -> ModelRunnerOutput:
        """Schedule and execute; by default everything that all requests lack."""
        if num_scheduled is None:
            num_scheduled = {name: sequence.lacking for name, sequence in self.sequences.items()}
        return self.execute(self.schedule(num_scheduled))

    def generate(self, request_id: str, num_tokens: int) -> list[int]:
        """Run one request alone until it has a number of output tokens."""
        sequence = self.sequences[request_id]
        while len(sequence.output) < num_tokens:
            self.step({request_id: sequence.lacking})
        return sequence.output


MakeDriver = Callable[..., Driver]
Generate = Callable[..., list[int]]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed * 1000 + length)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]
