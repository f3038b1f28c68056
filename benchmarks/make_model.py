"""Makes models of well-known shapes with random weights: they compute as long as real ones.

    python benchmarks/make_model.py 135m DIR

Shapes: 135m (SmolLM2-135M), 0.6b (Qwen3-0.6B), 2m (a 2-million-parameter Llama); qwen3-moe, mixtral
and gpt-oss, small ones with experts. bfloat16, tied embeddings. The tokenizer is the embedded
model's, filled up with a word of its own for every id that the shape has beyond it, so that each
token has text. What they say means nothing.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "models"
TOKENIZER = ROOT / "aioserve" / "model_source" / "embedded"
NUM_POSITIONS = 16_384

# Of models with experts: few layers, 0.8 GB of experts.
_SMALL = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "2m": {
        "model_type": "llama",
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 512,
        "vocab_size": 2048,
    },
    "135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49_152,
    },
    "0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **_SMALL,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_SMALL,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 2048,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **_SMALL,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 512,
        "sliding_window": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def model_path(model: str) -> Path:
    """The directory of a shape, made now if it is not in the cache; any other name is a path."""
    if model not in SHAPES:
        return Path(model)
    path = CACHE / model
    return path if path.is_dir() else make_model(model, path)


def make_model(shape: str, path: Path) -> Path:
    """Write the model to `path`, all of it or nothing, and return `path`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(SHAPES[shape])
    config = AutoConfig.for_model(
        fields.pop("model_type"),
        **fields,
        max_position_embeddings=NUM_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,  # the tokenizer's
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / "model"
        model.save_pretrained(whole)
        _write_tokenizer(whole, fields["vocab_size"])
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(whole, path)
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    # A byte-level vocabulary writes a space as U+0120. No merge leads to these words, so text
    # never becomes one of them.
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), vocab_size)}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, path / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", metavar="DIR", type=Path, nargs="?", help="default: build/models")
    args = parser.parse_args()
    print(make_model(args.shape, args.path) if args.path else model_path(args.shape))


if __name__ == "__main__":
    main()
