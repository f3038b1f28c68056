"""One step after another on the CPU: batch, forward pass, sample.

Used on one thread. Knows nothing about requests that are not in its batch, about text, or about how
a model is loaded.
"""

import itertools

import torch

from aioserve.outputs import EMPTY_RUNNER_OUTPUT, ModelRunnerOutput
from aioserve.runner.attention.backend import ModelInputs, StepInputs
from aioserve.runner.cpu.attention import AttentionBackend
from aioserve.runner.cpu.compute_threads import ComputeThreads
from aioserve.runner.cpu.sampler import SampledTokens, sample
from aioserve.runner.input_batch import InputBatch
from aioserve.runner.served_model import ServedModel
from aioserve.scheduler.output import SchedulerOutput


class StepExecutor:
    """Owns weights, KV cache and batch; computes steps in the order of the calls."""

    def __init__(
        self,
        model: ServedModel,
        backend: AttentionBackend,
        threads: ComputeThreads,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._backend.memory.commit(0)  # a first step finds its blocks in memory, too
        self._threads = threads
        self._batch = InputBatch(max_num_seqs, max_model_len, block_size, vocab_size)
        self._block_size = block_size
        self.num_kv_blocks = backend.memory.num_blocks

    @property
    def num_compute_threads(self) -> int:
        """For the next step."""
        return self._threads.count

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
        num_written = int(inputs.slot_mapping.max()) // self._block_size + 1
        self._backend.memory.commit(num_written, soon=_highest_new_block(scheduler_output) + 1)
        self._threads.begin_step()
        self._backend.prepare(inputs)
        logits = self._model.forward(ModelInputs.of(inputs), self._backend)
        sampled = sample(logits, self._batch.sampling_inputs(inputs))
        self._threads.end_step()
        self._batch.append(inputs, sampled.token_ids)
        return _make_output(inputs, sampled)

    def close(self) -> None:
        """Give back weights, KV cache and threads. Idempotent."""
        if hasattr(self, "_backend"):
            self._backend.memory.close()
        self._threads.close()
        for name in ("_model", "_backend", "_batch"):
            self.__dict__.pop(name, None)


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
