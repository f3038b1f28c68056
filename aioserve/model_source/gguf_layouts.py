"""How llama.cpp's converter stores weights of some architectures, undone.

Each function takes the name of a tensor, its weights as a numpy array of the file's shape, and the
fields of the configuration. Where it only changes the order of rows, the first dimension tells:
the same order is then given to the blocks of quantized weights.
"""

from collections.abc import Mapping
from typing import Any


def permuted(name: str, weights: Any, fields: Mapping[str, Any]) -> Any:
    """Rows of queries and keys whose rotated pairs stand side by side, as Llama's."""
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
