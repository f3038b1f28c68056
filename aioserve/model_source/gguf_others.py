"""Older decoders of GGUF files, and those whose layers keep states, by llama.cpp's names."""

from collections.abc import Mapping
from functools import partial

from aioserve.model_source import gguf_layouts as layouts
from aioserve.model_source.gguf_config import LAYER_NORM, RMS_KEY, Architecture, Facts

_GPT2 = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
}
_SSM = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}
_SSM_KEYS = {
    RMS_KEY: "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
}
_SSM_ZERO = ("context_length", "feed_forward_length", "attention.head_count")


def lfm2_facts(facts: Facts) -> None:
    heads = facts.metadata.each("attention.head_count_kv", facts.num_layers) or []
    kinds = ["full_attention" if count else "conv" for count in heads]
    others = {count for count in heads if count}
    if len(others) != 1:
        raise facts.metadata.refused("attention.head_count_kv", f"{heads!r:.99}")
    facts.fields |= {
        "num_key_value_heads": others.pop(),
        "layer_types": kinds,
        "conv_bias": facts.has("shortconv.conv.bias"),
    }


def _gpt2_width(facts: Facts) -> None:
    facts.metadata.expect("attention.head_count_kv", lambda n: n == facts.fields["n_head"], "all")


def _no_groups(facts: Facts) -> None:
    heads = facts.fields["num_attention_heads"]
    facts.metadata.expect("attention.head_count_kv", lambda count: count == heads, str(heads))


def _one_kv_head(facts: Facts) -> None:
    facts.metadata.expect("attention.head_count_kv", lambda count: count == 1, "1")


def _falcon(facts: Facts) -> None:
    heads = facts.fields.pop("num_key_value_heads")
    facts.fields |= {
        "multi_query": heads == 1,
        "new_decoder_architecture": heads != 1,
        "num_kv_heads": heads,
        "bias": facts.has("attn_qkv.bias"),
        "num_ln_in_parallel_attn": 2 if facts.has("attn_norm_2.weight") else 1,
    }
    facts.fields["ffn_hidden_size"] = facts.fields.pop("intermediate_size")
    del facts.fields["head_dim"]


def _expand(facts: Facts, inner: int) -> None:
    hidden = facts.fields["hidden_size"]
    if inner % hidden:
        raise facts.metadata.refused("ssm.inner_size", f"{inner}, no multiple of {hidden}")
    facts.fields["expand"] = inner // hidden


def _mamba(facts: Facts) -> None:
    fields = facts.fields
    _expand(facts, fields["intermediate_size"])
    fields["use_conv_bias"] = facts.has("ssm_conv1d.bias")
    fields["use_bias"] = facts.has("ssm_in.bias")
    facts.metadata.expect("ssm.dt_b_c_rms", lambda is_normed: not is_normed, "false")


def _mamba2(facts: Facts) -> None:
    fields = facts.fields
    inner = facts.metadata.need("ssm.inner_size")
    _expand(facts, inner)
    fields["head_dim"] = inner // fields["num_heads"]
    fields["use_conv_bias"] = facts.has("ssm_conv1d.bias")
    fields["use_bias"] = facts.has("ssm_in.bias")


#: An architecture of Mamba layers alone.
_state_space = partial(
    Architecture, ignored=_SSM_ZERO, turned="none", usual=_SSM, layout=layouts.mamba
)

OTHERS: Mapping[str, Architecture] = {
    "lfm2": Architecture(
        "lfm2",
        keys={RMS_KEY: "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        fixed={"block_auto_adjust_ff_dim": False, "num_key_value_heads": None},
        more=lfm2_facts,
    ),
    "mamba": _state_space(
        "mamba",
        keys={
            **_SSM_KEYS,
            "ssm.time_step_rank": "time_step_rank",
            "ssm.inner_size": "intermediate_size",
        },
        more=_mamba,
    ),
    "mamba2": _state_space(
        "mamba2",
        keys={**_SSM_KEYS, "ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
        more=_mamba2,
        names={"mixer.dt_bias": "ssm_dt.bias"},
    ),
    "gptneox": Architecture(
        "gpt_neox",
        keys={LAYER_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        turned="part",
        more=_no_groups,
        layout=layouts.qkv_by_head,
    ),
    "gpt2": Architecture(
        "gpt2",
        keys={LAYER_NORM: "layer_norm_epsilon"},
        turned="none",
        usual=_GPT2,
        more=_gpt2_width,
        layout=layouts.transposed,
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        keys={LAYER_NORM: "layer_norm_epsilon"},
        fixed={"multi_query": True},
        turned="none",
        usual=_GPT2,
        more=_one_kv_head,
    ),
    "falcon": Architecture(
        "falcon",
        heads="derived",
        keys={LAYER_NORM: "layer_norm_epsilon"},
        fixed={"alibi": False, "parallel_attn": True},
        more=_falcon,
        layout=layouts.qkv_by_group,
    ),
    "bloom": Architecture(
        "bloom",
        keys={LAYER_NORM: "layer_norm_epsilon"},
        ignored=("context_length", "feed_forward_length", "attention.head_count_kv"),
        turned="none",
        usual={
            "embedding_length": "hidden_size",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
        },
        layout=layouts.qkv_by_head,
        names={
            "word_embeddings_layernorm.weight": "token_embd_norm.weight",
            "word_embeddings_layernorm.bias": "token_embd_norm.bias",
            "post_attention_layernorm.weight": "ffn_norm.weight",
            "post_attention_layernorm.bias": "ffn_norm.bias",
        },
    ),
}
