"""What llama.cpp's converter does to weights, written once more for the tests of GGUF files.

Knows the names of parameters of `transformers` and of GGUF; arrays are numpy's.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

_PERMUTED = {
    *("llama", "mistral3", "granite", "granitemoe", "smollm3", "olmo", "arcee"),
    *("granitehybrid", "nemotron_h", "nemotron_h_moe"),
    *("granite_swa", "internlm2", "minicpm"),
}
_ONE_MORE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"}
_TILED = {"qwen35", "qwen35moe"}
_MAMBA2 = {"mamba2", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"}


def parts(name: str, weights: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """Names of tensors, within a layer, that a parameter is cut into; none if it stays whole."""
    if name.endswith(".kv_b_proj.weight"):
        by_head = weights.reshape(config.num_attention_heads, -1, weights.shape[1])
        keys, values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        return [("attn_k_b.weight", keys.swapaxes(1, 2)), ("attn_v_b.weight", values)]
    if name.endswith(".in_proj_qkvz.weight"):
        return list(_queries_first(weights, config))
    if name.endswith((".gate_up_proj", ".gate_up_proj_bias", ".input_linear.weight")):
        return list(_halves(name, weights, config))
    if name.endswith(".shared_mlp.output_linear.weight") and not config.num_local_experts:
        return [("ffn_down.weight", weights)]
    return []


def _queries_first(weights: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim // heads
    by_head = weights.reshape(heads, -1, weights.shape[1])
    cut = np.split(by_head, [key, 2 * key, 2 * key + values], axis=1)
    query, keys, value, gate = (part.reshape(-1, weights.shape[1]) for part in cut)
    yield "attn_qkv.weight", np.concatenate([query, keys, value])
    yield "attn_gate.weight", gate


def _halves(name: str, weights: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    kind = "_exps"
    if "shared_mlp" in name:
        kind = "_shexp" if config.num_local_experts else ""
    for number, which in enumerate(("gate", "up")):
        if config.model_type == "gpt_oss":
            part = weights[..., number::2]
            is_bias = name.endswith("bias")
            end = "bias" if is_bias else "weight"
            yield f"ffn_{which}_exps.{end}", part if is_bias else part.swapaxes(1, 2)
        elif config.model_type == "llama4_text":
            yield f"ffn_{which}_exps.weight", np.split(weights, 2, 2)[number].swapaxes(1, 2)
        else:
            axis = weights.ndim - 2
            yield f"ffn_{which}{kind}.weight", np.split(weights, 2, axis)[number]


def stored(name: str, weights: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    """The weights of a whole tensor, by its name in the file, as they stand there."""
    heads = config.num_attention_heads if hasattr(config, "num_attention_heads") else 0
    if architecture == "falcon-h1":
        weights = weights * _multipliers(name, weights, config)
    if architecture in _TILED:
        weights = _tiled(name.split(".")[2] if name.startswith("blk.") else name, weights, config)
    if architecture in _PERMUTED and (".attn_q." in name or ".attn_k." in name):
        count = heads if ".attn_q." in name else config.num_key_value_heads
        pairs = weights.reshape(count, 2, weights.shape[0] // count // 2, -1)
        return pairs.swapaxes(1, 2).reshape(weights.shape)
    if architecture in _ONE_MORE and name.endswith("norm.weight") and ".ssm_norm." not in name:
        return weights + 1
    if architecture in ("gpt-oss", "llama4") and name.endswith("ffn_down_exps.weight"):
        return weights.swapaxes(1, 2)
    if architecture == "gpt2" and name.startswith("blk.") and weights.ndim == 2:
        return weights.T
    if architecture in ("bloom", "gptneox") and ".attn_qkv." in name:
        qkv = weights.reshape(heads, 3, -1, *weights.shape[1:])
        return qkv.swapaxes(0, 1).reshape(weights.shape)
    if name.endswith("ssm_a"):
        weights = -np.exp(weights)
    if architecture in _MAMBA2:
        if name.endswith(("ssm_a", "ssm_d")):
            return weights[:, None]
        if name.endswith("ssm_norm.weight"):
            groups = config.n_groups if hasattr(config, "n_groups") else config.mamba_n_groups
            return weights.reshape(groups, -1)
    if name.endswith(("conv1d.weight", "shortconv.conv.weight")):
        return weights.squeeze(1)
    return weights[0] if name.endswith("ffn_gate_inp_shexp.weight") else weights


def _multipliers(name: str, weights: np.ndarray, config: Any) -> Any:
    """Those that Falcon-H1 multiplies with as it computes."""
    into, out = config.attention_in_multiplier, config.attention_out_multiplier
    gate, down = config.mlp_multipliers
    known = {
        "attn_q": into,
        "attn_k": into * config.key_multiplier,
        "attn_v": into,
        "attn_output": out,
        "ffn_gate": gate,
        "ffn_down": down,
        "ssm_out": config.ssm_out_multiplier,
        "output": config.lm_head_multiplier,
        "token_embd": config.embedding_multiplier,
    }
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part != "ssm_in":
        return known.get(part, 1.0)
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    counts = [inner, inner, states, states, config.mamba_n_heads]
    return config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, counts)[:, None]


def _tiled(part: str, weights: np.ndarray, config: Any) -> np.ndarray:
    """Value heads of linear attention: the first of each key head, then the second ones."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size = config.linear_value_head_dim

    def apart(rows: np.ndarray, size: int) -> np.ndarray:
        grouped = rows.reshape(keys, values // keys, size, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if part in ("ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt"):
        return apart(weights, 1)
    if part == "attn_gate":
        return apart(weights, size)
    if part in ("attn_qkv", "ssm_conv1d"):
        first = 2 * keys * config.linear_key_head_dim
        return np.concatenate([weights[:first], apart(weights[first:], size)])
    return apart(weights.T, size).T if part == "ssm_out" else weights
