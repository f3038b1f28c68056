"""What the table of GGUF architectures does not say as data: fields that come of several facts.

Each function takes the facts of a file and sets fields of the configuration, or refuses the file by
`ConfigError`; a few tell which model of `transformers` it is.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from aioserve.features.gguf.config import LAYER_NORM, RMS_KEY, Facts, read_rope

#: Keys of the scales of Granite, and the field for each.
GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
#: MiniCPM's scales, of which its files say nothing, or not all.
MINICPM_EMBEDDING_SCALE, MINICPM_DEPTH_SCALE, MINICPM_BASE_WIDTH = 12.0, 1.4, 256
_GATING, _SOFTMAX, _SIGMOID = "expert_gating_func", 1, 2
_NO_KEY_NORMS = 128  # experts of the one Llama 4 that does not normalize queries and keys
_NEVER = 1e29  # divisors from here on stand for dimensions that do not turn


def with_key(key: str, stated: str, otherwise: str) -> Callable[[Facts], str]:
    """Tells models of `transformers` apart: `stated` is one whose key is stated and not 0."""
    return lambda facts: stated if facts.metadata.get(key) else otherwise


# Dense decoders: Llama and those that are built as it is.


def llama(facts: Facts) -> None:
    facts.fields["attention_bias"] = facts.has("attn_q.bias") and facts.has("attn_output.bias")
    facts.fields["mlp_bias"] = facts.has("ffn_down.bias")
    if facts.metadata.get("expert_count"):
        facts.fields["num_local_experts"] = facts.metadata.get("expert_count")
        facts.fields["num_experts_per_tok"] = facts.metadata.need("expert_used_count")
        facts.fields["sliding_window"] = None


def phi3(facts: Facts) -> None:
    facts.fields["sliding_window"] = facts.metadata.get("attention.sliding_window") or None
    rope = facts.fields["rope_parameters"]
    original = facts.metadata.get("rope.scaling.original_context_length")
    if original is None or rope["rope_type"] != "longrope":
        original = facts.fields["max_position_embeddings"]
    facts.fields["original_max_position_embeddings"] = original


def stablelm(facts: Facts) -> None:
    parallel = not facts.has("ffn_norm.weight")
    facts.metadata.expect(
        "use_parallel_residual", lambda stated: stated == parallel, f"{parallel} with its tensors"
    )
    facts.fields["use_parallel_residual"] = parallel


def gemma2(facts: Facts) -> None:
    _scale_of_gemma(facts, 46)


def gemma3(facts: Facts) -> None:
    _scale_of_gemma(facts, 62)


def _scale_of_gemma(facts: Facts, num_layers_of_27b: int) -> None:
    """Return the scale of scores: no key says it, llama.cpp tells the 27B by its layers."""
    fields = facts.fields
    by_heads = fields["hidden_size"] // fields["num_attention_heads"]
    is_27b = facts.num_layers == num_layers_of_27b
    fields["query_pre_attn_scalar"] = by_heads if is_27b else fields["head_dim"]


def granite(facts: Facts) -> None:
    if facts.fields["attention_multiplier"] is None:
        facts.fields["attention_multiplier"] = facts.fields["head_dim"] ** -0.5
    facts.fields["attention_bias"] = facts.has("attn_q.bias")
    facts.fields["mlp_bias"] = facts.has("ffn_down.bias")
    facts.metadata.expect("rope.scaling.finetuned", bool, "true: a rotary embedding")


def smollm3(facts: Facts) -> None:
    facts.fields |= {
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(facts.num_layers)],
        "layer_types": ["full_attention"] * facts.num_layers,
    }


def mistral3(facts: Facts) -> None:
    """Scores of later tokens are scaled, where the file says by how much; else this is a Llama."""
    if beta := facts.metadata.get("attention.temperature_scale"):
        rope = facts.fields["rope_parameters"]
        if rope["rope_type"] != "yarn":  # whose original length is the unit of lateness
            raise facts.metadata.refused("attention.temperature_scale", "a scale without YaRN")
        rope["llama_4_scaling_beta"] = beta
        facts.fields["sliding_window"] = None
    else:
        llama(facts)


def olmo(facts: Facts) -> None:
    facts.fields["clip_qkv"] = facts.metadata.get("attention.clamp_kqv") or None
    # the norms of `transformers` have this one built in
    facts.metadata.expect(LAYER_NORM, lambda eps: abs(eps - 1e-5) < 1e-9, "1e-5")


def olmo2(facts: Facts) -> None:
    if facts.metadata.get("attention.sliding_window"):
        facts.windows(4)
        facts.rope_by_type()


def glm4(facts: Facts) -> None:
    # such files have rows of queries and keys in another order
    facts.metadata.expect("rope.dimension_sections", lambda _: False, "no M-RoPE")


def minicpm(facts: Facts) -> None:
    fields = facts.fields
    if fields["residual_multiplier"] is None:
        fields["residual_multiplier"] = MINICPM_DEPTH_SCALE / facts.num_layers**0.5
    if fields["logits_scaling"] is None:
        fields["logits_scaling"] = fields["hidden_size"] / MINICPM_BASE_WIDTH
    granite(facts)


def minicpm3(facts: Facts) -> None:
    """Latent attention; the sizes of values are those of the tensors."""
    metadata, fields = facts.metadata, facts.fields
    turned, heads = metadata.need("rope.dimension_count"), fields["num_attention_heads"]
    metadata.expect("attention.head_count_kv", heads.__eq__, str(heads))
    inputs = facts.tensors.get("blk.0.attn_output.weight", (0, 0))[1]
    fields |= {
        "num_key_value_heads": heads,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": metadata.need("attention.key_length") - turned,
        "v_head_dim": inputs // heads,
        "rope_parameters": read_rope(metadata, facts.rope_tensors, turned),
    }
    metadata.expect("attention.value_length", fields["v_head_dim"].__eq__, "that of its tensors")


def granite_swa(facts: Facts) -> None:
    granite(facts)
    if facts.metadata.get("expert_count"):
        del facts.fields["mlp_bias"]
        facts.fields |= {
            "num_local_experts": facts.metadata.get("expert_count"),
            "num_experts_per_tok": facts.metadata.need("expert_used_count"),
            "shared_intermediate_size": facts.metadata.get("expert_shared_feed_forward_length", 0),
        }


# Gemma 3n: predictions beside the stream, and embeddings of each layer.


def gemma3n(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    fields["intermediate_size"] = metadata.each("feed_forward_length", facts.num_layers)
    scales = metadata.each("activation_sparsity_scale", facts.num_layers)
    fields["activation_sparsity_pattern"] = [*map(_sparsity, scales or [-math.inf])]
    if scales is None:
        fields["activation_sparsity_pattern"] *= facts.num_layers
    fields["laurel_rank"] = facts.tensors.get("blk.0.laurel_l.weight", (0,))[0]
    fields["altup_correct_scale"] = facts.has("altup_correct_scale.weight")
    fields["vocab_size_per_layer_input"] = facts.tensors.get(
        "per_layer_token_embd.weight", (fields["vocab_size"],)
    )[0]


def _sparsity(scale: Any) -> float:
    """Return the share of activations that become 0, of which the file has the quantile."""
    return 0.0 if scale == -math.inf else round(NormalDist().cdf(scale), 6)


# Gemma 4: two kinds of layers, each with heads and a rotary embedding of its own.


def gemma4(facts: Facts) -> None:
    metadata, fields, layers = facts.metadata, facts.fields, facts.num_layers
    facts.windows(6)
    fields["num_kv_shared_layers"] = shared = metadata.get("attention.shared_kv_layers", 0)
    width = "embedding_length_per_layer_input"
    fields["hidden_size_per_layer_input"] = metadata.get(width, 0)
    table = facts.tensors.get("per_layer_token_embd.weight")
    fields["vocab_size_per_layer_input"] = table[0] if table else fields["vocab_size"]
    full = [i for i, kind in enumerate(fields["layer_types"]) if kind == "full_attention"]
    own = [i for i in full if i < layers - shared]  # the others take K and V of earlier layers
    stored = [f"blk.{i}.attn_v.weight" in facts.tensors for i in own]
    fields["attention_k_eq_v"] = bool(stored) and not any(stored)
    _gemma4_heads(facts, full)
    _gemma4_widths(facts, shared)
    _gemma4_rope(facts)
    _gemma4_experts(facts)


def _gemma4_heads(facts: Facts, full: list[int]) -> None:
    metadata, fields = facts.metadata, facts.fields
    fields["global_head_dim"] = size = metadata.need("attention.key_length")
    fields["head_dim"] = near = metadata.get("attention.key_length_swa", size)
    for end, expected in (("", size), ("_swa", near)):
        for key in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
            metadata.expect(key, expected.__eq__, str(expected))
    counts = metadata.each("attention.head_count_kv", facts.num_layers)
    counts = counts or [fields["num_attention_heads"]] * facts.num_layers
    of_full = {counts[i] for i in full}
    of_near = {count for i, count in enumerate(counts) if i not in set(full)}
    if len(of_full) > 1 or len(of_near) > 1:
        raise metadata.refused("attention.head_count_kv", f"{counts!r:.99}")
    fields["num_key_value_heads"] = min(of_near or of_full)
    if of_full and of_near and of_full != of_near:
        fields["num_global_key_value_heads"] = min(of_full)


def _gemma4_widths(facts: Facts, shared: int) -> None:
    widths = facts.metadata.each("feed_forward_length", facts.num_layers) or [0]
    first = len(widths) - shared
    fields, narrow = facts.fields, widths[0]
    fields["intermediate_size"] = narrow
    fields["use_double_wide_mlp"] = wide = shared > 0 and widths[-1] == 2 * narrow
    expected = [narrow] * first + [2 * narrow if wide else narrow] * shared
    if widths != expected:
        raise facts.metadata.refused("feed_forward_length", f"{widths!r:.99}")


def _gemma4_rope(facts: Facts) -> None:
    metadata, divisors = facts.metadata, facts.rope_tensors.divisors or [1.0]
    metadata.expect("rope.scaling.type", lambda kind: kind == "none", "none")
    turned = sum(divisor == 1 for divisor in divisors)
    if not all(divisor == 1 for divisor in divisors[:turned]) or not all(
        divisor > _NEVER for divisor in divisors[turned:]
    ):
        raise metadata.refused("rope.freq_base", "other divisors than of dimensions that rest")
    facts.fields["rope_parameters"] = {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": metadata.get("rope.freq_base", 10_000.0),
            "partial_rotary_factor": turned / len(divisors),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": metadata.get("rope.freq_base_swa", 10_000.0),
        },
    }


def _gemma4_experts(facts: Facts) -> None:
    if facts.has("ffn_gate_inp.weight"):
        facts.fields |= {
            "enable_moe_block": True,
            "num_experts": facts.metadata.need("expert_count"),
            "top_k_experts": facts.metadata.need("expert_used_count"),
            "moe_intermediate_size": facts.metadata.need("expert_feed_forward_length"),
        }


# Mixtures of experts.


def gpt_oss(facts: Facts) -> None:
    width = facts.metadata.one("feed_forward_length")
    facts.fields["intermediate_size"] = facts.metadata.one("expert_feed_forward_length", width)
    rope = facts.fields["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as it is published; no key says it


def granite_moe(facts: Facts) -> None:
    granite(facts)
    del facts.fields["mlp_bias"]
    if width := facts.metadata.get("expert_shared_feed_forward_length"):
        facts.fields["shared_intermediate_size"] = width


def glm4_moe(facts: Facts) -> None:
    glm4(facts)
    # layers that predict further tokens stand behind the others, and are not used
    facts.fields["num_hidden_layers"] -= facts.metadata.get("nextn_predict_layers", 0)


def hunyuan_moe(facts: Facts) -> None:
    """Make all experts, the shared one included, as wide as `feed_forward_length`."""
    width = facts.fields["intermediate_size"]
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        facts.metadata.expect(key, width.__eq__, str(width))
    facts.metadata.expect("expert_shared_count", lambda count: count == 1, "1")


def minimax(facts: Facts) -> None:
    width = facts.fields["intermediate_size"]
    facts.metadata.expect("expert_feed_forward_length", lambda n: n == width, str(width))
    facts.fields["rotary_dim"] = facts.metadata.get("rope.dimension_count", 64)


def expert_width(facts: Facts) -> None:
    """Experts are as wide as `feed_forward_length`, whichever of the keys says it."""
    width = facts.metadata.one("feed_forward_length")
    facts.fields["intermediate_size"] = facts.metadata.one("expert_feed_forward_length", width)


def normed_shares(facts: Facts) -> None:
    """The shares of the experts of a token add up."""
    if not facts.metadata.need("expert_weights_norm"):
        raise facts.metadata.refused("expert_weights_norm", "false; shares that add up are served")


def _layers_of_experts(facts: Facts) -> list[str]:
    """Return `mlp_layer_types`, which says which layers have a router."""
    routers = (f"blk.{layer}.ffn_gate_inp.weight" for layer in range(facts.num_layers))
    return ["sparse" if router in facts.tensors else "dense" for router in routers]


def hy_v3(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    normed_shares(facts)
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    fields["mlp_layer_types"] = _layers_of_experts(facts)
    width = fields["moe_intermediate_size"]
    shared = metadata.get("expert_shared_feed_forward_length", width)
    if shared % width:
        raise metadata.refused("expert_shared_feed_forward_length", f"{shared} for {width} each")
    fields["num_shared_experts"] = shared // width
    dense = fields["mlp_layer_types"].index("sparse") if facts.has("ffn_gate_inp.weight") else 0
    metadata.expect("leading_dense_block_count", dense.__eq__, str(dense))


def llama4(facts: Facts) -> None:
    """Chunks, layers without rotation and scales of late tokens are those of all published ones."""
    facts.metadata.expect("attention.sliding_window", lambda _: False, "none: its chunks of 8192")
    facts.same_theta()
    facts.fields["use_qk_norm"] = facts.fields["num_local_experts"] != _NO_KEY_NORMS


def mellum(facts: Facts) -> None:
    facts.fields["mlp_layer_types"] = _layers_of_experts(facts)


def cohere2_moe(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    metadata.expect("expert_gating_func", lambda kind: kind in (_SOFTMAX, _SIGMOID), "1 or 2")
    is_sigmoid = metadata.get("expert_gating_func", _SOFTMAX) == _SIGMOID
    fields["expert_selection_fn"] = "sigmoid" if is_sigmoid else "softmax"
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    facts.windows(4)
    facts.same_theta()
    metadata.expect("leading_dense_block_count", lambda count: count == 0, "0")
    fields["mlp_layer_types"] = _layers_of_experts(facts)
    shared = fields["num_shared_experts"] * fields["intermediate_size"]
    metadata.expect("expert_shared_feed_forward_length", shared.__eq__, str(shared))


# Latent attention: DeepSeek 2 and 3, Kimi K2, GLM-4.7 Flash, Youtu. llama.cpp has one name for
# them, `deepseek2`: how experts are chosen tells which it is.


def deepseek2_type(facts: Facts) -> str:
    facts.metadata.expect(_GATING, lambda kind: kind in (_SOFTMAX, _SIGMOID), "1 or 2")
    is_dense = not facts.has("ffn_gate_inp.weight")
    by_default = _SIGMOID if is_dense or facts.has("exp_probs_b.bias") else _SOFTMAX
    is_third = facts.metadata.get(_GATING, by_default) == _SIGMOID
    return "deepseek_v3" if is_third else "deepseek_v2"


def deepseek2(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    _latent_heads(facts)
    fields["rope_parameters"] = rope = read_rope(
        metadata, facts.rope_tensors, fields["qk_rope_head_dim"]
    )
    if all_dims := rope.get("mscale_all_dim"):  # the converter writes a tenth of it
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * all_dims, 6)
    _latent_experts(facts)


def _latent_experts(facts: Facts) -> None:
    metadata, fields, groups = facts.metadata, facts.fields, facts.fields["n_group"]
    metadata.expect(
        "expert_group_used_count", lambda used: 0 < used <= groups, f"a number from 1 to {groups}"
    )
    if not facts.has("ffn_gate_inp.weight"):  # all layers are dense
        width = fields["intermediate_size"]
        metadata.expect("expert_feed_forward_length", width.__eq__, str(width))
        metadata.expect("expert_shared_count", lambda count: not count, "0")
    elif deepseek2_type(facts) == "deepseek_v2":
        metadata.expect("expert_weights_norm", lambda is_normed: not is_normed, "false")
        fields["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"


def _latent_heads(facts: Facts) -> None:
    """Files of today have keys and values of latent states for all heads in common; older ones
    those of each head.
    """
    metadata, fields = facts.metadata, facts.fields
    rope, rank = metadata.need("rope.dimension_count"), fields["kv_lora_rank"]
    end, expected = "", {"attention.head_count_kv": fields["num_attention_heads"]}
    if facts.has("attn_k_b.weight"):
        end = "_mla"
        expected = {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
        }
    for key, value in expected.items():
        metadata.expect(key, value.__eq__, str(value))
    fields |= {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": metadata.need(f"attention.key_length{end}") - rope,
        "v_head_dim": metadata.need(f"attention.value_length{end}"),
        "num_key_value_heads": fields["num_attention_heads"],
    }


def _indexed_latent(facts: Facts) -> None:
    """An indexer chooses the tokens that a layer looks at (DeepSeek 3.2, GLM 5)."""
    metadata, fields = facts.metadata, facts.fields
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    _latent_heads(facts)
    fields["rope_parameters"] = read_rope(metadata, facts.rope_tensors, fields["qk_rope_head_dim"])
    groups = fields["n_group"]
    metadata.expect(
        "expert_group_used_count", lambda used: 0 < used <= groups, f"a number from 1 to {groups}"
    )


def glm_dsa(facts: Facts) -> None:
    _indexed_latent(facts)
    kinds = facts.metadata.each("attention.indexer.types", facts.num_layers)
    if kinds is not None:
        facts.fields["indexer_types"] = ["full" if is_full else "shared" for is_full in kinds]


def deepseek32(facts: Facts) -> None:
    _indexed_latent(facts)
    if all_dims := facts.fields["rope_parameters"].get("mscale_all_dim"):
        rope = facts.fields["rope_parameters"]
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * all_dims, 6)


# Older decoders, and those whose layers keep states.


def lfm2(facts: Facts) -> None:
    heads = facts.metadata.each("attention.head_count_kv", facts.num_layers) or []
    kinds = ["full_attention" if count else "conv" for count in heads]
    others = {count for count in heads if count}
    if len(others) != 1:
        raise facts.metadata.refused("attention.head_count_kv", f"{heads!r:.99}")
    facts.fields |= {
        "num_key_value_heads": others.pop(),
        "layer_types": kinds,
    }


def no_groups_of_gpt2(facts: Facts) -> None:
    facts.metadata.expect("attention.head_count_kv", lambda n: n == facts.fields["n_head"], "all")


def no_groups(facts: Facts) -> None:
    heads = facts.fields["num_attention_heads"]
    facts.metadata.expect("attention.head_count_kv", lambda count: count == heads, str(heads))


def one_kv_head(facts: Facts) -> None:
    facts.metadata.expect("attention.head_count_kv", lambda count: count == 1, "1")


def falcon(facts: Facts) -> None:
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


def mamba(facts: Facts) -> None:
    fields = facts.fields
    _expand(facts, fields["intermediate_size"])
    facts.metadata.expect("ssm.dt_b_c_rms", lambda is_normed: not is_normed, "false")


def mamba2(facts: Facts) -> None:
    fields = facts.fields
    inner = facts.metadata.need("ssm.inner_size")
    _expand(facts, inner)
    fields["head_dim"] = inner // fields["num_heads"]


# Linear attention beside attention: Qwen3-Next and Qwen3.5.


def delta_net(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    fields["linear_value_head_dim"] = _inner_head_size(facts, fields["linear_num_value_heads"])
    stated = metadata.each("attention.recurrent_layers", fields["num_hidden_layers"])
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    every = metadata.get("full_attention_interval", 4)
    layers = range(facts.num_layers)
    linear = stated[: len(layers)] if stated else [(layer + 1) % every != 0 for layer in layers]
    fields["layer_types"] = [_kind_of(is_linear) for is_linear in linear]


def _kind_of(has_state: bool) -> str:
    """Return the type of a layer, for `layer_types`."""
    return "linear_attention" if has_state else "full_attention"


def _inner_head_size(facts: Facts, heads: int) -> int:
    """Return the size of a head of states: `ssm.inner_size` by the number of `heads`. Raises
    `ConfigError` if it is no multiple of that.
    """
    inner = int(facts.metadata.need("ssm.inner_size"))
    if heads < 1 or inner % heads:
        raise facts.metadata.refused("ssm.inner_size", f"{inner}, no multiple of {heads} heads")
    return inner // heads


# Mamba layers beside attention: Falcon-H1, Granite 4, Nemotron-H, Jamba.


def _attention_where_stated(facts: Facts) -> list[bool]:
    """Return which layers have K and V: those with heads of them. Sets `num_key_value_heads`."""
    counts = facts.metadata.each("attention.head_count_kv", facts.num_layers) or []
    others = {count for count in counts if count}
    if len(others) != 1:
        raise facts.metadata.refused("attention.head_count_kv", f"{counts!r:.99}")
    facts.fields["num_key_value_heads"] = others.pop()
    return [count > 0 for count in counts]


def falcon_h1(facts: Facts) -> None:
    fields = facts.fields
    fields |= {
        "mamba_d_head": _inner_head_size(facts, fields["mamba_n_heads"]),
        "mamba_d_ssm": facts.metadata.get("ssm.inner_size"),
    }


def _granite_hybrid(facts: Facts) -> None:
    fields = facts.fields
    facts.metadata.need("expert_shared_feed_forward_length")
    attention = _attention_where_stated(facts)
    fields["layer_types"] = [_kind_of(not has_kv) for has_kv in attention]
    fields["mamba_d_head"] = _inner_head_size(facts, fields["mamba_n_heads"])
    inner = fields["mamba_n_heads"] * fields["mamba_d_head"]
    if inner % fields["hidden_size"]:
        raise facts.metadata.refused("ssm.inner_size", f"{inner}, no multiple of the width")
    fields["mamba_expand"] = inner // fields["hidden_size"]
    if fields["attention_multiplier"] is None:
        fields["attention_multiplier"] = fields["head_dim"] ** -0.5
    if not fields["num_local_experts"]:
        facts.metadata.expect("expert_used_count", lambda count: not count, "0")
    facts.metadata.expect("rope.scaling.finetuned", lambda turns: not turns, "false: no rotation")


def granite_hybrid_or_bamba(facts: Facts) -> None:
    if not facts.metadata.get("rope.scaling.finetuned"):
        _granite_hybrid(facts)
        return
    metadata, fields = facts.metadata, facts.fields
    for key in GRANITE_SCALES:
        metadata.expect(key, lambda _: False, "no scale, as in Bamba,")
    for key in ("expert_count", "expert_used_count", "expert_shared_feed_forward_length"):
        metadata.expect(key, lambda count: not count, "0, as in Bamba,")
    attention = _attention_where_stated(facts)
    fields["attn_layer_indices"] = [layer for layer, has_kv in enumerate(attention) if has_kv]
    size, inner = fields["head_dim"], int(metadata.need("ssm.inner_size"))
    fields["mamba_d_head"] = _inner_head_size(facts, fields["mamba_n_heads"])
    fields["mamba_expand"] = inner // fields["hidden_size"]
    turned = metadata.get("rope.dimension_count", size)
    fields["rope_parameters"] = read_rope(metadata, facts.rope_tensors, turned)
    fields["rope_parameters"]["partial_rotary_factor"] = turned / size


def nemotron_h(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    attention = _attention_where_stated(facts)
    widths = metadata.each("feed_forward_length", facts.num_layers) or []
    rest = "moe" if facts.has("ffn_gate_inp.weight") else "mlp"
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    kinds = [
        "full_attention" if has_kv else rest if width else "linear_attention"
        for has_kv, width in zip(attention, widths, strict=True)
    ]
    fields["layers_block_type"] = kinds[: facts.num_layers]
    if len(own := {width for width in widths if width}) > 1:
        raise metadata.refused("feed_forward_length", f"{widths!r:.99}")
    fields["intermediate_size"] = next(iter(own), 0)
    eps = metadata.get(RMS_KEY, metadata.get(LAYER_NORM))
    fields["layer_norm_epsilon"] = metadata.need(RMS_KEY) if eps is None else eps
    fields |= {
        "mamba_head_dim": _inner_head_size(facts, fields["mamba_num_heads"]),
    }


def jamba(facts: Facts) -> None:
    attention = _attention_where_stated(facts)
    experts = [
        f"blk.{layer}.ffn_gate_inp.weight" in facts.tensors for layer in range(facts.num_layers)
    ]
    for name, layers in (("attn", attention), ("expert", experts)):
        period, offset = _period(layers)
        if [layer % period == offset for layer in range(facts.num_layers)] != layers:
            raise facts.metadata.refused("attention.head_count_kv", f"no period: {layers!r:.99}")
        facts.fields |= {f"{name}_layer_period": period, f"{name}_layer_offset": offset}
    inner, hidden = facts.metadata.need("ssm.inner_size"), facts.fields["hidden_size"]
    if inner % hidden:
        raise facts.metadata.refused("ssm.inner_size", f"{inner}, no multiple of {hidden}")
    facts.fields["mamba_expand"] = inner // hidden


def _period(layers: list[bool]) -> tuple[int, int]:
    """Return the distance from the first layer that is marked true to the next one, and the place
    of the first. Where none is marked, the distance is longer than the list.
    """
    places = [layer for layer, is_so in enumerate(layers) if is_so] or [len(layers)]
    following = places[1] if len(places) > 1 else max(len(layers), places[0]) + 1 + places[0]
    return following - places[0], places[0]
