"""How far the CPU runner is from what this machine can do, and where the rest goes.

    python benchmarks/cpu.py 135m                 # or 0.6b, 2m, or a model directory
    python benchmarks/cpu.py 135m --only steps --cases "decode 16 at 512,prefill 512"

(a) floors: bandwidth, and the model's matrix products by rows; (b) steps of the real runner, each
as a multiple of its floor; (c) the step by purpose; (d) the whole engine with 64 streams: what the
loop costs and how long it lets others wait. Medians, with half the distance between quartiles as
noise. The last line is JSON.

The step by purpose is cProfile on the runner's calls. A call of C code belongs to the Python
function it is made from, unless its name says what it is. The profiler makes Python slower than it
is; the sum beside the step's own time says by how much. The engine is `AsyncEngine` in this process
without HTTP.
"""

import asyncio
import cProfile
import pstats
import re
import statistics
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Args, Opt, Program, Table
from make_model import SHAPES, model_path
from steps import CASES, Case, Floors, Shapes, StepBench, chosen, floor

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import ModelConfig, RunnerConfig
from aioserve.engine.builder import make_runner
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.lab.simulation.outcome import DelegatingRunner
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.cpu.kv_memory import CPU_TYPES
from aioserve.runner.cpu.models import CpuPlace
from aioserve.runner.fused.decoder import FusedDecoder
from aioserve.runner.interface import RunnerInterface
from aioserve.runner.loader import named_dtype, num_weight_bytes
from aioserve.scheduler import SchedulerOutput

PARTS = ("floors", "steps", "breakdown", "engine")
FLOOR_ROWS = (1, 4, 16, 64, 512, 2048)
BROKEN_DOWN = (Case(1, 512), Case(16, 512), Case(64, 512), Case(0, 0, 512))
POOL_SHARE = 0.6  # of the free memory: the largest case that does not fit is skipped
WIDENING = ("baseline", "avx2", "avx512")  # kernels that compute in float32
MAX_DRIFT = 1.15  # more between a floor's first and last run: others used the machine. A guess.
PROBE_SECONDS = 0.002  # between two looks at the event loop

Function = tuple[str, int, str]  # file ("~" for C code), line, name

# The first that matches file:name of a function, or of the nearest caller of C code, decides.
RULES = [
    ("linear", r"~:.*(linear|addmm|\bmm\b)|cpu/(linear|panels)\.py|kernels/__init__\.py:linear"),
    ("attention", r"kernels/__init__\.py:(paged_attention|store_kv)"),
    ("attention", r"attention(/\w+)?\.py:(?!prepare)"),
    ("attention", r"~:.*scaled_dot_product"),
    ("sampling", r"runner/(cpu/sampler|logits_edits|noise|sampling_columns)\.py"),
    ("input preparation", r"input_batch\.py|attention\.py:prepare|ops\.py:begin"),
    (
        "norm, rotary, activation",
        r"kernels/__init__\.py:(rms_norm|add_rms_norm|rope_store|\w+_and_mul)|fused(/\w+)?\.py"
        r"|transformers/.*\.py|~:.*(silu|gelu|embedding)",
    ),
]
PYTHON = "Python"
# Own time of these Python functions is that of the kernels they call through ctypes.
CTYPES = re.compile(r"kernels/__init__\.py")
PURPOSES = [*dict.fromkeys(purpose for purpose, _ in RULES), PYTHON]

Row = dict[str, Any]


# The step by purpose.


