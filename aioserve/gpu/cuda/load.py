"""From settings to a `StepExecutor` on a CUDA device: what fits, what is loaded and captured.

Begins with how a card's memory is shared out: arithmetic that asks no device, all sizes in bytes.
Last, passes of a drafting model, which are planned, staged and launched as steps are, and take
turns with the steps of the served model, whose sampler they use.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.features.grammars.rows import MAX_GUESSES
from aioserve.features.lora.peft_directory import stored_parameters
from aioserve.features.spec_decode.drafts import find_draft
from aioserve.features.spec_decode.model_drafter import Draft, DraftRunner, DraftSource, Forward
from aioserve.features.states.cpu_memory import find_window_layers, with_windows
from aioserve.gpu.cuda.attention import (
    DeviceAttention,
    DeviceStep,
    PagedCache,
    TorchDeviceAttention,
)
from aioserve.gpu.cuda.cuda_device import CudaDevice
from aioserve.gpu.cuda.device import CardMemory, Device, StagingRing
from aioserve.gpu.cuda.executor import StepExecutor, capture_sizes
from aioserve.gpu.cuda.flashinfer_attention import (
    FlashInferAttention,
    have_kernels,
    stored_spec,
    why_not,
    workspace_bytes,
)
from aioserve.gpu.cuda.fused import CudaPlace
from aioserve.gpu.cuda.host_blocks import device_bytes
from aioserve.gpu.cuda.plan import Layout, Limits, WindowLimits, plan_step
from aioserve.gpu.cuda.sampler import DeviceSampler, Draw, DrawColumns, draw, write_logprobs
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import family_of
from aioserve.params import MAX_LOGPROBS
from aioserve.runner.attention.backend import (
    AttentionCall,
    AttentionOptions,
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    StepInputs,
)
from aioserve.runner.batch.drafter import DraftPlace
from aioserve.runner.batch.masks import Masks
from aioserve.runner.batch.prompt_rows import largest_piece
from aioserve.runner.batch.sampling_columns import SamplingInputs
from aioserve.runner.fused.decoder import Place
from aioserve.runner.fused.ops import PlainLinear
from aioserve.runner.interface import OutputCompiler, max_useful_blocks
from aioserve.runner.load_plan import LoadPlan, SideTypes, plan_load
from aioserve.runner.loader import MODEL_PARTS, load_model, num_weight_bytes
from aioserve.runner.models.architecture import has_states
from aioserve.runner.ranks import Ranks
from aioserve.runner.served_model import ServedModel, collect_modules

GIB = 1 << 30
GRAPH_RESERVE = 1 << 30  # for 23 captured sizes in one pool; a guess, said beside what they took
ENCODER_RESERVE = 2 << 30  # for one large image on its way through an encoder; a guess


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The shares of the memory budget of a device, in bytes: weights, KV pages and the rest."""

    budget: int
    weights: int
    activations: int  # of the largest step, workspaces included
    graphs: int  # a reserve; what they take is only known when the pool is there
    num_pages: int
    page_bytes: int
    adapters: int = 0  # those that are loaded at start; others take what is left
    images: int = 0  # outputs of the encoder, as many as it keeps
    windows: int = 0  # pages of layers with a sliding window, their dummy page included

    @property
    def total(self) -> int:
        """All bytes that the plan gives out, the dummy page included."""
        pool = (self.num_pages + 1) * self.page_bytes
        parts = self.weights, self.activations, self.graphs, self.adapters
        return sum(parts) + self.images + self.windows + pool

    def describe(self, page_size: int, max_model_len: int) -> str:
        """Return one line with every number."""
        num_tokens = self.num_pages * page_size
        pool = (
            f"KV pool {self.num_pages * self.page_bytes / GIB:.2f}: {num_tokens} tokens, "
            f"{num_tokens / max_model_len:.1f} requests of {max_model_len}"
        )
        if not self.page_bytes:  # its blocks only count tokens
            pool = "no other KV pool: all layers have a sliding window"
        return (
            f"device memory: {self.budget / GIB:.2f} GiB to use; weights {self.weights / GIB:.2f}, "
            f"activations {self.activations / GIB:.2f}, CUDA graphs {self.graphs / GIB:.2f}, "
            f"{f'adapters {self.adapters / GIB:.2f}, ' if self.adapters else ''}"
            f"{f'encoded images {self.images / GIB:.2f}, ' if self.images else ''}"
            f"{f'window blocks {self.windows / GIB:.2f}, ' if self.windows else ''}"
            f"{pool}"
        )


