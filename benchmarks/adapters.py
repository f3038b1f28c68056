"""What adapters add to a step: decodes of 4 adapters beside as many of none, in one process.

    python benchmarks/adapters.py [--rows 16] [--adapters 4] [--rank 16] [--threads 1]

Steps of the whole runner, sampling included, alternate: with adapters, without. What is told is the
CPU time of all threads, so that a busy machine matters little: the median of each, and their ratio.
The floor is what the adapters' weights add to the bytes that a step reads. The last line is JSON.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path

import torch
from make_model import model_path
from safetensors import safe_open
from safetensors.torch import save_file

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.features.lora.peft_directory import read_adapter
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.scheduler import CachedRequestData, NewRequestData, SchedulerOutput

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCK_SIZE = 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100, help="of each kind")
    args = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s")
    path = model_path(args.model)
    num_blocks = 2 * args.rows * (-(-(args.context + args.steps + 12) // BLOCK_SIZE))
    config = EngineConfig(
        model=ModelConfig(model=str(path)),
        cache=CacheConfig(num_kv_blocks=num_blocks, block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=2 * args.rows),
        runner=RunnerConfig(threads=args.threads),
    )
    runner = load_on_cpu(config, ModelInfo(config.model))
    names = [f"adapter-{number}" for number in range(args.adapters)]
    num_bytes = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            adapter = runner.adapters.put(
                read_adapter(make_adapter(path, Path(folder) / name, args.rank, number))
            )
            num_bytes += adapter.num_bytes
            runner.adapters.load(name, adapter)
    per_row = num_blocks // (2 * args.rows)
    cases: dict[str, list[NewRequestData]] = {"none": [], "adapted": []}
    for number in range(2 * args.rows):
        case, row = ("none", "adapted")[number // args.rows], number % args.rows
        blocks = list(range(number * per_row, (number + 1) * per_row))
        tokens = [(7 * number + place) % 1000 for place in range(args.context)]
        cases[case].append(
            NewRequestData(
                *(str(number), tokens, args.context, GREEDY, frozenset(), blocks),
                args.context - 1,
                adapter_id=names[row % len(names)] if case == "adapted" else "",
            )
        )
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for step in range(args.steps + 6):
        for case, rows in cases.items():
            output = plan(rows, step, args.context)
            began = time.process_time()
            runner.execute_model(output)
            if step >= 6:  # the first ones warm up
                seconds[case].append(time.process_time() - began)
    none, adapted = (statistics.median(seconds[case]) for case in ("none", "adapted"))
    read = sum(weight.numel() * 2 for name, weight in weights(path) if "embed" not in name) + next(
        weight.numel() * 2 for name, weight in weights(path) if "embed" in name
    )
    print(
        json.dumps(
            {
                "model": args.model,
                "rows": args.rows,
                "adapters": args.adapters,
                "rank": args.rank,
                "threads": args.threads,
                "cpu_ms_without": round(1000 * none, 2),
                "cpu_ms_with": round(1000 * adapted, 2),
                "ratio": round(adapted / none, 3),
                "floor": round(1 + num_bytes / read, 3),
            }
        )
    )
    runner.close()


def plan(rows: list[NewRequestData], step: int, context: int) -> SchedulerOutput:
    """A token for each; the blocks are there from the beginning."""
    ids = [row.request_id for row in rows]
    known = CachedRequestData(ids, [context - 1 + step] * len(ids), {})
    return SchedulerOutput(
        step_id=step,
        scheduled_new_reqs=[] if step else rows,
        scheduled_cached_reqs=known if step else CachedRequestData([], [], {}),
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        total_num_scheduled_tokens=len(ids),
        preempted_req_ids=[],
        finished_req_ids=[],
    )


def make_adapter(model: Path, path: Path, rank: int, seed: int) -> Path:
    """All linear layers, random and small."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights(model):
        module = name.removesuffix(".weight")
        if module.endswith(PROJECTIONS):
            for side, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                factor = torch.randn(shape, generator=generator) * 0.01
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = factor
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def weights(model: Path) -> list[tuple[str, torch.Tensor]]:
    """Of one file."""
    with safe_open(model / "model.safetensors", framework="pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118


if __name__ == "__main__":
    main()
