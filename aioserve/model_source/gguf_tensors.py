"""Tensors of a GGUF file: their bytes, and the numbers that these mean."""

from typing import Any

from aioserve.errors import ConfigError, one_line
from aioserve.model_source.gguf_header import Tensor

_PIECE = 1 << 20  # weights that are unpacked at a time


def read_bytes(tensor: Tensor) -> Any:
    """Its bytes, a numpy array."""
    import numpy as np

    return np.fromfile(tensor.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)


def unpack(tensor: Tensor) -> Any:
    """The weights of a tensor as float32, a numpy array of its shape. Raises `ConfigError` for a
    type that cannot be unpacked.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.type_id)
    row_bytes = tensor.num_bytes * tensor.shape[-1] // tensor.num_elements
    rows = read_bytes(tensor).reshape(-1, row_bytes)
    weights = np.empty((len(rows), tensor.shape[-1]), dtype=np.float32)
    step = max(1, _PIECE // tensor.shape[-1])  # `dequantize` takes several times what it returns
    try:
        for start in range(0, len(rows), step):
            piece = slice(start, start + step)
            weights[piece] = dequantize(rows[piece], kind)
    except NotImplementedError as error:
        raise ConfigError(
            f"{tensor.path}: tensor {tensor.name} is {kind.name}, which cannot be unpacked: "
            f"{one_line(error)}"
        ) from None
    return weights.reshape(tensor.shape)
