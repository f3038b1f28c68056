"""Finds the parts of a Llama-like decoder in a tree of `transformers` modules, by structure.

What a module must consist of comes first, then layers of experts, then the whole decoder. Knows
modules of torch and numbers; knows no names of models.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.model_source.quantized_weight import QuantizedWeight, quantized_experts
from aioserve.runner.fused.ops import (
    Activation,
    AttentionLayer,
    ExpertActivation,
    ExpertWeights,
    NotFusedError,
    RMSNorm,
    Router,
)

if TYPE_CHECKING:
    from aioserve.runner.attention.bridge import AttentionProbe


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def expect(module: nn.Module, names: set[str], all_or_none: Collection[str] = ()) -> None:
    """Exactly these children, and no weights of its own. Raises `NotFusedError`."""
    found = {name for name, _ in module.named_children()}
    found |= {name for name, _ in module.named_parameters(recurse=False)}
    if not found.isdisjoint(all_or_none):
        names = names | set(all_or_none)
    for name in sorted(names - found):
        raise NotFusedError(f"{type(module).__name__} has no {name}")
    for name in sorted(found - names):
        raise NotFusedError(f"{type(module).__name__} has {name}")


def child(module: nn.Module, name: str, kind: type[Any]) -> Any:
    """Return the child of this name and kind. Raises `NotFusedError`."""
    found = getattr(module, name, None)
    if type(found) is not kind:  # a subclass may scale, quantize or adapt
        raise NotFusedError(f"{type(module).__name__}.{name} is no {kind.__name__}")
    return found


def find_activation(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """Return the activation that gives the same numbers as `function`; None if none is known."""
    x = torch.linspace(-6, 6, 193)
    found = function(x)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(found, known(x), rtol=1e-5, atol=1e-6):
            return name
    return None


# Finds the parts of a layer of experts in modules of `transformers`, by structure and numbers. Such
# layers are a router, a linear layer whose largest logits choose, and experts, whose weights lie in
# one tensor. What they add up to is for `fuse` to show.


_NUM_ROWS = 8  # of noise, by which a router is recognized


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedExperts:
    """The module with the weights of gated experts, and how they go."""

    experts: Any
    activation: ExpertActivation
    is_interleaved: bool  # whether gates and ups lie by turns

    @property
    def inner_size(self) -> int:
        return self._weight("down_proj", 0).shape[1]

    def weights(self) -> Iterator[ExpertWeights]:
        """Yield the weights of the experts, one expert after the other."""
        for number in range(len(self.experts.down_proj)):
            bias = self._bias("gate_up_proj", number)
            yield ExpertWeights(
                self._gate_up(number),
                None if bias is None else self._gates_first(bias),
                self._weight("down_proj", number),
                self._bias("down_proj", number),
            )

    def _weight(self, name: str, number: int) -> Tensor | QuantizedWeight:
        """Return the weight `name` of expert `number`, [out, in]."""
        parameter: Tensor = getattr(self.experts, name)
        if (small := quantized_experts(parameter)) is not None:
            return small[number]
        weight = parameter.data[number]
        return weight.T if self.experts.is_transposed else weight

    def _bias(self, name: str, number: int) -> Tensor | None:
        biases = getattr(self.experts, f"{name}_bias", None)
        return None if biases is None else biases.data[number]

    def _gate_up(self, number: int) -> Tensor | QuantizedWeight:
        weight = self._weight("gate_up_proj", number)
        if isinstance(weight, Tensor):
            return self._gates_first(weight)
        return weight.rows(self._gates_first(torch.arange(weight.shape[0])))

    def _gates_first(self, rows: Tensor) -> Tensor:
        return torch.cat((rows[::2], rows[1::2])) if self.is_interleaved else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts(GatedExperts):
    """The modules of a layer of experts, its router included."""

    router_module: nn.Module
    router: Router


def gated_experts(experts: Any) -> GatedExperts:
    """Return how a module with the weights of gated experts goes. Raises `NotFusedError`."""
    activation, is_interleaved = _activation(experts)
    return GatedExperts(experts=experts, activation=activation, is_interleaved=is_interleaved)


def between(experts: Any) -> Callable[[Tensor], Tensor] | None:
    """Return what a module with the weights of experts computes between their two products."""
    name = "_apply_gate" if experts.has_gate else "act_fn"
    found: Callable[[Tensor], Tensor] | None = getattr(experts, name, None)
    return found


def find_experts(mlp: Any) -> ExpertParts:
    """Return the parts of a module that has experts. Raises `NotFusedError`."""
    name = "router" if hasattr(mlp, "router") else "gate"
    expect(mlp, {name, "experts"})
    router, experts = getattr(mlp, name), mlp.experts
    expect(router, {"weight"}, all_or_none={"bias"} if _has(router, "bias") else ())
    act_fn = {"act_fn"} if isinstance(getattr(experts, "act_fn", None), nn.Module) else set()
    expect(
        experts,
        {"gate_up_proj", "down_proj"} | act_fn,
        all_or_none={"gate_up_proj_bias", "down_proj_bias"},
    )
    if not hasattr(experts, "is_transposed") or getattr(experts, "has_post_expert_norm", False):
        raise NotFusedError(f"{type(experts).__name__} keeps its weights in a way of its own")
    activation, is_interleaved = _activation(experts)
    return ExpertParts(
        experts=experts,
        activation=activation,
        is_interleaved=is_interleaved,
        router_module=router,
        router=_router(router),
    )


def _has(module: nn.Module, name: str) -> bool:
    return getattr(module, name, None) is not None


def _router(module: Any) -> Router:
    """Return the router of a mixture of experts, recognized by its numbers. Raises
    `NotFusedError`.
    """
    weight, bias = module.weight.data, module.bias.data if _has(module, "bias") else None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_NUM_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    spread = F.linear(x, weight).float().std()
    if spread > 0:  # so that no share is all or nothing
        x = x / spread.to(x.dtype)
    name, rounding = type(module).__name__, 8 * torch.finfo(weight.dtype).eps
    try:
        _, found, chosen = module(x)
    except Exception as error:  # code of any kind of model
        raise NotFusedError(f"{name} gives other things than a router") from error
    logits = F.linear(x, weight, bias).float()
    top_k = chosen.shape[-1]
    if (
        not top_k
        or found.shape != chosen.shape
        or not torch.equal(
            logits.gather(1, chosen).sort(descending=True).values, logits.topk(top_k).values
        )
    ):
        raise NotFusedError(f"{name} does not choose the largest logits")
    of_chosen = logits.gather(1, chosen).softmax(-1)
    of_all = logits.softmax(-1).gather(1, chosen)
    for is_of_all, shares in ((False, of_chosen), (True, of_all)):
        if torch.allclose(found.float(), shares, rtol=rounding, atol=rounding):
            return Router(weight, bias, top_k, is_of_all)
    raise NotFusedError(f"{name} gives other shares than a softmax")


def _activation(experts: Any) -> tuple[ExpertActivation, bool]:
    """Return the activation, by its numbers; whether gates and ups take turns. Else
    `NotFusedError`.
    """
    if not hasattr(experts, "_apply_gate"):  # a private name of `transformers`
        raise NotFusedError(f"{type(experts).__name__} has no _apply_gate")
    gates, ups = torch.linspace(-12, 12, 96), torch.linspace(11, -10, 96)
    halves, turns = torch.cat((gates, ups))[None], torch.stack((gates, ups), dim=1).view(1, -1)
    if hasattr(experts, "limit") and hasattr(experts, "alpha"):
        alpha, limit = float(experts.alpha), float(experts.limit)
        gate, up = gates.clamp(max=limit), ups.clamp(-limit, limit)
        expected = gate * torch.sigmoid(gate * alpha) * (up + 1)
        if torch.allclose(experts._apply_gate(turns)[0], expected, rtol=1e-5, atol=1e-6):
            return ExpertActivation(None, alpha, limit), True
    elif hasattr(experts, "act_fn"):
        name = find_activation(experts.act_fn)
        if name is not None:
            plain = experts.act_fn(gates) * ups
            if torch.allclose(experts._apply_gate(halves)[0], plain, rtol=1e-5, atol=1e-6):
                return ExpertActivation(name), False
    raise NotFusedError(f"the activation of {type(experts).__name__} is not served")


# Finds the parts of a Llama-like decoder in a tree of `transformers` modules, by structure. What
# has one part more, or one of another kind, is not Llama-like, whatever its class is called.
# Whether the parts are used as Llama uses them is for `fuse` to show.


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
        """Return rows [N] of the table by which N tokens turn, `axes` [3, N]; until it is called
        again.
        """
        cos, sin = self._rotary(self._table.new_empty(1), axes[:, None])
        end, half = self._first + axes.shape[1], cos.shape[-1] // 2
        self._table[self._first : end] = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
        return torch.arange(self._first, end, device=self._table.device)


def find_parts(
    module: nn.Module, probe: "AttentionProbe", max_model_len: int, num_mrope_tokens: int = 0
) -> DecoderParts:
    """Return the parts of a causal language model; `num_mrope_tokens` of a step may turn by axes.
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
    """Return whether a layer rotates its heads; SmolLM3 and others have some that do not."""
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
    """Return the model's own rotary numbers for every position, as `AttentionLayer.cos_sin` has
    them.
    """
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
