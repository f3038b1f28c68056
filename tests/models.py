"""Tiny random models of several architectures, as directories that `from_pretrained` can read.

Weights are large enough that the best token leads by a wide margin, so that greedy decoding can
be compared token by token.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

_KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 24},
    "smollm3": {"no_rope_layer_interval": 2},
    "gemma2": {
        "sliding_window": 24,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

# Of other parts than these are: for tests that name them.
_MORE_KINDS: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 24,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "bloom": {},
}

MODEL_KINDS = tuple(_KINDS)
#: Each kind, fused and as it is; and of these every second, as on a chessboard.
KINDS_AND_FUSED = [(kind, fused) for kind in MODEL_KINDS for fused in (True, False)]
EACH_KIND_ONCE = [(kind, i % 2 == 0) for i, kind in enumerate(MODEL_KINDS)]


def made_once(make: Callable[..., Path]) -> Callable[..., Path]:
    """Return `make(kind, path, ...)`, which writes a model to `path`, so that each model is made
    once in this process: a copy takes a thirtieth of the time. Random numbers of torch go on behind
    a copy as behind the making.
    """
    kept: dict[str, tuple[Path, Any]] = {}
    folder = Path(tempfile.mkdtemp(prefix="aioserve-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    @wraps(make)
    def copied(kind: str, path: Path, *args: Any, **fields: Any) -> Path:
        import torch

        asked = repr((kind, args, sorted(fields.items())))
        if asked not in kept:
            made = make(kind, folder / str(len(kept)), *args, **fields)
            kept[asked] = made, torch.get_rng_state()
        made, state = kept[asked]
        shutil.copytree(made, path, copy_function=shutil.copyfile, dirs_exist_ok=True)
        torch.set_rng_state(state)
        return path

    return copied


@made_once
def make_model(kind: str, path: Path, **overrides: Any) -> Path:
    """Write a model of one of `MODEL_KINDS`, or of another kind, to `path` and return `path`.

    `overrides` are fields of its `transformers` configuration. There is no tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    own = (_KINDS | _MORE_KINDS).get(kind, {})
    config = AutoConfig.for_model(kind, **{**COMMON, **own, **overrides})
    model = AutoModelForCausalLM.from_config(config)
    if kind == "gemma2":  # else its tied embedding makes every model repeat its input
        for name, parameter in model.named_parameters():
            if "layernorm" in name and "post" in name:
                torch.nn.init.constant_(parameter, 3.0)
    model.save_pretrained(path)
    return path


def edit_config(path: Path, **fields: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return path
