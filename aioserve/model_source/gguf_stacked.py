"""Parameters that take several tensors of a GGUF file, each in a part of its own.

Each function takes the name of a parameter and the fields of the configuration, and gives the names
that tensors of its layer have, each with a view of the parameter that takes its weights; None is
all of it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Part = Callable[[Any], Any]
Parts = Callable[[str, Mapping[str, Any]], Iterator[tuple[str, Part | None]]]


def experts(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
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


def gpt_oss(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
    """Gate and up by turns, and matrices that are multiplied from the other side."""
    end = parameter.rpartition(".experts.")[2]
    for which, part in (("gate", 0), ("up", 1)):
        if end == "gate_up_proj":
            yield f"ffn_{which}_exps.weight", _every_second(part, is_matrix=True)
        elif end == "gate_up_proj_bias":
            yield f"ffn_{which}_exps.bias", _every_second(part, is_matrix=False)
    if end == "down_proj":
        yield "ffn_down_exps.weight", lambda whole: whole.transpose(1, 2)


def llama4(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
    """Gates before ups, all multiplied from the other side."""
    end = parameter.rpartition(".experts.")[2]
    if end == "gate_up_proj":
        for which, number in (("gate", 0), ("up", 1)):
            yield f"ffn_{which}_exps.weight", _transposed_half(number)
    elif end == "down_proj":
        yield "ffn_down_exps.weight", lambda whole: whole.transpose(1, 2)


def delta_net(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
    """Queries, keys and values of each key head, and behind them its gates (Qwen3-Next)."""
    yield from experts(parameter, fields)
    if parameter.endswith(".linear_attn.in_proj_qkvz.weight"):
        heads = fields["linear_num_key_heads"]
        values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
        own = 2 * fields["linear_key_head_dim"] + values // heads
        yield "attn_qkv.weight", lambda whole: _by_head(whole, heads)[:, :own]
        yield "attn_gate.weight", lambda whole: _by_head(whole, heads)[:, own:]


def latent(parameter: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Part | None]]:
    """What makes keys and values of each head from latent states; keys from the other side."""
    yield from experts(parameter, fields)
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
