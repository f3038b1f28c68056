"""What whole steps of models cost, one way beside another: experts, quantized, adapters, states.

    python benchmarks/model_steps.py experts qwen3-moe     # or mixtral, gpt-oss, or a directory
    python benchmarks/model_steps.py quantized 135m [--activations int8]    # or 0.6b, 2m, ...
    python benchmarks/model_steps.py attention 135m [--cpu-time]
    python benchmarks/model_steps.py adapters [--rank 16] [--threads 1]
    python benchmarks/model_steps.py states [--models lfm2 mamba]
    python benchmarks/model_steps.py quantized-states

`experts`: steps on fused weights beside those of the modules; the best step of each counts. The
floor of a decode step is reading, once, what it multiplies with: all but the experts, and those
experts that its tokens are likely to take, if all are as likely.

`quantized`: steps with quantized weights beside the same model in bfloat16; the lower quartile of
their steps counts. Weights come from memory, unlike in `kernel_costs.py quantized`.

`attention`: steps at long contexts with int8 activations, by the cache: that of bfloat16, whose
attention is in bfloat16, and that of int8, whose attention multiplies bytes; beside both the int8
cache with exact activations. `memory` is the floor by bytes alone: weights and K and V, read once.

`adapters`: decodes of some adapters beside as many of none, in one batch; CPU time of all threads.
The floor is what the adapters' weights add to the bytes that a step reads.

`states`: models with states, beside reading weights and states and multiplying once. Random weights
of 8 layers, 1,024 wide: linear attention, convolutions, Mamba 2 beside or in parallel with
attention, Mamba 1 alone. Decodes of some rows at once, and prompts; least processor time. A
decode's floor is its bytes over the rate of a plain read, by one thread; a prompt's the products of
its weights over the rate of a large one in torch. `quantized-states`: the same models with
`--quantization` beside the same without, in bfloat16 on one thread.

All ways are loaded at once and take turns, as others may use the machine. The last line is JSON.
"""

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from harness import MODELS, Args, Opt, Program, Table, by_turns, samples
from make_model import MODEL, make_adapter, model_path, shapes_of
from steps import (
    BLOCK_SIZE,
    NAMED_CASES,
    THREADS,
    Case,
    Shapes,
    StepBench,
    chosen,
    new_request,
    plan,
    read_bandwidth,
    steps_by_turns,
)

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.features.lora.peft_directory import read_adapter
from aioserve.features.lora.products import Adapter
from aioserve.kernels import load_kernels
from aioserve.kv_cache import StateSlots
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.scheduler import NewRequestData

program = Program(__doc__)
CHUNK_TOKENS = 2048  # of a prompt, in one step
CPU_TIME = Opt(False, "seconds of CPU on one thread: beside other work")


def clock_of(args: Args) -> tuple[int, Callable[[], float]]:
    """The number of threads, which torch has from now on, and the clock."""
    threads = 1 if args.cpu_time else args.threads or machine.default_num_threads()
    torch.set_num_threads(threads)
    return threads, time.process_time if args.cpu_time else time.perf_counter


# Experts.


EXPERT_CASES = (Case(1, 128), Case(4, 128), Case(16, 128), Case(0, 0, 512))


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


@program.command("experts", MODEL, threads=THREADS, cpu_time=CPU_TIME, rounds=5)
def experts(args: Args) -> dict[str, Any]:
    """Models with experts: fused weights beside modules."""
    threads, clock = clock_of(args)
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
            num_kv_tokens=max(case.num_kv_tokens for case in EXPERT_CASES),
            kv_bytes_per_token=Shapes.of(config, torch.bfloat16).kv_bytes_per_token,
        )
        for name in ("modules", "fused")
    }
    columns = {"tokens per second": "<24", "modules": "10.1f", "fused": "10.1f"}
    table = Table({**columns, "ratio": "8.2f", "x floor": "9.2f"})
    for case in EXPERT_CASES:
        found = steps_by_turns(benches, case, case.prompt or 1, args.rounds, clock)
        best = {name: min(seconds) for name, seconds in found.items()}
        tokens = case.decodes + case.prompt
        floor = weights.of_step(tokens) / bandwidth if case.decodes else None
        row = {name: tokens / seconds for name, seconds in best.items()}
        row["ratio"] = best["modules"] / best["fused"]
        row |= {"x floor": best["fused"] / floor, "floor_ms": 1e3 * floor} if floor else {}
        table.add({"tokens per second": case.name, **row})
    for bench in benches.values():
        bench.runner.close()
    return {"model": args.model, "bandwidth_gb_s": bandwidth / 1e9, "steps": table.rows}


