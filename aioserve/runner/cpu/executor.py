"""One step after another on the CPU: batch, forward pass, sample.

Used on one thread. Knows nothing about requests that are not in its batch, about text, or about how
a model is loaded.
"""

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from aioserve.config import CacheConfig, EngineConfig
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import EMPTY_RUNNER_OUTPUT, ModelRunnerOutput, TokenLogprobs
from aioserve.request import ROW_VALUES
from aioserve.runner.attention.backend import (
    ADAPTERS,
    POOLED,
    PROMPT_LOGPROBS,
    ModelInputs,
    StepInputs,
)
from aioserve.runner.batch.input_batch import InputBatch, kept_logprobs
from aioserve.runner.cpu.kv_memory import AttentionBackend, StepMemory
from aioserve.runner.cpu.machine import ComputeThreads, give_back_freed_memory
from aioserve.runner.cpu.sampler import SampledTokens, sample_each
from aioserve.runner.interface import (
    HostCopies,
    KVConnectorWorker,
    RunnerInfo,
    failed_requests,
    parameters_of,
)
from aioserve.runner.load_plan import BatchParts, LoadPlan
from aioserve.runner.served_model import collect_modules
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from aioserve.runner.adapters import AdapterOwners, LoadedAdapters
    from aioserve.runner.batch.rescue import StepRescue
    from aioserve.runner.cpu.asked_results import Looked, RowValueStep


class ComputedStep(NamedTuple):
    """The results of the forward pass and the sampler for the rows of a step, until the batch has
    the tokens: entering them is the part that is never done twice.
    """

    inputs: StepInputs
    sampled: SampledTokens
    looked: "Looked | None"  # if prompts are looked at
    is_masked: bool
    started: float
    values: "RowValueStep | None"  # if a policy wants some
    sat_out: list[str]  # requests that get no token, as their masks were not ready

    def keep(
        self, batch: InputBatch, parts: BatchParts, *, takes_guesses: bool
    ) -> ModelRunnerOutput:
        """Enter the tokens into the batch, and guess what comes next if it `takes_guesses`."""
        inputs, sampled, drafter = self.inputs, self.sampled, parts.drafter
        token_ids = batch.append(inputs, sampled.token_ids)
        guesses: dict[str, list[int]] = {}
        if drafter is not None:
            parts.drafts.learn(inputs, time.perf_counter() - self.started)
        if takes_guesses and (self.is_masked or drafter is not None):
            guesses = parts.drafts.guesses(inputs, batch)
        failed = batch.failures(inputs)
        if sampled.failed:
            rows = failed_requests(sampled.failed, inputs.sampling.tolist(), token_ids)
            failed |= {inputs.req_ids[row]: why for row, why in rows.items()}
        told, vectors = ({}, {}) if self.looked is None else self.looked.keep(failed)
        if failed:  # what was sampled for them means nothing
            token_ids = [
                [] if req_id in failed else own
                for req_id, own in zip(inputs.req_ids, token_ids, strict=True)
            ]
        logprobs: dict[str, list[TokenLogprobs]] = {}
        if sampled.logprobs:
            logprobs = kept_logprobs(inputs, sampled.logprobs, token_ids)
        values = {} if self.values is None else self.values.of_newest(inputs, token_ids)
        return ModelRunnerOutput(
            *(inputs.req_ids, token_ids, logprobs, guesses, failed, told, vectors, values),
            [i for i in self.sat_out if i not in failed] if failed else self.sat_out,
        )


