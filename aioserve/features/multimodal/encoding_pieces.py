"""Images that are encoded over several steps: some of the encoder's work in each.

What a layer costs by the size of an image is an estimate of products and attention alone, from
names in configurations of `transformers`. The encoder runs as a call that pauses, on a thread of
its own.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
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


# A call that runs in pieces: on a thread of its own, and only while another thread waits for it. So
# code of any kind can be stopped half-way, at places that call `pause`, and go on later. No two of
# the threads ever run at the same time. Knows nothing about what is called.


T = TypeVar("T")


class _DroppedError(BaseException):
    """Ends the thread of a call that is not wanted any more."""


class PausedCall(Generic[T]):
    """A paused call, to be ended by `finish` or by `drop`, as its thread waits until then."""

    def __init__(self, call: Callable[[], T]) -> None:
        """`call` has not begun yet. It may call `pause` of this object."""
        self._call = call
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._passed = 0.0  # of its work, at its last pause
        self._until: float | None = 0.0  # behind how much work it stops
        self._has_ended = self._is_dropped = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="aioserve-encoder", daemon=True)
        self._thread.start()

    def advance(self, work: float) -> None:
        """Let it run until it has come to a pause behind that much of its work, or has ended; not
        at all if it has come that far.
        """
        if not self._has_ended and self._passed < work:
            self._until = work
            self._resume()

    def finish(self) -> T:
        """Let it run to its end and return what it returns. Raises what it raises."""
        if not self._has_ended:
            self._until = None
            self._resume()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def drop(self) -> None:
        """End the call where it is, without a result."""
        if not self._has_ended:
            self._is_dropped = True
            self._resume()
        self._thread.join()

    def pause(self, work: float = 1.0) -> None:
        """Called by the call itself, or by what it calls: a place to stop, behind `work` since the
        last one. On another thread it does nothing.
        """
        if threading.current_thread() is not self._thread:
            return
        self._passed += work
        if self._until is not None and self._passed >= self._until:
            self._back.release()
            self._wait()

    def _resume(self) -> None:
        self._go.release()
        self._back.acquire()

    def _wait(self) -> None:
        self._go.acquire()
        if self._is_dropped:
            raise _DroppedError

    def _run(self) -> None:
        try:
            self._wait()
            self._result = self._call()
        except BaseException as error:  # told to the caller of `finish`
            self._error = error
        finally:
            self._has_ended = True
            self._back.release()


# Images that are encoded over several steps: some of the encoder's work in each. A layer is cut as
# well: its products and its attention are places to stop. Knows where the layers of an encoder are,
# and how far each image has come. Knows no steps.


# Between two places to stop: some 20 ms of one thread, and no fewer rows. Guesses.
MULTIPLICATIONS, LEAST_ROWS = 1 << 32, 64
CARD_FACTOR = 64  # by how much faster than a thread a card is, at the least: a guess

_here = threading.local()  # `begun`: what is encoded on this thread, in pieces


def rows_at_once(num_rows: int, per_row: int) -> int:
    """Return how many rows, each of that many multiplications, this thread computes between two
    places to stop: all of `num_rows` where nothing is to be stopped.
    """
    begun: _Begun | None = getattr(_here, "begun", None)
    if begun is None:
        return num_rows
    return min(num_rows, max(begun.factor * MULTIPLICATIONS // per_row, LEAST_ROWS))


def may_stop(multiplications: float) -> None:
    """A place to stop, after that much work of an image on a thread that encodes in pieces."""
    if (begun := getattr(_here, "begun", None)) is not None:
        begun.do(multiplications)


class EncodingPieces:
    """The images that are half encoded, by content."""

    def __init__(self, module: Any, *, is_on_card: bool = False) -> None:
        """`module` is the whole model without its text model."""
        #: Called first on the thread of each image, so that its work is on the stream of the steps.
        self.begin_thread: Callable[[], None] = lambda: None
        self._factor = CARD_FACTOR if is_on_card else 1
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
            self._begun[content] = _Begun(encode, self._costs, self._factor, self.begin_thread)
        self._begun[content].call.advance(1 + share)

    def take(self, content: str) -> Tensor | None:
        """Return the rows of what has begun, once it is done; None if it has not begun. Raises what
        the encoder raises.
        """
        begun = self._begun.pop(content, None)
        return None if begun is None else begun.call.finish()

    def drop(self, content: str) -> None:
        """Forget the encoding of an image, if it has begun."""
        begun = self._begun.pop(content, None)
        if begun is not None:
            begun.call.drop()

    def close(self) -> None:
        """Drop all images whose encoding has begun."""
        for content in list(self._begun):
            self.drop(content)


class _Begun:
    """An image on its way through the layers: 1 at the first one, and 2 behind the last."""

    def __init__(
        self,
        encode: Callable[[], Tensor],
        costs: LayerCosts,
        factor: int,
        begin_thread: Callable[[], None],
    ) -> None:
        self._encode, self._costs, self._begin_thread = encode, costs, begin_thread
        self.factor = factor  # to the multiplications between two places to stop
        self._begins: Sequence[float] = ()  # of layers, as shares of the work of all
        self._whole, self._done = 1.0, 0.0  # all work, in multiplications, and the share of it
        self.call = PausedCall(self._run)

    def enter(self, number: int, hidden: Tensor) -> None:
        """Note that a layer begins, with its input."""
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
        self._begin_thread()
        _here.begun = self
        return self._encode()


def _before_layer(number: int, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    begun = getattr(_here, "begun", None)
    hidden = args[0] if args else given.get("hidden_states")
    if begun is not None and isinstance(hidden, Tensor):
        begun.enter(number, hidden)


def _product(part: nn.Linear, x: Tensor) -> Tensor:
    """Return what `nn.Linear` computes; where it may be stopped, of some rows at a time."""
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
    """Return the layers of the part that sees: the longest list of modules that hears nothing."""
    lists = [
        list(part)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and "audio" not in name
    ]
    return max(lists, key=len, default=[])
