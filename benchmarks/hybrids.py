"""What steps of models with states cost, beside reading weights and states and multiplying once.

    python benchmarks/hybrids.py [--models qwen3_5_text lfm2] [--dtype float32] [--profile]
    python benchmarks/hybrids.py --against ../other-checkout --turns 3

Random weights of 8 layers, 1,024 wide: linear attention, convolutions, Mamba 2 beside or in
parallel with attention, Mamba 1 alone. Decodes of some rows at once, and prompts; least processor
time of the steps. A decode's floor is its bytes over the rate of a plain read, by one thread; a
prompt's the products of its weights over the rate of a large one in torch. `--against` measures
another checkout, whose kernels are built, by turns. The last line is JSON.
"""

import argparse
import cProfile
import json
import math
import os
import pstats
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.kv_cache import StateSlots
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.scheduler import CachedRequestData, NewRequestData, SchedulerOutput

COMMON = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MAMBA2 = {"mamba_d_state": 128, "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {  # the linear attention of Qwen3-Next, without its experts
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "lfm2": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 2},
    "granitemoehybrid": {
        **MAMBA2,
        "layer_types": (["mamba"] * 3 + ["attention"]) * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 3072,
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 2048},
    "mamba": {"intermediate_size": 2048, "state_size": 16},
    "qwen3_5_moe_text": {
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
DECODES = (1, 4, 16)
PROMPTS = (512, 4096)
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class Bench:
    """One model in a runner, and steps planned by hand."""

    def __init__(
        self,
        model: str,
        dtype: Literal["bfloat16", "float32"],
        threads: int,
        quantization: Literal["int8", "int4"] | None = None,
        activations: Literal["int8"] | None = None,
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = AutoConfig.for_model(model, **(COMMON | MODELS[model]))
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            self.num_weights = sum(p.numel() for p in made.parameters())
            self.num_multiplied = self.num_weights - 8192 * 1024  # a prompt's: without the head
            made.save_pretrained(folder)
            engine = EngineConfig(
                model=ModelConfig(
                    model=folder,
                    dtype=dtype,
                    skip_tokenizer_init=True,
                    quantization=quantization,
                    activations=activations,
                ),
                cache=CacheConfig(num_kv_blocks=512, num_state_slots=2 * max(DECODES)),
                scheduler=SchedulerConfig(max_num_seqs=max(DECODES) + 1),
                runner=RunnerConfig(threads=threads),
            )
            self._runner = load_on_cpu(engine, ModelInfo(engine.model))
        states = self._runner._model.states
        assert states is not None
        self.bytes_per_state = states.bytes_per_slot
        self._num_steps = 0
        self._known: dict[str, int] = {}
        self.num_decodes = 0

    def decode(self) -> None:
        """One more token for each row."""
        rows = [f"{i}" for i in range(self.num_decodes)]
        cached = {name: self._known[name] for name in rows}
        self._execute([], cached, dict.fromkeys(rows, 1), {})

    def prompt(self, num_tokens: int) -> None:
        """A whole prompt, of a request that has the row of the last one."""
        self._execute(
            [self._new("prompt", num_tokens, 0, 256)],
            {},
            {"prompt": num_tokens},
            {"prompt": StateSlots(31, -1, [])},
        )

    def begin(self, num_decodes: int) -> None:
        """Put so many rows at 64 tokens into the batch; their states before are zeros."""
        self.num_decodes = num_decodes
        names = [f"{i}" for i in range(num_decodes)]
        self._known = dict.fromkeys(names, 63)
        new = [self._new(name, 64, 63, 16 * i) for i, name in enumerate(names)]
        slots = {name: StateSlots(i, i, []) for i, name in enumerate(names)}
        self._execute(new, {}, dict.fromkeys(names, 1), slots)

    def close(self) -> None:
        """Give back what it holds."""
        self._runner.close()

    @staticmethod
    def _new(name: str, num_tokens: int, num_computed: int, block: int) -> NewRequestData:
        rng = random.Random(name)
        tokens = [rng.randrange(8192) for _ in range(num_tokens)]
        blocks = list(range(block, block + max(num_tokens // 16, 32)))
        return NewRequestData(name, tokens, num_tokens, GREEDY, frozenset(), blocks, num_computed)

    def _execute(
        self,
        new: list[NewRequestData],
        cached: dict[str, int],
        num_scheduled: dict[str, int],
        states: dict[str, StateSlots],
    ) -> None:
        self._num_steps += 1
        self._runner.execute_model(
            SchedulerOutput(
                step_id=self._num_steps,
                scheduled_new_reqs=new,
                scheduled_cached_reqs=CachedRequestData(list(cached), list(cached.values()), {}),
                num_scheduled_tokens=num_scheduled,
                total_num_scheduled_tokens=sum(num_scheduled.values()),
                preempted_req_ids=[],
                finished_req_ids=[],
                parts={"states": states},
            )
        )
        for name, count in num_scheduled.items():
            self._known[name] = self._known.get(name, 0) + count


def least(run: Callable[[], object], repeats: int) -> float:
    """Seconds of processor time."""
    best = math.inf
    for _ in range(repeats):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best


def measure(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of each kind of step, and its floor."""
    memory = torch.ones(64 << 20)
    bandwidth = memory.nbytes / least(lambda: memory.sum(), 10)
    bench = Bench(model, args.dtype, args.threads)
    size = 2 if args.dtype == "bfloat16" else 4
    x, weight = (torch.ones(n, 1024, dtype=getattr(torch, args.dtype)) for n in (512, 3072))
    rate = 2 * x.numel() * len(weight) / least(lambda: torch.nn.functional.linear(x, weight), 10)
    rows = []
    for decodes in DECODES:
        bench.begin(decodes)
        taken = 1e3 * least(bench.decode, args.repeats)
        bytes_moved = bench.num_weights * size + 2 * decodes * bench.bytes_per_state
        floor = 1e3 * bytes_moved / bandwidth
        rows.append({"model": model, "step": f"decode {decodes}", "ms": taken, "floor": floor})
        if args.profile and decodes == 4:
            profile = cProfile.Profile()
            for _ in range(10):
                profile.runcall(bench.decode)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    for num_tokens in PROMPTS:
        repeats = max(args.repeats * PROMPTS[0] // num_tokens // 10, 1)
        taken = 1e3 * least(lambda n=num_tokens: bench.prompt(n), repeats)  # type: ignore[misc]
        floor = 1e3 * 2 * bench.num_multiplied * num_tokens / rate
        rows.append({"model": model, "step": f"prompt {num_tokens}", "ms": taken, "floor": floor})
    bench.close()
    return rows


def measure_by_turns(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The least of this checkout's times and of the other's, each measured `turns` times."""
    least_ms: dict[tuple[str, str], list[dict[str, Any]]] = {}
    words = [sys.executable, __file__, "--dtype", args.dtype, "--threads", str(args.threads)]
    for turn in range(args.turns):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        for model in args.models:
            for side in order:
                place = (Path(__file__).parents[1], args.against.resolve())[side]
                command = [*words, "--repeats", str(args.repeats), "--models", model]
                environment = {**os.environ, "PYTHONPATH": str(place)}
                found = subprocess.run(
                    command, env=environment, check=True, stdout=subprocess.PIPE, text=True
                )
                for row in json.loads(found.stdout.splitlines()[-1]):
                    both = least_ms.setdefault((model, row["step"]), [{}, {}])
                    if row["ms"] < both[side].get("ms", math.inf):
                        both[side] = row
    return [own | {"other ms": other["ms"]} for own, other in least_ms.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=40, help="of a decode; a tenth of a prompt")
    parser.add_argument("--profile", action="store_true", help="of the Python of 4 decodes")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measured by turns")
    parser.add_argument("--turns", type=int, default=3, help="of each checkout")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.against:
        rows = measure_by_turns(args)
    else:
        rows = [row for model in args.models for row in measure(model, args)]
    print(f"{'model':18}{'step':>12}{'ms':>9}{'floor':>9}{'x':>6}{'other ms':>10}{'ratio':>7}")
    for row in rows:
        taken, floor, other = row["ms"], row["floor"], row.get("other ms")
        beside = "" if other is None else f"{other:10.2f}{taken / other:7.2f}"
        print(
            f"{row['model']:18}{row['step']:>12}{taken:9.2f}{floor:9.2f}{taken / floor:6.2f}"
            + beside
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
