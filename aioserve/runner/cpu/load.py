"""From settings to a `StepExecutor` on this CPU: what fits, in which type, on how many threads.

Runs on the thread that computes. The choices are made, and told, here; how weights are read and how
a step is done is known elsewhere.
"""

import gc
import logging
from contextlib import ExitStack

import msgspec
import torch

from aioserve.config import EngineConfig, ModelConfig
from aioserve.errors import ConfigError
from aioserve.grammars import GrammarCompiler
from aioserve.images.families import family_of
from aioserve.kernels import KernelsUnavailableError, compute_thread_ids, load_kernels
from aioserve.kv_cache import WindowSpec
from aioserve.model_info import ModelInfo
from aioserve.runner.architecture import check_architecture, has_states
from aioserve.runner.attention.backend import SCALE_BYTES, KVCacheSpec, WindowLayers
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.attention import AttentionBackend
from aioserve.runner.cpu.compiled_attention import create_attention_backend
from aioserve.runner.cpu.compute_threads import ComputeThreads
from aioserve.runner.cpu.drafts import CpuDraftRunner
from aioserve.runner.cpu.executor import StepExecutor
from aioserve.runner.cpu.fused import CpuPlace
from aioserve.runner.cpu.linear import pack_linear
from aioserve.runner.cpu.memory import (
    MIB,
    check_memory,
    choose_num_kv_blocks,
    choose_num_state_slots,
    expected_bytes_per_token,
)
from aioserve.runner.cpu.rows import PagedRows
from aioserve.runner.cpu.windows import find_window_layers, make_window_spec
from aioserve.runner.drafter import Drafter
from aioserve.runner.drafts import Draft, find_draft, load_draft
from aioserve.runner.eagle import NUM_TAPS, is_eagle
from aioserve.runner.image_encoder import num_deep_rows
from aioserve.runner.loader import load_model, named_dtype, num_weight_bytes
from aioserve.runner.ngram import ngram_drafter
from aioserve.runner.served_model import ServedModel
from aioserve.runner.tensor_parallel.group import Ranks
from aioserve.runner.tensor_parallel.plan import shares_heads

logger = logging.getLogger(__name__)


