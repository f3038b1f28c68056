"""The structs that the compiled decoder reads, field for field as in src/decoder.h and weight.h.

Knows layouts and addresses; the caller that fills them in keeps what they point to alive.
"""

import ctypes
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

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
