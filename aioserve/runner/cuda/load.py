"""From settings to a `StepExecutor` on a CUDA device: what fits, what is loaded, what is captured.

Runs on the thread that launches. The choices are made, and told, here; how a step is done is
known elsewhere.
"""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from aioserve.config import EngineConfig, ModelConfig
from aioserve.errors import ConfigError
from aioserve.grammars import GrammarCompiler
from aioserve.model_info import ModelInfo
from aioserve.model_source.adapter import stored_parameters
from aioserve.runner.attention.backend import AttentionOptions, KVCacheSpec, ModelInputs
from aioserve.runner.cuda import draw
from aioserve.runner.cuda.attention import (
    DeviceAttention,
    DeviceStep,
    PagedCache,
    TorchDeviceAttention,
)
from aioserve.runner.cuda.cuda_device import CudaDevice
from aioserve.runner.cuda.device import CardMemory, Device
from aioserve.runner.cuda.executor import StepExecutor
from aioserve.runner.cuda.flashinfer_attention import FlashInferAttention, why_not, workspace_bytes
from aioserve.runner.cuda.fused import CudaPlace
from aioserve.runner.cuda.graphs import capture_sizes
from aioserve.runner.cuda.memory import GIB, GRAPH_RESERVE, check_weights_fit, plan_memory
from aioserve.runner.cuda.plan import Layout, Limits
from aioserve.runner.cuda.sampler import DeviceSampler, Draw, write_logprobs
from aioserve.runner.grammar_rows import MAX_GUESSES
from aioserve.runner.loader import load_model, num_weight_bytes
from aioserve.runner.ngram import ngram_drafter
from aioserve.runner.prompt_logprobs import largest_piece
from aioserve.runner.served_model import ServedModel
from aioserve.sampling_params import MAX_LOGPROBS

logger = logging.getLogger(__name__)

INSTALL_LINE = "pip install 'aioserve[gpu]'"


@torch.inference_mode()
def load_on_cuda(
    config: EngineConfig, info: ModelInfo, grammars: GrammarCompiler | None = None
) -> StepExecutor:
    """Load the model, share out the memory, capture graphs. Raises `ConfigError`."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} cannot use the CUDA device of this machine: install a "
            "build of torch with CUDA, or set runner.device to cpu"
        )
    device = CudaDevice()
    card = device.card()
    model_config = with_dtype(config.model)
    place = CudaPlace(device.torch_device, has_triton=find_spec("triton") is not None)
    check_weights_fit(card, config, num_weight_bytes(model_config, info, place))
    model = load_model(model_config, info, place)
    return make_executor(config, info, model, device, card, grammars)


def make_executor(
    config: EngineConfig,
    info: ModelInfo,
    model: ServedModel,
    device: Device,
    card: CardMemory,
    grammars: GrammarCompiler | None = None,
) -> StepExecutor:
    """All but the weights, which are loaded. `card` is as it was before that."""
    weights = device.num_allocated()
    query_dtype, max_model_len = model.kv_cache_spec.dtype, info.max_model_len
    spec = with_kv_dtype(model.kv_cache_spec, config)
    num_rows = config.scheduler.max_num_seqs
    num_tokens = config.scheduler.step_budget(max_model_len)
    drafter = ngram_drafter(config.speculation)
    num_drafts = 0
    if drafter is not None:  # or what a grammar forces
        num_drafts = max(config.speculation.num_speculative_tokens, MAX_GUESSES)
    choose_token = choose_draw(device)
    flashinfer = find_flashinfer(model, spec, query_dtype)
    sizes: tuple[int, ...] = ()
    if flashinfer is not None and not config.runner.enforce_eager:
        sizes = capture_sizes(min(num_rows, num_tokens))
    activations = (
        device.measure(
            lambda: run_largest(
                model, spec, device, num_tokens, num_rows * (1 + num_drafts), choose_token
            )
        )
        + workspace_bytes(model.attention_calls, len(sizes))
        + DeviceSampler.num_bytes(num_rows, info.vocab_size)
    )
    memory = plan_memory(
        card,
        config,
        weights=weights,
        activations=activations,
        graphs=GRAPH_RESERVE if sizes else 0,
        page_bytes=spec.bytes_per_token * config.cache.block_size,
        max_model_len=max_model_len,
        adapters=adapter_bytes(config, model),
    )
    limits = Limits(
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_row_pages=-(-(max_model_len + 1) // config.cache.block_size),
        page_size=config.cache.block_size,
        num_pages=memory.num_pages,
        num_drafts=num_drafts,
    )
    layout = Layout(limits)
    arena = torch.zeros(layout.size, dtype=torch.int32, device=device.torch_device)
    attention: DeviceAttention
    if flashinfer is None:
        attention = TorchDeviceAttention(spec, limits, device.torch_device)
    else:
        attention = FlashInferAttention(
            flashinfer,
            spec,
            model.attention_calls,
            limits,
            device,
            query_dtype,
            max_model_len=max_model_len,
            capture_sizes=sizes,
            arrays=layout.split(arena),
        )
    executor = StepExecutor(
        device,
        model,
        attention,
        choose_token,
        layout,
        arena,
        max_model_len=max_model_len,
        vocab_size=info.vocab_size,
        grammars=grammars,
        eos_token_ids=info.eos_token_ids,
        drafter=drafter,
        adapter_room=card.free - memory.total + memory.adapters,
    )
    try:
        executor.warm_up()
    except Exception as error:
        raise ConfigError(f"the first step on {card.name} failed: {error}") from error
    before = device.card().free
    executor.capture(sizes)
    graphs = before - device.card().free
    logger.info(
        "%s on %s: %s, %.1fM parameters; %s",
        model.name,
        card.name,
        str(query_dtype).removeprefix("torch."),
        model.num_parameters / 1e6,
        memory.describe(limits.page_size, max_model_len),
    )
    if sizes:
        logger.info("CUDA graphs took %.2f GiB", graphs / GIB)
    return executor


def adapter_bytes(config: EngineConfig, model: ServedModel) -> int:
    """What those take that are loaded at start, as many as there may be at a time."""
    paths = [Path(spec.partition("=")[2]).expanduser() for spec in config.adapters.lora]
    sizes = sorted(map(stored_parameters, paths), reverse=True)
    num_parameters = sum(sizes[: config.adapters.max_cpu_loras])
    return num_parameters * model.kv_cache_spec.dtype.itemsize


def with_dtype(config: ModelConfig) -> ModelConfig:
    """The model's settings with "auto" resolved for this device."""
    if config.dtype != "auto":
        return config
    has_bfloat16 = torch.cuda.get_device_capability()[0] >= 8
    return msgspec.structs.replace(config, dtype="bfloat16" if has_bfloat16 else "float16")


