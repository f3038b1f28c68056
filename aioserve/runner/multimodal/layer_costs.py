"""What each layer of an image encoder costs, by the size of an image.

An estimate of products and attention alone. Knows names in configurations of `transformers`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class LayerCosts:
    """The costs of the layers of one image encoder."""

    def __init__(self, layers: Sequence[nn.Module], vision_config: Any) -> None:
        """`vision_config` says which layers have windows, if any have."""
        self._products = [
            sum(part.weight.numel() for part in layer.modules() if type(part) is nn.Linear)
            for layer in layers
        ]
        whole = getattr(vision_config, "fullatt_block_indexes", None)
        self._is_whole = [whole is None or number in whole for number in range(len(layers))]
        self._window = 0  # tokens of a window
        if whole is not None:
            self._window = (vision_config.window_size // vision_config.patch_size) ** 2

    def of(self, hidden: Tensor) -> list[float]:
        """Multiplications of each layer, whose input is [length, hidden] or [n, length, hidden]."""
        length, width = hidden.shape[-2:]
        num_rows = hidden.numel() // width
        costs = []
        for products, is_whole in zip(self._products, self._is_whole, strict=True):
            seen = length if is_whole else min(length, self._window)
            costs.append(float(num_rows * (products + 2 * seen * width)))
        return costs
