"""Gemma 4 in GGUF files: two kinds of layers, each with heads and a rotary embedding of its own."""

from collections.abc import Mapping

from aioserve.model_source.gguf_config import RMS, USUAL_WITHOUT_WIDTH, Architecture, Facts

_NEVER = 1e29  # divisors from here on stand for dimensions that do not turn


def _gemma4(facts: Facts) -> None:
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
    _heads(facts, full)
    _width_of_layers(facts, shared)
    _rope(facts)
    _experts(facts)


def _heads(facts: Facts, full: list[int]) -> None:
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


def _width_of_layers(facts: Facts, shared: int) -> None:
    widths = facts.metadata.each("feed_forward_length", facts.num_layers) or [0]
    first = len(widths) - shared
    fields, narrow = facts.fields, widths[0]
    fields["intermediate_size"] = narrow
    fields["use_double_wide_mlp"] = wide = shared > 0 and widths[-1] == 2 * narrow
    expected = [narrow] * first + [2 * narrow if wide else narrow] * shared
    if widths != expected:
        raise facts.metadata.refused("feed_forward_length", f"{widths!r:.99}")


def _rope(facts: Facts) -> None:
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


def _experts(facts: Facts) -> None:
    if facts.has("ffn_gate_inp.weight"):
        facts.fields |= {
            "enable_moe_block": True,
            "num_experts": facts.metadata.need("expert_count"),
            "top_k_experts": facts.metadata.need("expert_used_count"),
            "moe_intermediate_size": facts.metadata.need("expert_feed_forward_length"),
        }


GEMMA4: Mapping[str, Architecture] = {
    "gemma4": Architecture(
        "gemma4_text",
        keys={**RMS, "final_logit_softcapping": "final_logit_softcapping"},
        fixed={"final_logit_softcapping": None},
        heads="own",
        turned="none",
        usual=USUAL_WITHOUT_WIDTH,
        more=_gemma4,
        names={
            "router.per_expert_scale": "ffn_down_exps.scale",
            "router.scale": "ffn_gate_inp.scale",
        },
    )
}
