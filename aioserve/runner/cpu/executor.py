"""The model on this machine: weights, KV cache, persistent batch, one forward pass per step.

Built, used and closed on one thread. Knows nothing about requests that are not in its batch, nor
about text.
"""

import itertools
import logging

import torch

from aioserve.config import EngineConfig
from aioserve.kernels import compute_thread_ids
from aioserve.model_info import ModelInfo
from aioserve.outputs import EMPTY_RUNNER_OUTPUT, ModelRunnerOutput
from aioserve.runner.attention.backend import ModelInputs, StepInputs
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.compiled_attention import create_attention_backend
from aioserve.runner.cpu.compute_threads import ComputeThreads
from aioserve.runner.cpu.load import load_model_on_cpu, with_dtype
from aioserve.runner.cpu.memory import (
    MIB,
    check_memory,
    choose_num_kv_blocks,
    expected_bytes_per_token,
)
from aioserve.runner.cpu.sampler import SampledTokens, sample
from aioserve.runner.input_batch import InputBatch
from aioserve.runner.loader import named_dtype, num_weight_bytes
from aioserve.scheduler.output import SchedulerOutput

logger = logging.getLogger(__name__)


class ModelRunner:
    """Computes steps in the order of the calls."""

    def __init__(self, config: EngineConfig, model_info: ModelInfo) -> None:
        self._config = config
        self._model_info = model_info
        self.num_kv_blocks = 0  # known after `load`

    @torch.inference_mode()
    def load(self) -> None:
        """Load the weights and allocate the KV cache. Raises `ConfigError`."""
        config, cache = self._config, self._config.cache
        num_threads = config.runner.threads or machine.default_num_threads()
        is_fixed = config.runner.threads is not None or num_threads == 1
        self._threads = ComputeThreads(num_threads, _fix_threads if is_fixed else _start_threads)
        machine.keep_freed_memory()
        self._check_memory()
        loaded = load_model_on_cpu(config.model, self._model_info)
        machine.give_back_freed_memory()
        spec = loaded.kv_cache_spec
        self.num_kv_blocks = choose_num_kv_blocks(
            config, spec.bytes_per_token, self._model_info.max_model_len
        )
        self._backend = create_attention_backend(spec, self.num_kv_blocks, cache.block_size)
        self._backend.memory.commit(0)  # a first step finds its blocks in memory, too
        self._model = loaded
        self._batch = InputBatch(
            config.scheduler.max_num_seqs,
            self._model_info.max_model_len,
            cache.block_size,
            self._model_info.vocab_size,
        )
        num_tokens = self.num_kv_blocks * cache.block_size
        logger.info(
            "%s: %s, %.1fM parameters; attention: %s; KV pool: %d blocks, %d tokens, up to %.0f "
            "MiB as it fills; %d threads%s",
            loaded.name,
            str(spec.dtype).removeprefix("torch."),
            loaded.num_parameters / 1e6,
            self._backend.description,
            self.num_kv_blocks,
            num_tokens,
            num_tokens * spec.bytes_per_token / MIB,
            num_threads,
            "" if is_fixed else ", fewer while steps wait for a core",
        )

    @property
    def num_compute_threads(self) -> int:
        """For the next step; known after `load`."""
        return self._threads.count

    def _check_memory(self) -> None:
        config, info = self._config, self._model_info
        model = with_dtype(config.model)
        per_token = expected_bytes_per_token(info.hf_config, named_dtype(model.dtype).itemsize)
        weights = num_weight_bytes(model, info)
        check_memory(config, weights, per_token, info.max_model_len)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One forward pass, and a token for each row whose known tokens are then all computed.

        If it raises, the requests of this step are in an unknown state and must be dropped; all
        others can go on.
        """
        self._batch.apply(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_RUNNER_OUTPUT
        inputs = self._batch.prepare(scheduler_output)
        num_written = int(inputs.slot_mapping.max()) // self._config.cache.block_size + 1
        self._backend.memory.commit(num_written, soon=_highest_new_block(scheduler_output) + 1)
        self._threads.begin_step()
        self._backend.prepare(inputs)
        logits = self._model.forward(ModelInputs.of(inputs), self._backend)
        sampled = sample(logits, self._batch.sampling_inputs(inputs))
        self._threads.end_step()
        self._batch.append(inputs, sampled.token_ids)
        return _make_output(inputs, sampled)

    def close(self) -> None:
        """Give back weights and KV cache. Idempotent."""
        if hasattr(self, "_backend"):
            self._backend.memory.close()
        if hasattr(self, "_threads"):
            self._threads.close()
        for name in ("_model", "_backend", "_batch"):
            self.__dict__.pop(name, None)


def _start_threads(count: int) -> list[int]:
    torch.set_num_threads(count)
    return compute_thread_ids(count)


def _fix_threads(count: int) -> tuple[int, ...]:
    torch.set_num_threads(count)
    return ()


def _highest_new_block(step: SchedulerOutput) -> int:
    """Of those that somebody got for this step or a later one; -1 if nobody did."""
    given = [request.block_ids for request in step.scheduled_new_reqs]
    given += step.scheduled_cached_reqs.new_block_ids.values()
    return max(itertools.chain.from_iterable(given), default=-1)


def _make_output(inputs: StepInputs, sampled: SampledTokens) -> ModelRunnerOutput:
    token_ids: list[list[int]] = [[] for _ in inputs.req_ids]
    sampling = inputs.sampling.tolist()
    for index, token_id in zip(sampling, sampled.token_ids.tolist(), strict=True):
        token_ids[index] = [token_id]
    logprobs = {
        inputs.req_ids[sampling[index]]: [entry] for index, entry in sampled.logprobs.items()
    }
    return ModelRunnerOutput(inputs.req_ids, token_ids, logprobs)