def check_weights_fit(card: CardMemory, config: EngineConfig, weights: int) -> None:
    """Refuse, before loading, a model that cannot fit. Raises `ConfigError` with the numbers."""
    utilization = config.runner.gpu_memory_utilization
    budget = card.budget(utilization)
    if weights >= budget:
        raise ConfigError(
            f"the weights need {weights / GIB:.2f} GiB; {card.name} has {card.free / GIB:.2f} of "
            f"{card.total / GIB:.2f} GiB free, of which gpu_memory_utilization={utilization} "
            f"leaves {max(budget, 0) / GIB:.2f}: take a smaller model or dtype, or a freer card"
        )


def plan_memory(
    card: CardMemory,
    config: EngineConfig,
    *,
    weights: int,
    activations: int,
    graphs: int,
    page_bytes: int,
    max_model_len: int,
    adapters: int = 0,
    images: int = 0,
    windows: int = 0,
) -> MemoryPlan:
    """Give the KV pool what the others leave. Raises `ConfigError` that names what to turn.

    Never more than `max_useful_blocks`, unless set. Without `page_bytes`, all layers have pages of
    their own for windows, and its blocks only count tokens.
    """
    cache, useful = config.cache, max_useful_blocks(config, max_model_len)
    budget = card.budget(config.runner.gpu_memory_utilization)
    left = budget - weights - activations - graphs - adapters - images - windows
    wanted = cache.num_kv_blocks
    if page_bytes:
        num_pages = left // page_bytes - 1  # the dummy page
        if wanted is None and cache.kv_cache_gib is not None:
            wanted = (int(cache.kv_cache_gib * GIB) - windows) // page_bytes
    else:
        num_pages = max(useful, wanted or 0) if left >= 0 else 0
    fitting = num_pages if wanted is None else min(num_pages, wanted)
    if fitting < max(wanted or 1, 1):
        others = ("adapters", adapters), ("encoded images", images), ("window blocks", windows)
        more = "".join(f", {name} {size / GIB:.2f}" for name, size in others if size)
        needs = f"the KV pool needs {max(wanted or 1, 1)} blocks of {page_bytes} bytes"
        if not page_bytes:
            needs = f"the pool of windows needs {windows / GIB:.2f} GiB of KV blocks"
        raise ConfigError(
            f"{needs}, {max(fitting, 0)} fit: of {budget / GIB:.2f} GiB, weights take "
            f"{weights / GIB:.2f}, activations {activations / GIB:.2f} and CUDA graphs "
            f"{graphs / GIB:.2f}{more} (raise gpu_memory_utilization, lower "
            f"max_num_batched_tokens, {'num_window_blocks, ' if windows else ''}kv_cache_gib or "
            "num_kv_blocks, or set enforce_eager)"
        )
    if wanted is None:
        wanted = min(num_pages, useful)
    shares = budget, weights, activations, graphs, wanted, page_bytes
    return MemoryPlan(*shares, adapters=adapters, images=images, windows=windows)


# From settings to a `StepExecutor` on a CUDA device: what fits, what is loaded, what is captured.
# Runs on the thread that launches. The choices are made, and told, here; how a step is done is
# known elsewhere.


logger = logging.getLogger(__name__)