class StepExecutor:
    """Owns weights, KV cache and batch; computes steps in the order of the calls."""

    choose: Callable[..., SampledTokens] = staticmethod(sample_each)  # unless another rank does
    #: Called when the arrays of a step are made: what follows leaves Python's lock to others.
    lets_go: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, plan: LoadPlan, backend: AttentionBackend, threads: ComputeThreads, parts: BatchParts
    ) -> None:
        """`backend` and `parts` are what `plan` asks for."""
        model = self._model = plan.model
        self._backend, self._threads = backend, threads
        self.memory = StepMemory(backend, parts.sizes[-1])
        self.parts, self._batch = parts, InputBatch(*parts.sizes, parts.all, overwrites=True)
        self._last: tuple[StepInputs, ModelInputs] | None = None  # without adapters
        # States cannot be taken back; ranks would have to run a step again together.
        self._batch.may_lose = plan.ranks is None and model.states is None
        # A token that is computed again reads what a window may have let go.
        self._may_sit_out = self._batch.may_lose and not plan.windows
        self._encoder = model.image_encoder
        self._takes_guesses = (  # of a grammar or a drafter
            model.states is None or plan.config.speculation.drafts_surely
        )
        self.info = RunnerInfo(
            num_kv_blocks=backend.memory.num_blocks,
            num_state_slots=None if model.states is None else model.states.num_slots,
            windows=plan.windows,
            parameters=parameters_of(model.halves),
            supports_pooling=model.halves is not None,
            supports_images=model.image_encoder is not None,
            gives_row_values=True,
            max_draft_tokens=parts.max_draft_tokens if self._takes_guesses else 0,
        )

    @cached_property
    def copies(self) -> HostCopies:
        """The tensors that a KV connector keeps of this model, and its copies in host memory."""
        from aioserve.support.parts import load

        parts = self.parts
        made: HostCopies = load("kv copies", "cpu")(
            self._backend, self._model, parts.drafter, parts.sizes[-1]
        )
        return made

    @cached_property
    def adapters(self) -> "LoadedAdapters":
        """Loads and drops LoRA adapters."""
        from aioserve.runner.adapters import make_loaded

        return make_loaded(self._model.adapter_sites, self.parts.adapters)

    @property
    def loaded_adapters(self) -> Mapping[str, object]:
        """The LoRA adapters of which requests may come, by id."""
        return self.adapters.loaded if "adapters" in self.__dict__ else {}

    @property
    def num_compute_threads(self) -> int:
        """The number of threads that will compute the next step."""
        return self._threads.count

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Return one forward pass, and a token for each row whose known tokens are then all
        computed.

        A request that makes it raise fails alone, if steps can be repeated. If this raises even so,
        its requests are in an unknown state and must be dropped; all others can go on.
        """
        with torch.inference_mode():
            return self.execute_in_mode(scheduler_output)

    def execute_in_mode(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Return what `execute_model` does; the calling thread is in torch's inference mode."""
        try:
            parts = scheduler_output.parts
            if parts and (transfers := scheduler_output.kv_connector_metadata) is not None:
                self.copies.transfer(transfers)
        finally:  # behind it: a drafter asks what loaded blocks hold
            self._batch.apply(scheduler_output)
        if self._encoder is not None:
            self._encoder.run(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_RUNNER_OUTPUT
        outputs = [
            done.keep(self._batch, self.parts, takes_guesses=self._takes_guesses)
            for done in self._run(scheduler_output)
        ]
        if len(outputs) == 1 and not self._batch.lost:
            return outputs[0]
        from aioserve.runner.batch.rescue import merge_outputs

        return merge_outputs(scheduler_output, outputs, self._batch.lost.why)

    @cached_property
    def _rescue(self) -> "StepRescue[ComputedStep]":
        """Runs steps again in parts; loaded when the first step raises, or loses a request."""
        from aioserve.runner.batch.rescue import StepRescue

        return StepRescue(self._batch, self._compute)

    def _run(self, step: SchedulerOutput) -> "list[ComputedStep]":
        """Compute a step that the batch was told of, in parts if it raises."""
        if self._batch.lost or "_rescue" in self.__dict__:
            return self._rescue.run(step)
        try:
            return [self._compute(step)]
        except Exception as error:
            self._rescue.note_raised(error, step)
        return self._rescue.run_again(step)

    def _compute(self, step: SchedulerOutput) -> ComputedStep:
        """Compute and sample a step that the batch was told of. It may be asked for again."""
        started = time.perf_counter()
        inputs = self._batch.prepare(step)
        wanted, pooled = inputs.parts.get(PROMPT_LOGPROBS), inputs.parts.get(POOLED)
        masks = None
        if self.parts.has_matchers:
            masks = self.parts.grammars.begin(inputs.rows[inputs.sampling], inputs.drafts)
        try:
            self.memory.commit(inputs, step)
            self._threads.begin_step()
            attention = self._backend
            attention.prepare(inputs)
            owners = inputs.parts.get(ADAPTERS)
            looked: Looked | None = None
            self.lets_go()
            if wanted is None and pooled is None:
                logits = self._model.forward(self._tensors(inputs, owners), attention)
            else:
                from aioserve.runner.cpu.asked_results import forward_and_look

                halves = self._model.halves
                assert halves is not None, "`RunnerInfo.parameters`"
                logits, looked = forward_and_look(halves, inputs, owners, attention, wanted, pooled)
        finally:  # also if that fails: rows may change only when no thread reads them
            made = None
            if masks is not None:
                may_sit_out = self._may_sit_out and wanted is None
                rows = inputs.rows[inputs.sampling]
                made = masks.take(rows, may_sit_out=may_sit_out)
        sat_out: list[str] = []
        if made is not None and len(made.late):
            from aioserve.runner.batch.masks import leave_out_late

            inputs, logits, made, sat_out = leave_out_late(inputs, logits, made)
        sampled = self.choose(logits, self.parts.sampling.of(inputs), made)
        wanted_values = step.parts.get(ROW_VALUES)
        values = None
        if wanted_values is not None and len(logits):
            from aioserve.runner.cpu.asked_results import RowValueStep

            values = RowValueStep(wanted_values, logits)
        self._threads.end_step()
        return ComputedStep(inputs, sampled, looked, made is not None, started, values, sat_out)

    def _tensors(self, inputs: StepInputs, owners: "AdapterOwners | None") -> ModelInputs:
        """Return the tensors of a step: the very same where its arrays are those of the last."""
        if owners is not None:
            return ModelInputs.of(inputs, owners)
        if self._last is None or self._last[0] is not inputs:
            self._last = inputs, ModelInputs.of(inputs)
        return self._last[1]

    def release_kv(self) -> None:
        """Give back the KV cache's memory; no request has blocks. It comes back as steps write."""
        self.memory.release()

    def close(self) -> None:
        """Give back weights, KV cache and threads. Idempotent."""
        if hasattr(self, "_backend"):
            self._backend.close()
        self._threads.close()
        if hasattr(self, "_batch"):
            self._batch.close()
            if "copies" in self.__dict__:
                self.copies.close()
            if self._model.states is not None:
                self._model.states.close()
        names = "_model", "_encoder", "_backend", "_batch", "parts", "memory", "copies", "adapters"
        self._last = None
        for name in (*names, "_rescue"):
            self.__dict__.pop(name, None)


# A model on the thread that computes, which gives back its memory for a while, or its weights. So
# does every rank of a model with its share. Knows that the scheduler counts on as many blocks and
# slots as there were.


#: Loads a model, or a rank's share of it.
Make = Callable[[EngineConfig, ModelInfo], StepExecutor]


class ResidentModel:
    """A model and its memory. Without weights it has no `executor`, and no step is handed over."""

    def __init__(self, config: EngineConfig, info: ModelInfo, make: Make) -> None:
        """Load the model by `make`, which raises `ConfigError`."""
        self._config, self.info, self._make = config, info, make
        self.executor: StepExecutor | None = make(config, info)
        self._made_cache = config.cache
        # What outlives an executor: it is of the model's sizes, and of none of its weights.
        self.adapters: dict[str, object] = {}
        self.host_blocks: KVConnectorWorker | None = None

    def make_host_blocks(self, num_bytes: int, shared: object = None) -> KVConnectorWorker:
        """Make room for KV blocks in host memory, of at most `num_bytes` of all ranks, which share
        it. Raises `ConfigError`.
        """
        assert self.executor is not None, "awake"
        self.host_blocks = blocks = self.executor.copies.make(num_bytes, shared)
        return blocks

    def load(self, info: ModelInfo, cache: CacheConfig) -> None:
        """Load the model of `info` with a KV cache of the sizes of `cache`, then free the one that
        is there. Raises `ConfigError`; nothing has changed then.
        """
        made = self._make(
            msgspec.structs.replace(self._config, model=info.config, cache=cache), info
        )
        self.free()
        for adapter_id, adapter in self.adapters.items():
            made.adapters.load(adapter_id, adapter)
        if self.host_blocks is not None:
            made.copies.take(self.host_blocks)
        self.executor, self.info = made, info
        give_back_freed_memory()

    @property
    def geometry(self) -> CacheConfig:
        """The settings of the cache with the sizes that they have come to."""
        if (executor := self.executor) is not None:
            info = executor.info
            self._made_cache = msgspec.structs.replace(
                self._config.cache,
                kv_cache_gib=None,
                num_kv_blocks=info.num_kv_blocks,
                num_state_slots=info.num_state_slots,
                num_window_blocks=0 if info.windows is None else info.windows.num_blocks,
            )
        return self._made_cache

    def free(self, *, weights: bool = True) -> None:
        """Give back the memory of the KV cache, and by default of the weights. Idempotent."""
        if self.executor is None:
            return
        if not weights:
            self.executor.release_kv()
            return
        self._made_cache = self.geometry
        self.adapters = dict(self.executor.loaded_adapters)
        self.executor.close()
        self.executor = None
        collect_modules()
        give_back_freed_memory()

    def drop_adapter(self, adapter_id: str) -> None:
        """Forget an adapter, also while the weights are gone."""
        self.adapters.pop(adapter_id, None)
        if self.executor is not None:
            self.executor.adapters.unload(adapter_id)
