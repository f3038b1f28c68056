"""One step after another on the CPU: batch, forward pass, sample.

Used on one thread. Knows nothing about requests that are not in its batch, about text, or about how
a model is loaded.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from aioserve.kv_cache import WindowSpec
from aioserve.outputs import EMPTY_RUNNER_OUTPUT, ModelRunnerOutput
from aioserve.runner.adapter_rows import LoadedAdapters
from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.cpu.attention import AttentionBackend
from aioserve.runner.cpu.compute_threads import ComputeThreads
from aioserve.runner.cpu.computed_step import ComputedStep
from aioserve.runner.cpu.each_row import sample_each
from aioserve.runner.cpu.image_attention import TogetherAttention
from aioserve.runner.cpu.prompts import Looked, forward_and_look
from aioserve.runner.cpu.sampler import SampledTokens
from aioserve.runner.cpu.step_memory import StepMemory
from aioserve.runner.drafter import Drafter
from aioserve.runner.host_blocks import HostBlocks
from aioserve.runner.info import RunnerInfo
from aioserve.runner.input_batch import InputBatch
from aioserve.runner.rescue import StepRescue, merge_outputs
from aioserve.runner.served_model import ServedModel
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from aioserve.grammars import GrammarCompiler


class StepExecutor:
    """Owns weights, KV cache and batch; computes steps in the order of the calls."""

    choose: Callable[..., SampledTokens] = staticmethod(sample_each)  # unless another rank does

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
        grammars: "GrammarCompiler | None" = None,
        eos_token_ids: Sequence[int] = (),
        takes_guesses: bool = True,
        drafter: Drafter | None = None,
        windows: WindowSpec | None = None,
        repeats_steps: bool = True,
    ) -> None:
        """`takes_guesses`: what a grammar leaves no choice in is sent along with the next step, and
        what the `drafter` guesses. `windows` are those of the `backend`. `repeats_steps`: whether
        a step that raised may be run again, so that it fails none but those that made it raise.
        """
        self._model, self._backend, self._threads = model, backend, threads
        self._memory = StepMemory(backend, block_size)
        self._batch = InputBatch(
            max_num_seqs,
            max_model_len,
            block_size,
            vocab_size,
            grammars=grammars,
            eos_token_ids=eos_token_ids,
            drafter=drafter,
            has_states=model.states is not None,
            has_windows=windows is not None,
            image_rows=None if model.image_encoder is None else model.image_encoder.batch_rows,
        )
        self._rescue = StepRescue(self._batch, self._compute, is_possible=repeats_steps)
        self._encoder = model.image_encoder
        self.adapters = LoadedAdapters(model.adapter_sites, self._batch.adapter_rows)
        self._drafter, self._takes_guesses = drafter, takes_guesses
        self._block_size = block_size
        self.info = RunnerInfo(
            num_kv_blocks=backend.memory.num_blocks,
            num_state_slots=None if model.states is None else model.states.num_slots,
            windows=windows,
            supports_prompt_logprobs=model.halves is not None,
            supports_pooling=model.halves is not None,
            supports_images=model.image_encoder is not None,
        )

    @property
    def num_compute_threads(self) -> int:
        """For the next step."""
        return self._threads.count

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One forward pass, and a token for each row whose known tokens are then all computed.

        A request that makes it raise fails alone, if steps can be repeated. If this raises even so,
        its requests are in an unknown state and must be dropped; all others can go on.
        """
        self._batch.apply(scheduler_output)
        if (transfers := scheduler_output.kv_connector_metadata) is not None:
            self._memory.transfer(transfers)
        if self._encoder is not None:
            self._encoder.run(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_RUNNER_OUTPUT
        outputs = [
            done.keep(self._batch, self._drafter, takes_guesses=self._takes_guesses)
            for done in self._rescue.run(scheduler_output)
        ]
        if len(outputs) == 1 and not self._batch.lost:
            return outputs[0]
        return merge_outputs(scheduler_output, outputs, self._batch.lost.why)

    def _compute(self, step: SchedulerOutput) -> ComputedStep:
        """What is sampled in a step that the batch was told of. It may be asked for again."""
        started = time.perf_counter()
        inputs = self._batch.prepare(step)
        wanted = self._batch.prompt_rows.begin(inputs)
        pooled = self._batch.pooled_rows.begin(inputs)
        masks = self._batch.begin_masks(inputs)
        try:
            self._memory.commit(inputs, step)
            self._threads.begin_step()
            self._backend.prepare(inputs)
            owners = self._batch.adapter_rows.of(inputs)
            unseen: dict[str, str] = {}
            if self._encoder is not None:
                inputs, unseen = self._encoder.see(inputs, step)
            attention: LayerAttention = self._backend
            if inputs.together:
                attention = TogetherAttention(self._backend, inputs, self._block_size)
            looked: Looked | None = None
            if wanted is None and pooled is None:
                logits = self._model.forward(ModelInputs.of(inputs, owners), attention)
            else:
                halves = self._model.halves
                assert halves is not None, "`supports_prompt_logprobs`"
                logits, looked = forward_and_look(halves, inputs, owners, attention, wanted, pooled)
        finally:  # also if that fails: rows may change only when nobody reads them
            made = None if masks is None else masks.result()
        sampled = self.choose(logits, self._batch.sampling_inputs(inputs), made)
        self._threads.end_step()
        return ComputedStep(inputs, sampled, unseen, looked, made is not None, started)

    def release_kv(self) -> None:
        """Give back the memory of the KV cache; nobody has blocks. It comes back as steps write."""
        self._memory.release()

    def make_host_blocks(self, num_bytes: int) -> HostBlocks:
        """Where blocks may be kept outside the KV cache. Raises `ConfigError`."""
        return self._memory.make_host_blocks(self._model, num_bytes)

    def close(self) -> None:
        """Give back weights, KV cache and threads. Idempotent."""
        if hasattr(self, "_backend"):
            self._backend.close()
        self._threads.close()
        if hasattr(self, "_batch"):
            self._batch.close()
            self._memory.close()
            if self._model.states is not None:
                self._model.states.close()
        for name in ("_model", "_encoder", "_backend", "_batch", "_memory", "adapters"):
            self.__dict__.pop(name, None)
