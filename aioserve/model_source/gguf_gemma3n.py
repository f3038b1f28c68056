"""Gemma 3n in GGUF files: predictions beside the stream, and embeddings of each layer."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from aioserve.model_source.gguf_config import RMS, USUAL_WITHOUT_WIDTH, Architecture, Facts

_MOST_STREAMS = 8  # that are predicted beside each other


def _gemma3n(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    facts.windows(5)
    facts.rope_by_type(10_000.0)
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
    """The share of activations that become 0, of which the file has the quantile."""
    return 0.0 if scale == -math.inf else round(NormalDist().cdf(scale), 6)


GEMMA3N: Mapping[str, Architecture] = {
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
        more=_gemma3n,
        unstacked={
            f"{name}.weight": f"blk.{{}}.{name}.weight"
            for name in ("altup_proj", "altup_unembd_proj")
        },
        names={
            f"altup_{theirs}.{number}.weight": f"altup_{ours}.weight"
            for theirs, ours in (("projections", "proj"), ("unembed_projections", "unembd_proj"))
            for number in range(_MOST_STREAMS)
        },
    )
}