def break_down(bench: StepBench, case: Case, chunk: int, num_steps: int = 10) -> dict[str, float]:
    """Seconds of one step by purpose, profiler included.

    A forward pass that is one call into C is taken apart: its operations run one by one.
    """
    decoder = getattr(bench.runner._model, "decoder", None)
    if isinstance(decoder, WholeDecoder):
        vars(decoder)["forward"] = partial(FusedDecoder.forward, decoder)
    steps = bench.begin(case, chunk)
    steps.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        steps.step()
    profiler.disable()
    steps.end()
    if isinstance(decoder, WholeDecoder):
        del vars(decoder)["forward"]
    totals: dict[str, float] = defaultdict(float)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for function, (_, _, own, _, callers) in stats.items():
        if not _is_c(function):
            totals[PYTHON if not CTYPES.search(function[0]) else _purpose(function)] += own
        elif (purpose := _named(function)) is not None:
            totals[purpose] += own
        else:
            for caller, (_, _, share, _) in callers.items():
                totals[_purpose_of_caller(caller, stats)] += share
    return {purpose: seconds / num_steps for purpose, seconds in totals.items()}


def _is_c(function: Function) -> bool:
    return function[0] == "~"


def _named(function: Function) -> str | None:
    text = f"{function[0]}:{function[2]}"
    return next((purpose for purpose, pattern in RULES if re.search(pattern, text)), None)


def _purpose(function: Function) -> str:
    return _named(function) or PYTHON


def _purpose_of_caller(function: Function, stats: dict[Function, tuple], depth: int = 4) -> str:  # type: ignore[type-arg]
    """Of the nearest function up the calls that has one; of several callers the costliest."""
    for _ in range(depth):
        if (purpose := _named(function)) is not None:
            return purpose
        callers = stats[function][4] if function in stats else {}
        if not callers:
            break
        function = max(callers, key=lambda caller: callers[caller][3])
    return PYTHON


# The engine.


class StepTimes(DelegatingRunner):
    """Passes steps on and notes those that hold nothing but a decode of each of `streams`."""

    def __init__(self, runner: RunnerInterface, streams: int) -> None:
        super().__init__(runner)
        self.compute: list[float] = []  # from hand-over to the result on the loop
        self.handover: list[float] = []  # from there to the next hand-over: update and schedule
        self._streams = streams
        self._ended = 0.0

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        began = time.perf_counter()
        is_steady = (
            scheduler_output.total_num_scheduled_tokens == self._streams
            and len(scheduler_output.num_scheduled_tokens) == self._streams
        )
        if is_steady and self._ended:
            self.handover.append(began - self._ended)

        def note(future: "asyncio.Future[ModelRunnerOutput]") -> None:
            self._ended = time.perf_counter() if is_steady else 0.0
            if is_steady:
                self.compute.append(self._ended - began)

        future = super().execute_model(scheduler_output)
        future.add_done_callback(note)
        return future


