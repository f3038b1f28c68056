"""PEFT directories with random weights, and the same weights merged into a model directory.

Merged by hand, in float32: W + scale * B @ A. Needs no PEFT.
"""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL_LINEAR = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def make_adapter(
    model: Path,
    path: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ALL_LINEAR,
    strength: float = 0.5,
    but: Sequence[str] = (),
    **config: Any,
) -> Path:
    """Write an adapter for the model directory `model` to `path` and return `path`.

    `targets` are ends of modules' names, `but` beginnings of those that have none. Every product
    changes by about `strength` times itself. `config` are further fields of adapter_config.json;
    ranks follow its `rank_pattern`.
    """
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, weight in load_file(model / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if not module.endswith(tuple(targets)) or module.startswith(tuple(but)):
            continue
        own = next((r for k, r in config.get("rank_pattern", {}).items() if k in module), rank)
        is_table = module.endswith("embed_tokens")
        shape = weight.shape[::-1] if is_table else weight.shape
        a = torch.randn(own, shape[1], generator=generator)
        b = torch.randn(shape[0], own, generator=generator)
        size = weight.float().norm() * strength / (b @ a).norm()
        for side, tensor in (("A", a), ("B", b * size)):
            name = f"lora_embedding_{side}" if is_table else f"lora_{side}.weight"
            tensors[f"base_model.model.{module}.{name}"] = tensor.contiguous()
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", **config}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


def merge(model: Path, adapter: Path, path: Path) -> Path:
    """Write `model` with the adapter in its weights to `path`, tied ones untied; return `path`."""
    import torch
    from safetensors.torch import load_file, save_file

    from aioserve.features.lora.peft_directory import read_adapter

    shutil.copytree(model, path)
    weights = load_file(model / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    if config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = False
        (path / "config.json").write_text(json.dumps(config))
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    fields = json.loads((adapter / "adapter_config.json").read_text())
    files = read_adapter(adapter)
    for module, part in files.modules.items():
        rank = len(part.a)
        alphas = (fields.get("alpha_pattern") or {}).items()
        alpha = next((v for k, v in alphas if k in module), fields["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
        weights[f"{module}.weight"] += scale * (part.b.float() @ part.a.float())
    for module, part in files.embeddings.items():
        scale = fields["lora_alpha"] / len(part.a)
        weights[f"{module}.weight"] += (scale * (part.b.float() @ part.a.float())).T
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
