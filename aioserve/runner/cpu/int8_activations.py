"""Activations quantized to int8 in the products of a model: `--activations int8`.

A model is proved with exact products, as any other; then they are told to quantize their rows.
Knows which products there are; the kernels know how.
"""

from typing import Any

import msgspec

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.model_info import ModelInfo
from aioserve.runner.cpu.experts import CompiledExperts, CompiledMixture
from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.cpu.products import BlockLinear
from aioserve.runner.fused.decoder import GatedMLP, own_experts, own_product
from aioserve.runner.fused.model import FusedModel
from aioserve.runner.fused.ops import Mixture
from aioserve.runner.models.own_products import EachExpert
from aioserve.runner.served_model import ServedModel

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
    """The products of `model` outside of experts, and its experts. Raises `ConfigError`."""
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
    """All but those of experts."""
    products = [decoder.head]
    for layer in decoder.layers:
        products += (layer.qkv, layer.output)
        if isinstance(layer.mlp, GatedMLP):
            products += (layer.mlp.gate_up, layer.mlp.down)
    return [own_product(linear) for linear in products]
