"""Settings of quantization: of weights as they are loaded, and of activations in their products."""

from typing import Annotated, Literal

from aioserve.config.section import Section, doc


class QuantizationConfig(Section, frozen=True, kw_only=True):
    """Quantization of weights and activations. Part of the section `model`."""

    quantization: Annotated[
        Literal["int8", "int4"] | None,
        doc(
            "quantize weights to int8 or int4 at load time (CPU kernels only; with int4, embedding "
            "and head are int8)"
        ),
    ] = None
    quantization_group_size: Annotated[
        Literal[32, 64, 128],
        doc(
            "group size of --quantization: inputs that share one scale; must divide the input size "
            "of every matrix"
        ),
    ] = 32
    activations: Annotated[
        Literal["int8"] | None,
        doc(
            "quantize activations to int8 in the products with quantized weights: faster, and "
            "answers may differ (CPU kernels only; default: activations are exact)"
        ),
    ] = None
