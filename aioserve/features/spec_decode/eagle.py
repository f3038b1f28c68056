"""EAGLE-3 heads: one decoder layer that continues from what a larger model thought of its tokens.

A checkpoint `LlamaForCausalLMEagle3`: `fc` makes one state of what entered three layers of the
larger model; `midlayer` sees it beside the next token; `lm_head` knows some of the vocabulary,
which `d2t` translates. Knows weights and attention; knows nothing about requests.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from aioserve.errors import ConfigError, one_line
from aioserve.features.spec_decode.model_drafter import Draft, DraftHead, DraftSource, draft_of_head
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.source import read_json
from aioserve.runner.attention.backend import (
    AttentionCall,
    AttentionOptions,
    KVCacheSpec,
    LayerAttention,
    LayerSpec,
)
from aioserve.runner.batch.drafter import DraftPlace
from aioserve.runner.fused.ops import Linear
from aioserve.runner.models.long_rope import with_factors_chosen
from aioserve.runner.ranks import Ranks
from aioserve.runner.served_model import ServedModel, Taps

NUM_TAPS = 3
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_LINEARS = ("self_attn.o_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


class EagleHead(DraftHead):
    """Weights of one type, laid out where the larger model computes."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, Tensor],
        embedding: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        vocab_size: int,
        device: torch.device,
        linear: Callable[[Tensor], Linear],
    ) -> None:
        """`weights`: as `read_eagle` returns them. `embedding`: of the larger model, for a
        checkpoint without one of its own. `linear`: the product with a weight there.
        """
        w = {name: tensor.to(device, dtype) for name, tensor in weights.items() if name != "d2t"}
        table = w.get("embed_tokens.weight")
        self._embedding = embedding if table is None else lambda ids: F.embedding(ids, table)
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._head_dim = w["layer.self_attn.q_proj.weight"].shape[0] // self._num_heads
        self._eps = float(config.rms_norm_eps)
        self._norms = {name: w[f"layer.{name}.weight"] for name in _NORMS} | {
            "norm": w["norm.weight"]
        }
        qkv = [w[f"layer.self_attn.{name}_proj.weight"] for name in "qkv"]
        gate_up = [w[f"layer.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        self._qkv, self._gate_up = (linear(torch.cat(part)) for part in (qkv, gate_up))
        self._output, self._down = (linear(w[f"layer.{name}.weight"]) for name in _LINEARS)
        self._fc, self._head = (linear(w[f"{name}.weight"]) for name in ("fc", "lm_head"))
        self._rope = LlamaRotaryEmbedding(config).to(device)
        self._options = AttentionOptions(scaling=self._head_dim**-0.5)
        self._is_residual_normed = bool(getattr(config, "norm_before_residual", False))
        self._vocab_size = vocab_size
        self.state_size = w["fc.weight"].shape[1]
        offsets = weights.get("d2t")
        self._token_ids: Tensor | None = None
        if offsets is not None:
            self._token_ids = (torch.arange(len(offsets)) + offsets.to(torch.int64)).to(device)
        layer = LayerSpec(self._num_kv_heads, self._head_dim, self._head_dim)
        self.kv_cache_spec = KVCacheSpec((layer,), dtype)
        self.attention_calls = (AttentionCall(self._num_heads, self._options),)
        self.device = device
        self.num_parameters = sum(tensor.numel() for tensor in w.values())

    def combine(self, states: Tensor) -> Tensor:
        return self._fc(states)

    def forward(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, attention: LayerAttention
    ) -> Tensor:
        seen, residual = self._norm("hidden_norm", states), states
        if self._is_residual_normed:
            residual = seen
        embedded = self._norm("input_layernorm", self._embedding(token_ids))
        qkv = self._qkv(torch.cat((embedded, seen), dim=-1))
        heads = qkv.view(len(token_ids), -1, self._head_dim)
        query, key, value = torch.split(
            heads, [self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1
        )
        cos, sin = self._rope(heads, positions[None])
        query, key = apply_rotary_pos_emb(query, key, cos[0], sin[0])
        attended = attention.forward(0, query, key, value.contiguous(), self._options)
        x = residual + self._output(attended.reshape(len(token_ids), -1))
        gate, up = self._gate_up(self._norm("post_attention_layernorm", x)).chunk(2, dim=-1)
        return x + self._down(F.silu(gate) * up)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits; those of tokens that the head does not know are very low."""
        known = self._head(self._norm("norm", states))
        if self._token_ids is None:
            return known
        lowest = torch.finfo(known.dtype).min
        logits = known.new_full((len(known), self._vocab_size), lowest)
        logits[:, self._token_ids] = known
        return logits

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Normalize as Llama does: in float32, rounded, times the weight."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._norms[name] * wide.to(x.dtype)


class _Taps(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


class _Stated(_Taps):
    """The fields that are read of a config.json beside those of `LlamaConfig`."""

    architectures: list[str] | None = None
    eagle_config: _Taps | None = None
    draft_vocab_size: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "_Stated":
        try:
            return msgspec.convert(config, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"cannot read config.json: {error}") from error


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an EAGLE-3 head. Raises `ConfigError` if it is
    none.
    """
    return any("eagle3" in name.lower() for name in _Stated.of(config).architectures or ())


def tapped_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input the head wants, of the larger model's `num_layers`."""
    stated = _Stated.of(config)
    inner = stated.eagle_config and stated.eagle_config.eagle_aux_hidden_state_layer_ids
    layers = inner or stated.eagle_aux_hidden_state_layer_ids
    return layers or (2, num_layers // 2, num_layers - 3)


def read_eagle(
    path: Path, hidden_size: int, vocab_size: int
) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Configuration and weights of a head for a model of these sizes, under the names `fc`, `norm`,
    `lm_head`, `embed_tokens`, `d2t` and `layer.*`. Raises `ConfigError` for what cannot be served.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"the EAGLE-3 head {path} cannot be served: {why}")

    stated = read_json(path / "config.json", dict[str, Any])
    try:
        config = LlamaConfig(**stated)
    except Exception as error:  # transformers raises whatever the values provoke
        raise refuse(one_line(error)) from error
    for name in _SIZES:
        if type(size := getattr(config, name)) is not int or size < 1:
            raise refuse(f"its {name} is {size!r}")
    if config.num_hidden_layers != 1:
        raise refuse(f"it has {config.num_hidden_layers} layers, only one is known")
    if config.vocab_size != vocab_size:
        raise refuse(f"it is for {config.vocab_size:,} tokens, the model has {vocab_size:,}")
    if getattr(config, "attention_bias", False) or config.hidden_act != "silu":
        raise refuse("attention_bias, and activations other than silu, are not known")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise refuse("there are no *.safetensors in it")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded = load_file(file)
        except (SafetensorError, OSError) as error:
            raise refuse(f"{file.name}: {error}") from error
        for name, tensor in loaded.items():
            name = name.removeprefix("model.").replace("midlayer.", "layer.")
            weights[name.replace("layers.0.", "layer.")] = tensor
    weights.pop("t2d", None)
    hidden, inner, heads, kv_heads = (int(getattr(config, name)) for name in _SIZES)
    dim = config.head_dim or hidden // heads
    known = _Stated.of(stated).draft_vocab_size or vocab_size
    if (table := weights.get("embed_tokens.weight")) is None and hidden != hidden_size:
        raise refuse(f"it has no embedding, and states of {hidden}, not {hidden_size}")
    shapes = {
        "fc.weight": (hidden, NUM_TAPS * hidden_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (known, hidden),
        "layer.self_attn.q_proj.weight": (heads * dim, 2 * hidden),
        "layer.self_attn.k_proj.weight": (kv_heads * dim, 2 * hidden),
        "layer.self_attn.v_proj.weight": (kv_heads * dim, 2 * hidden),
        "layer.self_attn.o_proj.weight": (hidden, heads * dim),
        "layer.mlp.gate_proj.weight": (inner, hidden),
        "layer.mlp.up_proj.weight": (inner, hidden),
        "layer.mlp.down_proj.weight": (hidden, inner),
        **{f"layer.{name}.weight": (hidden,) for name in _NORMS},
    }
    if table is not None:
        shapes["embed_tokens.weight"] = (vocab_size, hidden)
    if known != vocab_size or "d2t" in weights:
        shapes["d2t"] = (known,)
    for name, shape in shapes.items():
        found = weights.get(name)
        if found is None or tuple(found.shape) != shape:
            has = "is missing" if found is None else f"is {list(found.shape)}, not {list(shape)}"
            raise refuse(f"{name} {has}")
    if strangers := sorted(weights.keys() - shapes.keys()):
        raise refuse(f"{strangers[0]} is not known")
    if "d2t" in weights:
        targets = torch.arange(known) + weights["d2t"].to(torch.int64)
        if targets.min() < 0 or targets.max() >= vocab_size:
            raise refuse("d2t leaves the vocabulary")
    return config, weights


# The directory of an EAGLE-3 head: how the head is loaded for the model that it is made for. Knows
# files and which layers the head looks at; knows nothing about steps.


logger = logging.getLogger(__name__)


class EagleSource(DraftSource):
    """One layer that continues from what three layers of the served model thought."""

    def __init__(self, info: ModelInfo, target_info: ModelInfo) -> None:
        super().__init__(info)
        self.num_states = NUM_TAPS * target_info.hidden_size
        self._num_layers = int(target_info.hf_config.num_hidden_layers)
        self._layers = tapped_layers(info.source.known_config, self._num_layers)
        self._taps: Taps | None = None

    def meet(self, target: ServedModel, ranks: Ranks) -> None:
        # A model that is not fused is run for it, and that takes all ranks.
        if self._num_layers > max(self._layers):
            self._taps = target.tap(self._layers)

    def load(self, target: ServedModel, target_info: ModelInfo, place: DraftPlace) -> Draft:
        path, num_layers, layers = self.info.source.path, self._num_layers, self._layers
        if len(layers) != NUM_TAPS or not all(0 <= layer < num_layers for layer in layers):
            raise ConfigError(
                f"the EAGLE-3 head {path} looks at layers {layers}: three of the {num_layers} of "
                f"{target.name} are needed"
            )
        config, weights = read_eagle(path, target_info.hidden_size, target_info.vocab_size)
        taps = self._taps or target.tap(layers)
        if taps is None or target.embedding is None:
            raise ConfigError(
                f"{target.name} does not tell what enters its layers, which an EAGLE-3 head needs"
            )
        head = EagleHead(
            with_factors_chosen(config, target_info.max_model_len),
            weights,
            target.embedding,
            target.kv_cache_spec.dtype,
            target_info.vocab_size,
            place.device,
            place.linear,
        )
        logger.info("drafts by an EAGLE-3 head, %.1fM parameters", head.num_parameters / 1e6)
        return draft_of_head(self.info, head, taps, target)