@torch.inference_mode()
def load_on_cpu(
    config: EngineConfig,
    info: ModelInfo,
    grammars: GrammarCompiler | None = None,
    ranks: Ranks | None = None,
) -> StepExecutor:
    """Load the weights and allocate the KV cache. With `ranks`, the share of one of them, on its
    share of the threads. Raises `ConfigError`.
    """
    check_architecture(info)
    num_ranks = 1 if ranks is None else ranks.size
    num_threads = config.runner.threads or machine.default_num_threads()
    num_threads = max(1, num_threads // num_ranks)
    is_fixed = config.runner.threads is not None or num_threads == 1
    with ExitStack() as undo:
        threads = ComputeThreads(num_threads, _fix_threads if is_fixed else _start_threads)
        undo.callback(threads.close)
        machine.keep_freed_memory()
        draft_info = find_draft(config, info)
        sees = ranks is None and draft_info is None and sees_images(info)
        if ranks is None or ranks.is_first:
            _check_memory(config, info, draft_info, num_ranks)
        if has_states(info):
            _check_states(config, ranks)
        num_seen = config.scheduler.step_budget(info.max_model_len) if sees else 0
        model = load_model_on_cpu(config.model, info, ranks, num_seen=num_seen)
        draft: Draft | None = None
        if draft_info is not None:
            draft = load_draft(
                draft_info,
                model,
                info,
                load=lambda info: load_model_on_cpu(info.config, info),
                linear=lambda weight: pack_linear(weight, None),
                device=CpuPlace.device,
            )
        machine.give_back_freed_memory()
        if model.reads_rows and config.cache.kv_cache_dtype != "auto":
            raise ConfigError(
                f"cache.kv_cache_dtype is {config.cache.kv_cache_dtype}, which is not served for "
                f"{model.name}: leave it out"
            )
        spec, block_size = with_kv_dtype(model.kv_cache_spec, config), config.cache.block_size
        bytes_per_token = spec.bytes_per_token
        if draft is not None:
            draft_spec = with_kv_dtype(draft.spec, config)
            bytes_per_token += draft_spec.bytes_per_token + draft.state_bytes
        num_other_bytes = _make_state_slots(config, model, bytes_per_token)
        found = find_window_layers(config, model, info.max_model_len, ranks)
        window_spec: WindowSpec | None = None
        window_layers: WindowLayers | None = None
        if found:
            others = bytes_per_token - spec.part(found).bytes_per_token
            made = make_window_spec(config, spec, found, info.max_model_len, others)
            if made is not None:
                window_spec, window_layers, num_other_bytes = made
                bytes_per_token = others
        num_blocks = 0
        if ranks is None or ranks.is_first:  # one pool, and each has its heads of every block
            in_all = bytes_per_token * num_ranks
            num_other_bytes += _encoder_cache_bytes(config, info, model.kv_cache_spec.dtype, sees)
            num_blocks = choose_num_kv_blocks(config, in_all, info.max_model_len, num_other_bytes)
        if ranks is not None:
            num_blocks = int(ranks.told_by_first([num_blocks])[0])
        backend: AttentionBackend
        if model.reads_rows:
            backend = PagedRows(spec, num_blocks, block_size)
        else:
            backend = create_attention_backend(spec, num_blocks, block_size, window_layers)
        undo.callback(backend.close)
        drafter: Drafter | None
        if ranks is not None and not ranks.is_first:
            drafter = None  # its guesses come with the steps
        elif draft is None:
            drafter = ngram_drafter(config.speculation)
        else:
            draft_backend = create_attention_backend(draft_spec, num_blocks, block_size)
            drafter = draft.make_drafter(config, CpuDraftRunner(draft_backend, block_size))
        undo.pop_all()
    executor = StepExecutor(
        model,
        backend,
        threads,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=info.max_model_len,
        block_size=block_size,
        vocab_size=info.vocab_size,
        grammars=grammars,
        eos_token_ids=info.eos_token_ids,
        # A step planned ahead would not know which of them are right.
        # States cannot be taken back.
        takes_guesses=config.scheduler.depth == 1 and model.states is None,
        drafter=drafter,
        windows=window_spec,
        repeats_steps=ranks is None and model.states is None,
    )
    num_tokens = num_blocks * block_size
    logger.info(
        "%s: %s, %.1fM parameters; attention: %s%s; KV pool: %d blocks, %d tokens, up to %.0f MiB "
        "as it fills; %d threads%s%s",
        model.name,
        str(model.kv_cache_spec.dtype).removeprefix("torch."),
        model.num_parameters / 1e6,
        backend.description,
        ", int8 cache" if spec.dtype is torch.int8 else "",
        num_blocks,
        num_tokens,
        num_tokens * bytes_per_token / MIB,
        num_threads,
        "" if is_fixed else ", fewer while steps wait for a core",
        "" if ranks is None else f"; so on each of {num_ranks} ranks",
    )
    return executor


def sees_images(info: ModelInfo) -> bool:
    """Whether the model sees, and what sees of it is served."""
    if family_of(info) is None or info.config.quantization is not None:
        return False
    return not getattr(info.whole_config, "quantization_config", None)


def load_model_on_cpu(
    config: ModelConfig, info: ModelInfo, ranks: Ranks | None = None, *, num_seen: int = 0
) -> ServedModel:
    """As `load_model`, on this CPU."""
    resolved = with_dtype(config)
    model = load_model(resolved, info, CpuPlace(ranks), num_seen=num_seen)
    is_right = model.is_compiled or machine.has_native_bf16() or resolved.dtype == "float32"
    if config.dtype != "auto" or is_right:
        return model
    logger.info("%s is loaded again, as float32: the CPU has no bfloat16 of its own", model.name)
    del model
    gc.collect()  # modules know each other
    resolved = msgspec.structs.replace(config, dtype="float32")
    return load_model(resolved, info, CpuPlace(ranks), num_seen=num_seen)


def with_dtype(config: ModelConfig) -> ModelConfig:
    """The model's settings with "auto" resolved, rightly if our kernels serve the model."""
    if config.dtype != "auto":
        return config
    try:
        is_fast = machine.has_native_bf16() or load_kernels().is_fast
    except KernelsUnavailableError:
        is_fast = False
    return msgspec.structs.replace(config, dtype="bfloat16" if is_fast else "float32")


def with_kv_dtype(spec: KVCacheSpec, config: EngineConfig) -> KVCacheSpec:
    """The type in which K and V are kept. Raises `ConfigError` if the model has none such."""
    wanted = config.cache.kv_cache_dtype
    if wanted == "auto":
        return spec
    if wanted != "int8":
        raise ConfigError(
            f"cache.kv_cache_dtype is {wanted}, which is for CUDA: give int8, or leave it out"
        )
    for layer in spec.layers:
        for dim in (layer.key_head_dim, layer.value_head_dim):
            if dim % SCALE_BYTES:
                raise ConfigError(
                    "cache.kv_cache_dtype is int8, which needs heads of a multiple of "
                    f"{SCALE_BYTES}, but the model has heads of {dim}: leave it out"
                )
    return KVCacheSpec(spec.layers, torch.int8)


def _check_states(config: EngineConfig, ranks: Ranks | None) -> None:
    """Raises `ConfigError` for what is not served with states."""
    refused = {
        f"speculation.speculative_method is {config.speculation.speculative_method}": (
            config.speculation.speculative_method != "none"
        ),
        f"cache.kv_connector is {config.cache.kv_connector}": config.cache.kv_connector != "none",
        "runner.tensor_parallel_size is more than 1": ranks is not None,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{setting}, which is not served for a model whose layers have states "
                "(state-space, linear attention, convolutions): leave it out"
            )


def _make_state_slots(config: EngineConfig, model: ServedModel, bytes_per_token: int) -> int:
    """The memory of the states, if the model has any; returns its bytes. Raises `ConfigError`."""
    if model.states is None:
        if config.cache.num_state_slots is not None:
            raise ConfigError(
                f"cache.num_state_slots is {config.cache.num_state_slots}, but no layer of "
                f"{model.name} has a state: leave it out"
            )
        return 0
    size = model.states.bytes_per_slot
    num_slots = choose_num_state_slots(config, size, is_shared=bool(bytes_per_token))
    model.states.allocate(num_slots)
    logger.info(
        "%s: states of %.2f MiB a request; %d slots for them, up to %.0f MiB as they fill",
        model.name,
        size / MIB,
        num_slots,
        num_slots * size / MIB,
    )
    return num_slots * size


def _encoder_cache_bytes(
    config: EngineConfig, info: ModelInfo, dtype: torch.dtype, sees: bool
) -> int:
    """What outputs of the encoder may take, if the model `sees`."""
    if not sees:
        return 0
    size = info.hidden_size * dtype.itemsize * (1 + num_deep_rows(info.whole_config))
    return config.scheduler.encoder_cache_tokens * size


def _check_memory(
    config: EngineConfig, info: ModelInfo, draft: ModelInfo | None, num_ranks: int
) -> None:
    """Of all ranks: they are on this machine."""
    weights, per_token = 0, []
    for part in (info,) if draft is None else (info, draft):
        model = with_dtype(part.config)
        weights += num_weight_bytes(model, part, CpuPlace())
        sizes = (named_dtype(model.dtype).itemsize, 0)
        if config.cache.kv_cache_dtype == "int8":
            sizes = (1, SCALE_BYTES)
        per_token.append(expected_bytes_per_token(part.hf_config, *sizes))
        if is_eagle(part.source.known_config):
            per_token.append(NUM_TAPS * info.hidden_size * named_dtype(model.dtype).itemsize)
    if num_ranks > 1:
        itemsize = named_dtype(with_dtype(info.config).dtype).itemsize
        weights += (num_ranks - 1) * info.vocab_size * info.hidden_size * itemsize  # whole on each
        if not shares_heads(info.hf_config):
            per_token = [None if size is None else size * num_ranks for size in per_token]
    known = [size for size in per_token if size is not None]
    all_known = sum(known) if len(known) == len(per_token) else None
    dtype = named_dtype(with_dtype(info.config).dtype)
    sees = num_ranks == 1 and draft is None and sees_images(info)
    num_image_bytes = _encoder_cache_bytes(config, info, dtype, sees)
    check_memory(config, weights, all_known, info.max_model_len, num_image_bytes)


def _start_threads(count: int) -> list[int]:
    torch.set_num_threads(count)
    return compute_thread_ids(count)


def _fix_threads(count: int) -> tuple[int, ...]:
    torch.set_num_threads(count)
    return ()
