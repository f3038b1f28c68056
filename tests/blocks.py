"""Random weights in the formats of `aioserve.features.quantized`."""

import torch

from aioserve.features.quantized import format_of, quantized_weight
from aioserve.model_source.quantized_weight import QuantizedWeight

# Bytes of a block where a float16 number lies, which may not be infinite or none.
_HALVES = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def random_weight(kind: str, outputs: int, inputs: int, scale: float = 1.0) -> QuantizedWeight:
    """Bytes of any value; scales are `scale` times 2^-8 to 2^-7, of either sign."""
    per_block, num_bytes, _ = format_of(kind)
    generator = torch.Generator().manual_seed(outputs)
    shape = (outputs, inputs // per_block, num_bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for place in _HALVES.get(kind, (0,)):
        numbers = torch.rand(shape[:2], generator=generator) * 3 - 1.5
        numbers = (numbers + numbers.sign() / 2) * scale * 2**-8
        data[..., place : place + 2] = numbers.half()[..., None].view(torch.uint8)
    return quantized_weight(kind, data.flatten(1))
