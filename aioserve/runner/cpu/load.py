"""From settings to a `StepExecutor` on this CPU: what fits, in which type, on how many threads.

Runs on the thread that computes. The choices are made, and told, here; how weights are read and how
a step is done is known elsewhere.
"""

import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import msgspec
import torch

from aioserve.config import EngineConfig, ModelConfig
from aioserve.errors import ConfigError
from aioserve.grammars import GrammarCompiler
from aioserve.kernels import KernelsUnavailableError, compute_thread_ids, load_kernels
from aioserve.model_info import ModelInfo
from aioserve.runner.attention.backend import SCALE_BYTES, KVCacheSpec
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.compiled_attention import create_attention_backend
from aioserve.runner.cpu.compute_threads import ComputeThreads
from aioserve.runner.cpu.draft_model import DraftModel
from aioserve.runner.cpu.eagle import NUM_TAPS, EagleHead, is_eagle, read_eagle, tapped_layers
from aioserve.runner.cpu.eagle_drafter import EagleDrafter
from aioserve.runner.cpu.executor import StepExecutor
from aioserve.runner.cpu.fused import CpuPlace
from aioserve.runner.cpu.memory import (
    MIB,
    check_memory,
    choose_num_kv_blocks,
    expected_bytes_per_token,
)
from aioserve.runner.draft_length import ModelDraftLength
from aioserve.runner.drafter import Drafter
from aioserve.runner.loader import load_model, named_dtype, num_weight_bytes
from aioserve.runner.ngram import ngram_drafter
from aioserve.runner.served_model import ServedModel

logger = logging.getLogger(__name__)


@torch.inference_mode()
def load_on_cpu(
    config: EngineConfig, info: ModelInfo, grammars: GrammarCompiler | None = None
) -> StepExecutor:
    """Load the weights and allocate the KV cache. Raises `ConfigError`."""
    num_threads = config.runner.threads or machine.default_num_threads()
    is_fixed = config.runner.threads is not None or num_threads == 1
    with ExitStack() as undo:
        threads = ComputeThreads(num_threads, _fix_threads if is_fixed else _start_threads)
        undo.callback(threads.close)
        machine.keep_freed_memory()
        draft_info = find_draft(config, info)
        _check_memory(config, info, draft_info)
        model = load_model_on_cpu(config.model, info)
        draft = None if draft_info is None else _load_draft(config, draft_info, model, info)
        machine.give_back_freed_memory()
        spec, block_size = with_kv_dtype(model.kv_cache_spec, config), config.cache.block_size
        bytes_per_token = spec.bytes_per_token
        if draft is not None:
            bytes_per_token += draft.bytes_per_token
        num_blocks = choose_num_kv_blocks(config, bytes_per_token, info.max_model_len)
        backend = create_attention_backend(spec, num_blocks, block_size)
        undo.callback(backend.memory.close)
        drafter: Drafter | None
        if draft is None:
            drafter = ngram_drafter(config.speculation)
        else:
            drafter = draft.make_drafter(config, num_blocks)
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
        takes_guesses=config.scheduler.depth == 1,
        drafter=drafter,
    )
    num_tokens = num_blocks * block_size
    logger.info(
        "%s: %s, %.1fM parameters; attention: %s%s; KV pool: %d blocks, %d tokens, up to %.0f MiB "
        "as it fills; %d threads%s",
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
    )
    return executor


def find_draft(config: EngineConfig, info: ModelInfo) -> ModelInfo | None:
    """The model that makes guesses for that of `info`, if one is to. Raises `ConfigError`."""
    speculation = config.speculation
    if speculation.speculative_method != "draft":
        return None
    assert speculation.draft_model is not None, "EngineConfig.check_effects"
    settings = msgspec.structs.replace(
        config.model, model=speculation.draft_model, revision=None, max_model_len=None
    )
    if speculation.draft_model.endswith(".gguf"):  # served in the types that it has
        settings = msgspec.structs.replace(settings, quantization=None)
    own_length = ModelInfo(settings).max_model_len
    length = min(own_length, info.max_model_len)
    draft = ModelInfo(msgspec.structs.replace(settings, max_model_len=length))
    why_not = None
    if is_eagle(draft.source.known_config):
        return draft  # which has no tokenizer; what else must fit is seen when it is read
    if draft.vocab_size != info.vocab_size:
        why_not = f"{draft.vocab_size:,} tokens, not {info.vocab_size:,}"
    elif not config.model.skip_tokenizer_init:
        ours, theirs = (model.tokenizer.get_vocab() for model in (info, draft))
        if ours != theirs:
            token = min(ours.items() ^ theirs.items())[0]
            why_not = f"{token!r} is {theirs.get(token)} in it, and {ours.get(token)} here"
    if why_not is not None:
        raise ConfigError(
            f"speculation.draft_model {speculation.draft_model} has another vocabulary than "
            f"{config.model.model}: {why_not}"
        )
    return draft


