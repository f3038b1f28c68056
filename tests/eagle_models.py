"""EAGLE-3 heads with random weights, as directories: how they are published. Knows no engine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TARGET, INNER, HEADS, KV_HEADS, DIM = 192, 96, 4, 2, 32
VOCAB, KNOWN = 2048, 700
LAYERS = (1, 3, 4)
EPS, THETA = 1e-5, 10_000.0


def make_head(
    path: Path,
    *,
    target: int = TARGET,
    layers: Sequence[int] = LAYERS,
    vocab_size: int = VOCAB,
    dim: int = DIM,
    **changes: Any,
) -> Path:
    """A checkpoint as they are published, for a model of hidden size `target`, whose states behind
    `layers` it reads; `dim` is the size of its heads, `changes` are fields of its config.json.
    """
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    weights = {
        "fc.weight": weight(target, 3 * target),
        "norm.weight": 1 + 0.1 * weight(target),
        "lm_head.weight": 3 * weight(KNOWN, target),
        "midlayer.self_attn.q_proj.weight": 2 * weight(HEADS * dim, 2 * target),
        "midlayer.self_attn.k_proj.weight": 2 * weight(KV_HEADS * dim, 2 * target),
        "midlayer.self_attn.v_proj.weight": weight(KV_HEADS * dim, 2 * target),
        "midlayer.self_attn.o_proj.weight": weight(target, HEADS * dim),
        "midlayer.mlp.gate_proj.weight": weight(INNER, target),
        "midlayer.mlp.up_proj.weight": weight(INNER, target),
        "midlayer.mlp.down_proj.weight": weight(target, INNER),
        "midlayer.input_layernorm.weight": 1 + weight(target),
        "midlayer.hidden_norm.weight": 1 + weight(target),
        "midlayer.post_attention_layernorm.weight": 1 + weight(target),
        "d2t": torch.arange(KNOWN) * 2,  # token n of the head is token 3 n
        "t2d": torch.zeros(vocab_size, dtype=torch.bool),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": dim,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "draft_vocab_size": KNOWN - 20,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
        **changes,
    }
    known = int(config["draft_vocab_size"])
    for name in ("lm_head.weight", "d2t"):
        weights[name] = weights[name][:known].clone()
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
