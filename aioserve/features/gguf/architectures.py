"""The architectures of GGUF files that are served, by llama.cpp's names: a table.

What a key means is what llama.cpp's converter wrote it from; what no key says, llama.cpp knows.
`Architecture` says what each column is; a function of `facts` reads what is no column.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from aioserve.features.gguf import facts as read
from aioserve.features.gguf import layouts
from aioserve.features.gguf.config import (
    LAYER_NORM,
    RMS,
    RMS_KEY,
    USUAL_WITHOUT_WIDTH,
    Architecture,
    Windows,
)

_GRANITE = {
    **RMS,
    **read.GRANITE_SCALES,
}
_GRANITE_FIXED = {
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
_MOST_STREAMS = 8  # that are predicted beside each other
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
#: Layers of experts as DeepSeek's: some shared, some layers dense, a sigmoid and a bias per expert.
_DEEP_EXPERTS = {
    **_EXPERTS,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_DEEP_FIXED = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "first_k_dense_replace": 0,
}
_GATE_BIAS = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
_LATENT = {
    **RMS,
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    **_DEEP_EXPERTS,
}
#: What an absent key means; of a model without experts there is none.
_LATENT_FIXED: Mapping[str, Any] = {
    **_DEEP_FIXED,
    "q_lora_rank": None,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "num_mtp_layers": 0,
}
_INDEXED_LATENT: dict[str, Any] = {
    "keys": {
        **_LATENT,
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    },
    "fixed": _LATENT_FIXED,
    "heads": "own",
    "turned": "none",
    "parts": layouts.latent_parts,
    "named_as": "glm-dsa",
    "is_sigmoid": True,
    "names": _GATE_BIAS,
}
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
_MAMBA_BIASES = {"use_conv_bias": "ssm_conv1d.bias", "use_bias": "ssm_in.bias"}
_SSM_ZERO = ("context_length", "feed_forward_length", "attention.head_count")
#: An architecture of Mamba layers alone.
_state_space = partial(
    Architecture, ignored=_SSM_ZERO, turned="none", usual=_SSM, layout=layouts.mamba
)
_DELTA_NET = {
    **RMS,
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_DT_BIAS = {"linear_attn.dt_bias": "ssm_dt.bias"}
_DENSE_WIDTH = ("feed_forward_length",)  # without effect where all layers are of experts
#: Of a Mamba 2 layer, after `mamba_`.
_MAMBA2 = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_MAMBA2_BIASES = {
    "mamba_conv_bias": "ssm_conv1d.bias",
    "mamba_proj_bias": "ssm_in.bias",
    "attention_bias": "attn_q.bias",
}
_ROPE = ("rope.freq_base", "rope.dimension_count")  # without effect where nothing turns
_NEMOTRON_H: dict[str, Any] = {
    "keys": {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
    },
    "ignored": (*_ROPE, LAYER_NORM),
    "fixed": {"num_key_value_heads": None},
    "usual": USUAL_WITHOUT_WIDTH,
    "turned": "none",
    "is_sigmoid": True,
    "has": {
        "use_conv_bias": "ssm_conv1d.bias",
        "use_bias": "ssm_out.bias",
        "mlp_bias": "ffn_up.bias",
    },
    "more": read.nemotron_h,
    "layout": layouts.hybrid,
    "stem": "backbone",
    "names": {
        "mixer.dt_bias": "ssm_dt.bias",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mixer.experts.up_proj": "ffn_up_exps.weight",
        "mixer.experts.down_proj": "ffn_down_exps.weight",
    },
}
ARCHITECTURES: Mapping[str, Architecture] = {
    # Dense decoders: Llama and those that are built as it is.
    "llama": Architecture(
        read.with_key("expert_count", "mixtral", "llama"),
        more=read.llama,
        layout=layouts.permuted,
    ),
    "mistral3": Architecture(
        read.with_key("attention.temperature_scale", "ministral3", "llama"),
        more=read.mistral3,
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
    "phi3": Architecture("phi3", turned="part", more=read.phi3),
    "stablelm": Architecture(
        "stablelm",
        keys={LAYER_NORM: "layer_norm_eps"},
        turned="part",
        has={"use_qkv_bias": "attn_q.bias"},
        more=read.stablelm,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        keys={LAYER_NORM: "norm_epsilon"},
        fixed={"sliding_window": None},
        has={"use_bias": "attn_q.bias"},
    ),
    "nemotron": Architecture(
        "nemotron",
        keys={LAYER_NORM: "norm_eps"},
        ignored=(RMS_KEY,),
        turned="part",
        has={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"},
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
        windows=Windows(2, 4096),
        more=read.gemma2,
        layout=layouts.norms_less_one,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        keys={**RMS, "final_logit_softcapping": "final_logit_softcapping"},
        fixed={"final_logit_softcapping": None},
        windows=Windows(6, theta=10_000.0),
        more=read.gemma3,
        layout=layouts.norms_less_one,
    ),
    "granite": Architecture(
        "granite", keys=_GRANITE, fixed=_GRANITE_FIXED, more=read.granite, layout=layouts.permuted
    ),
    "smollm3": Architecture(
        "smollm3",
        fixed={"use_sliding_window": False},
        has={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"},
        more=read.smollm3,
        layout=layouts.permuted,
    ),
    "olmo": Architecture("olmo", keys={}, more=read.olmo, layout=layouts.permuted),
    "olmo2": Architecture(
        read.with_key("attention.sliding_window", "olmo3", "olmo2"),
        more=read.olmo2,
    ),
    "command-r": Architecture(
        "cohere",
        keys={LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"},
        fixed={"logit_scale": 1.0},
        has={"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"},
    ),
    "cohere2": Architecture(
        "cohere2",
        keys={LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"},
        windows=Windows(4),
    ),
    "glm4": Architecture(
        "glm4", turned="part", has={"attention_bias": "attn_q.bias"}, more=read.glm4
    ),
    "chatglm": Architecture("glm", turned="part", has={"attention_bias": "attn_q.bias"}),
    "exaone4": Architecture("exaone4", windows=Windows(4)),
    "seed_oss": Architecture(
        "seed_oss",
        has={
            "attention_bias": "attn_q.bias",
            "attention_out_bias": "attn_output.bias",
            "mlp_bias": "ffn_down.bias",
        },
    ),
    "ernie4_5": Architecture("ernie4_5", has={"use_bias": "attn_q.bias"}),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", has={"attention_bias": "attn_q.bias"}),
    "arcee": Architecture("arcee", more=read.llama, layout=layouts.permuted),
    "apertus": Architecture(
        "apertus",
        has={"attention_bias": "attn_q.bias"},
        numbers={f"mlp.act_fn.{name}": f"xielu.{name}" for name in _XIELU},
    ),
    "exaone": Architecture("llama", more=read.llama),
    "granite_swa": Architecture(
        read.with_key("expert_count", "granitemoe_swa", "granite_swa"),
        keys=_GRANITE,
        fixed=_GRANITE_FIXED,
        windows=Windows(4),
        more=read.granite_swa,
        layout=layouts.permuted,
        named_as="granite",
        names={
            "self_attn.sinks": "attn_sinks.weight",
            "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
            "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        },
    ),
    "internlm2": Architecture("llama", more=read.llama, layout=layouts.permuted),
    "jais2": Architecture(
        "jais2",
        keys={LAYER_NORM: "layer_norm_eps"},
        has={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"},
    ),
    "minicpm": Architecture(
        "granite",
        keys={key: name for key, name in _GRANITE.items() if key != "attention.scale"},
        fixed=_GRANITE_FIXED
        | {
            "embedding_multiplier": read.MINICPM_EMBEDDING_SCALE,
            "residual_multiplier": None,
            "logits_scaling": None,
        },
        more=read.minicpm,
        layout=layouts.permuted,
    ),
    "minicpm3": Architecture(
        "minicpm3",
        keys={
            **RMS,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
        },
        fixed={
            "scale_emb": read.MINICPM_EMBEDDING_SCALE,
            "scale_depth": read.MINICPM_DEPTH_SCALE,
            "dim_model_base": read.MINICPM_BASE_WIDTH,
        },
        heads="own",
        turned="none",
        more=read.minicpm3,
    ),
    # Gemma 3n: predictions beside the stream, and embeddings of each layer.
    "gemma3n": Architecture(
        "gemma3n_text",
        keys={
            **RMS,
            "final_logit_softcapping": "final_logit_softcapping",
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
        },
        fixed={"final_logit_softcapping": None},
        usual=USUAL_WITHOUT_WIDTH,
        windows=Windows(5, theta=10_000.0),
        more=read.gemma3n,
        unstacked={
            f"{name}.weight": f"blk.{{}}.{name}.weight"
            for name in ("altup_proj", "altup_unembd_proj")
        },
        names={
            f"altup_{theirs}.{number}.weight": f"altup_{ours}.weight"
            for theirs, ours in (("projections", "proj"), ("unembed_projections", "unembd_proj"))
            for number in range(_MOST_STREAMS)
        },
    ),
    # Gemma 4: two kinds of layers, each with heads and a rotary embedding of its own.
    "gemma4": Architecture(
        "gemma4_text",
        keys={**RMS, "final_logit_softcapping": "final_logit_softcapping"},
        fixed={"final_logit_softcapping": None},
        heads="own",
        turned="none",
        usual=USUAL_WITHOUT_WIDTH,
        more=read.gemma4,
        names={
            "router.per_expert_scale": "ffn_down_exps.scale",
            "router.scale": "ffn_gate_inp.scale",
        },
    ),
    # Mixtures of experts.
    "qwen2moe": Architecture(
        "qwen2_moe",
        keys={
            **RMS,
            **_EXPERTS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        ignored=_DENSE_WIDTH,
        fixed={"use_sliding_window": False, "norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        keys={**RMS, **_EXPERTS},
        ignored=_DENSE_WIDTH,
        fixed={"use_sliding_window": False, "norm_topk_prob": True},
    ),
    "qwen3vlmoe": Architecture(
        "qwen3_moe",
        keys={**RMS, **_EXPERTS},
        ignored=(*_DENSE_WIDTH, "n_deepstack_layers"),
        fixed={"use_sliding_window": False, "norm_topk_prob": True},
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        keys={**RMS, "expert_count": "num_experts", "expert_used_count": "moe_topk"},
        has={"attention_bias": "attn_q.bias"},
        more=read.hunyuan_moe,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        keys={
            **RMS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        ignored=_DENSE_WIDTH,
        windows=Windows(2),
        more=read.gpt_oss,
        parts=layouts.gpt_oss_parts,
        names={
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
        },
    ),
    "granitemoe": Architecture(
        read.with_key("expert_shared_feed_forward_length", "granitemoeshared", "granitemoe"),
        keys={
            **_GRANITE,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        fixed=_GRANITE_FIXED,
        more=read.granite_moe,
        layout=layouts.permuted,
        names={
            "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        },
    ),
    "olmoe": Architecture(
        "olmoe",
        keys={
            **RMS,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        fixed={"norm_topk_prob": False},
        more=read.expert_width,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        keys={**RMS, **_DEEP_EXPERTS, "feed_forward_length": "intermediate_size"},
        # of Solar Open, all of whose layers have experts, no width of dense ones is stated
        fixed={**_DEEP_FIXED, "intermediate_size": 1},
        usual=USUAL_WITHOUT_WIDTH,
        turned="part",
        has={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        is_sigmoid=True,
        more=read.glm4_moe,
        names=_GATE_BIAS,
    ),
    "dots1": Architecture(
        "dots1",
        keys={**RMS, **_DEEP_EXPERTS},
        fixed={**_DEEP_FIXED, "sliding_window": None},
        is_sigmoid=True,
        names=_GATE_BIAS,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        keys={
            **RMS,
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        fixed={"moe_layer_start_index": 0},
        # the shapes of the tensors say how wide shared experts are; the key says something else
        ignored=("expert_shared_feed_forward_length",),
        has={"use_bias": "attn_q.bias"},
        names={"moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        keys={
            **RMS,
            **_DEEP_EXPERTS,
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
        },
        ignored=("expert_shared_feed_forward_length",),  # that of all shared experts together
        fixed=_DEEP_FIXED,
        is_sigmoid=True,
        windows=Windows(4, 128),
        names=_GATE_BIAS,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        keys={
            **RMS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        turned="part",
        is_sigmoid=True,
        more=read.minimax,
        names={"mlp.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        keys={
            RMS_KEY: "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
            **_EXPERTS,
            "leading_dense_block_count": "num_dense_layers",
        },
        fixed={"num_key_value_heads": None, "norm_topk_prob": True, "num_dense_layers": 0},
        has={"conv_bias": "shortconv.conv.bias", "use_expert_bias": "exp_probs_b.bias"},
        is_sigmoid=True,
        more=read.lfm2,
        names={"feed_forward.expert_bias": "exp_probs_b.bias"},
    ),
    "afmoe": Architecture(
        "afmoe",
        keys={
            **RMS,
            **_EXPERTS,
            "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "route_scale",
            "leading_dense_block_count": "num_dense_layers",
        },
        # llama.cpp multiplies embeddings by the root of their width
        fixed={"route_scale": 1.0, "num_dense_layers": 0, "mup_enabled": True},
        has={"attention_bias": "attn_q.bias"},
        is_sigmoid=True,
        windows=Windows(4),
        more=read.normed_shares,
        names={"mlp.expert_bias": "exp_probs_b.bias"},
    ),
    "cohere2moe": Architecture(
        "cohere2_moe",
        keys={
            **_EXPERTS,
            LAYER_NORM: "layer_norm_eps",
            "logit_scale": "logit_scale",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": "num_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
        },
        fixed={"num_shared_experts": 0, "norm_topk_prob": False},
        usual=USUAL_WITHOUT_WIDTH,
        more=read.cohere2_moe,
        named_as="dots1",
    ),
    "hy_v3": Architecture(
        "hy_v3",
        keys={**RMS, **_EXPERTS, "expert_weights_scale": "router_scaling_factor"},
        fixed={"router_scaling_factor": 1.0},
        has={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"},
        is_sigmoid=True,
        more=read.hy_v3,
        named_as="dots1",
        names={"mlp.e_score_correction_bias": "exp_probs_b"},
    ),
    "llama4": Architecture(
        "llama4_text",
        keys={
            **RMS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        usual={**USUAL_WITHOUT_WIDTH, "feed_forward_length": "intermediate_size_mlp"},
        has={"attention_bias": "attn_q.bias"},
        more=read.llama4,
        parts=layouts.llama4_parts,
        packs_experts=False,
    ),
    "mellum": Architecture(
        "mellum",
        keys={**RMS, **_EXPERTS},
        fixed={"norm_topk_prob": True},
        ignored=_DENSE_WIDTH,
        has={"attention_bias": "attn_q.bias"},
        windows=Windows(4, theta=None),
        more=read.mellum,
        named_as="qwen3moe",
    ),
    # Latent attention: DeepSeek 2 and 3, Kimi K2, GLM-4.7 Flash, Youtu. llama.cpp has one name for
    # them, `deepseek2`: how experts are chosen tells which it is.
    "deepseek2": Architecture(
        read.deepseek2_type,
        keys=_LATENT,
        fixed=_LATENT_FIXED,
        heads="own",
        turned="none",
        more=read.deepseek2,
        parts=layouts.latent_parts,
        names=_GATE_BIAS,
    ),
    "deepseek32": Architecture("deepseek_v32", more=read.deepseek32, **_INDEXED_LATENT),
    "glm-dsa": Architecture("glm_moe_dsa", more=read.glm_dsa, **_INDEXED_LATENT),
    # Older decoders, and those whose layers keep states.
    "lfm2": Architecture(
        "lfm2",
        keys={RMS_KEY: "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        fixed={"block_auto_adjust_ff_dim": False, "num_key_value_heads": None},
        has={"conv_bias": "shortconv.conv.bias"},
        more=read.lfm2,
    ),
    "mamba": _state_space(
        "mamba",
        keys={
            **_SSM_KEYS,
            "ssm.time_step_rank": "time_step_rank",
            "ssm.inner_size": "intermediate_size",
        },
        has=_MAMBA_BIASES,
        more=read.mamba,
    ),
    "mamba2": _state_space(
        "mamba2",
        keys={**_SSM_KEYS, "ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
        has=_MAMBA_BIASES,
        more=read.mamba2,
        names={"mixer.dt_bias": "ssm_dt.bias"},
    ),
    "gptneox": Architecture(
        "gpt_neox",
        keys={LAYER_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        turned="part",
        more=read.no_groups,
        layout=layouts.qkv_by_head,
    ),
    "gpt2": Architecture(
        "gpt2",
        keys={LAYER_NORM: "layer_norm_epsilon"},
        turned="none",
        usual=_GPT2,
        more=read.no_groups_of_gpt2,
        layout=layouts.transposed,
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        keys={LAYER_NORM: "layer_norm_epsilon"},
        fixed={"multi_query": True},
        turned="none",
        usual=_GPT2,
        more=read.one_kv_head,
    ),
    "falcon": Architecture(
        "falcon",
        heads="derived",
        keys={LAYER_NORM: "layer_norm_epsilon"},
        fixed={"alibi": False, "parallel_attn": True},
        more=read.falcon,
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
    # Linear attention beside attention: Qwen3-Next and Qwen3.5.
    "qwen3next": Architecture(
        "qwen3_next",
        keys={**_DELTA_NET, **_EXPERTS, **_SHARED_EXPERT},
        ignored=_DENSE_WIDTH,
        fixed={"norm_topk_prob": True},
        usual=USUAL_WITHOUT_WIDTH,
        turned="part",
        more=read.delta_net,
        layout=layouts.delta_net,
        parts=layouts.delta_net_parts,
        names=_DT_BIAS,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        keys=_DELTA_NET,
        turned="part",
        more=read.delta_net,
        layout=layouts.tiled_delta_net,
        names=_DT_BIAS,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        keys={**_DELTA_NET, **_EXPERTS, **_SHARED_EXPERT},
        ignored=_DENSE_WIDTH,
        usual=USUAL_WITHOUT_WIDTH,
        turned="part",
        more=read.delta_net,
        layout=layouts.tiled_delta_net,
        names=_DT_BIAS,
    ),
    # Mamba layers beside attention: Falcon-H1, Granite 4, Nemotron-H, Jamba.
    "falcon-h1": Architecture(
        "falcon_h1",
        keys={**RMS, **_MAMBA2},
        # weights are multiplied by the multipliers of the configuration; llama.cpp gates first
        fixed={"mamba_norm_before_gate": False},
        has={
            **_MAMBA2_BIASES,
            "mamba_rms_norm": "ssm_norm.weight",
            "projectors_bias": "ssm_out.bias",
            "mlp_bias": "ffn_down.bias",
        },
        more=read.falcon_h1,
        layout=layouts.mamba,
        names={"mamba.dt_bias": "ssm_dt.bias"},
    ),
    "granitehybrid": Architecture(
        read.with_key("rope.scaling.finetuned", "bamba", "granitemoehybrid"),
        keys={
            **_GRANITE,
            **_MAMBA2,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        ignored=_ROPE,
        fixed={
            **_GRANITE_FIXED,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": None,
            "num_key_value_heads": None,
            "position_embedding_type": None,
        },
        turned="none",
        has=_MAMBA2_BIASES,
        more=read.granite_hybrid_or_bamba,
        layout=layouts.hybrid,
        names={
            "mamba.dt_bias": "ssm_dt.bias",
            "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        },
    ),
    "nemotron_h": Architecture("nemotron_h", **_NEMOTRON_H),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        **_NEMOTRON_H
        | {
            "keys": {
                **_NEMOTRON_H["keys"],
                "expert_count": "n_routed_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
                "expert_weights_norm": "norm_topk_prob",
                "expert_weights_scale": "routed_scaling_factor",
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
                "moe_latent_size": "moe_latent_size",
            },
            # the shapes of the tensors say how wide shared experts are together
            "ignored": (*_NEMOTRON_H["ignored"], "expert_shared_count"),
            "fixed": {
                **_NEMOTRON_H["fixed"],
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.0,
                "n_group": 1,
                "topk_group": 1,
                "moe_latent_size": None,
            },
        },
    ),
    "jamba": Architecture(
        "jamba",
        keys={
            **RMS,
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        fixed={"num_key_value_heads": None},
        turned="none",
        has={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"},
        more=read.jamba,
        layout=layouts.mamba,
    ),
}
