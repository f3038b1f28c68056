"""Which weights are quantized as a model is loaded, and whether that is how they are multiplied.

Knows settings, formats and modules; knows nothing about files or kernels.
"""

import logging
from typing import Any, NamedTuple

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.model_source.quantized import (
    has_quantized_layers,
    quantize_experts,
    quantize_linears,
    told_of_weights,
)
from aioserve.model_source.source import Rounding
from aioserve.runner.served_model import ServedModel

logger = logging.getLogger(__name__)


def rounding_of(config: ModelConfig) -> Rounding | None:
    """The rounding that `model.quantization` asks for: one scale for a group of inputs."""
    if config.quantization is None:
        return None
    group = config.quantization_group_size
    outer = "Q8_0" if group == 32 else f"int8/{group}"
    if config.quantization == "int8":
        return Rounding(outer, outer)
    return Rounding("Q4_0" if group == 32 else f"int4/{group}", outer)


def check_kernels(config: ModelConfig, *, keeps_blocks: bool) -> None:
    """Raise `ConfigError` where weights are to be quantized, and nothing multiplies with such."""
    if config.quantization is not None and not keeps_blocks:
        raise ConfigError(
            f"model.quantization is {config.quantization!r}, which needs the compiled kernels of a "
            "CPU and model.fused"
        )


class QuantizedLoad(NamedTuple):
    """What is quantized of a module that was loaded, before it is made a model that is served."""

    kinds: str  # of formats, in words
    num_bytes: int
    has_layers: bool

    @classmethod
    def of(cls, module: Any, rounding: Rounding | None) -> "QuantizedLoad":
        """Of a causal language model; what its source could not quantize weight by weight, as
        `transformers` puts it together of several ones, is quantized first.
        """
        if rounding is not None:
            quantize_linears(module, rounding)
            quantize_experts(module, rounding.inner)
        return cls(*told_of_weights(module), has_quantized_layers(module))

    def check(self, model: ServedModel, config: ModelConfig) -> None:
        """Say of `model`, which the module became, how its weights are multiplied. Raises
        `ConfigError` if layers were to be quantized and are not multiplied so.
        """
        if config.quantization is not None and not (self.has_layers and model.is_stored):
            raise ConfigError(
                f"model.quantization is {config.quantization!r}, but the compiled kernels do not "
                f"multiply with quantized layers of {model.name}: leave it out"
            )
        if self.kinds:
            logger.info(
                "%s: %.0f MB of weights, %s, %s",
                model.name,
                self.num_bytes / 1e6,
                self.kinds,
                "multiplied as they are stored"
                if model.is_stored
                else f"unpacked to {config.dtype}",
            )
