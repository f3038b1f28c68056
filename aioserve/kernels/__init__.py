"""Compiled kernels for the CPU: norms, rotary embedding, activations, attention, products.

Thin calls into C on torch tensors, without the GIL, on as many threads as the calling thread gave
torch, and the structs that the calls read. Knows shapes, layouts and pointers; knows nothing about
models, requests or steps. The environment variable AIOSERVE_KERNELS (off, or one of
`library.VARIANTS`) overrides the choice of instruction set.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels.library import (
    KernelsUnavailableError,
    choose_variant,
    compute_thread_ids,
    open_library,
    usable_variants,
)

__all__ = [
    "Kernels",
    "KernelsUnavailableError",
    "check_ids",
    "compute_thread_ids",
    "load_kernels",
    "usable_variants",
]

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@functools.cache
def load_kernels() -> "Kernels":
    """Return the kernels for this CPU, loaded once. Raises `KernelsUnavailableError`."""
    return Kernels(choose_variant())


def check_ids(ids: Tensor, count: int) -> None:
    """Raise `IndexError` unless all of `ids`, int64, are rows of a table of `count`: the kernels
    would read whatever lies beside it.
    """
    most = ids.numpy().view(np.uint64).max(initial=0)  # below 0, they are large there
    if most >= count:
        raise IndexError(f"token {most.astype(np.int64)} is outside the vocabulary of {count}")


# What the calls read, field for field as in src/decoder.h, weight.h, low_rank.h and experts.h. The
# caller that fills a struct in keeps what it points to alive.


#: Of an address and how many numbers lie there. What it raises is lost.
AddUp = ctypes.CFUNCTYPE(None, _P, _I)


class PanelShape(NamedTuple):
    """Layout of weights for one variant and type: [out / outputs, in / depth, outputs, depth]."""

    outputs: int
    depth: int


class BlockPart(ctypes.Structure):
    """Mirrors `block_part` of src/weight.h: outputs of a quantized weight, as 4- or 8-bit codes."""

    _fields_ = (
        ("panels", _P),
        *((name, _I) for name in ("outputs", "bits", "group", "per_super", "has_offset", "zero")),
        ("panel_bytes", _I),
    )


class PackedWeight(ctypes.Structure):
    """Mirrors `linear` of src/weight.h: a weight [outputs, inputs] in panels or quantized parts."""

    _fields_ = (
        *(("weight", _P), ("bias", _P), ("inputs", _I), ("outputs", _I)),
        *(("parts", ctypes.POINTER(BlockPart)), ("num_parts", _I)),
        *(("is_wide", ctypes.c_int32), ("is_int8", ctypes.c_int32)),
        ("maxima", _P),
    )


class LowRankPiece(ctypes.Structure):
    """Mirrors `low_rank_piece` of src/low_rank.h: B of a LoRA pair, and the outputs it adds to."""

    _fields_ = (
        ("b", _P),
        *((name, _I) for name in ("first", "rank", "column", "outputs")),
    )


class LowRankStruct(ctypes.Structure):
    """Mirrors `low_rank` of src/low_rank.h: A of a LoRA product, with up to 3 pieces of B."""

    _fields_ = (
        *(("a", _P), ("inputs", _I), ("ranks", _I)),
        *(("pieces", LowRankPiece * 3), ("num_pieces", _I)),
    )


class AdapterStruct(ctypes.Structure):
    """Mirrors `adapter_rows` of src/low_rank.h: a LoRA adapter's products, and its rows."""

    _fields_ = (
        *((name, ctypes.POINTER(LowRankStruct)) for name in ("products", "table")),
        *(("rows", _P), ("count", _I)),
    )


#: Activations of experts, in the order of C.
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")


class ExpertsStruct(ctypes.Structure):
    """Mirrors `experts` of src/experts.h: the router and experts of a mixture-of-experts layer."""

    _fields_ = (
        *(("router", PackedWeight), ("gate_up", ctypes.POINTER(PackedWeight))),
        *(("down", ctypes.POINTER(PackedWeight)), ("top_k", _I), ("of_all", _I)),
        *(("activation", _I), ("alpha", _F), ("limit", _F)),
    )


class LayerStruct(ctypes.Structure):
    """Mirrors `decoder_layer` of src/decoder.h: a layer's weights, norms, KV cache and sizes."""

    _fields_ = (
        *((name, PackedWeight) for name in ("qkv", "output", "gate_up", "down")),
        ("experts", ctypes.POINTER(ExpertsStruct)),
        *((name, _P) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, _P) for name in ("cos_sin", "sinks", "key_cache", "value_cache")),
        *((name, _I) for name in ("q_heads", "kv_heads", "head_dim", "block_size")),
        *((name, _I) for name in ("window", "in_windows", "is_gelu", "is_int8", "in_bytes")),
        *((name, _F) for name in ("input_eps", "post_eps", "head_eps", "scaling", "softcap")),
    )