# Quantized weights.


KINDS = (None, "int4", "int8")  # of --quantization
QUANTIZED_CASES = (
    *(Case(decodes, 128) for decodes in (1, 4, 16, 64)),
    *(Case(decodes, 512) for decodes in (16, 64)),
    *(Case(0, 0, prompt) for prompt in (256, 2048)),
)


@program.command(
    "quantized",
    MODEL,
    threads=THREADS,
    activations=Opt(str, "default: exact", ["int8"]),
    cases=NAMED_CASES,
    cpu_time=CPU_TIME,
    rounds=8,
)
def quantized(args: Args) -> dict[str, Any]:
    """Steps with quantized weights beside those in bfloat16."""
    threads, clock = clock_of(args)
    cases = chosen(QUANTIZED_CASES, args.cases)
    path = model_path(args.model)
    shapes = Shapes.of(ModelInfo(ModelConfig(model=str(path))).hf_config, torch.bfloat16)
    benches = {
        kind: StepBench(
            path,
            threads=threads,
            dtype="bfloat16",
            quantization=kind,
            activations=args.activations if kind else None,
            num_kv_tokens=max(case.num_kv_tokens for case in cases),
            kv_bytes_per_token=shapes.kv_bytes_per_token,
        )
        for kind in KINDS
    }
    about = {"model": args.model, "kernels": load_kernels().variant, "threads": threads}
    precision = f"{args.activations or 'exact'} activations of quantized weights"
    print(", ".join(f"{name} {value}" for name, value in about.items()), precision, sep=", ")
    table = Table({"step": "<24", "bfloat16, ms": "14.2f", "int4": "9.2f", "int8": "9.2f"})
    for case in cases:
        found = steps_by_turns(benches, case, CHUNK_TOKENS, args.rounds, clock)
        plain, int4, int8 = (statistics.quantiles(found[kind], n=4)[0] for kind in KINDS)
        row = {"bfloat16, ms": 1e3 * plain, "int4": int4 / plain, "int8": int8 / plain}
        table.add({"step": case.name, **row})
    for bench in benches.values():
        bench.runner.close()
    return {**about, "activations": args.activations, "steps": table.rows}


# Attention by the type of the cache.


LONG_CASES = (
    *(Case(decodes, context) for context in (2048, 8192) for decodes in (1, 4, 16)),
    *(Case(0, 0, prompt) for prompt in (2048, 8192)),
)
#: Of `--kv-cache-dtype` and `--activations`.
CACHES = {"plain": ("auto", "int8"), "exact": ("int8", None), "int8": ("int8", "int8")}


@program.command(
    "attention",
    MODEL,
    threads=THREADS,
    cases=NAMED_CASES,
    cpu_time=CPU_TIME,
    rounds=8,
)
def attention(args: Args) -> dict[str, Any]:
    """Steps at long contexts, with caches of bfloat16 and of int8."""
    threads, clock = clock_of(args)
    cases = chosen(LONG_CASES, args.cases)
    path = model_path(args.model)
    config = ModelInfo(ModelConfig(model=str(path))).hf_config
    shapes = Shapes.of(config, torch.bfloat16)
    weights = (sum(map(math.prod, shapes.products)) + math.prod(shapes.head)) * 1.0625
    kv_bytes = shapes.kv_bytes_per_token
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    int8_bytes = kv_bytes * (head_dim + 4) // (2 * head_dim)
    benches = {
        name: StepBench(
            path,
            threads=threads,
            dtype="bfloat16",
            quantization="int8",
            activations=activations,
            kv_cache_dtype=kv_cache_dtype,
            num_kv_tokens=max(case.num_kv_tokens for case in cases),
            kv_bytes_per_token=kv_bytes if name == "plain" else int8_bytes,
        )
        for name, (kv_cache_dtype, activations) in CACHES.items()
    }
    about = {"model": args.model, "kernels": load_kernels().variant, "threads": threads}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    columns = {"bfloat16, ms": "14.2f", "int8 cache": "12.2f", "int8 attention": "16.2f"}
    table = Table({"step": "<24", **columns, "memory": "8.2f"})
    for case in cases:
        found = steps_by_turns(benches, case, CHUNK_TOKENS, args.rounds, clock)
        plain, exact, int8 = (min(found[way]) for way in CACHES)
        row = {"bfloat16, ms": 1e3 * plain, "int8 cache": exact / plain}
        row["int8 attention"] = int8 / plain
        if case.decodes:
            tokens = case.decodes * case.context
            row["memory"] = (weights + tokens * int8_bytes) / (weights + tokens * kv_bytes)
        table.add({"step": case.name, **row})
    for bench in benches.values():
        bench.runner.close()
    return {**about, "steps": table.rows}


