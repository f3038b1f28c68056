"""How llama.cpp's converter stores weights of some architectures, undone: rows, and parts.

The first functions take the name of a tensor, its weights as a numpy array of the file's shape,
and the fields of the configuration. Where one only changes the order of rows, the first dimension
tells: the same order is then given to the blocks of quantized weights.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def permuted(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Return rows of queries and keys whose rotated pairs stand side by side, as Llama's."""
    if ".attn_q." in name:
        heads = fields["num_attention_heads"]
    elif ".attn_k." in name:
        heads = fields["num_key_value_heads"]
    else:
        return weights
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def norms_less_one(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Norms that multiply by their weights and one more."""
    return weights - 1 if name.endswith("norm.weight") else weights


def mamba(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Decays are stored as what they are, not by their logarithms."""
    import numpy as np

    return np.log(-weights) if name.endswith(".ssm_a") else weights


def qkv_by_head(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Queries, keys and values of one head after the other; the file has all queries first."""
    if ".attn_qkv." not in name:
        return weights
    heads = fields.get("n_head") or fields["num_attention_heads"]
    parts = weights.reshape(3, heads, -1, *weights.shape[1:])
    return parts.swapaxes(0, 1).reshape(weights.shape)


def qkv_by_group(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Queries, the key and the value of one group after the other (Falcon)."""
    import numpy as np

    if ".attn_qkv." not in name:
        return weights
    heads, groups = fields["num_attention_heads"], fields["num_kv_heads"]
    size, rest = weights.shape[0] // (heads + 2 * groups), weights.shape[1:]
    query, key, value = np.split(weights, [heads * size, (heads + groups) * size])
    parts = [part.reshape(groups, -1, size, *rest) for part in (query, key, value)]
    return np.concatenate(parts, axis=1).reshape(weights.shape)


def transposed(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Matrices of GPT-2's layers, which `transformers` multiplies from the other side."""
    is_layer = name.startswith("blk.") and name.endswith(".weight") and weights.ndim == 2
    return weights.T if is_layer else weights


def hybrid(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Mamba layers beside attention whose rotated pairs stand side by side."""
    return permuted(name, mamba(name, weights, fields), fields)


def delta_net(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Norms and decays of linear attention (Qwen3-Next), whose queries, keys and values stand
    together for each key head; the file has all queries first.
    """
    import numpy as np

    part = name.split(".")[2] if name.startswith("blk.") else name
    if part == "attn_qkv":
        heads = fields["linear_num_key_heads"]
        keys = heads * fields["linear_key_head_dim"]
        parts = np.split(weights, [keys, 2 * keys])
        return np.concatenate([rows.reshape(heads, -1, rows.shape[1]) for rows in parts], axis=1)
    if part == "attn_gate":
        return weights.reshape(fields["linear_num_key_heads"], -1, weights.shape[1])
    return _norms_and_decays(part, weights)


def tiled_delta_net(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Linear attention (Qwen3.5) whose value heads stand together for each key head; the file has
    the first value head of each key head, then the second ones.
    """
    import numpy as np

    part = name.split(".")[2] if name.startswith("blk.") else name
    keys, values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    size = fields["linear_value_head_dim"]

    def together(rows: Any, size: int) -> Any:
        tiles = rows.reshape(values // keys, keys, size, *rows.shape[1:])
        return tiles.swapaxes(0, 1).reshape(rows.shape)

    if part in ("ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt"):
        weights = together(weights, 1)
    elif part == "attn_gate":
        weights = together(weights, size)
    elif part in ("attn_qkv", "ssm_conv1d"):
        first = 2 * keys * fields["linear_key_head_dim"]
        weights = np.concatenate([weights[:first], together(weights[first:], size)])
    elif part == "ssm_out" and keys != values:
        if weights.shape[1] != values * size:  # asked about the order of rows alone
            return weights.T
        weights = together(weights.T, size).T
    return _norms_and_decays(part, weights)


def _norms_and_decays(part: str, weights: Any) -> Any:
    import numpy as np

    if part == "ssm_a":
        return np.log(-weights)
    is_norm = part.removesuffix(".weight").endswith("norm") and part != "ssm_norm"
    return weights - 1 if is_norm else weights


# Parameters that take several tensors of a GGUF file, each in a part of its own. Each function
# takes the name of a parameter and the fields of the configuration, and gives the names that
# tensors of its layer have, each with a view of the parameter that takes its weights; None is all
# of it.


Part = Callable[[Any], Any]
Parts = Callable[[str, Mapping[str, Any]], Iterator[tuple[str, Part | None]]]


def expert_parts(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
    """Gate and up of experts, behind each other along their outputs; of shared ones as well, which
    stand alone in a model without others.
    """
    if parameter.endswith(".experts.gate_up_proj"):
        yield "ffn_gate_exps.weight", _half(1, 0)
        yield "ffn_up_exps.weight", _half(1, 1)
    elif parameter.endswith(".shared_mlp.input_linear.weight"):
        for end in ("_shexp", ""):
            yield f"ffn_gate{end}.weight", _half(0, 0)
            yield f"ffn_up{end}.weight", _half(0, 1)
    elif parameter.endswith(".shared_mlp.output_linear.weight"):
        yield "ffn_down.weight", None


def gpt_oss_parts(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
    """Gate and up by turns, and matrices that are multiplied from the other side."""
    end = parameter.rpartition(".experts.")[2]
    for which, part in (("gate", 0), ("up", 1)):
        if end == "gate_up_proj":
            yield f"ffn_{which}_exps.weight", _every_second(part, is_matrix=True)
        elif end == "gate_up_proj_bias":
            yield f"ffn_{which}_exps.bias", _every_second(part, is_matrix=False)
    if end == "down_proj":
        yield "ffn_down_exps.weight", lambda whole: whole.transpose(1, 2)


def llama4_parts(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
    """Gates before ups, all multiplied from the other side."""
    end = parameter.rpartition(".experts.")[2]
    if end == "gate_up_proj":
        for which, number in (("gate", 0), ("up", 1)):
            yield f"ffn_{which}_exps.weight", _transposed_half(number)
    elif end == "down_proj":
        yield "ffn_down_exps.weight", lambda whole: whole.transpose(1, 2)


def delta_net_parts(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
    """Queries, keys and values of each key head, and behind them its gates (Qwen3-Next)."""
    yield from expert_parts(parameter, fields)
    if parameter.endswith(".linear_attn.in_proj_qkvz.weight"):
        heads = fields["linear_num_key_heads"]
        values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
        own = 2 * fields["linear_key_head_dim"] + values // heads
        yield "attn_qkv.weight", lambda whole: _by_head(whole, heads)[:, :own]
        yield "attn_gate.weight", lambda whole: _by_head(whole, heads)[:, own:]


def latent_parts(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
    """Yield what makes keys and values of each head from latent states; keys from the other
    side.
    """
    yield from expert_parts(parameter, fields)
    if parameter.endswith(".self_attn.kv_b_proj.weight"):
        heads, own = fields["num_attention_heads"], fields["qk_nope_head_dim"]
        yield "attn_k_b.weight", lambda whole: _by_head(whole, heads)[:, :own].transpose(1, 2)
        yield "attn_v_b.weight", lambda whole: _by_head(whole, heads)[:, own:]


def _by_head(whole: Any, heads: int) -> Any:
    return whole.view(heads, -1, whole.shape[-1])


def _half(dim: int, which: int) -> Part:
    return lambda whole: whole.chunk(2, dim)[which]


def _transposed_half(which: int) -> Part:
    return lambda whole: whole.chunk(2, 2)[which].transpose(1, 2)


def _every_second(which: int, *, is_matrix: bool) -> Part:
    if is_matrix:
        return lambda whole: whole[..., which::2].transpose(1, 2)
    return lambda whole: whole[..., which::2]
