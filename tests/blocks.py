"""Random weights in the formats of GGUF."""

import torch

from aioserve.model_source.quantized import FORMATS, QuantizedWeight

# Bytes of a block where a float16 number lies, which may not be infinite or none.
HALVES = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def random_weight(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    """Bytes of any value; scales are from 2^-8 to 2^-7, of either sign."""
    per_block, num_bytes, _ = FORMATS[kind]
    generator = torch.Generator().manual_seed(outputs)
    shape = (outputs, inputs // per_block, num_bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for place in HALVES.get(kind, (0,)):
        data[..., place + 1] = data[..., place + 1] & 0x83 | 0x1C
    return QuantizedWeight(kind, data.flatten(1))
