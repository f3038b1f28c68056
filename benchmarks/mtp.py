"""What drafts of an MTP layer gain at most, and cost where all are wrong, beside no drafts.

    python benchmarks/mtp.py [--models llama qwen3_5_text glm4_moe] [--streams 1 4] [--rounds 3]

Random weights, 1,024 wide: the outputs of all layers are zero, so that the next token follows from
the newest one alone, which an MTP layer that hands the token on knows; no step is cheaper by that.
How often a published layer is right is not shown. Engines without drafts, with right ones and with
wrong ones take turns; medians of the ratios, of time and of processor time, which other processes
disturb less. The last line is JSON.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, SpeculationConfig

COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},  # served fused; no published one has an MTP layer
    "qwen3_5_text": {
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024},
}
NUM_TOKENS = 128
OUTPUTS = ("o_proj.weight", "down_proj.weight", "out_proj.weight")


class Measured(NamedTuple):
    """One run of some streams."""

    seconds: float
    cpu_seconds: float
    num_steps: int
    num_drafts: int
    num_right: int


def write_model(kind: str, path: Path, *, is_right: bool) -> None:
    """A model with an MTP layer, under the names of GLM and DeepSeek, or of Qwen."""
    fields, is_qwen = COMMON | MODELS[kind], kind.startswith("qwen")
    one = fields | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    if is_qwen:
        one["layer_types"] = ["full_attention"]
    weights, layer = _weights(kind, path, fields), _weights(kind, path / "layer", one)
    prefix = "mtp." if is_qwen else "model.layers.8."
    inner = f"{prefix}layers.0." if is_qwen else prefix
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    if not is_qwen:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    norm = weights["model.norm.weight"]
    project = torch.eye(1024, 2048, dtype=norm.dtype)  # the token's half of what it is given
    parts = (norm, norm, project if is_right else project.flip(0), norm)
    own = {f"{prefix}{name}.weight": part.clone() for name, part in zip(names, parts, strict=True)}
    own |= {
        inner + name.removeprefix("model.layers.0."): weight
        for name, weight in layer.items()
        if name.startswith("model.layers.0.")
    }
    save_file(weights | own, path / "model.safetensors", {"format": "pt"})


def _weights(kind: str, path: Path, fields: dict[str, Any]) -> dict[str, Tensor]:
    """Those of a random model, whose layers add nothing; `path` gets its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    weights: dict[str, Tensor] = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(OUTPUTS):
            weight.zero_()
    return weights


async def measure(engine: AsyncEngine, num_streams: int) -> Measured:
    """Greedy replies to short prompts, at once."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, detokenize=False)

    async def one(number: int) -> None:
        async for _ in engine.generate([100 + number, 200 + number, 300], params):
            pass

    before, started, cpu_started = engine.get_stats(), time.perf_counter(), time.process_time()
    await asyncio.gather(*map(one, range(num_streams)))
    seconds, after = time.perf_counter() - started, engine.get_stats()
    assert before is not None
    assert after is not None
    return Measured(
        seconds,
        time.process_time() - cpu_started,
        after.num_steps - before.num_steps,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


async def compare(kind: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of streams, and for right and wrong drafts."""
    engines = {}
    for name in ("right", "wrong"):
        write_model(kind, folder / name, is_right=name == "right")
    for name in ("none", "right", "wrong"):
        speculation = SpeculationConfig(speculative_method="mtp")
        config = EngineConfig(
            model=ModelConfig(
                model=str(folder / ("right" if name == "none" else name)), skip_tokenizer_init=True
            ),
            cache=CacheConfig(kv_cache_gib=0.5, enable_prefix_caching=False),
            speculation=SpeculationConfig() if name == "none" else speculation,
        )
        engines[name] = AsyncEngine(config)
        await engines[name].start()
        for num_streams in (1, *args.streams):  # what drafts cost is learned
            await measure(engines[name], num_streams)
    rows = []
    for num_streams in args.streams:
        rounds = [
            {name: await measure(engine, num_streams) for name, engine in engines.items()}
            for _ in range(args.rounds)
        ]
        for name in ("right", "wrong"):
            drafts = sum(found[name].num_drafts for found in rounds)
            row = {
                "model": kind,
                "streams": num_streams,
                "drafts": name,
                "speed": statistics.median(f["none"].seconds / f[name].seconds for f in rounds),
                "cpu": statistics.median(
                    f[name].cpu_seconds / f["none"].cpu_seconds for f in rounds
                ),
                "steps": statistics.median(f[name].num_steps / f["none"].num_steps for f in rounds),
                "num_drafts": drafts,
                "accepted": sum(f[name].num_right for f in rounds) / max(drafts, 1),
            }
            rows.append(row)
            print(
                f"{kind}, {num_streams} streams, {name} drafts: {row['speed']:.2f} times the speed "
                f"without, {row['cpu']:.2f} times the processor time, {row['steps']:.2f} times the "
                f"steps; {row['accepted']:.0%} of {drafts} drafts accepted",
                flush=True,
            )
    for engine in engines.values():
        await engine.shutdown()
    return rows


def main() -> None:
    """Print a line for each model, number of streams, and kind of drafts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for kind in args.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(compare(kind, Path(folder), args))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
