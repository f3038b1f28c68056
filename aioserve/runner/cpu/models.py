"""Which models serve on this CPU: checked against memory and settings, read, and proved.

Brings `transformers`, whose import takes seconds: `load` asks here only for what has not been
prepared.
"""

import gc
import logging

import msgspec

from aioserve.config import EngineConfig, ModelConfig
from aioserve.model_info import ModelInfo
from aioserve.runner.attention.backend import SCALE_BYTES
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.encoder_attention import use_kernels
from aioserve.runner.cpu.fused import CpuPlace
from aioserve.runner.cpu.int8_activations import check_activations, quantize_activations
from aioserve.runner.cpu.memory import CPU_TYPES, check_memory, expected_bytes_per_token
from aioserve.runner.cpu.products import pack_linear
from aioserve.runner.loader import load_model, named_dtype, num_weight_bytes
from aioserve.runner.models.architecture import check_architecture
from aioserve.runner.multimodal.image_encoder import encoder_cache_bytes, sees_images
from aioserve.runner.served_model import ServedModel
from aioserve.runner.spec_decode.drafts import find_draft, load_draft
from aioserve.runner.spec_decode.model_drafter import Draft, DraftPlace, DraftSource
from aioserve.runner.tensor_parallel.group import Ranks, together
from aioserve.runner.tensor_parallel.plan import shares_heads

logger = logging.getLogger(__name__)


def load_models(
    config: EngineConfig, info: ModelInfo, ranks: Ranks | None
) -> tuple[ServedModel, Draft | None, int]:
    """Load the weights of `info`, and those of a draft model if there is to be one; with `ranks`
    the share of one of them. Beside both returns the bytes that outputs of an image encoder may
    take. Raises `ConfigError`.
    """
    with together(ranks):
        check_activations(info)
        check_architecture(info)
        source = find_draft(config, info)
        sees = sees_images(info)
        if ranks is None or ranks.is_first:
            _check_memory(config, info, source, 1 if ranks is None else ranks.size)
    num_seen = config.scheduler.step_budget(info.max_model_len) if sees else 0
    model = load_model_on_cpu(config.model, info, ranks, num_seen=num_seen)
    quantize_activations(model, config.model)
    use_kernels(model.image_encoder)
    place = DraftPlace(
        lambda info: load_model_on_cpu(info.config, info),
        lambda weight: pack_linear(weight, None),
        CpuPlace.device,
    )
    model, draft = load_draft(source, model, info, place, ranks)
    size = encoder_cache_bytes(config, info, model.kv_cache_spec.dtype, sees)
    return model, draft, size


def load_model_on_cpu(
    config: ModelConfig, info: ModelInfo, ranks: Ranks | None = None, *, num_seen: int = 0
) -> ServedModel:
    """Load a model on this CPU, as `load_model` does."""
    resolved = CPU_TYPES.resolve(config)
    model = load_model(resolved, info, CpuPlace(ranks), num_seen=num_seen)
    is_right = model.is_compiled or machine.has_native_bf16() or resolved.dtype == "float32"
    if config.dtype != "auto" or is_right:
        return model
    logger.info("%s is loaded again, as float32: the CPU has no bfloat16 of its own", model.name)
    del model
    gc.collect()  # modules know each other
    resolved = msgspec.structs.replace(config, dtype="float32")
    return load_model(resolved, info, CpuPlace(ranks), num_seen=num_seen)


def _check_memory(
    config: EngineConfig, info: ModelInfo, draft: DraftSource | None, num_ranks: int
) -> None:
    """Raises `ConfigError` if the weights of all ranks do not fit: they are on this machine."""
    weights, per_token = num_weight_bytes(CPU_TYPES.resolve(info.config), info, CpuPlace()), []
    if draft is not None and draft.has_files:
        weights += num_weight_bytes(CPU_TYPES.resolve(draft.info.config), draft.info, CpuPlace())
    for part in (info,) if draft is None else (info, draft):
        itemsize = named_dtype(CPU_TYPES.resolve(part.config).dtype).itemsize
        sizes = (1, SCALE_BYTES) if config.cache.kv_cache_dtype == "int8" else (itemsize, 0)
        per_token.append(expected_bytes_per_token(part.hf_config, *sizes))
        per_token.append(draft.num_states * itemsize if part is draft else 0)
    dtype = named_dtype(CPU_TYPES.resolve(info.config).dtype)
    if num_ranks > 1:
        weights += (num_ranks - 1) * info.vocab_size * info.hidden_size * dtype.itemsize  # on each
        if not shares_heads(info.hf_config):
            per_token = [None if size is None else size * num_ranks for size in per_token]
    known = [size for size in per_token if size is not None]
    all_known = sum(known) if len(known) == len(per_token) else None
    num_image_bytes = num_ranks * encoder_cache_bytes(config, info, dtype, sees_images(info))
    check_memory(config, weights, all_known, info.max_model_len, num_image_bytes)
