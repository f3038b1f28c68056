"""What steps of models with states cost, beside reading their weights and states once.

    python benchmarks/hybrids.py [--models qwen3_5_text lfm2] [--dtype float32] [--profile]

Random weights of 8 layers, 1,024 wide: linear attention, convolutions, Mamba 2 beside or in
parallel with attention, Mamba 1 alone. Decodes of some rows at once, and a chunk of a prompt; least
processor time of the steps. A decode's floor is its bytes over the rate of a plain read, by one
thread. The last line is JSON.
"""

import argparse
import cProfile
import json
import math
import pstats
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.kv_cache import StateSlots
from aioserve.model_info import ModelInfo
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.sampling_params import SamplingParams
from aioserve.scheduler import CachedRequestData, NewRequestData, SchedulerOutput

COMMON = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
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
}
DECODES = (1, 4, 16)
PROMPT = 512
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class Bench:
    """One model in a runner, and steps planned by hand."""

    def __init__(self, model: str, dtype: Literal["bfloat16", "float32"], threads: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = AutoConfig.for_model(model, **(COMMON | MODELS[model]))
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            self.num_weights = sum(p.numel() for p in made.parameters())
            made.save_pretrained(folder)
            engine = EngineConfig(
                model=ModelConfig(model=folder, dtype=dtype, skip_tokenizer_init=True),
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

    def prompt(self) -> None:
        """A whole prompt, of a request that has the row of the last one."""
        self._execute(
            [self._new("prompt", PROMPT, 0, 480)],
            {},
            {"prompt": PROMPT},
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
        blocks = list(range(block, block + 32))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=40, help="of a decode; a tenth of a prompt")
    parser.add_argument("--profile", action="store_true", help="of the Python of 4 decodes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    memory = torch.ones(64 << 20)
    bandwidth = memory.nbytes / least(lambda: memory.sum(), 10)
    print(f"read {bandwidth / 1e9:.1f} GB/s\n{'model':18}{'step':>12}{'ms':>9}{'floor':>9}{'x':>6}")
    rows = []
    for model in args.models:
        bench = Bench(model, args.dtype, args.threads)
        size = 2 if args.dtype == "bfloat16" else 4
        for decodes in DECODES:
            bench.begin(decodes)
            taken = 1e3 * least(bench.decode, args.repeats)
            bytes_moved = bench.num_weights * size + 2 * decodes * bench.bytes_per_state
            floor = 1e3 * bytes_moved / bandwidth
            rows.append({"model": model, "step": f"decode {decodes}", "ms": taken, "floor": floor})
            print(
                f"{model:18}{f'decode {decodes}':>12}{taken:9.2f}{floor:9.2f}{taken / floor:6.2f}"
            )
            if args.profile and decodes == 4:
                profile = cProfile.Profile()
                for _ in range(10):
                    profile.runcall(bench.decode)
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        taken = 1e3 * least(bench.prompt, max(args.repeats // 10, 1))
        rows.append({"model": model, "step": f"prompt {PROMPT}", "ms": taken})
        print(f"{model:18}{f'prompt {PROMPT}':>12}{taken:9.2f}", flush=True)
        bench.close()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
