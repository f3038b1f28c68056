"""What an image encoder's layers cost, with the attention of torch and of the compiled kernels.

    python benchmarks/encoders.py                     # 1,024 tokens of an image in bfloat16
    python benchmarks/encoders.py --side 1792 --layers 4 --dtype float32

A Qwen2.5-VL encoder with random weights, whose last layer of every `--layers` sees the whole image
and the others windows. Processor time of one thread, as the two take turns; the least of each. The
floor is what the products of a layer take at the speed of one large product. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from aioserve.config import ModelConfig
from aioserve.features.multimodal.cpu_encoder_attention import NAME
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.bridge import ATTN_IMPLEMENTATION

sys.path.append(str(Path(__file__).parents[1]))
from tests.seeing_models import make_seeing_model

PATCH, MERGED, WINDOW = 14, 2, 8  # the last in patches of a side


def load(args: argparse.Namespace, dtype: torch.dtype) -> Any:
    """The whole model, of which only the encoder is used."""
    vision = {
        "depth": args.layers,
        "hidden_size": args.hidden,
        "intermediate_size": 4 * args.hidden,
        "num_heads": args.hidden // 80,
        "patch_size": PATCH,
        "window_size": WINDOW * PATCH,
        "fullatt_block_indexes": [args.layers - 1],
        "initializer_range": 0.02,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = make_seeing_model("qwen2_5_vl", Path(folder), vision, {"patch_size": PATCH})
        info = ModelInfo(ModelConfig(model=str(path)))
        whole = info.source.load_seeing_module(dtype, torch.device("cpu"), ATTN_IMPLEMENTATION)
    return whole


def taken(call: Callable[[], Any]) -> float:
    """The processor seconds that one call takes."""
    began = time.process_time()
    call()
    return time.process_time() - began


def measure(whole: Any, args: argparse.Namespace, dtype: torch.dtype) -> dict[str, list[float]]:
    """Seconds of each layer, the least of all rounds, by what attends."""
    visual, side = whole.model.visual, args.side // PATCH
    pixels = torch.randn(side * side, 3 * 2 * PATCH * PATCH, dtype=dtype)
    grid = torch.tensor([[1, side, side]])
    begun: list[float] = []
    for block in visual.blocks:
        block.register_forward_pre_hook(lambda *_: begun.append(time.process_time()))
    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name in (NAME, "sdpa"):
            visual.set_attn_implementation(name)
            begun.clear()
            whole.get_image_features(pixel_values=pixels, image_grid_thw=grid)
            ends = [*begun[1:], time.process_time()]
            own = [end - begin for begin, end in zip(begun, ends, strict=True)]
            found[name] = list(map(min, own, found.get(name, own)))
    return found


def floors(whole: Any, args: argparse.Namespace, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of the products of a layer with windows and of one without."""
    x, weight = (torch.randn(2048, args.hidden, dtype=dtype) for _ in range(2))
    speed = 2 * 2048 * weight.numel() / min(taken(lambda: F.linear(x, weight)) for _ in range(9))
    num_patches = (args.side // PATCH) ** 2
    block = whole.model.visual.blocks[0]
    linears = [part for part in block.modules() if isinstance(part, torch.nn.Linear)]
    products = 2 * num_patches * sum(linear.weight.numel() for linear in linears)
    windows, full = (4 * num_patches * seen * args.hidden for seen in (WINDOW**2, num_patches))
    return (products + windows) / speed, (products + full) / speed


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--side", type=int, default=896, help="pixels of the square image")
    parser.add_argument("--layers", type=int, default=2, help="of the encoder")
    parser.add_argument("--hidden", type=int, default=1280, help="size of the encoder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    whole = load(args, dtype)
    found, least = measure(whole, args, dtype), floors(whole, args, dtype)
    print(f"{(args.side // PATCH // MERGED) ** 2:,} tokens of an image, {args.dtype}")
    print(f"{'s of a layer':>14}{'with windows':>14}{'without':>10}")
    for name, layers in (("kernels", found[NAME]), ("torch", found["sdpa"])):
        print(f"{name:>14}{min(layers[:-1]):14.2f}{layers[-1]:10.2f}")
    print(f"{'floor':>14}{least[0]:14.2f}{least[1]:10.2f}")
    print(json.dumps({"load": os.getloadavg(), "layers": found, "floors": least}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