# Adapters.


ROWS, ADAPTERS, CONTEXT = 16, 4, 128  # of each kind of decodes


@program.command("adapters", model="135m", rank=16, threads=1, steps=Opt(100, "of each kind"))
def adapters(args: Args) -> dict[str, Any]:
    """Decodes with adapters beside as many without."""
    path, count = model_path(args.model), 2 * ROWS
    per_row = -(-(CONTEXT + args.steps + 12) // BLOCK_SIZE)
    config = EngineConfig(
        model=ModelConfig(model=str(path)),
        cache=CacheConfig(num_kv_blocks=count * per_row, block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=count),
        runner=RunnerConfig(threads=args.threads),
    )
    runner = load_on_cpu(config, ModelInfo(config.model))
    names = [f"adapter-{number}" for number in range(ADAPTERS)]
    num_bytes = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            made = make_adapter(path, Path(folder) / name, args.rank, number)
            adapter = runner.adapters.put(read_adapter(made))
            assert isinstance(adapter, Adapter)
            num_bytes += adapter.num_bytes
            runner.adapters.load(name, adapter)
    kinds: dict[str, list[NewRequestData]] = {"without": [], "with": []}
    for number in range(count):
        kind, row = ("without", "with")[number // ROWS], number % ROWS
        blocks = list(range(number * per_row, (number + 1) * per_row))
        tokens = [(7 * number + place) % 1000 for place in range(CONTEXT)]
        own = names[row % len(names)] if kind == "with" else ""
        kinds[kind].append(new_request(str(number), tokens, CONTEXT - 1, blocks, adapter_id=own))
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(args.steps + 6):
        for kind, rows in kinds.items():
            ids = [row.request_id for row in rows]
            known = dict.fromkeys(ids, CONTEXT - 1 + step) if step else {}
            output = plan(step, [] if step else rows, known, dict.fromkeys(ids, 1))
            began = time.process_time()
            runner.execute_model(output)
            if step >= 6:  # the first ones warm up
                seconds[kind].append(time.process_time() - began)
    without, with_ = (1e3 * statistics.median(own) for own in seconds.values())
    read = sum(2 * math.prod(shape) for shape in shapes_of(path).values())
    runner.close()
    columns = {"adapters": "9", "CPU ms without": "16.2f", "with": "8.2f", "ratio": "7.2f"}
    table = Table({**columns, "floor": "7.2f"})
    times = {"CPU ms without": without, "with": with_, "ratio": with_ / without}
    table.add({"adapters": ADAPTERS, **times, "floor": 1 + num_bytes / read})
    return {"rows": table.rows}


# States.


Way = Literal["int8", "int4"] | None
WAYS: tuple[Way, ...] = (None, "int8", "int4")

COMMON, STATES = MODELS["common"]["1024 wide"], MODELS["states"]
DECODES = (1, 4, 16)
PROMPTS = (512, 4096)


class StatesBench:
    """One model in a runner, and steps planned by hand."""

    def __init__(
        self,
        model: str,
        threads: int,
        quantization: Way = None,
        activations: Literal["int8"] | None = None,
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = AutoConfig.for_model(model, **(COMMON | STATES[model]))
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            self.num_weights = sum(p.numel() for p in made.parameters())
            self.num_multiplied = self.num_weights - 8192 * 1024  # a prompt's: without the head
            made.save_pretrained(folder)
            engine = EngineConfig(
                model=ModelConfig(
                    model=folder,
                    dtype="bfloat16",
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
        """Put `num_decodes` rows at 64 tokens into the batch; their states before are zeros."""
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
        return new_request(name, tokens, num_computed, blocks)

    def _execute(
        self,
        new: list[NewRequestData],
        cached: dict[str, int],
        num_scheduled: dict[str, int],
        states: dict[str, StateSlots],
    ) -> None:
        self._num_steps += 1
        output = plan(self._num_steps, new, cached, num_scheduled, states=states)
        self._runner.execute_model(output)
        for name, count in num_scheduled.items():
            self._known[name] = self._known.get(name, 0) + count


def least(run: Callable[[], object], repeats: int) -> float:
    """Return the least processor time of several runs, in seconds."""
    return min(samples(run, repeats, clock=time.process_time))


def measure(model: str, args: Args) -> list[dict[str, Any]]:
    """Milliseconds of each kind of step, and its floor."""
    memory = torch.ones(64 << 20)
    bandwidth = memory.nbytes / least(lambda: memory.sum(), 10)
    bench = StatesBench(model, args.threads)
    x, weight = (torch.ones(n, 1024, dtype=torch.bfloat16) for n in (512, 3072))
    rate = 2 * x.numel() * len(weight) / least(lambda: torch.nn.functional.linear(x, weight), 10)
    rows = []
    for decodes in DECODES:
        bench.begin(decodes)
        taken = 1e3 * least(bench.decode, args.repeats)
        bytes_moved = 2 * bench.num_weights + 2 * decodes * bench.bytes_per_state
        floor = 1e3 * bytes_moved / bandwidth
        rows.append({"model": model, "step": f"decode {decodes}", "ms": taken, "floor": floor})
    for num_tokens in PROMPTS:
        repeats = max(args.repeats * PROMPTS[0] // num_tokens // 10, 1)
        taken = 1e3 * least(lambda n=num_tokens: bench.prompt(n), repeats)  # type: ignore[misc]
        floor = 1e3 * 2 * bench.num_multiplied * num_tokens / rate
        rows.append({"model": model, "step": f"prompt {num_tokens}", "ms": taken, "floor": floor})
    bench.close()
    return rows


@program.command(
    "states",
    models=Opt(list(STATES), choices=STATES),
    threads=1,
    repeats=Opt(40, "of a decode; a tenth of a prompt"),
)
def states(args: Args) -> dict[str, Any]:
    """Models with states, beside their floors."""
    torch.set_num_threads(1)
    columns = {"model": "<18", "step": "12", "ms": "9.2f", "floor": "9.2f", "x": "6.2f"}
    table = Table(columns)
    for model in args.models:
        for row in measure(model, args):
            table.add({**row, "x": row["ms"] / row["floor"]})
    return {"rows": table.rows}


@program.command(
    "quantized-states",
    models=Opt(list(STATES), choices=STATES),
    activations=Opt(str, choices=["int8"]),
    repeats=Opt(30, "of a decode; a fifth of a prompt"),
)
def quantized_states(args: Args) -> dict[str, Any]:
    """Models with states and quantized weights, beside the same without."""
    table = Table({"model": "<18", "step": "<12", "int8": "8.2f", "int4": "8.2f"})
    for model in args.models:
        benches = {
            way: StatesBench(model, 1, way, args.activations if way else None) for way in WAYS
        }
        for decodes in (*DECODES, 0):
            for bench in benches.values() if decodes else ():
                bench.begin(decodes)
            repeats = args.repeats if decodes else args.repeats // 5
            prompt = PROMPTS[0]
            seconds = by_turns(
                {
                    way: bench.decode if decodes else partial(bench.prompt, prompt)
                    for way, bench in benches.items()
                },
                repeats,
            )
            best, *others = (min(seconds[way]) for way in WAYS)
            step = f"decode {decodes}" if decodes else f"prompt {prompt}"
            table.add(
                {"model": model, "step": step, "int8": others[0] / best, "int4": others[1] / best}
            )
        for bench in benches.values():
            bench.close()
    return {"rows": table.rows}


if __name__ == "__main__":
    program.main()