CUDA_TYPES = SideTypes("fp8", "float16", lambda: torch.cuda.get_device_capability()[0] >= 8)
INSTALL_LINE = "pip install flashinfer-python accelerate"
COMPILER_LINE = (
    "install the CUDA toolkit (nvcc on PATH) and ninja, or the package flashinfer-jit-cache of the "
    "same version, see docs/gpu.md"
)


@torch.inference_mode()
def load_on_cuda(
    config: EngineConfig,
    info: ModelInfo,
    grammars: OutputCompiler | None = None,
    ranks: Ranks | None = None,
    devices: list[Device] | None = None,
) -> StepExecutor:
    """Load the model, share out the memory, capture graphs. With `ranks`, the share of one of them,
    on the current device. `devices`: the one that it was loaded on before; if there is none, it
    gets it. Raises `ConfigError`.
    """
    if info.config.activations is not None:
        raise ConfigError(
            "model.activations is 'int8', which needs the compiled kernels of a CPU: set "
            "runner.device to cpu, or leave it out"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} cannot use the CUDA device of this machine: install a "
            "build of torch with CUDA, or set runner.device to cpu"
        )
    devices = [] if devices is None else devices
    if not devices:
        devices.append(CudaDevice())
    (device,) = devices
    card = device.card()
    check_served(info)
    has_triton = find_spec("triton") is not None
    place = CudaPlace(device.torch_device, has_triton=has_triton, ranks=ranks)
    source = find_draft(config, info)
    parts = [info] if source is None or not source.has_files else [info, source.info]
    needed = sum(num_weight_bytes(CUDA_TYPES.resolve(part.config), part, place) for part in parts)
    check_weights_fit(card, config, needed if ranks is None else needed // ranks.size)
    model, draft = load_models(config, info, source, place)
    return make_executor(config, info, model, device, card, grammars, draft, ranks)


def give_back_freed_memory() -> None:
    """Free the modules of a model, and give their memory back to the card."""
    collect_modules()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_served(info: ModelInfo) -> None:
    """Raises `ConfigError` for what no CUDA device serves, before anything is loaded."""
    if has_states(info):
        raise ConfigError(
            "layers with states (state-space, linear attention, convolutions) are not served on "
            "CUDA: set runner.device to cpu"
        )


def load_models(
    config: EngineConfig, info: ModelInfo, source: DraftSource | None, place: Place
) -> tuple[ServedModel, Draft | None]:
    """Return the weights of both. Raises `ConfigError`."""

    def load(info: ModelInfo, num_seen: int = 0) -> ServedModel:
        return load_model(CUDA_TYPES.resolve(info.config), info, place, num_seen=num_seen)

    sees = family_of(info) is not None and MODEL_PARTS["sees"](info)
    model = load(info, config.scheduler.step_budget(info.max_model_len) if sees else 0)
    if source is None:
        return model, None
    own = DraftPlace(
        load, lambda weight: PlainLinear(weight, None), place.device, place.keep_latents
    )
    return model, source.load(model, info, own)


def make_executor(
    config: EngineConfig,
    info: ModelInfo,
    model: ServedModel,
    device: Device,
    card: CardMemory,
    grammars: OutputCompiler | None = None,
    draft: Draft | None = None,
    ranks: Ranks | None = None,
) -> StepExecutor:
    """Return all but the weights, which are loaded. `card` is as it was before that."""
    weights = device.num_allocated()
    plan = plan_load(CUDA_TYPES, config, info, model, draft, ranks)
    model = plan.model
    choose_token = choose_draw(device)
    limits = _limits(plan)
    sizes_of_steps = limits.num_tokens, info.max_model_len
    kinds = [_Kind.of(model, plan.specs[0], device, *sizes_of_steps)]
    if draft is not None:
        kinds.append(_Kind.of(draft, plan.specs[1], device, *sizes_of_steps))
    stored = [kind.stored for kind in kinds]
    more = sum(s.bytes_per_token for s in stored) - sum(s.bytes_per_token for s in plan.specs)
    plan = replace(plan, specs=stored, bytes_per_token=plan.bytes_per_token + more)
    sizes: tuple[int, ...] = ()
    if kinds[0].flashinfer is not None and not config.runner.enforce_eager:
        sizes = capture_sizes(min(limits.num_rows, limits.num_tokens))
    activations, hidden_size = _measure(plan, kinds, limits, device, choose_token)
    activations += workspace_bytes(kinds[0].calls, len(sizes))
    activations += sum(workspace_bytes(kind.calls, 0) for kind in kinds[1:])
    plan, memory = _share_memory(plan, card, weights, activations, GRAPH_RESERVE if sizes else 0)
    layout = Layout(_limits(plan))
    arena = _make_arena(layout, device)
    num_rows, num_samples = limits.num_rows, limits.num_samples
    sampler = DeviceSampler(device, num_rows, num_samples, info.vocab_size, choose_token)

    def make_draft_runner() -> DeviceDraftRunner:
        own_layout = Layout(replace(layout.limits, num_drafts=0, windows=None))
        own_arena = _make_arena(own_layout, device)
        own = kinds[1].make_attention(own_layout, own_arena, device, info.max_model_len, ())
        return DeviceDraftRunner(device, own, sampler, own_layout, own_arena)

    parts = plan.make_parts(grammars, make_draft_runner)
    executor = StepExecutor(
        device,
        model,
        kinds[0].make_attention(layout, arena, device, info.max_model_len, sizes),
        sampler,
        layout,
        arena,
        parts,
        hidden_size=hidden_size,
        adapter_room=card.free - memory.total + memory.adapters,
        windows=plan.windows,
        ranks=ranks,
    )
    graphs = _start(executor, device, card.name, sizes)
    logger.info(
        "%s on %s: %s; %s",
        model.name,
        card.name,
        plan.description,
        memory.describe(limits.page_size, info.max_model_len),
    )
    if sizes:
        logger.info("CUDA graphs took %.2f GiB", graphs / GIB)
    return executor


def _limits(plan: LoadPlan) -> Limits:
    """Return the limits of the largest step that the configuration allows."""
    speculation, max_model_len = plan.config.speculation, plan.info.max_model_len
    page_size, num_drafts = plan.config.cache.block_size, 0
    if speculation.drafts_surely:  # or what a grammar forces
        num_drafts = max(speculation.num_speculative_tokens, MAX_GUESSES)
    windows: WindowLimits | None = None
    if plan.windows is not None and plan.window_layers is not None:
        layers, num_pages = plan.window_layers
        windows = WindowLimits(layers, plan.windows.num_tokens, num_pages)
    return Limits(
        num_rows=plan.config.scheduler.max_num_seqs,
        num_tokens=plan.config.scheduler.step_budget(max_model_len),
        num_row_pages=-(-(max_model_len + 1) // page_size),
        page_size=page_size,
        num_pages=plan.num_blocks,
        num_drafts=num_drafts,
        windows=windows,
    )


def _measure(
    plan: LoadPlan, kinds: "Sequence[_Kind]", limits: Limits, device: Device, choose_token: Draw
) -> tuple[int, int]:
    """Return bytes that the largest step takes on the device, but for workspaces of attention, and
    the size of hidden states, 0 if the model gives none.
    """
    hidden_size = 0

    def largest() -> None:
        nonlocal hidden_size
        num_tokens, num_samples = limits.num_tokens, limits.num_samples
        hidden_size = run_largest(
            plan.model, kinds[0].spec, device, num_tokens, num_samples, choose_token
        )

    def largest_of_drafts() -> None:
        assert plan.draft is not None
        forward, num_rows = plan.draft.forward, limits.num_rows
        run_pass(forward, kinds[1].spec, device, limits.num_tokens, num_rows, choose_token)

    activations = max(map(device.measure, [largest, largest_of_drafts][: len(kinds)]))
    if plan.model.image_encoder is not None:  # it computes where steps do, before them
        activations = max(activations, ENCODER_RESERVE)
    activations += DeviceSampler.num_bytes(limits.num_rows, plan.info.vocab_size)
    if plan.config.cache.kv_connector != "none":
        found = find_window_layers(plan.config, plan.model, plan.info.max_model_len)
        own = plan.specs[0].part(found).bytes_per_token * limits.page_size
        in_all = plan.bytes_per_token * limits.page_size
        # Of one pool or of two, as there will be.
        activations += max(device_bytes(in_all), device_bytes(own, in_all - own))
    return activations, hidden_size


def _share_memory(
    plan: LoadPlan, card: CardMemory, weights: int, activations: int, graphs: int
) -> tuple[LoadPlan, MemoryPlan]:
    """Return the plan with the blocks of its pools, and what goes where. Raises `ConfigError` if
    too little is left for the KV pool.
    """
    cache, adapters = plan.config.cache, adapter_bytes(plan.config, plan.model)
    left = card.budget(plan.config.runner.gpu_memory_utilization) - weights - activations - graphs
    images = image_bytes(plan)
    left -= adapters + images
    if cache.kv_cache_gib is not None:
        left = min(left, int(cache.kv_cache_gib * GIB))
    left -= plan.bytes_per_token * cache.block_size  # the dummy pages
    plan, windows = with_windows(plan, left), 0
    if plan.window_layers is not None:
        layers, num_blocks = plan.window_layers
        spec = plan.specs[0].part(layers)
        windows = (num_blocks + 1) * cache.block_size * spec.bytes_per_token
    memory = plan_memory(
        card,
        plan.config,
        weights=weights,
        activations=activations,
        graphs=graphs,
        page_bytes=plan.bytes_per_token * cache.block_size,
        max_model_len=plan.info.max_model_len,
        adapters=adapters,
        images=images,
        windows=windows,
    )
    if plan.ranks is not None:  # one pool, and each has its heads of every block
        memory = replace(memory, num_pages=plan.ranks.least(memory.num_pages))
    return replace(plan, num_blocks=memory.num_pages), memory


def _make_arena(layout: Layout, device: Device) -> Tensor:
    return torch.zeros(layout.size, dtype=torch.int32, device=device.torch_device)


def _start(executor: StepExecutor, device: Device, card: str, sizes: Sequence[int]) -> int:
    """Run first steps and capture decodes of these `sizes`; returns the bytes that the CUDA graphs
    took. Raises `ConfigError` if a step fails.
    """
    try:
        executor.warm_up()
    except Exception as error:
        raise ConfigError(f"the first step on {card} failed: {error}") from error
    before = device.card().free
    executor.capture(sizes)
    return before - device.card().free


class _Kind(NamedTuple):
    """The parts of a model's attention, and what computes it."""

    spec: KVCacheSpec  # in the type in which K and V are kept
    stored: KVCacheSpec  # the same with heads as wide as they are kept
    calls: Sequence[AttentionCall]
    query_dtype: torch.dtype
    flashinfer: Any  # None: plain torch

    @classmethod
    def of(
        cls,
        model: ServedModel | Draft,
        spec: KVCacheSpec,
        device: Device,
        num_tokens: int,
        max_model_len: int,
    ) -> "_Kind":
        calls, dtype = model.attention_calls, model.kv_cache_spec.dtype
        found = find_flashinfer(spec, calls, dtype, device, num_tokens, max_model_len)
        stored = spec if found is None else stored_spec(spec)
        return cls(spec, stored, calls, dtype, found)

    def make_attention(
        self,
        layout: Layout,
        arena: Tensor,
        device: Device,
        max_model_len: int,
        sizes: Sequence[int],
    ) -> DeviceAttention:
        """Make the attention of steps in `arena`; CUDA graphs will hold decodes of `sizes`."""
        if self.flashinfer is None:
            return TorchDeviceAttention(self.spec, layout.limits, device.torch_device)
        return FlashInferAttention(
            self.flashinfer,
            self.spec,
            self.calls,
            layout.limits,
            device,
            self.query_dtype,
            max_model_len=max_model_len,
            capture_sizes=sizes,
            arrays=layout.split(arena),
        )


def adapter_bytes(config: EngineConfig, model: ServedModel) -> int:
    """Return what those take that are loaded at start, as many as there may be at a time."""
    paths = [Path(spec.partition("=")[2]).expanduser() for spec in config.adapters.lora]
    sizes = sorted(map(stored_parameters, paths), reverse=True)
    num_parameters = sum(sizes[: config.adapters.max_cpu_loras])
    return num_parameters * model.kv_cache_spec.dtype.itemsize


def image_bytes(plan: LoadPlan) -> int:
    """Return what the outputs of an image encoder take that are kept at a time."""
    if plan.model.image_encoder is None:
        return 0
    dtype = plan.model.kv_cache_spec.dtype
    num_bytes: int = MODEL_PARTS["encoder bytes"](plan.config, plan.info, dtype)
    return num_bytes


class NoAttention(DeviceStep):
    """A stand-in that takes the memory of attention's result and of one page: for measuring."""

    def __init__(self, spec: KVCacheSpec, tokens: Tensor) -> None:
        """`tokens`: those of the step, all of them 0."""
        one_page = Limits(num_rows=1, num_tokens=1, num_row_pages=1, page_size=1, num_pages=0)
        self.cache = PagedCache(spec, one_page, tokens.device, keep_finite=False)
        self._slots = {False: tokens}

    def slots_of(self, layer: int) -> Tensor:
        return self._slots[False]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        pass

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        return query.new_zeros(*query.shape[:2], self.cache.values[layer].shape[3])


def run_largest(
    model: ServedModel,
    spec: KVCacheSpec,
    device: Device,
    num_tokens: int,
    num_samples: int,
    choose_token: Draw,
) -> int:
    """Run the step that takes most memory, sampling included, but for attention. Returns the size
    of hidden states, 0 if the model gives none.
    """
    given = None if model.image_encoder is None else model.image_encoder.blank(num_tokens)

    def forward(inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        return model.forward(inputs._replace(given=given), attention)

    vocab_size = run_pass(forward, spec, device, num_tokens, num_samples, choose_token)
    if (halves := model.halves) is None:
        return 0
    place = device.torch_device  # every token, and the largest piece of their logits
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=place)
    attention = NoAttention(spec, tokens)
    inputs = ModelInputs(tokens, tokens, tokens, tokens, given=given)
    states = halves.hidden(inputs, attention)
    size = min(num_tokens, largest_piece(vocab_size))
    out = torch.zeros(size * (2 + 2 * MAX_LOGPROBS), dtype=torch.int32, device=place)
    width = min(MAX_LOGPROBS, vocab_size)
    write_logprobs(halves.logits(states[:size]), tokens[:size], width, out)
    return states.shape[1]


def run_pass(
    forward: Forward,
    spec: KVCacheSpec,
    device: Device,
    num_tokens: int,
    num_samples: int,
    choose_token: Draw,
) -> int:
    """Run `num_tokens` tokens, of which `num_samples` sample; returns the vocabulary size."""
    place = device.torch_device
    rows = torch.arange(min(num_samples, num_tokens), device=place)
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=place)
    logits = forward(ModelInputs(tokens, tokens, tokens, rows), NoAttention(spec, tokens))
    ones = torch.ones(len(rows), device=place)
    columns = DrawColumns(
        temperature=ones,
        top_k=ones.int(),
        top_p=ones * 0.9,
        min_p_floor=ones * -10,
        keys=torch.zeros(2, len(rows), dtype=torch.int32, device=place),
        has_top_k=True,
        has_top_p=True,
    )
    choose_token(logits.float() - 1, columns)
    return logits.shape[1]


def choose_draw(device: Device) -> Draw:
    """Return the draw by Triton where there is a card and Triton, else by torch."""
    if device.torch_device.type != "cuda":
        return draw
    if find_spec("triton") is None:
        logger.warning("Triton is not installed: plain torch draws tokens, which is slower")
        return draw
    from aioserve.gpu.cuda import triton_kernels

    return triton_kernels.draw


def find_flashinfer(
    spec: KVCacheSpec,
    calls: Sequence[AttentionCall],
    query_dtype: torch.dtype,
    device: Device,
    num_tokens: int,
    max_model_len: int,
) -> Any:
    """Return the module, if it is there, serves this model in steps of up to `num_tokens`, and has
    its kernels or can compile them; else None, and a log line says why.
    """
    if (lacking := why_not(spec, calls, query_dtype, num_tokens)) is not None:
        return _plain_torch(f"flashinfer does not serve {lacking}")
    try:
        import flashinfer
    except (ImportError, OSError) as error:  # it writes into its cache when imported
        return _plain_torch(f"flashinfer cannot be imported ({error}): {INSTALL_LINE}")
    try:
        have_kernels(flashinfer, spec, calls, query_dtype, device, max_model_len)
    except Exception as error:  # its compiler's, which have no common class
        return _plain_torch(
            f"flashinfer {flashinfer.__version__} has no kernels for this model and cannot compile "
            f"them ({_first_line(error)}): {COMPILER_LINE}"
        )
    logger.info("attention by flashinfer %s", flashinfer.__version__)
    return flashinfer


def _plain_torch(reason: str) -> None:
    logger.warning("attention in plain torch, without CUDA graphs, which is slow: %s", reason)


def _first_line(error: Exception) -> str:
    """Return what an error says first; the output of a compiler may follow."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"


# Passes of a drafting model on a device.


class DeviceDraftRunner(DraftRunner):
    """A runner of a draft model, used on the thread that launches, without CUDA graphs."""

    def __init__(
        self,
        device: Device,
        attention: DeviceAttention,
        sampler: DeviceSampler,
        layout: Layout,
        arena: Tensor,
    ) -> None:
        """`arena` [layout.size], int32 on the device, is for these passes alone."""
        limits = layout.limits
        self.num_blocks = limits.num_pages
        self.caches = attention.cache.tensors
        self.num_slots = (limits.num_pages + 1) * limits.page_size  # the dummy page included
        self._device, self._attention, self._sampler = device, attention, sampler
        self._layout, self._arena, self._arrays = layout, arena, layout.split(arena)
        self._ring = StagingRing(device, layout.size)
        self._result = device.host_buffer(limits.num_rows)

    def draw(
        self, step: StepInputs, forward: Forward, columns: SamplingInputs, masks: Masks | None
    ) -> list[int]:
        buffer = self._ring.take()
        plan = plan_step(step, columns, self._layout, buffer.array)
        assert (np.diff(plan.places) == 1).all(), "rows of one token come first"
        self._device.stage(self._arena[: plan.num_words], buffer)
        attention = self._attention.begin(plan, self._arrays)
        self._ring.guard()
        sampling = self._sampler.prepare(plan, [], {})
        staged = None if masks is None else self._sampler.stage_masks(masks)
        num_sampling = plan.num_sampling

        def work() -> None:
            logits = forward(plan.model_inputs(self._arrays), attention)
            if num_sampling:
                self._sampler.sample(logits, sampling, self._arrays, staged)

        self._device.launch(work)
        self._device.fetch(self._result, self._sampler.out[:num_sampling])
        self._device.record().wait()
        # Where the model gives no numbers, any guess does.
        token_ids: list[int] = np.maximum(self._result.array[:num_sampling], 0).tolist()
        return token_ids

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""
