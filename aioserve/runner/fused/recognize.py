"""Finds the parts of a Llama-like decoder in a tree of `transformers` modules, by structure.

What has one part more, or one of another kind, is not Llama-like, whatever its class is called.
Whether the parts are used as Llama uses them is for `proof` to show.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.runner.attention.bridge import AttentionProbe
from aioserve.runner.fused.ops import Activation, AttentionLayer, RMSNorm

_ROPE_CHUNK = 4096  # positions: bounds what a table needs beside itself
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class NotFusedError(Exception):
    """The model stays with the modules of `transformers`; the message says why."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The modules of one decoder layer, and how its attention goes."""

    module: nn.Module
    qkv: tuple[nn.Linear, ...]
    output: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear
    input_norm: RMSNorm
    post_norm: RMSNorm
    activation: Activation
    attention: AttentionLayer


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The modules of a decoder."""

    embedding: nn.Embedding
    layers: list[LayerParts]
    norm: RMSNorm
    head: nn.Linear

    @property
    def row_sizes(self) -> set[int]:
        """Numbers in a row that is normalized or gated."""
        return {len(self.norm.weight)} | {layer.down.in_features for layer in self.layers}


def find_parts(module: nn.Module, probe: AttentionProbe, max_model_len: int) -> DecoderParts:
    """The parts of a causal language model. Raises `NotFusedError`."""
    head = _child(module, "lm_head", nn.Linear)
    decoders = [child for name, child in module.named_children() if name != "lm_head"]
    if len(decoders) != 1:
        raise NotFusedError(f"{type(module).__name__} is not one decoder and a head")
    decoder: Any = decoders[0]
    _expect(decoder, {"embed_tokens", "layers", "norm", "rotary_emb"})
    layers = list(_child(decoder, "layers", nn.ModuleList))
    turning = _cos_sin(decoder.rotary_emb, max_model_len)
    still = turning
    if not all(_turns(layer) for layer in layers):
        half = turning.shape[1] // 2
        still = torch.cat(
            (torch.ones_like(turning[:, :half]), torch.zeros_like(turning[:, half:])), 1
        )
    return DecoderParts(
        embedding=_child(decoder, "embed_tokens", nn.Embedding),
        layers=[
            _layer_parts(layer, i, probe, turning if _turns(layer) else still)
            for i, layer in enumerate(layers)
        ],
        norm=_rms_norm(decoder.norm),
        head=head,
    )


def _layer_parts(layer: Any, index: int, probe: AttentionProbe, cos_sin: Tensor) -> LayerParts:
    _expect(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention, mlp = layer.self_attn, layer.mlp
    _expect(attention, {"q_proj", "k_proj", "v_proj", "o_proj"}, all_or_none={"q_norm", "k_norm"})
    _expect(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
    if probe.modules[index] is not attention:
        raise NotFusedError(f"layer {index} does not run in its place")
    call, spec = probe.calls[index], probe.spec(torch.float32).layers[index]
    head_dim = spec.key_head_dim
    qkv = tuple(_child(attention, name, nn.Linear) for name in ("q_proj", "k_proj", "v_proj"))
    num_heads = (call.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    if [part.out_features for part in qkv] != [count * head_dim for count in num_heads]:
        raise NotFusedError("its queries, keys and values are not what their projections give")
    if call.options.sinks is not None:
        raise NotFusedError("its attention has sinks")
    if cos_sin.shape[1] != head_dim:
        raise NotFusedError("its rotary embedding turns a part of each head")
    return LayerParts(
        module=layer,
        qkv=qkv,
        output=_child(attention, "o_proj", nn.Linear),
        gate_up=(_child(mlp, "gate_proj", nn.Linear), _child(mlp, "up_proj", nn.Linear)),
        down=_child(mlp, "down_proj", nn.Linear),
        input_norm=_rms_norm(layer.input_layernorm),
        post_norm=_rms_norm(layer.post_attention_layernorm),
        activation=_activation(mlp.act_fn),
        attention=AttentionLayer(
            index=index,
            num_heads=call.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=head_dim,
            cos_sin=cos_sin,
            head_norms=_head_norms(attention, head_dim),
            options=call.options,
        ),
    )


def _turns(layer: Any) -> bool:
    """Whether a layer rotates its heads; SmolLM3 and others have some that do not."""
    return bool(getattr(getattr(layer, "self_attn", None), "use_rope", True))


def _expect(module: nn.Module, names: set[str], all_or_none: Collection[str] = ()) -> None:
    """Exactly these children, and no weights of its own."""
    found = {name for name, _ in module.named_children()}
    found |= {name for name, _ in module.named_parameters(recurse=False)}
    if not found.isdisjoint(all_or_none):
        names = names | set(all_or_none)
    for name in sorted(names - found):
        raise NotFusedError(f"{type(module).__name__} has no {name}")
    for name in sorted(found - names):
        raise NotFusedError(f"{type(module).__name__} has {name}")


def _child(module: nn.Module, name: str, kind: type[Any]) -> Any:
    child = getattr(module, name, None)
    if type(child) is not kind:  # a subclass may scale, quantize or adapt
        raise NotFusedError(f"{type(module).__name__}.{name} is no {kind.__name__}")
    return child


def _rms_norm(module: nn.Module) -> RMSNorm:
    """Recognized by its numbers."""
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
    return RMSNorm(weight.data.clone(), eps)


def _head_norms(attention: Any, head_dim: int) -> tuple[RMSNorm, RMSNorm] | None:
    if not hasattr(attention, "q_norm"):
        return None
    norms = (_rms_norm(attention.q_norm), _rms_norm(attention.k_norm))
    if [len(norm.weight) for norm in norms] != [head_dim] * 2 or norms[0].eps != norms[1].eps:
        raise NotFusedError(f"{type(attention).__name__} normalizes more than heads")
    return norms


def _activation(module: nn.Module) -> Activation:
    """Recognized by its numbers."""
    x = torch.linspace(-6, 6, 193)
    for name, function in _ACTIVATIONS.items():
        if torch.allclose(module(x), function(x), rtol=1e-5, atol=1e-6):
            return name
    raise NotFusedError(f"its activation {type(module).__name__} is not served")


def _cos_sin(module: nn.Module, max_model_len: int) -> Tensor:
    """What the model's own module gives for every position, as `AttentionLayer.cos_sin`."""
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
        if not all(torch.equal(t[..., :half], t[..., half:]) for t in (cos, sin)):
            raise NotFusedError(f"{type(module).__name__} does not turn halves of heads")
        table.append(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1))
    return torch.cat(table)