class _Draft:
    """What makes guesses, and is loaded; its pool of blocks is not made yet."""

    def __init__(
        self,
        info: ModelInfo,
        spec: KVCacheSpec,
        more_bytes_per_token: int,
        make: Callable[..., Drafter],
    ) -> None:
        self._info, self._spec, self._make = info, spec, make
        self.bytes_per_token = spec.bytes_per_token + more_bytes_per_token

    def make_drafter(self, config: EngineConfig, num_blocks: int) -> Drafter:
        """With as many blocks as the served model has."""
        return self._make(
            create_attention_backend(self._spec, num_blocks, config.cache.block_size),
            ModelDraftLength(config.speculation.num_speculative_tokens),
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=self._info.max_model_len,
            max_step_tokens=config.scheduler.step_budget(self._info.max_model_len),
        )


def _load_draft(
    config: EngineConfig, info: ModelInfo, target: ServedModel, target_info: ModelInfo
) -> _Draft:
    """The model of `info`, or the head for `target`. Raises `ConfigError`."""
    stated = info.source.known_config
    if not is_eagle(stated):
        model = load_model_on_cpu(info.config, info)
        logger.info("drafts by %s, %.1fM parameters", model.name, model.num_parameters / 1e6)
        spec = with_kv_dtype(model.kv_cache_spec, config)
        return _Draft(info, spec, 0, partial(DraftModel, model))
    num_layers = len(target.attention_calls)
    layers = tapped_layers(stated, num_layers)
    if len(layers) != NUM_TAPS or not all(0 <= layer < num_layers for layer in layers):
        raise ConfigError(
            f"the EAGLE-3 head {info.source.path} looks at layers {layers}: three of the "
            f"{num_layers} of {target.name} are needed"
        )
    weights = read_eagle(info.source.path, target_info.hidden_size, target_info.vocab_size)
    taps = target.tap(layers)
    if taps is None:
        raise ConfigError(
            f"{target.name} does not tell of its layers, which an EAGLE-3 head needs: only fused "
            "models do (model.fused)"
        )
    dtype = target.kv_cache_spec.dtype
    head = EagleHead(*weights, taps.embedding, dtype, target_info.vocab_size)
    logger.info("drafts by an EAGLE-3 head, %.1fM parameters", head.num_parameters / 1e6)
    state_bytes = NUM_TAPS * head.target_size * dtype.itemsize
    spec = with_kv_dtype(head.kv_cache_spec, config)
    return _Draft(info, spec, state_bytes, partial(EagleDrafter, head, taps))


def load_model_on_cpu(config: ModelConfig, info: ModelInfo) -> ServedModel:
    """Load the weights of `info.source`. Raises `ConfigError`."""
    resolved = with_dtype(config)
    model = load_model(resolved, info, CpuPlace())
    is_right = model.is_compiled or machine.has_native_bf16() or resolved.dtype == "float32"
    if config.dtype != "auto" or is_right:
        return model
    logger.info("%s is loaded again, as float32: the CPU has no bfloat16 of its own", model.name)
    del model
    gc.collect()  # modules know each other
    return load_model(msgspec.structs.replace(config, dtype="float32"), info, CpuPlace())


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


def _check_memory(config: EngineConfig, info: ModelInfo, draft: ModelInfo | None) -> None:
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
    known = [size for size in per_token if size is not None]
    all_known = sum(known) if len(known) == len(per_token) else None
    check_memory(config, weights, all_known, info.max_model_len)


def _start_threads(count: int) -> list[int]:
    torch.set_num_threads(count)
    return compute_thread_ids(count)


def _fix_threads(count: int) -> tuple[int, ...]:
    torch.set_num_threads(count)
    return ()
