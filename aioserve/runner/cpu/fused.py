"""A fused decoder on the CPU: whole in one call into the kernels, or operation by operation.

Where a layer has a part that the one call does not know, each operation is a kernel, or torch on
packed weights. Knows the seams of `runner.fused`, and which sizes the kernels serve; knows nothing
about model classes.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aioserve.kernels import (
    AdapterStruct,
    AddUp,
    DecoderStruct,
    Kernels,
    LayerStruct,
    PackedWeight,
    StepStruct,
    check_ids,
    load_kernels,
)
from aioserve.kernels.tokens import LogitMaxima
from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.cpu.attention import CompiledAttention, Tables
from aioserve.runner.cpu.products import BlockEmbedding, BlockLinear, LogitsMemory, PanelLinear
from aioserve.runner.fused.decoder import (
    AllReduceLinear,
    DecoderLayer,
    FusedDecoder,
    GatedMLP,
    GatherToRank0,
    own_experts,
    own_product,
)
from aioserve.runner.fused.ops import (
    Activation,
    AttentionLayer,
    Embedding,
    ExpertActivation,
    Experts,
    ExpertWeights,
    Linear,
    Mixture,
    NotFusedError,
    Ops,
    PlainEmbedding,
    RMSNorm,
    Router,
    TorchOps,
)

if TYPE_CHECKING:  # what few models need is loaded where it is used
    from aioserve.model_source.quantized_weight import QuantizedWeight
    from aioserve.runner.adapters import DecoderAdapters
    from aioserve.runner.cpu.experts import CompiledExperts
    from aioserve.runner.ranks import Ranks

#: What the one call is told of adapters where no token has any: two arrays, and how many they have.
_NO_ADAPTERS: tuple[Any, ...] = ((AdapterStruct * 0)(), (AdapterStruct * 0)(), 0, 0)


class WholeDecoder(FusedDecoder):
    """`FusedDecoder` in one call; hidden states come from its loop, to the bit those in here."""

    def __init__(
        self,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        ops: Ops,
    ) -> None:
        """`serves` must be true of the arguments."""
        super().__init__(embedding, layers, norm, head, ops)
        self._kernels = load_kernels()
        self._attention: CompiledAttention | None = None  # whose caches are in the structs
        self._scratch = torch.empty(0, dtype=embedding.dtype)
        self._tapped = torch.empty(0, dtype=embedding.dtype)
        self._logits_memory = LogitsMemory()
        #: The last plain step and its struct: one whose tensors have other numbers has the same.
        self._last: tuple[ModelInputs | None, Tables | None, StepStruct] = None, None, StepStruct()
        output = layers[0].output
        self._sums = _Sums(output.ranks) if isinstance(output, AllReduceLinear) else None

    @cached_property
    def _adapters(self) -> "DecoderAdapters":
        """The adapters as the kernels take them, from the first step on that has some."""
        from aioserve.runner.adapters import make_decoder_adapters

        return make_decoder_adapters(len(self.layers))

    @staticmethod
    def serves(layers: list[DecoderLayer], head: Linear) -> bool:
        """Return whether all that these layers do is compiled."""
        return all(
            isinstance(linear, PanelLinear | BlockLinear) for linear in _products(layers, head)
        ) and all(
            layer.mlp.activation in ("silu", "gelu_tanh")
            if isinstance(layer.mlp, GatedMLP)
            else _are_compiled(own_experts(layer.mlp))
            for layer in layers
        )

    @property
    def alone_below(self) -> float:  # type: ignore[override]
        products = _products(self.layers, self.head)
        for layer in self.layers:
            if not isinstance(layer.mlp, GatedMLP):
                products += _compiled(layer.mlp).products
        blocks = [product for product in products if isinstance(product, BlockLinear)]
        return min((block.alone_below for block in blocks), default=math.inf)

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        assert isinstance(attention, CompiledAttention)
        tokens = inputs.adapters
        given = inputs.given is not None
        if inputs.given is not None and inputs.given.deep:
            return super().forward(inputs, attention)
        if tokens is not None and (given or not self._adapters.serves(tokens)):
            return super().forward(inputs, attention)
        check_ids(inputs.input_ids, self.embedding.shape[0])
        if self._attention is not attention:
            self._fill_in(attention)
        ids, table = inputs.input_ids, self._struct.embedding
        rows: Tensor | None = None
        if given:  # they are a table of their own, of this step
            rows = self.embedded(inputs)
            ids = torch.arange(len(rows))
        # `len` of a tensor is a function of Python
        num_tokens, num_sampling = inputs.input_ids.size(0), inputs.logits_rows.size(0)
        size = num_tokens * self._numbers_per_token
        if self._scratch.numel() < size:
            self._scratch = self._scratch.new_empty(size)
            if self._sums is not None:
                self._sums.scratch = self._scratch
        logits = self._logits_memory.take(num_sampling, self._head.outputs, self._num_maxima)
        adapters, self._head.maxima = _NO_ADAPTERS, None
        if tokens is not None:  # they may add to the logits
            adapters = self._adapters.structs(tokens, inputs.logits_adapters)
        elif self._num_maxima:
            self._head.maxima = LogitMaxima.attach(logits, self._kernels.noted).maxima
        taps = self.taps
        is_plain = tokens is None and rows is None and taps is None
        if is_plain and inputs is self._last[0] and attention.tables is self._last[1]:
            self._kernels.decode(self._struct, self._last[2], self._scratch, logits)
            return self._joined(logits)
        num_taps = 0 if taps is None else len(taps.layers)
        if num_taps:
            self._tapped = self._tapped.new_empty(num_taps, num_tokens, self.embedding.shape[1])
        tap_layers = (ctypes.c_int64 * num_taps)(*(taps.layers if taps is not None else ()))
        step = StepStruct(
            ids.data_ptr(),
            inputs.positions.data_ptr(),
            attention.tables.slots.data_ptr(),
            attention.query_start_loc.data_ptr(),
            attention.seq_lens.data_ptr(),
            inputs.logits_rows.data_ptr(),
            attention.tables.blocks.data_ptr(),
            attention.window_tables.slots.data_ptr(),
            attention.window_tables.blocks.data_ptr(),
            num_tokens,
            len(attention.seq_lens),
            attention.tables.blocks.shape[1],
            num_sampling,
            *adapters,
            ctypes.addressof(tap_layers),
            self._tapped.data_ptr(),
            num_taps,
        )
        if is_plain:
            self._last = inputs, attention.tables, step
        if rows is not None:
            self._struct.embedding = rows.data_ptr()
        try:
            self._kernels.decode(self._struct, step, self._scratch, logits)
        finally:  # the rows are gone after this
            self._struct.embedding = table
        if taps is not None:
            taps.keep(inputs.slots, self._tapped)
        return self._joined(logits)

    def _joined(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks."""
        if self._sums is not None:
            self._sums.check()
        return self.head.join(logits) if isinstance(self.head, GatherToRank0) else logits

    def _fill_in(self, attention: CompiledAttention) -> None:
        """The structs, with the caches of this attention."""
        table, layers = self.embedding, self.layers
        hidden = table.shape[1]
        products = [layer.qkv for layer in layers]
        products += [layer.mlp.gate_up for layer in layers if isinstance(layer.mlp, GatedMLP)]
        wide = max(_packed(product).outputs for product in products)
        self._structs = (LayerStruct * len(layers))(
            *(_layer_struct(layer, attention) for layer in layers)
        )
        self._struct = DecoderStruct(
            embedding=table.table.data_ptr() if isinstance(table, PlainEmbedding) else None,
            table=ctypes.pointer(table.packed) if isinstance(table, BlockEmbedding) else None,
            layers=ctypes.cast(self._structs, ctypes.POINTER(LayerStruct)),
            norm=self.norm.weight.data_ptr(),
            head=_packed(self.head),
            num_layers=len(layers),
            hidden=hidden,
            wide=wide,
            eps=self.norm.eps,
            add_up=AddUp() if self._sums is None else self._sums.add_up,
        )
        self._head = self._struct.head  # of the same memory
        #: Of a row of logits; 0 where the head notes none, or another rank has some of the logits.
        self._num_maxima = -(-self._head.outputs // self._kernels.noted)
        if self._head.bias or self._head.num_parts > 1 or isinstance(self.head, GatherToRank0):
            self._num_maxima = 0
        self._numbers_per_token = 2 * (hidden + wide)
        self._attention = attention


class _Sums:
    """The sums over all ranks that the one call asks for, twice in a layer."""

    def __init__(self, ranks: "Ranks") -> None:
        self.scratch = torch.empty(0)  # of the call: it asks for parts of it
        self._error: Exception | None = None

        def add_up(address: int, count: int) -> None:
            if self._error is not None:
                return  # it cannot be stopped; what it makes now is not used
            begin = (address - self.scratch.data_ptr()) // self.scratch.itemsize
            try:
                ranks.add_up(self.scratch[begin : begin + count])
            except Exception as error:
                self._error = error

        self.add_up = AddUp(add_up)

    def check(self) -> None:
        """Raise the error that a sum over ranks has raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _products(layers: list[DecoderLayer], head: Linear) -> list[object]:
    """Return the products of all but experts."""
    linears = [head]
    for layer in layers:
        linears += (layer.qkv, layer.output)
        if isinstance(layer.mlp, GatedMLP):
            linears += (layer.mlp.gate_up, layer.mlp.down)
    return [own_product(linear) for linear in linears]


def _are_compiled(experts: object) -> bool:
    from aioserve.runner.cpu.experts import CompiledExperts

    return isinstance(experts, CompiledExperts)


def _compiled(mlp: Any) -> "CompiledExperts":
    from aioserve.runner.cpu.experts import CompiledExperts

    experts = own_experts(mlp)
    assert isinstance(experts, CompiledExperts), "`serves`"
    return experts


def _packed(linear: Linear) -> PackedWeight:
    own = own_product(linear)
    assert isinstance(own, PanelLinear | BlockLinear)
    return own.packed


def _layer_struct(layer: DecoderLayer, caches: CompiledAttention) -> LayerStruct:
    attention, options = layer.attention, layer.attention.options
    query_norm, key_norm = attention.head_norms or (None, None)
    key_cache, mlp = caches.key_caches[attention.index], layer.mlp
    return LayerStruct(
        qkv=_packed(layer.qkv),
        output=_packed(layer.output),
        gate_up=_packed(mlp.gate_up) if isinstance(mlp, GatedMLP) else PackedWeight(),
        down=_packed(mlp.down) if isinstance(mlp, GatedMLP) else PackedWeight(),
        experts=None if isinstance(mlp, GatedMLP) else ctypes.pointer(_compiled(mlp).struct),
        input_norm=layer.input_norm.weight.data_ptr(),
        post_norm=layer.post_norm.weight.data_ptr(),
        q_norm=None if query_norm is None else query_norm.weight.data_ptr(),
        k_norm=None if key_norm is None else key_norm.weight.data_ptr(),
        cos_sin=attention.cos_sin.data_ptr(),
        sinks=None if options.sinks is None else options.sinks.data_ptr(),
        key_cache=key_cache.data_ptr(),
        value_cache=caches.value_caches[attention.index].data_ptr(),
        q_heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        block_size=key_cache.shape[2],
        window=options.sliding_window or 0,
        in_windows=attention.index in caches.window_layers,
        is_gelu=isinstance(mlp, GatedMLP) and mlp.activation == "gelu_tanh",
        is_int8=key_cache.dtype is torch.int8,
        in_bytes=caches.in_bytes,
        input_eps=layer.input_norm.eps,
        post_eps=layer.post_norm.eps,
        head_eps=0.0 if query_norm is None else query_norm.eps,
        scaling=options.scaling,
        softcap=options.softcap or 0.0,
    )


# A fused decoder's operations on the CPU: by our compiled kernels, or by torch on packed weights.
# Knows the seams of `runner.fused`, and which sizes the kernels serve; knows nothing about model
# classes.


class PackedOps(TorchOps):
    """Plain torch, on weights that are laid out once."""

    def __init__(self, why_not_compiled: str) -> None:
        """`why_not_compiled` says why these are no `CompiledOps`."""
        self._why_not_compiled = why_not_compiled

    def linear(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if out_dtype not in (None, weight.dtype):
            return super().linear(weight, bias, out_dtype)
        from aioserve.runner.cpu.onednn import pack_linear

        return pack_linear(weight, bias)

    def experts(
        self, router: Router, activation: ExpertActivation, weights: Iterable[ExpertWeights]
    ) -> Experts:
        reason = self._why_not_compiled
        raise NotFusedError(f"its experts are served by the kernels of a CPU alone: {reason}")


class CompiledOps(PackedOps):
    """Kernels, also for the products if there are some; one call per operation, nothing checked."""

    is_compiled = True
    low_rank = "kernels"

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if PanelLinear.serves(self._kernels, weight):
            return PanelLinear.of(self._kernels, weight, bias, out_dtype)
        return super().linear(weight, bias, out_dtype)

    def quantized_linear(
        self,
        weights: "Sequence[QuantizedWeight]",
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear | None:
        return BlockLinear.of(self._kernels, weights, bias, dtype, out_dtype)

    def experts(
        self, router: Router, activation: ExpertActivation, weights: Iterable[ExpertWeights]
    ) -> Experts:
        from aioserve.runner.cpu.experts import CompiledExperts

        if not CompiledExperts.serves(activation):
            raise NotFusedError(
                f"the activation {activation.name} of its experts is not served by the kernels"
            )
        return CompiledExperts(self._kernels, router, activation, weights)

    def mixture(
        self, activation: ExpertActivation, weights: Iterable[ExpertWeights], dtype: torch.dtype
    ) -> Mixture | None:
        from aioserve.runner.cpu.experts import CompiledMixture

        if not CompiledMixture.serves(activation):
            return None
        return CompiledMixture(self._kernels, activation, weights, dtype)

    def quantized_embedding(self, head: Linear, dtype: torch.dtype) -> Embedding | None:
        return BlockEmbedding(head, dtype) if isinstance(head, BlockLinear) else None

    def begin(self, inputs: ModelInputs, attention: LayerAttention) -> None:
        assert isinstance(attention, CompiledAttention)  # both are chosen by `why_not`
        self._compiled = attention
        self._positions = inputs.positions

    def rms_norm(self, x: Tensor, norm: RMSNorm, out: Tensor) -> None:
        self._kernels.rms_norm(x, norm.weight, norm.eps, out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: RMSNorm, out: Tensor) -> None:
        self._kernels.add_rms_norm(x, residual, norm.weight, norm.eps, out)

    def gate(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        if activation == "silu":
            self._kernels.silu_and_mul(x, out)
        elif activation == "gelu_tanh":
            self._kernels.gelu_tanh_and_mul(x, out)
        else:
            super().gate(x, activation, out)

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        backend, index = self._compiled, layer.index
        query_norm, key_norm = layer.head_norms or (None, None)
        self._kernels.rope_store(
            qkv,
            layer.cos_sin,
            self._positions,
            backend.tables_of(index).slots,
            backend.key_caches[index],
            backend.value_caches[index],
            layer.num_heads,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            0.0 if query_norm is None else query_norm.eps,
        )
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        attended = backend.attend(index, heads[:, : layer.num_heads], layer.options)
        return attended.view(len(qkv), -1)