class DecoderStruct(ctypes.Structure):
    """Mirrors `decoder` of src/decoder.h: embedding, layers, last norm and head of a model."""

    _fields_ = (
        ("embedding", _P),
        ("table", ctypes.POINTER(PackedWeight)),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("norm", _P),
        ("head", PackedWeight),
        *((name, _I) for name in ("num_layers", "hidden", "wide")),
        ("eps", _F),
        ("add_up", AddUp),
    )


class StepStruct(ctypes.Structure):
    """Mirrors `decoder_step` of src/decoder.h: tokens, block tables and adapters of one step."""

    _fields_ = (
        *((name, _P) for name in ("input_ids", "positions", "slots")),
        *((name, _P) for name in ("query_start_loc", "seq_lens", "sampling", "block_table")),
        *((name, _P) for name in ("window_slots", "window_table")),
        *((name, _I) for name in ("tokens", "rows", "table_width", "num_sampling")),
        *((name, ctypes.POINTER(AdapterStruct)) for name in ("adapters", "sampling_adapters")),
        *((name, _I) for name in ("num_adapters", "num_sampling_adapters")),
        *(("tap_layers", _P), ("taps", _P), ("num_taps", _I)),
    )


def pack_weight(weight: Tensor, shape: PanelShape) -> Tensor:
    """`weight` [out, in] in panels, with zeros after the last output. `in` is even."""
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // shape.outputs)
    whole = F.pad(weight, (0, 0, 0, num_panels * shape.outputs - num_outputs))
    panels = whole.view(num_panels, shape.outputs, num_inputs // shape.depth, shape.depth)
    return panels.transpose(1, 2).contiguous()


def pack_bias(bias: Tensor, shape: PanelShape) -> Tensor:
    """`bias` [out] with zeros after the last output, as many as the panels have."""
    return F.pad(bias, (0, -len(bias) % shape.outputs))


# The calls.


def _raise_shortage(status: int, function: Any, _: tuple[Any, ...]) -> None:
    """Raise if a kernel got no memory; ctypes calls this with its result: see memory.h."""
    if status:
        raise MemoryError(f"no memory for the intermediate numbers of {function.__name__}")


class Kernels:
    """One variant of the library.

    Nothing but ids is checked per call: tensors are contiguous unless said otherwise, of one dtype
    (float32, bfloat16 or float16; sums are float32), and rows have a multiple of 16 numbers.

    Attention, products, experts, `embed`, `add_low_rank` and `decode` raise `MemoryError` where the
    system gives them no memory: what they wrote is then worth nothing, and the next call is served.
    """

    dtypes = frozenset(_SUFFIXES)

    def __init__(self, variant: str) -> None:
        self.variant = variant
        library = open_library(variant)

        def by_dtype(name: str, *signature: Any) -> dict[torch.dtype, Any]:
            functions = {}
            for dtype, suffix in _SUFFIXES.items():
                function = functions[dtype] = library[f"{name}_{suffix}"]
                function.argtypes, function.restype = signature, None
            return functions

        def that_allocates(name: str, *signature: Any) -> dict[torch.dtype, Any]:
            functions = by_dtype(name, *signature)
            for function in functions.values():
                function.restype, function.errcheck = ctypes.c_int, _raise_shortage
            return functions

        self._rms_norm = by_dtype("rms_norm", _P, _P, _F, _P, _I, _I)
        self._add_rms_norm = by_dtype("add_rms_norm", _P, _P, _P, _F, _P, _I, _I)
        self._rope_store = by_dtype("rope_store", *[_P] * 6, *[_I] * 7, _P, _P, _F)
        self._store_kv = by_dtype("store_kv", _P, _I, _I, _P, _P, *[_I] * 5)
        self._silu_and_mul = by_dtype("silu_and_mul", _P, _P, _I, _I)
        self._gelu_tanh_and_mul = by_dtype("gelu_tanh_and_mul", _P, _P, _I, _I)
        attention = (_P, _I, _I, *[_P] * 4, _I, _P, _P, *[_I] * 6, _F, _I, _F, _P, _P)
        self._paged_attention = that_allocates("paged_attention", *attention)
        self._paged_attention_int8 = that_allocates("paged_attention_int8", *attention)
        self._paged_attention_bytes = that_allocates("paged_attention_bytes", *attention)
        self._route = that_allocates("route", _P, _P, _P, _P, _I)
        self._mix = that_allocates("mix", *[_P] * 5, _I)
        self._linear = that_allocates("linear", _P, _P, _P, _I)
        self._embed = that_allocates("embed", _P, _P, _P, _I)
        self._decode = that_allocates("decode", _P, _P, _P, _P)
        self._add_low_rank = that_allocates("add_low_rank", _P, _I, _I, _P, _P, _P, _I, _I)
        #: Numbers of a vector: how `add_low_rank` wants the first factors.
        self.lanes = _I.in_dll(library, "lanes").value
        #: Outputs of which a product notes the largest, where a `PackedWeight` has `maxima`.
        self.noted = 2 * self.lanes
        #: How `linear` and `decode` want weights; those in blocks are as many outputs wide.
        self.panel_shapes = {
            dtype: PanelShape(*(_I * 2).in_dll(library, f"panel_{suffix}"))
            for dtype, suffix in _SUFFIXES.items()
        }
        #: Rows in bfloat16 from which on weights in blocks become bfloat16 in their products, and
        #: rows are not quantized.
        self.rounded_from = _I.in_dll(library, "rounded_from").value
        #: Whether products of two-byte numbers are faster than those of float32 by other means.
        self.is_fast = bool(_I.in_dll(library, "has_multiply_add").value)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """`out` = `x` / rms(`x`) * `weight`, per row. `out` may be `x`."""
        n = weight.shape[0]
        self._rms_norm[x.dtype](
            x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.numel() // n, n
        )

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """`residual` += `x`, then `out` = its norm. `out` may be `x`."""
        n = weight.shape[0]
        self._add_rms_norm[x.dtype](
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            x.numel() // n,
            n,
        )

    def rope_store(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Rotate Q and K in place, and store K and V in the cache (not finite becomes 0).

        `qkv` [T, Hq * Dk + Hkv * (Dk + Dv)]. `cos_sin` float32 [positions, Dk]: Dk / 2 cosines,
        then as many sines, for the two halves of a head. `positions` and `slots` int64 [T].
        Caches [num_blocks, Hkv, block_size, D] of the type of `qkv`, or int8 [..., D + 4]: codes
        of a token and head, then their scale as the bytes of a float32. `q_norm` and `k_norm`
        [Dk]: weights of an RMS norm per head before the rotation, both or neither.
        """
        _, num_kv_heads, block_size, _ = key_cache.shape
        key_dim = cos_sin.shape[1]
        self._rope_store[qkv.dtype](
            qkv.data_ptr(),
            cos_sin.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            qkv.shape[0],
            num_heads,
            num_kv_heads,
            key_dim,
            qkv.shape[1] // num_kv_heads - key_dim * (num_heads // num_kv_heads + 1),
            block_size,
            key_cache.dtype is torch.int8,
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
        )

    def store_kv(self, x: Tensor, slots: Tensor, cache: Tensor) -> None:
        """K or V `x` [T, Hkv, D], any strides but the last, into the cache as `rope_store` does."""
        tokens, num_kv_heads, head_dim = x.shape
        token_stride, head_stride, _ = x.stride()
        self._store_kv[x.dtype](
            x.data_ptr(),
            token_stride,
            head_stride,
            slots.data_ptr(),
            cache.data_ptr(),
            tokens,
            num_kv_heads,
            head_dim,
            cache.shape[2],
            cache.dtype is torch.int8,
        )

    def silu_and_mul(self, x: Tensor, out: Tensor) -> None:
        """`x` [T, 2 * I] holds gates, then factors: `out` [T, I] = silu(gate) * factor."""
        tokens, n = out.shape
        self._silu_and_mul[x.dtype](x.data_ptr(), out.data_ptr(), tokens, n)

    def gelu_tanh_and_mul(self, x: Tensor, out: Tensor) -> None:
        """As `silu_and_mul`, `out` = gelu(gate) * factor, with gelu in its tanh form."""
        tokens, n = out.shape
        self._gelu_tanh_and_mul[x.dtype](x.data_ptr(), out.data_ptr(), tokens, n)

    def route(self, experts: ExpertsStruct, x: Tensor, chosen: Tensor, shares: Tensor) -> None:
        """The experts of each row of `x` [T, inputs]: `chosen` int32 and `shares` float32 [T, k],
        largest first. Where a logit is not finite, the shares of the row are NaN.
        """
        self._route[x.dtype](
            ctypes.byref(experts), x.data_ptr(), chosen.data_ptr(), shares.data_ptr(), x.shape[0]
        )

    def mix(
        self, experts: ExpertsStruct, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor
    ) -> None:
        """`out` [T, inputs] = what the `chosen` experts of each row of `x` make of it, times their
        `shares`, added up. A row's result depends neither on other rows nor on threads.
        """
        self._mix[x.dtype](
            ctypes.byref(experts),
            chosen.data_ptr(),
            shares.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            x.shape[0],
        )

    def linear(self, weight: PackedWeight, x: Tensor, out: Tensor) -> None:
        """`out` [T, outputs] = `x` [T, inputs] @ weight.T + bias, all packed for the type of `x`.

        `out` is of the type of `x`; of a weight that `is_wide`, float32: the sums as they are. A
        row's result does not depend on the other rows or on the number of threads.
        """
        self._linear[x.dtype](ctypes.byref(weight), x.data_ptr(), out.data_ptr(), x.shape[0])

    def embed(self, table: PackedWeight, ids: Tensor, out: Tensor) -> None:
        """`out` [T, inputs]: the outputs `ids` int64 [T] of a weight in blocks. Raises `IndexError`
        for an id outside the table.
        """
        check_ids(ids, table.outputs)
        self._embed[out.dtype](ctypes.byref(table), ids.data_ptr(), out.data_ptr(), ids.numel())

    def add_low_rank(
        self, adapter: AdapterStruct, x: Tensor | None, ids: Tensor | None, out: Tensor
    ) -> None:
        """`out` [T, outputs] += what the first product of `adapter` makes of its rows of `x`
        [T, inputs]; or its table, of `ids` int64 [T]. `out` is of the type of `x`, or float32.
        """
        dtype = out.dtype if x is None else x.dtype
        self._add_low_rank[dtype](
            ctypes.byref(adapter),
            1,
            0,
            None if x is None else x.data_ptr(),
            None if ids is None else ids.data_ptr(),
            out.data_ptr(),
            out.shape[1],
            out.dtype is not dtype,
        )

    def decode(
        self, decoder: DecoderStruct, step: StepStruct, scratch: Tensor, logits: Tensor
    ) -> None:
        """A whole forward pass: `logits` [S, V] of the tokens that sample, float32 if the head
        `is_wide`. Fills the KV cache. Its ids are the caller's to check, by `check_ids`.

        `scratch` has room for `tokens` times twice `hidden` and `wide` numbers.
        """
        self._decode[scratch.dtype](
            ctypes.byref(decoder), ctypes.byref(step), scratch.data_ptr(), logits.data_ptr()
        )

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        ends: Tensor | None = None,
        in_bytes: bool = False,
    ) -> None:
        """Attention of the last tokens of R rows to all of their past, which is in the cache.

        `query` [T, Hq, Dk], any strides but the last; `out` [T, Hq, Dv]. Caches as `rope_store`
        fills them, finite where a row has tokens and never read elsewhere. `block_table` int32 [R,
        W], `query_start_loc` int64 [R + 1], `seq_lens` int64 [R]; `sinks` float32 [Hq]. The options
        are those of `AttentionOptions`, `scaling` > 0; of window and chunk there may be one. `ends`
        int64 [T], up to `seq_lens`: behind the last position that a token sees, if not its own;
        never less than for the token before it in its row. A token's result does not depend on the
        other rows or on the number of threads.

        `in_bytes`, of int8 caches: queries are rounded to int8, with one scale per token and head,
        and weights, times the scales of their values, to 8 bits, with one scale per 32 positions;
        products are exact sums of whole numbers. But not, in bfloat16 where AMX multiplies, of rows
        of more than 16 new tokens: those are faster without.
        """
        _, num_heads, key_dim = query.shape
        token_stride, head_stride, _ = query.stride()
        _, num_kv_heads, block_size, _ = value_cache.shape
        by_dtype = self._paged_attention
        if key_cache.dtype is torch.int8:
            by_dtype = self._paged_attention_bytes if in_bytes else self._paged_attention_int8
        by_dtype[query.dtype](
            query.data_ptr(),
            token_stride,
            head_stride,
            out.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            block_table.data_ptr(),
            block_table.shape[1],
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            seq_lens.shape[0],
            num_heads,
            num_kv_heads,
            key_dim,
            out.shape[2],
            block_size,
            scaling,
            sliding_window or -(chunk or 0),
            softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
            None if ends is None else ends.data_ptr(),
        )
