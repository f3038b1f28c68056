"""The least time a forward pass can take on this machine: measured here, now, without our code.

A floor is the model's matrix products on packed weights, plus reading the KV cache once (or, for
long prompts, the arithmetic of attention at the rate of a large product). Where the CPU multiplies
no two-byte numbers, a product is reading its weights once, or its arithmetic at float32 rate.
Knows shapes from the model's configuration; knows nothing about aioserve's runner.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_HINT = 16  # of the packed layout; serves all numbers of rows
READ_BYTES = 512 << 20
# Products of one input are one product.
FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


class Time(NamedTuple):
    """Seconds: the median of some runs, and half of the distance between their quartiles."""

    median: float
    noise: float


def timed(run: Callable[[], object], repeats: int = 5, min_seconds: float = 0.2) -> Time:
    """At least `repeats` runs and so many seconds of them, after one that does not count."""
    run()
    return summary(samples(run, repeats, min_seconds))


def samples(
    run: Callable[[], object],
    repeats: int,
    min_seconds: float,
    at_most: int = 1000,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each run, by `clock`."""
    seconds: list[float] = []
    while len(seconds) < repeats or (sum(seconds) < min_seconds and len(seconds) < at_most):
        began = clock()
        run()
        seconds.append(clock() - began)
    return seconds


def summary(seconds: list[float]) -> Time:
    """Median and noise of at least two values."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return Time(median, (high - low) / 2)


class Shapes(NamedTuple):
    """What of a model takes time for certain."""

    products: list[tuple[int, int]]  # (outputs, inputs) of all layers, in order, without the head
    head: tuple[int, int]
    kv_bytes_per_token: int
    attention_flops: int  # per pair of a token and one in its past, all layers

    @classmethod
    def of(cls, config: object, dtype: torch.dtype) -> "Shapes":
        """From a `transformers` configuration, by building the model without memory."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        products: dict[tuple[str, str], tuple[int, int]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
                parent, _, leaf = name.rpartition(".")
                group = next((min(names) for names in FUSED if leaf in names), leaf)
                outputs = products.get((parent, group), (0, 0))[0] + module.out_features
                products[parent, group] = (outputs, module.in_features)
        head = model.get_output_embeddings().weight.shape
        text = config.get_text_config(decoder=True)  # type: ignore[attr-defined]
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        layers = text.num_hidden_layers
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return cls(
            list(products.values()),
            (head[0], head[1]),
            2 * layers * kv_heads * head_dim * dtype.itemsize,
            4 * layers * heads * head_dim,
        )


class Floors:
    """Measures what is asked for, once. Torch's number of threads is the caller's business."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, is_widened: bool) -> None:
        self.shapes = shapes
        self.is_widened = is_widened
        self._dtype = dtype
        self._rate_dtype = torch.float32 if is_widened else dtype
        if not is_widened:
            self._body = [
                packed_product(torch.randn(shape, dtype=dtype)) for shape in shapes.products
            ]
            self._head = packed_product(torch.randn(shapes.head, dtype=dtype))
        self._times: dict[tuple[bool, int], Time] = {}
        self.bandwidth = read_bandwidth(self._rate_dtype)  # bytes a second
        self.rate = _product_rate(self._rate_dtype)  # operations a second

    def linear(self, rows: int, sampled: int) -> Time:
        """All products of a step of so many tokens, of which so many need logits."""
        body = self._time(False, rows)
        head = self._time(True, sampled) if sampled else Time(0.0, 0.0)
        return Time(body.median + head.median, body.noise + head.noise)

    def attention(self, contexts: list[tuple[int, int]]) -> float:
        """Seconds for rows of (tokens in this step, tokens of context with those)."""
        read = sum(context for _, context in contexts) * self.shapes.kv_bytes_per_token
        pairs = sum(n * context - n * (n - 1) // 2 for n, context in contexts)
        return max(read / self.bandwidth, pairs * self.shapes.attention_flops / self.rate)

    def drift(self) -> float:
        """How much longer than at first the products of one row take now: 1 if nothing changed."""
        if self.is_widened:
            return self.bandwidth / read_bandwidth(self._rate_dtype)
        before = self._time(False, 1).median
        del self._times[False, 1]
        return self._time(False, 1).median / before

    def _time(self, is_head: bool, rows: int) -> Time:
        known = self._times.get((is_head, rows))
        if known is None and self.is_widened:
            shapes = [self.shapes.head] if is_head else self.shapes.products
            numbers = sum(outputs * inputs for outputs, inputs in shapes)
            read = numbers * self._dtype.itemsize / self.bandwidth
            known = Time(max(read, 2 * numbers * rows / self.rate), 0.0)
            self._times[is_head, rows] = known
        elif known is None:
            products = [self._head] if is_head else self._body
            inputs = {p.inputs: torch.randn(rows, p.inputs, dtype=self._dtype) for p in products}
            with torch.inference_mode():
                known = timed(lambda: [p.run(inputs[p.inputs]) for p in products])
            self._times[is_head, rows] = known
        return known


class Product(NamedTuple):
    inputs: int
    run: Callable[[Tensor], Tensor]


def packed_product(weight: Tensor) -> Product:
    """In oneDNN's own layout, where torch has it."""
    if not (torch.backends.mkldnn.is_available() and weight.dtype != torch.float16):
        return Product(weight.shape[1], lambda x: F.linear(x, weight))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    run = torch.ops.mkldnn._linear_pointwise.default
    return Product(weight.shape[1], lambda x: run(x, packed, None, "none", [], ""))


def _product_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """Operations a second of a product of two square matrices."""
    product = packed_product(torch.randn(size, size, dtype=dtype))
    rows = torch.randn(size, size, dtype=dtype)
    with torch.inference_mode():
        return 2 * size**3 / timed(lambda: product.run(rows)).median


def read_bandwidth(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second: the better of a product with one row and a sum over plain numbers."""
    outputs = READ_BYTES // (4096 * dtype.itemsize)
    product = packed_product(torch.randn(outputs, 4096, dtype=dtype))
    row = torch.randn(1, 4096, dtype=dtype)
    numbers = torch.ones(READ_BYTES // 4, dtype=torch.float32)
    with torch.inference_mode():
        runs: list[Callable[[], object]] = [lambda: product.run(row), numbers.sum]
        times = [samples(run, 6, 0.2, clock=clock)[1:] for run in runs]
    return READ_BYTES / min(summary(seconds).median for seconds in times)
