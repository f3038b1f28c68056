"""Models whose inputs lie on a device.

Knows how modules of `transformers` are called; knows nothing about steps.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from aioserve.runner.attention.backend import LayerAttention
from aioserve.runner.attention.bridge import PagedAttentionHandler, serving


class DeviceModel(ABC):
    """Weights on a device."""

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor, attention: LayerAttention
    ) -> Tensor:
        """Logits [S, V] of the tokens `logits_rows` [S]; all int64, of T tokens."""


class TransformersModel(DeviceModel):
    """Modules of `transformers` as they are."""

    def __init__(
        self, module: nn.Module, attention_modules: list[nn.Module], takes_logits_to_keep: bool
    ) -> None:
        self._module = module
        self._attention_modules = attention_modules
        self._takes_logits_to_keep = takes_logits_to_keep

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor, attention: LayerAttention
    ) -> Tensor:
        arguments: dict[str, Any] = {
            "input_ids": input_ids[None],
            "position_ids": positions[None],
            "use_cache": False,
        }
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = logits_rows
        with serving(PagedAttentionHandler(self._attention_modules, attention)):
            logits: Tensor = self._module(**arguments).logits[0]
        return logits if self._takes_logits_to_keep else logits[logits_rows]
