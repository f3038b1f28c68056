"""Images that are encoded over several steps: some layers of the encoder in each.

Knows where the layers of an encoder are, and how far each image has come. Knows no steps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.runner.multimodal.paused_call import PausedCall


class EncodingPieces:
    """The images that are half encoded, by content."""

    def __init__(self, module: Any) -> None:
        """`module` is the whole model without its text model."""
        self._begun: dict[str, PausedCall[Tensor]] = {}
        self._running: PausedCall[Tensor] | None = None
        layers = _layers_of(module)
        self._num_layers = len(layers)
        for layer in layers:
            layer.register_forward_pre_hook(self._before_layer)

    def __contains__(self, content: str) -> bool:
        return content in self._begun

    def advance(self, content: str, encode: Callable[[], Tensor], share: float) -> None:
        """Let `encode`, whose result is the rows of this content, go on until that `share` of it is
        done; at least, it begins.
        """
        if content not in self._begun:
            self._begun[content] = PausedCall(lambda: _inferred(encode))
        call = self._begun[content]
        with_layer = 1 + int(self._num_layers * share)  # the pause before the first is number 1
        self._run(call, lambda: call.advance(with_layer))

    def take(self, content: str) -> Tensor | None:
        """The rows of what has begun, once it is done; None if it has not begun. Raises what the
        encoder raises.
        """
        call = self._begun.pop(content, None)
        return None if call is None else self._run(call, call.finish)

    def drop(self, content: str) -> None:
        """Forget what has begun, if it has."""
        call = self._begun.pop(content, None)
        if call is not None:
            call.drop()

    def close(self) -> None:
        """Forget all that has begun."""
        for content in list(self._begun):
            self.drop(content)

    def _run(self, call: PausedCall[Tensor], go_on: Callable[[], Any]) -> Any:
        self._running = call
        try:
            return go_on()
        finally:
            self._running = None

    def _before_layer(self, *_: Any) -> None:
        if self._running is not None:
            self._running.pause()


@torch.inference_mode()
def _inferred(encode: Callable[[], Tensor]) -> Tensor:
    """On its own thread, which has modes of its own."""
    return encode()


def _layers_of(module: Any) -> list[nn.Module]:
    """The layers of the part that sees: the longest list of modules that hears nothing."""
    lists = [
        list(part)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and "audio" not in name
    ]
    return max(lists, key=len, default=[])
