"""What enters some layers of a module of `transformers`, told by hooks, for an EAGLE-3 head.

Knows lists of decoder layers, each of which is given the hidden states of all tokens; knows nothing
about heads or drafts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.runner.attention.bridge import AttentionProbe, serving
from aioserve.runner.models.attention_probe import takes
from aioserve.runner.served_model import Taps

_NUM_TOKENS = 4


class TappedLayers:
    """Hooks on the layers that `taps` names, which note what enters them."""

    def __init__(self, layers: Sequence[nn.Module], taps: Taps) -> None:
        self.taps = taps
        self._entered: dict[int, Tensor] = {}
        self._handles = [
            layers[index].register_forward_pre_hook(self._noting(index), with_kwargs=True)
            for index in taps.layers
        ]

    @contextmanager
    def telling(self, slots: Tensor) -> Iterator[None]:
        """All layers are run in here, once, on tokens of these `slots` [T]."""
        yield
        self.taps.keep(slots, torch.stack([self._entered.pop(index) for index in self.taps.layers]))

    def are_told(self, module: nn.Module) -> bool:
        """Whether a pass of `module` gives each of the layers one state for each token."""
        weight = next(module.parameters())
        config: Any = module.config
        inputs = {"input_ids": torch.arange(_NUM_TOKENS, device=weight.device)[None]}
        if takes(module, "position_ids"):
            inputs["position_ids"] = inputs["input_ids"]
        with serving(AttentionProbe()):
            module(**inputs, use_cache=False)
        shapes = {tuple(self._entered.pop(index).shape) for index in self.taps.layers}
        return shapes == {(_NUM_TOKENS, config.hidden_size)}

    def close(self) -> None:
        """Take the hooks away: the layers tell of their inputs no longer."""
        for handle in self._handles:
            handle.remove()

    def _noting(self, index: int) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states: Tensor = args[0] if args else kwargs["hidden_states"]
            self._entered[index] = states[0].clone()  # a layer may add to it in its place

        return note


@torch.inference_mode()
def tap_layers(module: nn.Module, layers: Sequence[int]) -> TappedLayers | None:
    """Hooks on `layers` of a causal language model; None if it is not a list of such layers."""
    config: Any = module.config
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    found = [part for part in lists if len(part) == config.num_hidden_layers]
    if not found:
        return None
    tapped = TappedLayers(list(found[0]), Taps(tuple(layers)))
    try:
        are_told = tapped.are_told(module)
    except Exception:  # code of any kind of model
        are_told = False
    if not are_told:
        tapped.close()
    return tapped if are_told else None
