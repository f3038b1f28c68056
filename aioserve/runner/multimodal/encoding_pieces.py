"""Images that are encoded over several steps: some of the encoder's work in each.

A layer is cut as well: its products and its attention are places to stop. Knows where the layers of
an encoder are, and how far each image has come. Knows no steps.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.runner.multimodal.layer_costs import LayerCosts
from aioserve.runner.multimodal.paused_call import PausedCall

# Between two places to stop: some 20 ms of one thread, and no fewer rows. Guesses.
MULTIPLICATIONS, LEAST_ROWS = 1 << 32, 64

_here = threading.local()  # `begun`: what is encoded on this thread, in pieces


def rows_at_once(num_rows: int, per_row: int) -> int:
    """How many rows, each of that many multiplications, this thread computes between two places to
    stop: all of `num_rows` where nothing is to be stopped.
    """
    if getattr(_here, "begun", None) is None:
        return num_rows
    return min(num_rows, max(MULTIPLICATIONS // per_row, LEAST_ROWS))


def may_stop(multiplications: float) -> None:
    """A place to stop, after that much work of an image on a thread that encodes in pieces."""
    if (begun := getattr(_here, "begun", None)) is not None:
        begun.do(multiplications)


class EncodingPieces:
    """The images that are half encoded, by content."""

    def __init__(self, module: Any) -> None:
        """`module` is the whole model without its text model."""
        self._begun: dict[str, _Begun] = {}
        layers = _layers_of(module)
        self._costs = LayerCosts(layers, module.config.vision_config)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(_before_layer, number), with_kwargs=True)
            for part in layer.modules():
                if type(part) is nn.Linear:
                    part.forward = partial(_product, part)  # type: ignore[method-assign]

    def __contains__(self, content: str) -> bool:
        return content in self._begun

    def advance(self, content: str, encode: Callable[[], Tensor], share: float) -> None:
        """Let `encode`, whose result is the rows of this content, go on until about that `share` of
        it is done; at least, it begins.
        """
        if content not in self._begun:
            self._begun[content] = _Begun(encode, self._costs)
        self._begun[content].call.advance(1 + share)

    def take(self, content: str) -> Tensor | None:
        """The rows of what has begun, once it is done; None if it has not begun. Raises what the
        encoder raises.
        """
        begun = self._begun.pop(content, None)
        return None if begun is None else begun.call.finish()

    def drop(self, content: str) -> None:
        """Forget what has begun, if it has."""
        begun = self._begun.pop(content, None)
        if begun is not None:
            begun.call.drop()

    def close(self) -> None:
        """Forget all that has begun."""
        for content in list(self._begun):
            self.drop(content)


class _Begun:
    """An image on its way through the layers: 1 at the first one, and 2 behind the last."""

    def __init__(self, encode: Callable[[], Tensor], costs: LayerCosts) -> None:
        self._encode, self._costs = encode, costs
        self._begins: Sequence[float] = ()  # of layers, as shares of the work of all
        self._whole, self._done = 1.0, 0.0  # all work, in multiplications, and the share of it
        self.call = PausedCall(self._run)

    def enter(self, number: int, hidden: Tensor) -> None:
        """A layer begins, with its input."""
        if not self._begins:
            costs = self._costs.of(hidden)
            self._whole = sum(costs) or 1.0
            self._begins = [cost / self._whole for cost in accumulate(costs, initial=0.0)]
            self.call.pause()
        self._come_to(self._begins[number])

    def do(self, multiplications: float) -> None:
        """That much work of a layer has been done."""
        self._come_to(self._done + multiplications / self._whole)

    def _come_to(self, done: float) -> None:
        if done > self._done:
            work, self._done = done - self._done, done
            self.call.pause(work)

    @torch.inference_mode()
    def _run(self) -> Tensor:
        """On its own thread, which has modes of its own."""
        _here.begun = self
        return self._encode()


def _before_layer(number: int, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    begun = getattr(_here, "begun", None)
    hidden = args[0] if args else given.get("hidden_states")
    if begun is not None and isinstance(hidden, Tensor):
        begun.enter(number, hidden)


def _product(part: nn.Linear, x: Tensor) -> Tensor:
    """As `nn.Linear` computes it; where it may be stopped, of some rows at a time."""
    num_rows, per_row = x.numel() // x.shape[-1], part.in_features * part.out_features
    if (at_once := rows_at_once(num_rows, per_row)) == num_rows:
        made = F.linear(x, part.weight, part.bias)
        may_stop(num_rows * per_row)
        return made
    rows = x.reshape(num_rows, -1)
    out = x.new_empty(num_rows, part.out_features)
    for begin in range(0, num_rows, at_once):
        some = rows[begin : begin + at_once]
        out[begin : begin + at_once] = F.linear(some, part.weight, part.bias)
        may_stop(len(some) * per_row)
    return out.view(*x.shape[:-1], part.out_features)


def _layers_of(module: Any) -> list[nn.Module]:
    """The layers of the part that sees: the longest list of modules that hears nothing."""
    lists = [
        list(part)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and "audio" not in name
    ]
    return max(lists, key=len, default=[])
