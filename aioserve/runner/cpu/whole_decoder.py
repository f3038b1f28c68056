"""A decoder whose forward pass is one call into the compiled kernels.

What Python does between the operations of a small model takes longer than they do, and needs the
GIL, which the event loop holds whenever it has work. Knows which addresses go where.
"""

import ctypes
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from aioserve.kernels import check_ids, load_kernels
from aioserve.kernels.structs import (
    AdapterStruct,
    AddUp,
    DecoderStruct,
    LayerStruct,
    PackedWeight,
    StepStruct,
)
from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.cpu.blocks import BlockEmbedding, BlockLinear
from aioserve.runner.cpu.compiled_attention import CompiledAttention
from aioserve.runner.cpu.experts import CompiledExperts
from aioserve.runner.cpu.logits_memory import LogitsMemory
from aioserve.runner.cpu.low_rank import CompiledAdapter
from aioserve.runner.cpu.panels import PanelLinear
from aioserve.runner.fused.decoder import HEAD, DecoderLayer, FusedDecoder, GatedMLP, LayerProduct
from aioserve.runner.fused.ops import Embedding, Linear, Ops, PlainEmbedding, RMSNorm
from aioserve.runner.fused.shares import AllReduceLinear, GatherToRank0, own_experts, own_product
from aioserve.runner.low_rank import Adapter, TokenAdapters
from aioserve.runner.tensor_parallel.group import Ranks


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
        output = layers[0].output
        self._sums = _Sums(output.ranks) if isinstance(output, AllReduceLinear) else None
        # Gone with their adapters.
        self._compiled_adapters = WeakKeyDictionary[Adapter, CompiledAdapter]()

    @staticmethod
    def serves(layers: list[DecoderLayer], head: Linear) -> bool:
        """Whether all that these layers do is compiled."""
        linears = [head]
        for layer in layers:
            linears += (layer.qkv, layer.output)
            if isinstance(layer.mlp, GatedMLP):
                linears += (layer.mlp.gate_up, layer.mlp.down)
        return all(
            isinstance(own_product(linear), PanelLinear | BlockLinear) for linear in linears
        ) and all(
            layer.mlp.activation in ("silu", "gelu_tanh")
            if isinstance(layer.mlp, GatedMLP)
            else isinstance(own_experts(layer.mlp), CompiledExperts)
            for layer in layers
        )

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        assert isinstance(attention, CompiledAttention)
        tokens = inputs.adapters
        given = inputs.given is not None
        if inputs.given is not None and inputs.given.deep:
            return super().forward(inputs, attention)
        if tokens is not None and (
            given or not all(CompiledAdapter.serves(a) for a, _ in tokens.groups)
        ):
            return super().forward(inputs, attention)
        check_ids(inputs.input_ids, self.embedding.shape[0])
        if self._attention is not attention:
            self._fill_in(attention)
        ids, table = inputs.input_ids, self._struct.embedding
        rows: Tensor | None = None
        if given:  # they are a table of their own, of this step
            rows = self.embedded(inputs)
            ids = torch.arange(len(rows))
        num_tokens, num_sampling = len(inputs.input_ids), len(inputs.logits_rows)
        size = num_tokens * self._numbers_per_token
        if self._scratch.numel() < size:
            self._scratch = self._scratch.new_empty(size)
            if self._sums is not None:
                self._sums.scratch = self._scratch
        logits = self._logits_memory.take(num_sampling, self._struct.head.outputs)
        taps = self.taps
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
            *self._adapters(tokens, inputs.logits_adapters),
            ctypes.addressof(tap_layers),
            self._tapped.data_ptr(),
            num_taps,
        )
        if rows is not None:
            self._struct.embedding = rows.data_ptr()
        try:
            self._kernels.decode(self._struct, step, self._scratch, logits)
        finally:  # the rows are gone after this
            self._struct.embedding = table
        if taps is not None:
            taps.keep(inputs.slots, self._tapped)
        if self._sums is not None:
            self._sums.check()
        return self.head.join(logits) if isinstance(self.head, GatherToRank0) else logits

    def _adapters(self, *rows: TokenAdapters | None) -> tuple[Any, ...]:
        """The groups of each, then their numbers."""
        structs = [
            [self._compiled(adapter).of(own) for adapter, own in (one.groups if one else ())]
            for one in rows
        ]
        arrays = [(AdapterStruct * len(own))(*own) for own in structs]
        return (*arrays, *map(len, arrays))

    def _compiled(self, adapter: Adapter) -> CompiledAdapter:
        found = self._compiled_adapters.get(adapter)
        if found is None:
            places = [(i, name) for i in range(len(self.layers)) for name in get_args(LayerProduct)]
            found = self._compiled_adapters[adapter] = CompiledAdapter(adapter, [*places, HEAD])
        return found

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
        self._numbers_per_token = 2 * (hidden + wide)
        self._attention = attention


class _Sums:
    """The sums over all ranks that the one call asks for, twice in a layer."""

    def __init__(self, ranks: Ranks) -> None:
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
        """Raise what a sum has raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _packed(linear: Linear) -> PackedWeight:
    own = own_product(linear)
    assert isinstance(own, PanelLinear | BlockLinear)
    return own.packed


def _layer_struct(layer: DecoderLayer, caches: CompiledAttention) -> LayerStruct:
    attention, options = layer.attention, layer.attention.options
    query_norm, key_norm = attention.head_norms or (None, None)
    key_cache, mlp = caches.key_caches[attention.index], own_experts(layer.mlp)
    return LayerStruct(
        qkv=_packed(layer.qkv),
        output=_packed(layer.output),
        gate_up=_packed(mlp.gate_up) if isinstance(mlp, GatedMLP) else PackedWeight(),
        down=_packed(mlp.down) if isinstance(mlp, GatedMLP) else PackedWeight(),
        experts=ctypes.pointer(mlp.struct) if isinstance(mlp, CompiledExperts) else None,
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
        input_eps=layer.input_norm.eps,
        post_eps=layer.post_norm.eps,
        head_eps=0.0 if query_norm is None else query_norm.eps,
        scaling=options.scaling,
        softcap=options.softcap or 0.0,
    )
