"""One step after another on a device: plan, stage, launch; and, later, read.

Before the executor, in the order of a step: the batch, in which a token that was sampled and not
read is a marker; graphs of decode steps; steps on their way. Knows nothing about threads or event
loops. Last, adapters on a device: they are brought there beside the steps, as far as there is room.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from aioserve.errors import AioserveError, ConfigError, RunnerDeadError
from aioserve.features.kv_connector.host_blocks import KeptTensors
from aioserve.features.lora.peft_directory import AdapterFiles
from aioserve.features.lora.products import Adapter, LowRankOwners, LowRankTokens
from aioserve.features.lora.rows import AdapterRows, LoadedLowRank, put_on
from aioserve.gpu.cuda.attention import DeviceAttention, SeenAhead
from aioserve.gpu.cuda.device import Device, Event, HostBuffer, StagingRing
from aioserve.gpu.cuda.host_blocks import Copied, DeviceBlocks
from aioserve.gpu.cuda.plan import Layout, StepPlan, plan_padding, plan_step
from aioserve.gpu.cuda.sampler import (
    DeviceMasks,
    DeviceSampler,
    PooledPlan,
    PromptPlan,
    SamplePlan,
    plan_pooled,
    plan_prompts,
    read_result,
)
from aioserve.kv_cache import BLOCKS, Ahead, WindowPool
from aioserve.outputs import ModelRunnerOutput, TokenLogprobs, Vector
from aioserve.params import SamplingParams
from aioserve.runner import interface
from aioserve.runner.adapters import AdapterSites, TokenAdapters
from aioserve.runner.attention.backend import (
    GivenRows,
    IntArray,
    LayerAttention,
    ModelInputs,
    StepInputs,
)
from aioserve.runner.batch.drafter import Drafter
from aioserve.runner.batch.input_batch import BatchPart, InputBatch
from aioserve.runner.batch.masks import Standing
from aioserve.runner.batch.prompt_rows import PooledRows, PromptRows, WantedLogprobs, WantedStates
from aioserve.runner.batch.rescue import StepRescue, merge_outputs
from aioserve.runner.interface import RunnerInfo, failed_requests
from aioserve.runner.load_plan import BatchParts
from aioserve.runner.served_model import ServedModel
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from aioserve.support.progress import stage

if TYPE_CHECKING:
    from aioserve.kv_cache import WindowSpec
    from aioserve.runner.ranks import Ranks


class OverlappedBatch(InputBatch):
    """An `InputBatch` whose sampled tokens stay on the device."""

    def append_unknown(self, inputs: StepInputs) -> None:
        """Count the tokens that the step of `inputs` samples; each is the marker -1 - row.

        A row samples nothing more until its marker was computed, so the marker always means the
        last token of its row. It is never replaced: a request that comes back after a preemption
        brings all its tokens.
        """
        rows, position = inputs.rows[inputs.sampling], inputs.seq_lens[inputs.sampling]
        self._token_ids[rows, position] = (-1 - rows).astype(np.int32)
        self._num_tokens[rows] = position + 1


# Forward passes of decode steps, captured once per padded size and replayed. At small batches a
# step is bound by the launches of its hundreds of kernels; a replay is one launch. Knows sizes and
# arrays; what a capture is, the device says.


logger = logging.getLogger(__name__)

Prepare = Callable[[int], LayerAttention]  # fills the arena with that number of rows
Forward = Callable[[int, LayerAttention], Tensor]  # logits [B, V] of the first B tokens of it
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def capture_sizes(max_num_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then by 8 to 64, then by 16 to 256, as far as a step may have rows; ascending."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16)]
    fitting = [size for size in sizes if size < max_num_rows]
    return (*fitting, min(max_num_rows, 256))


class DecodeGraphs:
    """Decode steps as CUDA graphs: one capture per padded number of rows, replayed in steps."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()  # ascending; none if nothing is captured
        self._replays: dict[int, Callable[[], None]] = {}
        self._logits: Tensor | None = None  # one for all sizes: only one is replayed at a time

    def capture(
        self,
        sizes: Iterable[int],
        prepare: Prepare,
        forward: Forward,
        capture: Capture,
    ) -> None:
        """Capture `forward` for each size, on what `prepare` has filled the arena with.

        Largest first: smaller ones then live in the memory of larger ones. What cannot be
        captured runs without graphs, and a log line says why.
        """

        def work(size: int, attention: LayerAttention) -> None:
            logits = forward(size, attention)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            self._logits[:size] = logits

        for size in stage(sorted(sizes, reverse=True), "Capturing CUDA graphs", "size"):
            try:
                self._replays[size] = capture(partial(work, size, prepare(size)))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model does that cannot be recorded
                logger.warning("decode steps run without CUDA graphs: %s", error)
                self._replays.clear()
                return
        self.sizes = tuple(sorted(self._replays))

    def replay(self, size: int) -> Tensor:
        """Logits [size, V]; valid until the next replay."""
        self._replays[size]()
        assert self._logits is not None
        return self._logits[:size]