class LoopLag:
    """How long the loop leaves a callback of another thread waiting."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seconds: list[float] = []
        self._loop, self._is_over = loop, threading.Event()
        self._thread = threading.Thread(target=self._probe)

    def __enter__(self) -> "LoopLag":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _probe(self) -> None:
        while not self._is_over.wait(PROBE_SECONDS):
            self._loop.call_soon_threadsafe(self._note, time.perf_counter())

    def _note(self, asked: float) -> None:
        self.seconds.append(time.perf_counter() - asked)


async def measure(
    path: Path, *, threads: int | None, streams: int, input_tokens: int, output_tokens: int
) -> dict[str, Any]:
    """Milliseconds unless the name says otherwise."""
    config = EngineConfig(model=ModelConfig(model=str(path)), runner=RunnerConfig(threads=threads))
    runner = StepTimes(make_runner(config, ModelInfo(config.model)), streams)
    params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)

    async def one(number: int) -> None:
        prompt = [16 + (number * 7919 + i) % 1900 for i in range(input_tokens)]
        async for _ in engine.generate(prompt, params):
            pass

    async with AsyncEngine(config, runner=runner) as engine:
        await one(-1)
        began, loop_cpu = time.perf_counter(), time.thread_time()
        with LoopLag(asyncio.get_running_loop()) as lag:
            await asyncio.gather(*(one(i) for i in range(streams)))
        seconds, loop_cpu = time.perf_counter() - began, time.thread_time() - loop_cpu
        idle_began, idle_cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(2)
        idle = (time.process_time() - idle_cpu) / (time.perf_counter() - idle_began)
    tokens = streams * output_tokens
    lags = statistics.quantiles(lag.seconds, n=100)
    return {
        "streams": streams,
        "output_tokens_per_second": tokens / seconds,
        "step_ms": 1e3 * statistics.median(runner.compute),
        "handover_us": 1e6 * statistics.median(runner.handover),
        "handover_p99_us": 1e6 * statistics.quantiles(runner.handover, n=100)[-1],
        "loop_cpu_us_per_token": 1e6 * loop_cpu / tokens,
        "loop_cpu_share": loop_cpu / seconds,
        "loop_lag_p50_ms": 1e3 * lags[49],
        "loop_lag_p99_ms": 1e3 * lags[98],
        "loop_lag_max_ms": 1e3 * max(lag.seconds),
        "idle_cpu_share": idle,
    }


# What is printed.


def show_floors(floors: Floors, block_bytes: int) -> list[Row]:
    if block_bytes:
        print(
            f"weights in blocks: a step reads {block_bytes / 1e6:.0f} MB of them, at least "
            f"{1e3 * block_bytes / floors.bandwidth:.2f} ms; the floors are of unpacked ones"
        )
    print(
        f"read {floors.bandwidth / 1e9:.1f} GB/s, large products {floors.rate / 1e9:.0f} GFLOP/s, "
        f"KV {floors.shapes.kv_bytes_per_token / 1024:.1f} KiB a token"
    )
    print(f"\n{'rows':>6}{'products':>12}{'+-':>8}  ms, with as many logits up to 64, then 1")
    rows = []
    for number in FLOOR_ROWS:
        time = floors.linear(number, number if number <= 64 else 1)
        rows.append({"rows": number, "ms": 1e3 * time.median, "noise_ms": 1e3 * time.noise})
        print(f"{number:6}{rows[-1]['ms']:12.2f}{rows[-1]['noise_ms']:8.2f}", flush=True)
    return rows


def show_steps(bench: StepBench, cases: list[Case], floors: Floors, args: Args) -> list[Row]:
    print()
    columns = {"step": "<30", "ms": "10.2f", "+-": "8.2f", "floor": "10.2f", "= linear": "10.2f"}
    table = Table({**columns, "+ attn": "9.2f", "x floor": "9.2f"})
    for case in cases:
        linear, attention = (1e3 * part for part in floor(case, args.chunk, floors))
        time = bench.measure(case, args.chunk, args.seconds)
        row = {"step": case.name, "ms": 1e3 * time.median, "+-": 1e3 * time.noise}
        row |= {"floor": linear + attention, "= linear": linear, "+ attn": attention}
        table.add(row | {"x floor": 1e3 * time.median / (linear + attention)})
    return table.rows


def show_breakdown(bench: StepBench, cases: list[Case], args: Args) -> list[Row]:
    heads = {purpose: purpose.split(",")[0].split(" ")[0] for purpose in PURPOSES}
    print()
    table = Table(
        {"ms by purpose": "<26", "profiled": "10.2f", **dict.fromkeys(heads.values(), "11.2f")}
    )
    for case in cases:
        parts = break_down(bench, case, args.chunk)
        row = {head: 1e3 * parts.get(purpose, 0.0) for purpose, head in heads.items()}
        table.add({"ms by purpose": case.name, "profiled": sum(row.values()), **row})
    return table.rows


def show_engine(args: Args) -> Row:
    found = asyncio.run(
        measure(
            model_path(args.model),
            threads=args.threads,
            streams=args.streams,
            input_tokens=128,
            output_tokens=64,
        )
    )
    print(f"\nengine, {args.streams} streams, 128 tokens in, 64 out")
    for name, value in found.items():
        print(f"  {name:28}{value:12.3f}")
    return found


def _fitting(cases: list[Case], info: ModelInfo, bytes_per_token: int) -> list[Case]:
    """Those that the model's positions and this machine's memory allow; says which do not."""
    room = POOL_SHARE * machine.available_memory() / bytes_per_token
    found = []
    for case in cases:
        if max(case.context, case.prompt) + 200 > info.max_model_len:
            print(f"{case.name}: skipped, the model has {info.max_model_len} positions")
        elif case.num_kv_tokens > room:
            print(f"{case.name}: skipped, {case.num_kv_tokens} tokens of KV do not fit")
        else:
            found.append(case)
    return found


program = Program(__doc__)


@program.command(
    words={"model": Opt(str, f"a directory, or one of {', '.join(SHAPES)}")},
    dtype=Opt("auto", "as of python -m aioserve"),
    threads=Opt(int, "default: one per physical core"),
    only=Opt(PARTS, choices=PARTS),
    cases=Opt(str, "names as printed, with commas between; default: all"),
    chunk=Opt(2048, "prompt tokens in one step"),
    seconds=Opt(0.5, "of repeats per case, at least"),
    streams=Opt(64, "of the engine's part"),
)
def main(args: Args) -> Row:
    """Measure the parts that are asked for."""
    threads = args.threads or machine.default_num_threads()
    torch.set_num_threads(threads)
    machine.keep_freed_memory()  # as the runner does; else floors pay for page faults
    path = model_path(args.model)
    info = ModelInfo(ModelConfig(model=str(path)))
    dtype = named_dtype(CPU_TYPES.resolve(ModelConfig(dtype=args.dtype)).dtype)
    shapes = Shapes.of(info.hf_config, dtype)
    cases = chosen(CASES, args.cases)
    try:
        variant = load_kernels().variant
    except KernelsUnavailableError:
        variant = "off"
    name = str(dtype).removeprefix("torch.")
    print(f"{args.model}: {name}, kernels {variant}, {threads} threads\n")
    result: Row = {"model": args.model, "dtype": name, "kernels": variant, "threads": threads}
    floors = None
    if {"floors", "steps"} & set(args.only):
        floors = Floors(shapes, dtype, is_widened=variant in WIDENING and dtype.itemsize == 2)
        result |= {"bandwidth_gb_s": floors.bandwidth / 1e9, "gflop_s": floors.rate / 1e9}
    if "floors" in args.only and floors:
        config = CPU_TYPES.resolve(ModelConfig(model=str(path), dtype=args.dtype))
        is_in_blocks = CpuPlace().multiplies_blocks and info.source.packs_embedding
        block_bytes = num_weight_bytes(config, info, CpuPlace()) if is_in_blocks else 0
        result |= {"floors": show_floors(floors, block_bytes), "block_bytes": block_bytes}
    if {"steps", "breakdown"} & set(args.only):
        fitting = _fitting(cases, info, shapes.kv_bytes_per_token)
        pool = max(case.num_kv_tokens for case in fitting)
        bench = StepBench(
            path,
            threads=args.threads,
            dtype=args.dtype,
            num_kv_tokens=pool,
            kv_bytes_per_token=shapes.kv_bytes_per_token,
        )
        if "steps" in args.only and floors:
            result["steps"] = show_steps(bench, fitting, floors, args)
            result["drift"] = floors.drift()
            if not 1 / MAX_DRIFT < result["drift"] < MAX_DRIFT:
                print(f"Not to be trusted: a floor now takes {result['drift']:.2f} times as long.")
        if "breakdown" in args.only:
            broken_down = [case for case in BROKEN_DOWN if case in fitting]
            result["breakdown"] = show_breakdown(bench, broken_down, args)
        bench.runner.close()
    if "engine" in args.only:
        result["engine"] = show_engine(args)
    return result


if __name__ == "__main__":
    program.main()
