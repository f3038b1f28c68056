"""How many requests run at once in the same memory, with and without blocks for sliding windows.

    python benchmarks/windows.py gpt_oss|gemma3_text [--gib 0.5] [--tokens 2048] [--requests 12]

Random weights with the layers and the K and V of gpt-oss-20b and of Gemma 3 1B, and small products.
Without: a KV connector, with which all layers keep all blocks. The last lines are JSON.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, SchedulerConfig
from aioserve.outputs import SchedulerStats

SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_attention_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "gemma3_text": {
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "num_attention_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "layer_types": [
            "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(26)
        ],
    },
}
REPLY = 96  # tokens


def stats_of(engine: AsyncEngine) -> SchedulerStats:
    """As it is now."""
    stats = engine.get_stats()
    assert stats is not None
    return stats


async def run(model: Path, cache: CacheConfig, num_tokens: int, num_requests: int) -> None:
    """Print what the pools hold, and how many of the requests ran at once."""
    config = EngineConfig(
        model=ModelConfig(
            model=str(model), dtype="bfloat16", max_model_len=8192, skip_tokenizer_init=True
        ),
        cache=cache,
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
    )
    random.seed(0)
    params = SamplingParams(max_tokens=REPLY, ignore_eos=True, detokenize=False)
    most = 0
    async with AsyncEngine(config) as engine:

        async def generate() -> None:
            nonlocal most
            prompt = [random.randrange(3, 500) for _ in range(num_tokens - REPLY)]
            async for _ in engine.generate(prompt, params):
                most = max(most, stats_of(engine).num_running_reqs)

        await asyncio.gather(*(generate() for _ in range(num_requests)))
        stats = stats_of(engine)
    found = {
        "tokens": stats.num_kv_blocks * cache.block_size,
        "window_blocks": stats.num_window_blocks,
        "at_once": most,
        "preemptions": stats.num_preemptions,
    }
    print(json.dumps(found))


def main() -> None:
    """Both, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=2048, help="of a request")
    parser.add_argument("--requests", type=int, default=12)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.models import make_model

    with tempfile.TemporaryDirectory() as folder:
        shape = {"max_position_embeddings": 8192, **SHAPES[args.shape]}
        model = make_model(args.shape, Path(folder), **shape)
        for cache in (
            CacheConfig(kv_cache_gib=args.gib),
            CacheConfig(kv_cache_gib=args.gib, kv_connector="memory", kv_connector_gib=0.01),
        ):
            asyncio.run(run(model, cache, args.tokens, args.requests))


if __name__ == "__main__":
    main()
