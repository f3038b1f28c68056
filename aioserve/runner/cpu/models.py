"""Which models serve on this CPU: checked against memory and settings, read, and proved.

Brings `transformers`, whose import takes seconds: `load` asks here only for what has not been
prepared. `CpuPlace`, at the end, says which operations and decoder this machine has.
"""

import gc
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from aioserve.config import EngineConfig, ModelConfig
from aioserve.errors import ConfigError
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import family_of
from aioserve.runner.attention.backend import (
    SCALE_BYTES,
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    RowStates,
    StepInputs,
)
from aioserve.runner.batch.drafter import DRAFTERS, DraftPlace, FoundDraft, LoadedDraft
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.attention import CompiledAttention, create_attention_backend
from aioserve.runner.cpu.experts import CompiledExperts, CompiledMixture
from aioserve.runner.cpu.fused import CompiledOps, PackedOps, WholeDecoder
from aioserve.runner.cpu.kv_memory import CPU_TYPES, check_memory, expected_bytes_per_token
from aioserve.runner.cpu.onednn import pack_linear
from aioserve.runner.cpu.products import BlockLinear
from aioserve.runner.fused.decoder import (
    DecoderLayer,
    FusedDecoder,
    GatedMLP,
    Place,
    own_experts,
    own_product,
)
from aioserve.runner.fused.model import FusedModel
from aioserve.runner.fused.ops import Embedding, Linear, Mixture, Ops, RMSNorm
from aioserve.runner.loader import MODEL_PARTS, load_model, named_dtype, num_weight_bytes
from aioserve.runner.models.architecture import check_architecture
from aioserve.runner.models.own_products import EachExpert
from aioserve.runner.ranks import Ranks, together
from aioserve.runner.served_model import ServedModel
from aioserve.support.parts import load

logger = logging.getLogger(__name__)


def load_models(
    config: EngineConfig, info: ModelInfo, ranks: Ranks | None
) -> tuple[ServedModel, LoadedDraft | None, int]:
    """Load the weights of `info`, and those of a draft model if there is to be one; with `ranks`
    the share of one of them. Beside both returns the bytes that outputs of an image encoder may
    take. Raises `ConfigError`.
    """
    with together(ranks):
        check_activations(info)
        check_architecture(info)
        source: FoundDraft | None = None
        if config.speculation.drafts_by_model:
            source = DRAFTERS["find"](config, info)
        sees = _sees(info)
        if ranks is None or ranks.is_first:
            _check_memory(config, info, source, ranks)
    num_seen = config.scheduler.step_budget(info.max_model_len) if sees else 0
    model = load_model_on_cpu(config.model, info, ranks, num_seen=num_seen)
    quantize_activations(model, config.model)

    draft: LoadedDraft | None = None
    if source is not None:
        place = DraftPlace(
            lambda info: load_model_on_cpu(info.config, info),
            lambda weight: pack_linear(weight, None),
            CpuPlace.device,
        )
        model, draft = DRAFTERS["load"](source, model, info, place, ranks)
    size = _encoder_bytes(config, info, model.kv_cache_spec.dtype, sees=sees)
    return model, draft, size


def _sees(info: ModelInfo) -> bool:
    """Return whether the model sees, and what sees of it is served."""
    if family_of(info) is None:
        return False
    found: bool = MODEL_PARTS["sees"](info)
    return found


def _encoder_bytes(config: EngineConfig, info: ModelInfo, dtype: torch.dtype, *, sees: bool) -> int:
    """Return the bytes that outputs of the encoder may take, if the model `sees`."""
    num_bytes: int = MODEL_PARTS["encoder bytes"](config, info, dtype) if sees else 0
    return num_bytes


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
    config: EngineConfig, info: ModelInfo, draft: FoundDraft | None, ranks: Ranks | None
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
    num_ranks = 1
    if ranks is not None:
        num_ranks = ranks.size
        weights += (num_ranks - 1) * info.vocab_size * info.hidden_size * dtype.itemsize  # on each
        if not ranks.shares_heads(info.hf_config):
            per_token = [None if size is None else size * num_ranks for size in per_token]
    known = [size for size in per_token if size is not None]
    all_known = sum(known) if len(known) == len(per_token) else None
    num_image_bytes = num_ranks * _encoder_bytes(config, info, dtype, sees=_sees(info))
    check_memory(config, weights, all_known, info.max_model_len, num_image_bytes)


# Activations quantized to int8 in the products of a model: `--activations int8`. A model is proved
# with exact products, as any other; then they are told to quantize their rows. Knows which products
# there are; the kernels know how.


_SETTING = "model.activations is 'int8', which"
_HOW = (
    "add model.quantization int8 or int4 (--quantization), or take a model with quantized weights"
)


