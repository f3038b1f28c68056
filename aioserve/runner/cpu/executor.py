"""One step after another on the CPU: batch, forward pass, sample.

Used on one thread. Knows nothing about requests that are not in its batch, about text, or about how
a model is loaded.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from aioserve.kv_cache import KVConnectorMetadata, WindowSpec
from aioserve.outputs import EMPTY_RUNNER_OUTPUT, ModelRunnerOutput, TokenLogprobs, Vector
from aioserve.runner.adapter_rows import LoadedAdapters
from aioserve.runner.attention.backend import LayerAttention, ModelInputs, StepInputs
from aioserve.runner.cpu.attention import AttentionBackend
from aioserve.runner.cpu.compute_threads import ComputeThreads
from aioserve.runner.cpu.image_attention import TogetherAttention
from aioserve.runner.cpu.prompts import forward_and_look
from aioserve.runner.cpu.sampler import SampledTokens, sample
from aioserve.runner.drafter import Drafter
from aioserve.runner.host_blocks import HostBlocks
from aioserve.runner.input_batch import InputBatch, kept_logprobs
from aioserve.runner.served_model import ServedModel
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from aioserve.grammars import GrammarCompiler


class StepExecutor:
    """Owns weights, KV cache and batch; computes steps in the order of the calls."""

    choose: Callable[..., SampledTokens] = staticmethod(sample)  # unless another rank does

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
    ) -> None:
        """`takes_guesses`: what a grammar leaves no choice in is sent along with the next step, and
        what the `drafter` guesses. `windows` are those of the `backend`.
        """
        self._model, self._backend, self._threads = model, backend, threads
        backend.memory.commit(0)  # a first step finds its blocks in memory, too
        if backend.window_memory is not None:
            backend.window_memory.commit(0)
        self.windows = windows
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
        self._encoder = model.image_encoder
        self.adapters = LoadedAdapters(model.adapter_sites, self._batch.adapter_rows)
        self._drafter, self._takes_guesses = drafter, takes_guesses
        self._host_blocks: HostBlocks | None = None
        self._block_size, self.num_kv_blocks = block_size, backend.memory.num_blocks
        self.num_state_slots = None if model.states is None else model.states.num_slots

    @property
    def tells_prompts(self) -> bool:
        """Whether it has log probabilities and vectors of prompts."""
        return self._model.halves is not None

    @property
    def reads_images(self) -> bool:
        """Whether it runs encoder inputs."""
        return self._encoder is not None

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
        if (transfers := scheduler_output.kv_connector_metadata) is not None:
            self._transfer(transfers)
        if self._encoder is not None:
            self._encoder.drop(scheduler_output.free_encoder_hashes)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_RUNNER_OUTPUT
        started = time.perf_counter()
        inputs = self._batch.prepare(scheduler_output)
        wanted = self._batch.prompt_rows.begin(inputs)
        pooled = self._batch.pooled_rows.begin(inputs)
        masks = self._batch.begin_masks(inputs)
        prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        vectors: dict[str, Vector] = {}
        self._commit(inputs, scheduler_output)
        self._threads.begin_step()
        self._backend.prepare(inputs)
        try:
            owners = self._batch.adapter_rows.of(inputs)
            unseen: dict[str, str] = {}
            if self._encoder is not None:
                inputs, unseen = self._encoder.see(inputs, scheduler_output)
            attention: LayerAttention = self._backend
            if inputs.together:
                attention = TogetherAttention(self._backend, inputs, self._block_size)
            if wanted is None and pooled is None:
                logits = self._model.forward(ModelInputs.of(inputs, owners), attention)
            else:
                halves = self._model.halves
                assert halves is not None, "`tells_prompts`"
                logits, prompt_logprobs, vectors = forward_and_look(
                    halves, inputs, owners, attention, wanted, pooled
                )
        finally:  # also if that fails: rows may change only when nobody reads them
            made = None if masks is None else masks.result()
        sampled = self.choose(logits, self._batch.sampling_inputs(inputs), made)
        self._threads.end_step()
        token_ids = self._batch.append(inputs, sampled.token_ids)
        guesses: dict[str, list[int]] = {}
        if self._drafter is not None:
            self._drafter.length.stepped(
                len(inputs.req_ids), len(inputs.positions), time.perf_counter() - started
            )
        if self._takes_guesses and (masks is not None or self._drafter is not None):
            guesses = self._batch.guesses(inputs)
        failed = unseen | self._batch.failures(inputs)
        if failed:  # what was sampled for them means nothing
            token_ids = [
                [] if req_id in failed else own
                for req_id, own in zip(inputs.req_ids, token_ids, strict=True)
            ]
        logprobs = kept_logprobs(inputs, sampled.logprobs, token_ids)
        return ModelRunnerOutput(
            inputs.req_ids, token_ids, logprobs, guesses, failed, prompt_logprobs, vectors
        )

    def release_kv(self) -> None:
        """Give back the memory of the KV cache; nobody has blocks. It comes back as steps write."""
        self._backend.memory.release()
        if self._backend.window_memory is not None:
            self._backend.window_memory.release()

    def make_host_blocks(self, num_bytes: int) -> HostBlocks:
        """Where blocks may be kept outside the KV cache. Raises `ConfigError`."""
        memory, model = self._backend.memory, self._model
        computed = f"{model.name}, {model.kv_cache_spec.dtype}, {self._backend.description}"
        caches = [*memory.key_caches, *memory.value_caches]
        self._host_blocks = HostBlocks(caches, num_bytes, computed)
        return self._host_blocks

    def _commit(self, inputs: StepInputs, step: SchedulerOutput) -> None:
        """Have in memory what the step writes, and soon what was given with it."""
        num_written = int(inputs.slot_mapping.max()) // self._block_size + 1
        self._backend.memory.commit(num_written, soon=step.highest_new_block + 1)
        if inputs.windows is not None and self._backend.window_memory is not None:
            num_written = int(inputs.windows.slot_mapping.max()) // self._block_size + 1
            self._backend.window_memory.commit(num_written)

    def _transfer(self, transfers: KVConnectorMetadata) -> None:
        assert self._host_blocks is not None, "there is a connector"
        self._backend.memory.commit(1 + max((block for _, block in transfers.loads), default=-1))
        self._host_blocks.transfer(transfers)

    def close(self) -> None:
        """Give back weights, KV cache and threads. Idempotent."""
        if hasattr(self, "_backend"):
            self._backend.close()
        self._threads.close()
        if hasattr(self, "_batch"):
            self._batch.close()
            if self._host_blocks is not None:
                self._host_blocks.close()
            if self._model.states is not None:
                self._model.states.close()
        for name in ("_model", "_encoder", "_backend", "_batch", "_host_blocks", "adapters"):
            self.__dict__.pop(name, None)