# Steps on their way to and from a device, and what comes of them when their results are read. Knows
# plans and host memory; launches nothing.


@dataclass(frozen=True, slots=True)
class Asked:
    """Parts of the inputs of a step that most steps do not have."""

    prompts: PromptPlan | None
    pooled: PooledPlan | None
    adapters: Sequence[TokenAdapters]  # of the T, of the S, of the pieces of `prompts`; or none
    given: GivenRows | None  # of images, at places among the T


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way; `result` may be read after `event`."""

    plan: StepPlan
    sampling: SamplePlan
    event: Event
    result: HostBuffer
    began: float
    standing: list[Standing]  # of its sampled rows that have a grammar
    failed: dict[str, str]
    prompts: PromptPlan | None
    prompt_words: HostBuffer | None  # of `prompts`
    pooled: PooledPlan | None
    pooled_words: HostBuffer | None  # of `pooled`


@dataclass(frozen=True, slots=True)
class LaunchedParts:
    """The launched parts of a step: all of it, or parts of it one after another."""

    step: SchedulerOutput
    parts: list[LaunchedStep]
    lost: dict[str, str]  # requests that are in none of the parts, and why
    copied: Copied | None  # what a KV connector has it copy


def one_token_each(plan: StepPlan, token_ids: list[int]) -> list[list[int]]:
    """Return the tokens by row, of a step in which no row samples more than one."""
    kept = [[token_id] for token_id in token_ids]
    rows, num_rows = plan.sampled.tolist(), len(plan.inputs.req_ids)
    if rows == list(range(num_rows)):  # each, and as scheduled: most steps
        return kept
    by_row = dict(zip(rows, kept, strict=True))
    return [by_row.get(row, []) for row in range(num_rows)]


def make_output(
    step: LaunchedStep,
    kept: list[list[int]],
    failed: dict[int, str],
    logprobs: dict[int, TokenLogprobs],
    of_prompts: dict[str, list[TokenLogprobs]],
    pooled: dict[str, Vector],
    guesses: dict[str, list[int]],
) -> ModelRunnerOutput:
    """Return the output of a step that was read. `kept`: by row. `failed` and `logprobs`: by place
    among the S, of which a row's first were kept.
    """
    req_ids = step.plan.inputs.req_ids
    rows = step.plan.sampled.tolist() if failed or logprobs else []
    if failed:
        for row, why in failed_requests(failed, rows, kept).items():
            step.failed.setdefault(req_ids[row], why)
    if step.failed:
        pairs = zip(req_ids, kept, strict=True)
        kept = [[] if req_id in step.failed else own for req_id, own in pairs]
    by_request: dict[str, list[TokenLogprobs]] = {}
    for place, entry in logprobs.items():
        entries = by_request.setdefault(req_ids[rows[place]], [])
        if len(entries) < len(kept[rows[place]]):
            entries.append(entry)
    return ModelRunnerOutput(req_ids, kept, by_request, guesses, step.failed, of_prompts, pooled)


# One step after another on a device: plan, stage, launch; and, later, read. `launch` needs no
# result of an earlier step: the tokens that it lacks are on the device. Only where a drafter
# guesses tokens, each step is read before the next is launched. Knows nothing about threads or
# event loops.


MAX_IN_FLIGHT = 2  # results that may be on their way; the engine hands over no more steps


class StepExecutor:
    """The owner of the batch and of everything on the device but the weights."""

    def __init__(
        self,
        device: Device,
        model: ServedModel,
        attention: DeviceAttention,
        sampler: DeviceSampler,
        layout: Layout,
        arena: Tensor,
        parts: BatchParts,
        *,
        hidden_size: int = 0,
        adapter_room: int = 0,
        windows: "WindowSpec | None" = None,
        ranks: "Ranks | None" = None,
    ) -> None:
        """`sampler`: for the limits of `layout`, whose `arena` [layout.size], int32 on the device,
        is where steps are staged. `hidden_size`: of the model's hidden states, where prompts are to
        become vectors of them. `adapter_room`: bytes on the device that adapters may take.
        `windows`: of the layers that have pages of their own. `ranks`: of which this is one; all
        get the tokens that the first one samples.
        """
        limits = layout.limits
        self._device = device
        self._model = model
        self._attention = attention
        self.parts, self._batch = parts, OverlappedBatch(*parts.sizes, parts.all)
        self.adapters = DeviceAdapters(model.adapter_sites, parts.adapters, device, adapter_room)
        self._host_blocks: DeviceBlocks | None = None
        self._drafter, self._ranks = parts.drafter, ranks
        self._encoder = model.image_encoder
        if self._encoder is not None:
            self._encoder.use_thread(device.lend)
        self._hidden_size = hidden_size
        self._unread: list[LaunchedStep] = []  # whose tokens grammars wait for
        self._batch.may_lose = ranks is None
        self._rescue = StepRescue(self._batch, self._launch, is_end=self._is_end)
        self._layout = layout
        self._ring = StagingRing(device, self._layout.size)
        self._sampler = sampler
        self._arena = arena
        self._arrays = layout.split(arena)
        self._graphs = DecodeGraphs()
        results = (device.host_buffer(len(self._sampler.out)) for _ in range(MAX_IN_FLIGHT))
        self._free_results = deque(results)
        self.info = RunnerInfo(
            num_kv_blocks=limits.num_pages,
            pipeline_depth=2,
            parameters=frozenset(() if model.halves is None else ("prompt_logprobs",)),
            supports_pooling=model.halves is not None and hidden_size > 0,
            supports_images=model.image_encoder is not None,
            max_draft_tokens=parts.max_draft_tokens,
            windows=windows,
        )

    @property
    def is_one_by_one(self) -> bool:
        """Whether each step must be finished, by the thread that launches, before the next one:
        what is guessed from it is made on the device as well.
        """
        return self._drafter is not None

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture decode steps of up to each of these numbers of rows, if the model allows it."""

        def prepare(size: int) -> LayerAttention:
            buffer = self._ring.take()
            plan = plan_padding(self._layout, buffer.array, size)
            self._device.stage(self._arena[: plan.num_words], buffer)
            attention = self._attention.begin(plan, self._arrays)
            self._ring.guard()
            return attention

        def forward(size: int, attention: LayerAttention) -> Tensor:
            rows = torch.arange(size, device=self._arena.device)
            return self._model.forward(self._inputs(size, rows), attention)

        self._graphs.capture(sizes, prepare, forward, self._device.capture)

    def forget_graphs(self) -> None:
        """Run every step eagerly from now on: for comparing."""
        self._graphs = DecodeGraphs()

    def attach(self) -> None:
        """Let this thread be the one that launches."""
        self._device.attach()

    def warm_up(self) -> None:
        """A prompt, a decode and a farewell: what is compiled or loaded on first use is, then."""
        params = SamplingParams(top_p=0.9, temperature=0.5, logprobs=1, presence_penalty=0.1)
        tokens = [0] * min(32, self._layout.limits.num_tokens)
        blocks = list(range(-(-(len(tokens) + 1) // self._layout.limits.page_size)))
        new = NewRequestData(
            "warm-up", tokens, len(tokens), params, frozenset(), blocks, 0, cache_salt="warm-up"
        )
        none = CachedRequestData([], [], {})
        known = CachedRequestData(["warm-up"], [len(tokens)], {})
        steps = (
            SchedulerOutput(0, [new], none, {"warm-up": len(tokens)}, len(tokens), [], []),
            SchedulerOutput(0, [], known, {"warm-up": 1}, 1, [], []),
            SchedulerOutput(0, [], none, {}, 0, [], ["warm-up"]),
        )
        for step in stage(steps, "Warming up", "step"):
            if (launched := self.launch(step)) is not None:
                self.finish(launched)
        if self._drafter is not None:
            self._drafter.length.forget_times()

    def launch(self, step: SchedulerOutput) -> LaunchedParts | None:
        """Start a step; None if it has no tokens. A request for which this raises fails alone,
        unless there are ranks. What raises even so leaves the requests of the step in an unknown
        state, and all others as they were.
        """
        copied = None
        try:
            try:
                if (transfers := step.kv_connector_metadata) is not None:
                    assert self._host_blocks is not None, "there is a connector"
                    copied = self._host_blocks.transfer(transfers)
            finally:  # behind it: a drafter asks what loaded blocks hold
                self._batch.apply(step)
            self._encode(step)
            if step.total_num_scheduled_tokens:
                parts = self._rescue.run(step)
                return LaunchedParts(step, parts, dict(self._batch.lost.why), copied)
        except BaseException:
            self._finish_copies(copied)
            raise
        self._finish_copies(copied)
        return None

    def _encode(self, step: SchedulerOutput) -> None:
        """Have images encoded behind the steps that are queued; this thread waits for those where
        the encoder's code asks for numbers.
        """
        if (encoder := self._encoder) is None:
            return
        if self._ranks is not None:
            if step.scheduled_encoder_inputs or Ahead.of(step.parts) is not None:
                # The ranks talk, and do so in the order in which their devices compute.
                self._device.record().wait()
        encoder.run(step)

    def make_host_blocks(self, num_bytes: int) -> DeviceBlocks:
        """Return where blocks may be kept outside the KV cache. Before the first step. Raises
        `ConfigError`.
        """
        model = self._model
        computed = f"{model.name}, {model.kv_cache_spec.dtype}, {type(self._attention).__name__}"
        computed += f" on {self._device.card().name}"
        noted = None if self._drafter is None else self._drafter.noted
        self._host_blocks = DeviceBlocks(self._device, self._kept, num_bytes, computed, noted)
        return self._host_blocks

    def take_host_blocks(self, blocks: DeviceBlocks) -> None:
        """Keep blocks outside the KV cache there, where an executor of the same model had them."""
        blocks.attach(self._kept, None if self._drafter is None else self._drafter.noted)
        self._host_blocks = blocks

    @property
    def _kept(self) -> list[KeptTensors]:
        """What lies on the device of each block, by pool."""
        cache = self._attention.cache
        of_drafter = () if self._drafter is None else self._drafter.kept
        pools = [KeptTensors(BLOCKS, [*cache.tensors, *of_drafter], 1)]
        if cache.window_layers:
            pools.append(KeptTensors(WindowPool.name, cache.window_tensors, 1))
        return pools

    def _finish_copies(self, copied: Copied | None) -> None:
        if copied is not None and self._host_blocks is not None:
            self._host_blocks.finish(copied)

    def _launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Return a step whose copies are queued. If this raises, it may be done again."""
        began = time.perf_counter()
        inputs = self._batch.prepare(step)
        columns = self.parts.sampling.of(inputs)
        buffer = self._ring.take()
        wanted: WantedLogprobs | None = inputs.parts.get(PromptRows.name)
        states: WantedStates | None = inputs.parts.get(PooledRows.name)
        owners: LowRankOwners | None = inputs.parts.get(AdapterRows.name)
        # graphs give no hidden states, and have no adapters and no rows of images
        is_plain = wanted is None and states is None and owners is None and inputs.given is None
        sizes = self._graphs.sizes if is_plain else ()
        plan = plan_step(inputs, columns, self._layout, buffer.array, sizes)
        new, slots = step.scheduled_new_reqs, dict[str, int]()
        if new:
            slots = dict(zip(inputs.req_ids, inputs.rows.tolist(), strict=True))
        sampling = self._sampler.prepare(plan, new, slots)
        pooled = plan_pooled(states, plan, self._sampler, self._hidden_size)
        given, ahead = stage_images(plan, self._sampler)
        asked = Asked(plan_prompts(wanted, plan, self._sampler), pooled, (), given)
        if owners is not None:
            asked = replace(asked, adapters=self._stage_adapters(owners, plan, asked.prompts))
        try:
            self._device.stage(self._arena[: plan.num_words], buffer)
            attention = self._attention.begin(plan, self._arrays, ahead)
        finally:  # also if that fails: it may be queued by then
            self._ring.guard()
        rows = inputs.rows[plan.sampled]
        standing = self.parts.grammars.standing(rows, plan.inputs.drafts)
        if any(each.is_bound for each in standing):
            self._launch_masked(plan, sampling, attention, rows, asked)
        else:
            self._device.launch(
                lambda: self._sample(self._compute(plan, attention, asked), sampling)
            )
        self._read_last()
        result = self._take_result()
        self._device.fetch(result, self._sampler.out[: sampling.num_words])
        prompt_words, pooled_words = (
            None if each is None else self._fetch(each.found)
            for each in (asked.prompts, asked.pooled)
        )
        failed = self._batch.failures(inputs)
        event = self._device.record()
        step_away = LaunchedStep(
            *(plan, sampling, event, result, began, standing, failed),
            *(asked.prompts, prompt_words, asked.pooled, pooled_words),
        )
        if self._drafter is None:
            self._batch.append_unknown(inputs)
            if standing:
                self._unread.append(step_away)
        return step_away

    def _fetch(self, found: Tensor) -> HostBuffer:
        """Return where `found` may be read once the step is over."""
        words = self._device.host_buffer(len(found))
        self._device.fetch(words, found)
        return words

    def _take_result(self) -> HostBuffer:
        """Return where a result may be read; a step in parts has several."""
        try:
            return self._free_results.popleft()
        except IndexError:
            return self._device.host_buffer(len(self._sampler.out))

    def _is_end(self, error: Exception) -> bool:
        return not isinstance(error, torch.OutOfMemoryError) and self._device.is_lost()

    def _launch_masked(
        self,
        plan: StepPlan,
        sampling: SamplePlan,
        attention: LayerAttention,
        rows: IntArray,
        asked: Asked,
    ) -> None:
        """Masks need the last step's tokens: they are waited for while this one computes."""
        logits: list[Tensor] = []
        self._device.launch(lambda: logits.append(self._compute(plan, attention, asked)))
        self._read_last()
        made = self.parts.grammars.begin(rows, plan.inputs.drafts)
        masks = None
        if made is not None:
            masks = self._sampler.stage_masks(made.take(rows, may_sit_out=False))
        self._device.launch(lambda: self._sample(logits.pop(), sampling, masks))

    def _stage_adapters(
        self, owners: LowRankOwners, plan: StepPlan, prompts: PromptPlan | None
    ) -> Sequence[TokenAdapters]:
        """Stage the adapters for T tokens, S sampled rows and the prompt pieces, in this order."""
        owners = owners.take(plan.tokens)
        parts = [owners, owners.take(plan.host.logits_rows[: plan.num_sampling])]
        if prompts is not None:
            parts += [owners.take(prompts.places[piece]) for piece in prompts.pieces]
        return stage_adapters(parts, self._sampler)

    def _read_last(self) -> None:
        """Tell the grammars what the last step sampled. Its buffer is not used again before the
        step after this one is launched.
        """
        while self._unread:
            last = self._unread.pop(0)
            last.event.wait()
            self.parts.grammars.catch_up(last.standing, last.result.array)

    def close(self) -> None:
        """End the thread of the batch, and let go of all that lies on the device. Idempotent."""
        if hasattr(self, "_batch"):
            self._batch.close()
            if self._host_blocks is not None:
                self._host_blocks.detach()
            if self._drafter is not None:
                self._drafter.close()
        names = "_model", "_attention", "_sampler", "_graphs", "_arena", "_arrays", "_ring"
        more = "_batch", "_rescue", "_drafter", "_encoder", "_free_results", "parts", "adapters"
        for name in (*names, *more):
            self.__dict__.pop(name, None)

    def finish(self, launched: LaunchedParts) -> ModelRunnerOutput:
        """Wait for a step and read its tokens; may be called from another thread, in order, unless
        `is_one_by_one`.
        """
        try:
            outputs = [self._finish(part) for part in launched.parts]
        finally:
            self._finish_copies(launched.copied)
        if len(outputs) == 1 and not launched.lost:
            return outputs[0]
        return merge_outputs(launched.step, outputs, launched.lost)

    def _finish(self, step: LaunchedStep) -> ModelRunnerOutput:
        try:
            step.event.wait()
            words = step.result.array
            token_ids, logprobs, failed = read_result(
                words, step.sampling, self._sampler.vocab_size
            )
            of_prompts, pooled = {}, dict[str, Vector]()
            if step.prompts is not None and step.prompt_words is not None:
                of_prompts = step.prompts.read(step.prompt_words.array)
            if step.pooled is not None and step.pooled_words is not None:
                pooled = step.pooled.read(step.pooled_words.array, step.failed)
        finally:
            self._free_results.append(step.result)
        if self._drafter is None:
            kept = one_token_each(step.plan, token_ids)
            return make_output(step, kept, failed, logprobs, of_prompts, pooled, {})
        kept, guesses = self._verify(self._drafter, step, token_ids)
        return make_output(step, kept, failed, logprobs, of_prompts, pooled, guesses)

    def _verify(
        self, drafter: Drafter, step: LaunchedStep, token_ids: list[int]
    ) -> tuple[list[list[int]], dict[str, list[int]]]:
        """Return what is kept of the tokens of each row, whose drafts are verified, and what to
        guess next.
        """
        inputs = step.plan.inputs
        sampled = np.empty(len(token_ids), dtype=np.int64)
        sampled[step.plan.places] = token_ids
        kept = self._batch.append(inputs, sampled)
        self.parts.drafts.learn(inputs, time.perf_counter() - step.began)
        guesses = self.parts.drafts.guesses(inputs, self._batch)
        step.failed.update(self._batch.failures(inputs))
        return kept, guesses

    def explain(self, error: Exception) -> Exception:
        """Return what an error of `launch` or `finish` means: a failed step, or the end."""
        if isinstance(error, torch.OutOfMemoryError):
            hint = "out of device memory: lower gpu_memory_utilization or max_num_batched_tokens"
            failed = AioserveError(hint)
            failed.__cause__ = error
            return failed
        if self._device.is_lost():
            dead = RunnerDeadError(f"the device can compute no more: {error}")
            dead.__cause__ = error
            return dead
        return error

    # What follows runs when the device gets there.

    def _sample(
        self, logits: Tensor, sampling: SamplePlan, masks: DeviceMasks | None = None
    ) -> None:
        self._sampler.sample(logits, sampling, self._arrays, masks)
        if self._ranks is not None:
            self._ranks.tell(self._sampler.last_token)

    def _compute(self, plan: StepPlan, attention: LayerAttention, asked: Asked) -> Tensor:
        tokens, sampling = asked.adapters[:2] or (None, None)
        has_states = asked.prompts is not None or asked.pooled is not None
        is_plain = not has_states and tokens is None and asked.given is None
        if is_plain and plan.is_decode and plan.num_padded_rows in self._graphs.sizes:
            logits = self._graphs.replay(plan.num_padded_rows)
            if plan.num_sampling == plan.num_rows:  # each row its only token
                return logits[: plan.num_rows]
            return logits[self._arrays.logits_rows[: plan.num_sampling].long()]
        rows = self._arrays.logits_rows[: plan.num_sampling].long()
        if has_states:
            everything = torch.arange(plan.num_tokens, device=rows.device)
            inputs = self._inputs(plan.num_tokens, everything, tokens, tokens, asked.given)
            halves = self._model.halves
            assert halves is not None, "`RunnerInfo.parameters`, `supports_pooling`"
            states = halves.hidden(inputs, attention)
            if (prompts := asked.prompts) is not None:
                prompts.look(halves, states[prompts.rows.long()], asked.adapters[2:])
            if asked.pooled is not None:
                asked.pooled.look(states)
            return halves.logits(states[rows], sampling)
        inputs = self._inputs(plan.num_tokens, rows, tokens, sampling, asked.given)
        return self._model.forward(inputs, attention)

    def _inputs(
        self,
        num_tokens: int,
        rows: Tensor,
        adapters: TokenAdapters | None = None,
        logits_adapters: TokenAdapters | None = None,
        given: GivenRows | None = None,
    ) -> ModelInputs:
        arrays = self._arrays
        return ModelInputs(
            input_ids=self._sampler.resolve(arrays.input_ids[:num_tokens].long()),
            positions=arrays.positions[:num_tokens].long(),
            slots=arrays.slots[:num_tokens].long(),
            logits_rows=rows,
            adapters=adapters,
            logits_adapters=logits_adapters,
            given=given,
        )


def stage_images(
    plan: StepPlan, sampler: DeviceSampler
) -> tuple[GivenRows | None, SeenAhead | None]:
    """Bring to the device what tokens for images are given, in the order of the plan, and how far
    they see ahead, by one copy.
    """
    given, ends = plan.inputs.given, plan.inputs.image_ends
    arrays: dict[str, IntArray] = {}
    if given is not None:
        arrays["places"] = plan.placed(given.places.numpy())
        if given.axes is not None:
            arrays["axes"] = given.axes.numpy().reshape(-1)
    if ends is not None:
        arrays["ends"] = ends.ends[plan.tokens]
    if not arrays:
        return None, None
    words = {name: np.ascontiguousarray(own).view(np.int32) for name, own in arrays.items()}
    staged = {name: own.view(torch.int64) for name, own in sampler.stage(words).items()}
    if given is not None:
        axes = None if given.axes is None else staged["axes"].view(3, -1)
        given = given._replace(places=staged["places"], axes=axes)
    return given, None if ends is None else SeenAhead(staged["ends"], ends.only_in_windows)


# Adapters on a device. With each step it is staged which of its rows have which adapter. Knows
# bytes and rows; what an adapter is made of is known to `AdapterSites`.


MIB = 1 << 20


class DeviceAdapters(LoadedLowRank):
    """LoRA adapters that are loaded on a device, and its room for more."""

    def __init__(
        self, sites: AdapterSites, rows: BatchPart[Any], device: Device, room: int
    ) -> None:
        """`room`: bytes on the device that all of them may take."""
        assert isinstance(rows, AdapterRows), "of that part"
        super().__init__(sites, rows)
        self._device, self._room = device, room
        self._placed = WeakSet[Adapter]()  # while they live: unloaded ones may still have rows

    def load(self, adapter_id: str, adapter: object) -> None:
        super().load(adapter_id, adapter)
        assert isinstance(adapter, Adapter), "made by `put`"
        self._placed.add(adapter)  # also where it was put on before the weights were loaded again

    def put(self, files: interface.AdapterFiles) -> Adapter:
        """Put the adapter on, as `put_on`. Raises `ConfigError` too if there is no room."""
        assert isinstance(files, AdapterFiles), "read by that part"
        needed = files.num_parameters * self._sites.dtype.itemsize
        left = self._room - sum(adapter.num_bytes for adapter in self._placed)
        full = ConfigError(
            f"adapter {files.path} takes {needed / MIB:,.1f} MiB of the device, {left / MIB:,.1f} "
            "are left: lower gpu_memory_utilization, adapters.max_cpu_loras or the KV pool"
        )
        if needed > left:
            raise full
        made: list[Adapter] = []

        def work() -> Sequence[Tensor]:
            made.append(put_on(self._sites, files))
            return made[0].tensors

        try:
            self._device.beside(work)
        except torch.OutOfMemoryError as error:  # others take of the card, too
            raise full from error
        self._placed.add(made[0])
        return made[0]


def stage_adapters(
    owners: Sequence[LowRankOwners], sampler: DeviceSampler
) -> Sequence[TokenAdapters]:
    """Return each of `owners` on the device, by one copy. To be used when the device gets there."""
    groups = [one.groups() for one in owners]
    words = {
        f"{number} {place}": rows.astype(np.int64).view(np.int32)
        for number, own in enumerate(groups)
        for place, (_, rows) in enumerate(own)
    }
    staged = sampler.stage(words)
    return [
        LowRankTokens(
            [
                (adapter, staged[f"{number} {place}"].view(torch.int64))
                for place, (adapter, _) in enumerate(own)
            ]
        )
        for number, own in enumerate(groups)
    ]
