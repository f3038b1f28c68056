"""Models with experts: steps on fused weights beside those of the modules, and the least time.

    python benchmarks/experts.py qwen3-moe        # or mixtral, gpt-oss, or a model directory

Both are loaded, and each case runs on them by turns: the best step of each counts, as others may
use the machine meanwhile. The floor of a decode step is reading, once, what it multiplies with: all
but the experts, and those experts that its tokens are likely to take, if all are as likely. The
last line is JSON.
"""

import argparse
import json
import math
import time
from typing import Any

import torch
from floors import Shapes, read_bandwidth, samples
from make_model import SHAPES, model_path
from steps import Case, StepBench

from aioserve.config import ModelConfig
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu import machine

CASES = (Case(1, 128), Case(4, 128), Case(16, 128), Case(0, 0, 512))
STEPS = 4  # of a case at a time


class WeightBytes:
    """Of a model with experts, by what a step reads of it."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        sizes = {name: p.numel() * 2 for name, p in model.named_parameters()}
        self.experts: int = sum(size for name, size in sizes.items() if ".experts." in name)
        self.rest: int = sum(size for name, size in sizes.items() if ".experts." not in name)
        text = config.get_text_config(decoder=True)
        count = getattr(text, "num_experts", None) or text.num_local_experts
        self._missed: float = 1 - text.num_experts_per_tok / count

    def of_step(self, tokens: int) -> float:
        """If every expert is as likely."""
        return self.rest + self.experts * (1 - math.pow(self._missed, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help=f"a directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of CPU on one thread: beside other work"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the two, by turns")
    args = parser.parse_args()
    threads = 1 if args.cpu_time else args.threads or machine.default_num_threads()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(threads)
    machine.keep_freed_memory()
    path = model_path(args.model)
    config = ModelInfo(ModelConfig(model=str(path))).hf_config
    weights, bandwidth = WeightBytes(config), read_bandwidth(torch.bfloat16, clock)
    kind = "CPU seconds" if args.cpu_time else "seconds"
    print(f"{args.model}: bfloat16, {threads} threads, read {bandwidth / 1e9:.1f} GB/s; {kind}")
    benches = {
        name: StepBench(
            path,
            threads=threads,
            dtype="bfloat16",
            fused=name == "fused",
            num_kv_tokens=max(case.num_kv_tokens for case in CASES),
            kv_bytes_per_token=Shapes.of(config, torch.bfloat16).kv_bytes_per_token,
        )
        for name in ("modules", "fused")
    }
    print(f"\n{'tokens per second':24}{'modules':>10}{'fused':>10}{'ratio':>8}{'x floor':>9}")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        best = dict.fromkeys(benches, float("inf"))
        for _ in range(args.rounds):
            for name, bench in benches.items():
                steps = bench.begin(case, case.prompt or 1)
                steps.step()
                best[name] = min(best[name], *samples(steps.step, STEPS, 0, clock=clock))
                steps.end()
        tokens = case.decodes + case.prompt
        floor = weights.of_step(tokens) / bandwidth if case.decodes else None
        row: dict[str, Any] = {"case": case.name, "floor_ms": floor and 1e3 * floor}
        row |= {name: tokens / seconds for name, seconds in best.items()}
        rows.append(row)
        print(
            f"{case.name:24}{row['modules']:10.1f}{row['fused']:10.1f}"
            f"{row['fused'] / row['modules']:8.2f}"
            + (f"{best['fused'] / floor:9.2f}" if floor else ""),
            flush=True,
        )
    for bench in benches.values():
        bench.runner.close()
    print(json.dumps({"model": args.model, "bandwidth_gb_s": bandwidth / 1e9, "steps": rows}))


if __name__ == "__main__":
    main()
