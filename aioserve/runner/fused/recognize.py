"""Finds the parts of a Llama-like decoder in a tree of `transformers` modules, by structure.

What has one part more, or one of another kind, is not Llama-like, whatever its class is called.
Whether the parts are used as Llama uses them is for `proof` to show.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.runner.fused.experts import ExpertParts, find_experts
from aioserve.runner.fused.ops import Activation, AttentionLayer, RMSNorm
from aioserve.runner.fused.structure import NotFusedError, child, expect, find_activation

if TYPE_CHECKING:  # it brings `transformers`, which takes seconds
    from aioserve.runner.attention.bridge import AttentionProbe

_ROPE_CHUNK = 4096  # positions: bounds what a table needs beside itself


@dataclass(frozen=True, slots=True)
class GatedParts:
    """The modules of a dense layer."""

    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear
    activation: Activation

    @property
    def inner_size(self) -> int:
        return self.down.in_features


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The modules of one decoder layer, and how its attention goes."""

    module: nn.Module
    qkv: tuple[nn.Linear, ...]
    output: nn.Linear
    mlp: GatedParts | ExpertParts
    input_norm: RMSNorm
    post_norm: RMSNorm
    attention: AttentionLayer


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The modules of a decoder."""

    embedding: nn.Embedding
    layers: list[LayerParts]
    norm: RMSNorm
    head: nn.Linear
    own_turns: "MRoPERows | None" = None

    @property
    def row_sizes(self) -> set[int]:
        """Numbers in a row that is normalized or gated."""
        return {len(self.norm.weight)} | {layer.mlp.inner_size for layer in self.layers}


class MRoPERows:
    """3-axis rotary positions (M-RoPE) of image tokens: cos/sin rows behind the ordinary ones."""

    def __init__(self, rotary: nn.Module, table: Tensor, num_positions: int) -> None:
        """`table` is the `cos_sin` of all layers; what is behind `num_positions` rows is spare."""
        self._rotary, self._table, self._first = rotary, table, num_positions

    def place(self, axes: Tensor) -> Tensor:
        """Rows [N] of the table by which N tokens turn, `axes` [3, N]; until it is called again."""
        cos, sin = self._rotary(self._table.new_empty(1), axes[:, None])
        end, half = self._first + axes.shape[1], cos.shape[-1] // 2
        self._table[self._first : end] = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
        return torch.arange(self._first, end)


def find_parts(
    module: nn.Module, probe: "AttentionProbe", max_model_len: int, num_mrope_tokens: int = 0
) -> DecoderParts:
    """The parts of a causal language model; `num_mrope_tokens` of a step may turn by axes.
    Raises `NotFusedError`.
    """
    head = child(module, "lm_head", nn.Linear)
    decoders = [part for name, part in module.named_children() if name != "lm_head"]
    if len(decoders) != 1:
        raise NotFusedError(f"{type(module).__name__} is not one decoder and a head")
    decoder: Any = decoders[0]
    expect(decoder, {"embed_tokens", "layers", "norm", "rotary_emb"})
    layers = list(child(decoder, "layers", nn.ModuleList))
    head_dim = probe.spec(torch.float32).layers[0].key_head_dim
    turning = _cos_sin(decoder.rotary_emb, max_model_len, head_dim)
    own_turns = None
    if num_mrope_tokens:
        turning = torch.cat((turning, turning.new_zeros(num_mrope_tokens, turning.shape[1])))
        own_turns = MRoPERows(decoder.rotary_emb, turning, max_model_len)
    still = turning
    if not all(_turns(layer) for layer in layers):
        half = turning.shape[1] // 2
        still = torch.cat(
            (torch.ones_like(turning[:, :half]), torch.zeros_like(turning[:, half:])), 1
        )
    return DecoderParts(
        embedding=child(decoder, "embed_tokens", nn.Embedding),
        layers=[
            _layer_parts(layer, i, probe, turning if _turns(layer) else still)
            for i, layer in enumerate(layers)
        ],
        norm=_rms_norm(decoder.norm, head.weight.dtype),
        head=head,
        own_turns=own_turns,
    )


def _layer_parts(layer: Any, index: int, probe: "AttentionProbe", cos_sin: Tensor) -> LayerParts:
    expect(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention = layer.self_attn
    names = {"q_proj", "k_proj", "v_proj", "o_proj"}
    names |= {"sinks"} & dict(attention.named_parameters()).keys()
    expect(attention, names, all_or_none={"q_norm", "k_norm"})
    if probe.modules[index] is not attention:
        raise NotFusedError(f"layer {index} does not run in its place")
    call, spec = probe.calls[index], probe.spec(torch.float32).layers[index]
    head_dim = spec.key_head_dim
    qkv = tuple(child(attention, name, nn.Linear) for name in ("q_proj", "k_proj", "v_proj"))
    num_heads = (call.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    if [part.out_features for part in qkv] != [count * head_dim for count in num_heads]:
        raise NotFusedError("its queries, keys and values are not what their projections give")
    options = call.options
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.detach().float())
    if cos_sin.shape[1] != head_dim:
        raise NotFusedError("its rotary embedding turns a part of each head")
    return LayerParts(
        module=layer,
        qkv=qkv,
        output=child(attention, "o_proj", nn.Linear),
        mlp=_mlp_parts(layer.mlp),
        input_norm=_rms_norm(layer.input_layernorm, qkv[0].weight.dtype),
        post_norm=_rms_norm(layer.post_attention_layernorm, qkv[0].weight.dtype),
        attention=AttentionLayer(
            index=index,
            num_heads=call.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=head_dim,
            cos_sin=cos_sin,
            head_norms=_head_norms(attention, head_dim),
            options=options,
        ),
    )


def _mlp_parts(mlp: Any) -> GatedParts | ExpertParts:
    if hasattr(mlp, "experts"):
        return find_experts(mlp)
    expect(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
    activation = find_activation(mlp.act_fn)
    if activation is None:
        raise NotFusedError(f"its activation {type(mlp.act_fn).__name__} is not served")
    return GatedParts(
        gate_up=(child(mlp, "gate_proj", nn.Linear), child(mlp, "up_proj", nn.Linear)),
        down=child(mlp, "down_proj", nn.Linear),
        activation=activation,
    )


def _turns(layer: Any) -> bool:
    """Whether a layer rotates its heads; SmolLM3 and others have some that do not."""
    return bool(getattr(getattr(layer, "self_attn", None), "use_rope", True))


def _rms_norm(module: nn.Module, dtype: torch.dtype) -> RMSNorm:
    """Recognized by its numbers; in the type of the rows, whatever the module keeps."""
    weight = dict(module.named_parameters()).get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    name = type(module).__name__
    if weight is None or weight.dim() != 1 or not isinstance(eps, float):
        raise NotFusedError(f"{name} is no RMS norm")
    x = torch.linspace(-3 * eps**0.5, 5 * eps**0.5, len(weight), dtype=weight.dtype)[None]
    x = x.to(weight.device)
    expected = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    if not torch.allclose(module(x).float(), expected, rtol=2 * torch.finfo(x.dtype).eps, atol=0):
        raise NotFusedError(f"{name} is not the RMS norm of Llama")
    return RMSNorm(weight.data.to(dtype, copy=True), eps)


def _head_norms(attention: Any, head_dim: int) -> tuple[RMSNorm, RMSNorm] | None:
    if not hasattr(attention, "q_norm"):
        return None
    dtype = attention.q_proj.weight.dtype
    norms = (_rms_norm(attention.q_norm, dtype), _rms_norm(attention.k_norm, dtype))
    if [len(norm.weight) for norm in norms] != [head_dim] * 2 or norms[0].eps != norms[1].eps:
        raise NotFusedError(f"{type(attention).__name__} normalizes more than heads")
    return norms


def _cos_sin(module: nn.Module, max_model_len: int, head_dim: int) -> Tensor:
    """The model's own rotary numbers for every position, as `AttentionLayer.cos_sin` has them."""
    table: list[Tensor] = []
    device = next((buffer.device for buffer in module.buffers()), None)
    for begin in range(0, max_model_len, _ROPE_CHUNK):
        end = min(begin + _ROPE_CHUNK, max_model_len)
        positions = torch.arange(begin, end, device=device)[None]
        try:
            cos, sin = module(positions.new_empty(1, dtype=torch.float32), positions)
        except Exception as error:  # code of any kind of model
            raise NotFusedError(f"{type(module).__name__} takes other arguments") from error
        half = cos.shape[-1] // 2
        if half and 2 * cos.shape[-1] == head_dim:  # only said for one of two halves (gpt-oss)
            half *= 2
        elif not all(torch.equal(t[..., :half], t[..., half:]) for t in (cos, sin)):
            raise NotFusedError(f"{type(module).__name__} does not turn halves of heads")
        table.append(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1))
    return torch.cat(table)
