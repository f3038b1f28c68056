"""Makes models of well-known shapes with random weights: they compute as long as real ones.

    python benchmarks/make_model.py 135m DIR

models.json has the shapes: 135m (SmolLM2-135M), 0.6b (Qwen3-0.6B), 2m (a 2-million-parameter
Llama); qwen3-moe, mixtral and gpt-oss, small ones with 0.8 GB of experts. Weights are bfloat16,
embeddings are tied. The tokenizer is the embedded model's, filled up with a word of its own for
every id that the shape has beyond it, so that each token has text. What they say means nothing.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import MODELS, ROOT, Args, Opt, Program

CACHE = ROOT / "build" / "models"
EMBEDDED = ROOT / "aioserve" / "model_source" / "embedded"
NUM_POSITIONS = 16_384
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPES: dict[str, dict[str, Any]] = MODELS["shapes"]
#: The word of a command line that names a model.
MODEL = {"model": Opt(str, f"a directory, or one of {', '.join(SHAPES)}")}


def model_path(model: str) -> Path:
    """The directory of a shape, made now if it is not in the cache; any other name is a path."""
    if model not in SHAPES:
        return Path(model)
    path = CACHE / model
    return path if path.is_dir() else make_model(model, path)


def make_model(shape: str, path: Path) -> Path:
    """Write the model to `path`, all of it or nothing, and return `path`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = configuration(shape, NUM_POSITIONS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / "model"
        model.save_pretrained(whole)
        write_tokenizer(whole, config.vocab_size)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(whole, path)
    return path


def configuration(shape: str, num_positions: int) -> Any:
    """The configuration of a shape in transformers."""
    from transformers import AutoConfig

    fields: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": num_positions}
    # The end is the tokenizer's.
    fields |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, **SHAPES[shape]}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write the embedded model's tokenizer with words for the ids that it lacks."""
    tokenizer = json.loads((EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    # A byte-level vocabulary writes a space as U+0120. No merge leads to these words, so text
    # never becomes one of them.
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), vocab_size)}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, path / name)


def shapes_of(model: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of a model that is one file."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def make_adapter(
    model: Path, path: Path, rank: int, seed: int, layers: Sequence[str] = PROJECTIONS
) -> Path:
    """Write a small LoRA adapter of random numbers for `layers` of a model; return `path`."""
    import numpy as np
    from safetensors.numpy import save_file

    chance, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes_of(model).items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(layers)):
            for side, own in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                tensor = 0.01 * chance.standard_normal(own)
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = tensor.astype("f4")
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


program = Program(__doc__)


@program.command(
    words={
        "shape": Opt(str, choices=SHAPES),
        "path": Opt("", "the directory; default: build/models"),
    }
)
def main(args: Args) -> None:
    """Make the model, and print where it is."""
    path = make_model(args.shape, Path(args.path)) if args.path else model_path(args.shape)
    print(path)


if __name__ == "__main__":
    program.main()
