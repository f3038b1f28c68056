"""A causal language model of `transformers` in two: its body, and its head with all that follows.

The head is asked by way of the model's own code, as only that knows what becomes of its logits.
Knows modules; knows nothing about steps or requests.
"""

from typing import Any

import torch
from torch import Tensor, nn

from aioserve.runner.attention.bridge import AttentionProbe, serving


class BodyAndHead:
    """`body` then `logits` is the whole model, if `find_body_and_head` says so."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._body: nn.Module = module.base_model  # type: ignore[assignment]
        self._output_type: Any = None  # of the body

    def hidden(self, **inputs: Tensor) -> Tensor:
        """Hidden states [T, hidden] after the last norm, for inputs [1, T]."""
        output = self._body(**inputs, use_cache=False)
        self._output_type = type(output)
        states: Tensor = output.last_hidden_state[0]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of rows of such states."""
        output = self._output_type(last_hidden_state=hidden[None])
        nothing = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self._body.forward = lambda *args, **kwargs: output
        try:
            logits: Tensor = self._module(
                input_ids=nothing, position_ids=nothing, use_cache=False
            ).logits[0]
        finally:
            del self._body.forward
        return logits


@torch.inference_mode()
def find_body_and_head(module: nn.Module, **inputs: Tensor) -> BodyAndHead | None:
    """The two parts of `module`, shown on `inputs` [1, T]; None if it does not consist of them."""
    try:
        parts = BodyAndHead(module)
        with serving(AttentionProbe()):
            expected = module(**inputs, use_cache=False).logits[0]
        with serving(AttentionProbe()):
            hidden = parts.hidden(**inputs)
        found = parts.logits(hidden)  # calls for attention get no answer: there must be none
    except Exception:  # code of any kind of model
        return None
    return parts if torch.allclose(found, expected, equal_nan=True) else None