def with_kv_dtype(spec: KVCacheSpec, config: EngineConfig) -> KVCacheSpec:
    """The type in which K and V are kept. Raises `ConfigError` for one of the CPU."""
    wanted = config.cache.kv_cache_dtype
    if wanted == "auto":
        return spec
    if wanted != "fp8":
        raise ConfigError(
            f"cache.kv_cache_dtype is {wanted}, which is for the CPU: give fp8, or leave it out"
        )
    return KVCacheSpec(spec.layers, torch.float8_e4m3fn)


class NoAttention(DeviceStep):
    """Takes the memory of attention's result and of one page: for measuring."""

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        one_page = Limits(num_rows=1, num_tokens=1, num_row_pages=1, page_size=1, num_pages=0)
        self.cache = PagedCache(spec, one_page, device, keep_finite=False)

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
) -> None:
    """The step that takes most memory, sampling included, but for attention."""
    place = device.torch_device
    rows = torch.arange(min(num_samples, num_tokens), device=place)
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=place)
    attention = NoAttention(spec, place)
    logits = model.forward(ModelInputs(tokens, tokens, tokens, rows), attention)
    if model.has_hidden:  # every token, and the largest piece of their logits
        states = model.hidden(ModelInputs(tokens, tokens, tokens, tokens), attention)
        size = min(num_tokens, largest_piece(logits.shape[1]))
        out = torch.zeros(size * (2 + 2 * MAX_LOGPROBS), dtype=torch.int32, device=place)
        width = min(MAX_LOGPROBS, logits.shape[1])
        write_logprobs(model.logits(states[:size]), tokens[:size], width, out)
    ones = torch.ones(len(rows), device=place)
    columns = draw.DrawColumns(
        temperature=ones,
        top_k=ones.int(),
        top_p=ones * 0.9,
        min_p_floor=ones * -10,
        keys=torch.zeros(2, len(rows), dtype=torch.int32, device=place),
        is_limited=True,
    )
    choose_token(logits.float() - 1, columns)


def choose_draw(device: Device) -> Draw:
    """By Triton where there is a card and Triton."""
    if device.torch_device.type != "cuda":
        return draw.draw
    if find_spec("triton") is None:
        logger.warning("Triton is not installed: plain torch draws tokens, which is slower")
        return draw.draw
    from aioserve.runner.cuda import triton_kernels

    return triton_kernels.draw


def find_flashinfer(model: ServedModel, spec: KVCacheSpec, query_dtype: torch.dtype) -> Any:
    """The module, if it is there and serves this model; else None, and a log line says why."""
    reason = why_not(spec, model.attention_calls, query_dtype)
    if reason is None:
        try:
            import flashinfer
        except (ImportError, OSError) as error:  # it writes into its cache when imported
            reason = f"flashinfer cannot be imported ({error}): {INSTALL_LINE}"
        else:
            logger.info("attention by flashinfer %s", flashinfer.__version__)
            return flashinfer
    else:
        reason = f"flashinfer does not serve {reason}"
    logger.warning("attention in plain torch, without CUDA graphs, which is slow: %s", reason)
    return None
