"""Dense decoders of GGUF files, by llama.cpp's names: Llama and those that are built as it is."""

from collections.abc import Mapping

from aioserve.model_source import gguf_layouts as layouts
from aioserve.model_source.gguf_config import LAYER_NORM, RMS, RMS_KEY, Architecture, Facts, biases

GRANITE = {
    **RMS,
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GRANITE_FIXED = {
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def llama_facts(facts: Facts) -> None:
    facts.fields["attention_bias"] = facts.has("attn_q.bias") and facts.has("attn_output.bias")
    facts.fields["mlp_bias"] = facts.has("ffn_down.bias")
    if facts.metadata.get("expert_count"):
        facts.fields["num_local_experts"] = facts.metadata.get("expert_count")
        facts.fields["num_experts_per_tok"] = facts.metadata.need("expert_used_count")
        facts.fields["sliding_window"] = None


def _phi3(facts: Facts) -> None:
    facts.fields["sliding_window"] = facts.metadata.get("attention.sliding_window") or None
    rope = facts.fields["rope_parameters"]
    original = facts.metadata.get("rope.scaling.original_context_length")
    if original is None or rope["rope_type"] != "longrope":
        original = facts.fields["max_position_embeddings"]
    facts.fields["original_max_position_embeddings"] = original


def _stablelm(facts: Facts) -> None:
    parallel = not facts.has("ffn_norm.weight")
    facts.metadata.expect(
        "use_parallel_residual", lambda stated: stated == parallel, f"{parallel} with its tensors"
    )
    facts.fields["use_parallel_residual"] = parallel
    facts.fields["use_qkv_bias"] = facts.has("attn_q.bias")


def _window_of_gemma2(facts: Facts) -> None:
    facts.windows(2, 4096)
    facts.same_theta()
    _scale_of_gemma(facts, 46)


def _gemma3(facts: Facts) -> None:
    facts.windows(6)
    facts.rope_by_type(10_000.0)
    _scale_of_gemma(facts, 62)


def _scale_of_gemma(facts: Facts, num_layers_of_27b: int) -> None:
    """What scores are scaled by: no key says it, llama.cpp tells the 27B by its layers."""
    fields = facts.fields
    by_heads = fields["hidden_size"] // fields["num_attention_heads"]
    is_27b = facts.num_layers == num_layers_of_27b
    fields["query_pre_attn_scalar"] = by_heads if is_27b else fields["head_dim"]


def granite_facts(facts: Facts) -> None:
    if facts.fields["attention_multiplier"] is None:
        facts.fields["attention_multiplier"] = facts.fields["head_dim"] ** -0.5
    facts.fields["attention_bias"] = facts.has("attn_q.bias")
    facts.fields["mlp_bias"] = facts.has("ffn_down.bias")
    facts.metadata.expect("rope.scaling.finetuned", bool, "true: a rotary embedding")


def _smollm3(facts: Facts) -> None:
    facts.fields |= {
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(facts.num_layers)],
        "layer_types": ["full_attention"] * facts.num_layers,
        "attention_bias": facts.has("attn_q.bias"),
        "mlp_bias": facts.has("ffn_down.bias"),
    }


def _mistral3(facts: Facts) -> None:
    """Scores of later tokens are scaled, where the file says by how much; else this is a Llama."""
    if beta := facts.metadata.get("attention.temperature_scale"):
        rope = facts.fields["rope_parameters"]
        if rope["rope_type"] != "yarn":  # whose original length is the unit of lateness
            raise facts.metadata.refused("attention.temperature_scale", "a scale without YaRN")
        rope["llama_4_scaling_beta"] = beta
        facts.fields["sliding_window"] = None
    else:
        llama_facts(facts)


def _olmo(facts: Facts) -> None:
    facts.fields["clip_qkv"] = facts.metadata.get("attention.clamp_kqv") or None
    # the norms of `transformers` have this one built in
    facts.metadata.expect(LAYER_NORM, lambda eps: abs(eps - 1e-5) < 1e-9, "1e-5")


def _olmo2(facts: Facts) -> None:
    if facts.metadata.get("attention.sliding_window"):
        facts.windows(4)
        facts.rope_by_type()


def glm4_facts(facts: Facts) -> None:
    facts.fields["attention_bias"] = facts.has("attn_q.bias")
    # such files have rows of queries and keys in another order
    facts.metadata.expect("rope.dimension_sections", lambda _: False, "no M-RoPE")


def _every_fourth_sees_all(facts: Facts) -> None:
    facts.windows(4)
    facts.same_theta()


DENSE: Mapping[str, Architecture] = {
    "llama": Architecture(
        lambda facts: "mixtral" if facts.metadata.get("expert_count") else "llama",
        more=llama_facts,
        layout=layouts.permuted,
    ),
    "mistral3": Architecture(
        lambda facts: (
            "ministral3" if facts.metadata.get("attention.temperature_scale") else "llama"
        ),
        more=_mistral3,
        layout=layouts.permuted,
    ),
    "qwen2": Architecture("qwen2", fixed={"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", fixed={"use_sliding_window": False}),
    # the text of models that see: their positions have axes, which text has in common
    "qwen2vl": Architecture("qwen2", fixed={"use_sliding_window": False}),
    "qwen3vl": Architecture(
        "qwen3", fixed={"use_sliding_window": False}, ignored=("n_deepstack_layers",)
    ),
    "phi2": Architecture("phi", keys={LAYER_NORM: "layer_norm_eps"}, turned="part"),
    "phi3": Architecture("phi3", turned="part", more=_phi3),
    "stablelm": Architecture(
        "stablelm", keys={LAYER_NORM: "layer_norm_eps"}, turned="part", more=_stablelm
    ),
    "starcoder2": Architecture(
        "starcoder2",
        keys={LAYER_NORM: "norm_epsilon"},
        fixed={"sliding_window": None},
        more=biases(use_bias="attn_q.bias"),
    ),
    "nemotron": Architecture(
        "nemotron",
        keys={LAYER_NORM: "norm_eps"},
        ignored=(RMS_KEY,),
        turned="part",
        more=biases(attention_bias="attn_q.bias", mlp_bias="ffn_down.bias"),
        layout=layouts.norms_less_one,
    ),
    "gemma": Architecture("gemma", layout=layouts.norms_less_one),
    "gemma2": Architecture(
        "gemma2",
        keys={
            **RMS,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        fixed={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        more=_window_of_gemma2,
        layout=layouts.norms_less_one,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        keys={**RMS, "final_logit_softcapping": "final_logit_softcapping"},
        fixed={"final_logit_softcapping": None},
        more=_gemma3,
        layout=layouts.norms_less_one,
    ),
    "granite": Architecture(
        "granite", keys=GRANITE, fixed=GRANITE_FIXED, more=granite_facts, layout=layouts.permuted
    ),
    "smollm3": Architecture(
        "smollm3",
        fixed={"use_sliding_window": False},
        more=_smollm3,
        layout=layouts.permuted,
    ),
    "olmo": Architecture("olmo", keys={}, more=_olmo, layout=layouts.permuted),
    "olmo2": Architecture(
        lambda facts: "olmo3" if facts.metadata.get("attention.sliding_window") else "olmo2",
        more=_olmo2,
    ),
    "command-r": Architecture(
        "cohere",
        keys={LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"},
        fixed={"logit_scale": 1.0},
        more=biases(use_qk_norm="attn_q_norm.weight", attention_bias="attn_q.bias"),
    ),
    "cohere2": Architecture(
        "cohere2",
        keys={LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"},
        more=_every_fourth_sees_all,
    ),
    "glm4": Architecture("glm4", turned="part", more=glm4_facts),
    "chatglm": Architecture("glm", turned="part", more=biases(attention_bias="attn_q.bias")),
    "exaone4": Architecture("exaone4", more=_every_fourth_sees_all),
    "seed_oss": Architecture(
        "seed_oss",
        more=biases(
            attention_bias="attn_q.bias",
            attention_out_bias="attn_output.bias",
            mlp_bias="ffn_down.bias",
        ),
    ),
    "ernie4_5": Architecture("ernie4_5", more=biases(use_bias="attn_q.bias")),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", more=biases(attention_bias="attn_q.bias")),
    "arcee": Architecture("arcee", more=llama_facts, layout=layouts.permuted),
}