def check_activations(info: ModelInfo) -> None:
    """Raise `ConfigError` where it is plain before loading that activations cannot be quantized."""
    if info.config.activations is None:
        return
    try:
        load_kernels()
    except KernelsUnavailableError as error:
        raise ConfigError(f"{_SETTING} needs the compiled kernels of a CPU: {error}") from error
    if not info.config.fused:
        raise ConfigError(f"{_SETTING} needs model.fused: leave one of them out")
    is_quantized = (
        info.config.quantization is not None
        or info.source.path.suffix == ".gguf"  # seen when it is loaded
        or getattr(info.whole_config, "quantization_config", None)
    )
    if not is_quantized:
        raise ConfigError(f"{_SETTING} is for quantized weights, and those of "
                          f"{info.config.model} are not: {_HOW}")  # fmt: skip


def quantize_activations(model: ServedModel, config: ModelConfig) -> None:
    """From now on, if `config` asks for it, every product of `model` with a quantized weight
    quantizes its rows to int8. Raises `ConfigError` if there are no such products.
    """
    if config.activations is None:
        return
    products, mixtures = _computing(model)
    products += [linear for one in mixtures for linear in one.products]
    quantized = [linear for linear in products if isinstance(linear, BlockLinear)]
    if not quantized:
        raise ConfigError(
            f"{_SETTING} is for weights that stay quantized, and {model.name} has none: {_HOW}"
        )
    for linear in quantized:
        linear.quantize_rows()
    for one in mixtures:
        one.update()
    name = f"{model.name}, int8 activations"
    if isinstance(model, FusedModel):
        model.facts = msgspec.structs.replace(model.facts, name=name)
    model.name = name


def _computing(model: ServedModel) -> tuple[list[Any], list[Mixture]]:
    """Return the products of `model` outside of experts, and its experts. Raises `ConfigError`."""
    if not isinstance(model, FusedModel):
        mixtures: list[Mixture] = [
            one for one in model.own if isinstance(one, CompiledMixture | EachExpert)
        ]
        return [one for one in model.own if isinstance(one, BlockLinear)], mixtures
    if not isinstance(model.decoder, WholeDecoder):
        raise ConfigError(
            f"{_SETTING} needs a model that the compiled kernels serve whole, and {model.name} is "
            "none: leave it out"
        )
    found = [own_experts(layer.mlp) for layer in model.decoder.layers]
    experts: list[Mixture] = [one for one in found if isinstance(one, CompiledExperts)]
    return _products(model.decoder), experts


def _products(decoder: WholeDecoder) -> list[Any]:
    """Return all but those of experts."""
    products = [decoder.head]
    for layer in decoder.layers:
        products += (layer.qkv, layer.output)
        if isinstance(layer.mlp, GatedMLP):
            products += (layer.mlp.gate_up, layer.mlp.down)
    return [own_product(linear) for linear in products]


# This machine as a place where a model is loaded: which operations serve it, and which decoder.
# Knows no files and no model classes.


_MULTIPLE = 16  # numbers in a row


class CpuPlace(Place):
    """This machine, with or without compiled kernels."""

    device = torch.device("cpu")

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks

    @property
    def multiplies_blocks(self) -> bool:  # type: ignore[override]
        try:
            load_kernels()
        except KernelsUnavailableError:
            return False
        return True

    def available_memory(self) -> int:
        return machine.available_memory()

    def create_ops(self, spec: KVCacheSpec, row_sizes: set[int]) -> Ops:
        why_not = CompiledAttention.why_not(spec)
        for size in sorted(row_sizes):
            if why_not is None and size % _MULTIPLE:
                why_not = f"rows of {size} are not served, only multiples of {_MULTIPLE}"
        return PackedOps(why_not) if why_not else self.create_products()

    def create_products(self) -> Ops:
        try:
            return CompiledOps(load_kernels())
        except KernelsUnavailableError as error:
            return PackedOps(str(error))

    def begin_alone(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int, step: StepInputs
    ) -> tuple[ModelInputs, LayerAttention]:
        backend = create_attention_backend(spec, num_blocks, block_size)
        backend.prepare(step)
        return ModelInputs.of(step), backend

    def own_forward(
        self, module: nn.Module, known: Callable[[], Tensor | None]
    ) -> Callable[..., Any]:
        made: Callable[..., Any] = load("states on a cpu", "steps")(module, known)
        return made

    def create_row_states(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int
    ) -> RowStates | None:
        if self.ranks is not None:
            return None
        from aioserve.runner.cpu.torch_attention import PagedRows

        return PagedRows(spec, num_blocks, block_size)

    def create_whole_decoder(
        self,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        ops: Ops,
    ) -> FusedDecoder | None:
        if not WholeDecoder.serves(layers, head):
            return None
        return WholeDecoder(embedding, layers, norm, head, ops)
