"""How far the CPU runner is from what this machine can do, and steps for other programs.

    python benchmarks/steps.py 135m                 # or 0.6b, 2m, or a model directory
    python benchmarks/steps.py 135m --cases "decode 16 at 512,prefill 512"

Steps of the real model runner, planned by hand, each as a multiple of its floor. A decode at a
context starts as if all but its last token were in the prefix cache, so a case costs its own steps
only. The KV pool holds zeros then; no kernel is faster for that.

A floor is measured here, now, without our code: the model's matrix products on packed weights, plus
reading the KV cache once (or, for long prompts, the arithmetic of attention at the rate of a large
product). Where the CPU multiplies no two-byte numbers, a product is reading its weights once, or
its arithmetic at float32 rate. Medians, with half the distance between quartiles as noise. Floors
know shapes from the model's configuration, and nothing about aioserve's runner.
"""

import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import Args, K, Opt, Program, Table, Time, samples, summary, timed, turns
from make_model import MODEL, model_path
from torch import Tensor, nn

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.kv_memory import CPU_TYPES
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.cpu.models import CpuPlace
from aioserve.runner.loader import named_dtype, num_weight_bytes
from aioserve.scheduler import CachedRequestData, NewRequestData, SchedulerOutput

BLOCK_SIZE = 16
MAX_STEPS = 100  # of one case: contexts grow by one with each
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
THREADS = Opt(int, "default: one per physical core")
NAMED_CASES = Opt(str, "names as printed, with commas between; default: all")
CHUNK = Opt(2048, "prompt tokens in one step")

ROWS_HINT = 16  # of the packed layout; serves all numbers of rows
READ_BYTES = 512 << 20
FLOOR_ROWS = (1, 4, 16, 64, 512, 2048)
POOL_SHARE = 0.6  # of the free memory: the largest case that does not fit is skipped
WIDENING = ("baseline", "avx2", "avx512")  # kernels that compute in float32
MAX_DRIFT = 1.15  # more between a floor's first and last run: others used the machine. A guess.
MIN_SECONDS = 0.5  # of repeats of a case
# Products of one input are one product.
FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


# Floors.


class Shapes(NamedTuple):
    """What of a model takes time for certain."""

    products: list[tuple[int, int]]  # (outputs, inputs) of all layers, in order, without the head
    head: tuple[int, int]
    kv_bytes_per_token: int
    attention_flops: int  # per pair of a token and one in its past, all layers

    @classmethod
    def of(cls, config: object, dtype: torch.dtype) -> "Shapes":
        """From a `transformers` configuration, by building the model without memory."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        products: dict[tuple[str, str], tuple[int, int]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
                parent, _, leaf = name.rpartition(".")
                group = next((min(names) for names in FUSED if leaf in names), leaf)
                outputs = products.get((parent, group), (0, 0))[0] + module.out_features
                products[parent, group] = (outputs, module.in_features)
        head = model.get_output_embeddings().weight.shape
        text = config.get_text_config(decoder=True)  # type: ignore[attr-defined]
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        layers = text.num_hidden_layers
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return cls(
            list(products.values()),
            (head[0], head[1]),
            2 * layers * kv_heads * head_dim * dtype.itemsize,
            4 * layers * heads * head_dim,
        )


class Floors:
    """Measures what is asked for, once. Torch's number of threads is the caller's business."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, is_widened: bool) -> None:
        self.shapes = shapes
        self.is_widened = is_widened
        self._dtype = dtype
        self._rate_dtype = torch.float32 if is_widened else dtype
        if not is_widened:
            self._body = [
                packed_product(torch.randn(shape, dtype=dtype)) for shape in shapes.products
            ]
            self._head = packed_product(torch.randn(shapes.head, dtype=dtype))
        self._times: dict[tuple[bool, int], Time] = {}
        self.bandwidth = read_bandwidth(self._rate_dtype)  # bytes a second
        self.rate = _product_rate(self._rate_dtype)  # operations a second

    def linear(self, rows: int, sampled: int) -> Time:
        """All products of a step of `rows` tokens, of which `sampled` need logits."""
        body = self._time(False, rows)
        head = self._time(True, sampled) if sampled else Time(0.0, 0.0)
        return Time(body.median + head.median, body.noise + head.noise)

    def attention(self, contexts: list[tuple[int, int]]) -> float:
        """Seconds for rows of (tokens in this step, tokens of context with those)."""
        read = sum(context for _, context in contexts) * self.shapes.kv_bytes_per_token
        pairs = sum(n * context - n * (n - 1) // 2 for n, context in contexts)
        return max(read / self.bandwidth, pairs * self.shapes.attention_flops / self.rate)

    def drift(self) -> float:
        """How much longer than at first the products of one row take now: 1 if nothing changed."""
        if self.is_widened:
            return self.bandwidth / read_bandwidth(self._rate_dtype)
        before = self._time(False, 1).median
        del self._times[False, 1]
        return self._time(False, 1).median / before

    def _time(self, is_head: bool, rows: int) -> Time:
        known = self._times.get((is_head, rows))
        if known is None and self.is_widened:
            shapes = [self.shapes.head] if is_head else self.shapes.products
            numbers = sum(outputs * inputs for outputs, inputs in shapes)
            read = numbers * self._dtype.itemsize / self.bandwidth
            known = Time(max(read, 2 * numbers * rows / self.rate), 0.0)
            self._times[is_head, rows] = known
        elif known is None:
            products = [self._head] if is_head else self._body
            inputs = {p.inputs: torch.randn(rows, p.inputs, dtype=self._dtype) for p in products}
            with torch.inference_mode():
                known = timed(lambda: [p.run(inputs[p.inputs]) for p in products])
            self._times[is_head, rows] = known
        return known


class Product(NamedTuple):
    inputs: int
    run: Callable[[Tensor], Tensor]


def packed_product(weight: Tensor) -> Product:
    """In oneDNN's own layout, where torch has it."""
    if not (torch.backends.mkldnn.is_available() and weight.dtype != torch.float16):
        return Product(weight.shape[1], lambda x: F.linear(x, weight))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    run = torch.ops.mkldnn._linear_pointwise.default
    return Product(weight.shape[1], lambda x: run(x, packed, None, "none", [], ""))


def _product_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """Operations a second of a product of two square matrices."""
    product = packed_product(torch.randn(size, size, dtype=dtype))
    rows = torch.randn(size, size, dtype=dtype)
    with torch.inference_mode():
        return 2 * size**3 / timed(lambda: product.run(rows)).median


def read_bandwidth(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second: the better of a product with one row and a sum over plain numbers."""
    outputs = READ_BYTES // (4096 * dtype.itemsize)
    product = packed_product(torch.randn(outputs, 4096, dtype=dtype))
    row = torch.randn(1, 4096, dtype=dtype)
    numbers = torch.ones(READ_BYTES // 4, dtype=torch.float32)
    with torch.inference_mode():
        runs: list[Callable[[], object]] = [lambda: product.run(row), numbers.sum]
        times = [samples(run, 6, 0.2, clock=clock)[1:] for run in runs]
    return READ_BYTES / min(summary(seconds).median for seconds in times)


# Steps.


def new_request(
    name: str,
    tokens: list[int],
    num_computed: int,
    block_ids: list[int],
    params: SamplingParams = GREEDY,
    **more: Any,
) -> NewRequestData:
    """A request as the scheduler tells the runner of it."""
    return NewRequestData(
        *(name, tokens, len(tokens), params, frozenset(), block_ids, num_computed), **more
    )


def plan(
    step_id: int,
    new: list[NewRequestData],
    cached: Mapping[str, int],
    num_scheduled: dict[str, int],
    finished: Sequence[str] = (),
    **parts: Any,
) -> SchedulerOutput:
    """A step; `cached` says how many tokens of the requests in the batch are computed."""
    return SchedulerOutput(
        step_id=step_id,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData(list(cached), list(cached.values()), {}),
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        preempted_req_ids=[],
        finished_req_ids=list(finished),
        parts=parts,
    )


class Case(NamedTuple):
    """One kind of step: `decodes` at `context` beside `prompt` tokens of a new request. The first
    `shared` tokens of the decodes, whole blocks, are in the same ones.
    """

    decodes: int
    context: int
    prompt: int = 0
    shared: int = 0

    @property
    def name(self) -> str:
        """What the step holds, in words, for a table."""
        parts = [f"decode {self.decodes} at {self.context}"] if self.decodes else []
        parts += [f"prefill {self.prompt}"] if self.prompt else []
        parts += [f"{self.shared} shared"] if self.shared else []
        return " + ".join(parts)

    @property
    def num_kv_tokens(self) -> int:
        """What it needs of the KV pool."""
        return self.decodes * (self.context + MAX_STEPS + BLOCK_SIZE) + self.prompt + BLOCK_SIZE


CASES = [
    *(Case(decodes, context) for context in (512, 2048) for decodes in (1, 4, 16, 64)),
    Case(16, 8192),
    *(Case(0, 0, prompt) for prompt in (512, 2048, 8192)),
    Case(16, 512, 256),
    Case(8, 1088),
    Case(8, 1088, shared=1024),
]


class StepBench:
    """A loaded runner and the steps of one case after the other."""

    def __init__(
        self,
        path: Path,
        *,
        threads: int | None,
        dtype: Any = "auto",
        fused: bool = True,
        quantization: Any = None,
        activations: Any = None,
        kv_cache_dtype: Any = "auto",
        num_kv_tokens: int,
        kv_bytes_per_token: int,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(
                model=str(path),
                dtype=dtype,
                fused=fused,
                quantization=quantization,
                activations=activations,
            ),
            cache=CacheConfig(
                num_kv_blocks=-(-num_kv_tokens // BLOCK_SIZE),
                block_size=BLOCK_SIZE,
                kv_cache_dtype=kv_cache_dtype,
            ),
            scheduler=SchedulerConfig(max_num_seqs=128),
            runner=RunnerConfig(threads=threads),
        )
        self._info = ModelInfo(config.model)
        self.runner = load_on_cpu(config, self._info)
        self.runner._backend.memory.commit(self.runner.info.num_kv_blocks)
        if _resident_bytes() < self.runner.info.num_kv_blocks * BLOCK_SIZE * kv_bytes_per_token:
            # All its pages would be one page of zeros, which never leaves the cache.
            raise SystemExit("the KV pool is not in memory yet: reading it would look too fast")
        self._blocks = list(range(self.runner.info.num_kv_blocks))
        random.Random(0).shuffle(self._blocks)
        self._num_steps = 0

    def measure(self, case: Case, chunk: int, min_seconds: float) -> Time:
        """One step of the case; for a prompt alone, all the steps of `chunk` tokens it takes."""
        steps = self.begin(case, chunk)
        began = time.perf_counter()
        steps.step()
        repeats = 5 if time.perf_counter() - began < 1 else 2  # what is long is steady
        seconds = samples(steps.step, repeats, min_seconds, at_most=MAX_STEPS - 2)
        steps.end()
        return summary(seconds)

    def begin(self, case: Case, chunk: int) -> "CaseSteps":
        """Let the decodes of the case enter the batch."""
        return CaseSteps(self, case, chunk, self._blocks, self._info.vocab_size)

    def execute(self, *planned: Any) -> None:
        """One step, given as to `plan`."""
        self._num_steps += 1
        self.runner.execute_model(plan(self._num_steps, *planned))


class CaseSteps:
    """The steps of one case; every call of `step` computes the same amount."""

    def __init__(
        self, bench: StepBench, case: Case, chunk: int, blocks: list[int], vocab_size: int
    ) -> None:
        self._bench, self._case, self._chunk = bench, case, chunk
        rng = random.Random(1)
        self._prompt = [
            rng.randrange(16, vocab_size) for _ in range(max(case.prompt, case.context))
        ]
        blocks_each = -(-(case.context + MAX_STEPS) // BLOCK_SIZE)
        num_shared = case.shared // BLOCK_SIZE
        tables = [
            blocks[:num_shared] + blocks[i * blocks_each + num_shared : (i + 1) * blocks_each]
            for i in range(case.decodes)
        ]
        self._prompt_blocks = blocks[case.decodes * blocks_each :][: -(-case.prompt // BLOCK_SIZE)]
        self._num_computed = {f"decode-{i}": case.context for i in range(case.decodes)}
        self._num_steps = 0
        if case.decodes:
            # each ends with another token, as experts are chosen by tokens
            contexts = [self._prompt[i:] + self._prompt[:i] for i in range(case.decodes)]
            bench.execute(
                [
                    new_request(f"decode-{i}", contexts[i][: case.context], case.context - 1, table)
                    for i, table in enumerate(tables)
                ],
                {},
                dict.fromkeys(self._num_computed, 1),
                [],
            )

    def step(self) -> None:
        """One more token for each decode, and a whole prompt."""
        self._num_steps += 1
        assert self._num_steps < MAX_STEPS or not self._case.decodes, "more steps than blocks"
        done = 0
        while done < self._case.prompt or not done:
            size = min(self._chunk, self._case.prompt - done)
            scheduled = dict.fromkeys(self._num_computed, 1)
            cached, new = dict(self._num_computed), []
            if size and not done:
                new = [
                    new_request("prompt", self._prompt[: self._case.prompt], 0, self._prompt_blocks)
                ]
            elif size:
                cached["prompt"] = done
            if size:
                scheduled["prompt"] = size
            # A new request of the same name replaces the last step's.
            self._bench.execute(new, cached, scheduled, [])
            for name in self._num_computed:
                self._num_computed[name] += 1
            done += max(size, 1)

    def end(self) -> None:
        """Empty the batch."""
        self._bench.execute([], {}, {}, [*self._num_computed, "prompt"])


def _resident_bytes() -> float:
    statm = Path("/proc/self/statm")  # Linux; elsewhere nobody knows
    if not statm.exists():
        return math.inf
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def steps_by_turns(
    benches: Mapping[K, StepBench],
    case: Case,
    chunk: int,
    rounds: int,
    clock: Callable[[], float],
    num_steps: int = 4,
) -> dict[K, list[float]]:
    """Seconds of the steps of a case, some steps of each bench at a time."""
    found: dict[K, list[float]] = {name: [] for name in benches}
    for _, name in turns(list(benches), rounds):
        steps = benches[name].begin(case, chunk)
        steps.step()
        found[name] += samples(steps.step, num_steps, clock=clock)
        steps.end()
    return found


def chosen(cases: Sequence[Case], names: str | None) -> list[Case]:
    """The cases of these names, with commas between, or all."""
    wanted = names and {name.strip() for name in names.split(",")}
    if wanted and (unknown := wanted - {case.name for case in cases}):
        known = ", ".join(case.name for case in cases)
        raise SystemExit(f"no case {unknown}; there are {known}")
    return [case for case in cases if not wanted or case.name in wanted]


def floor(case: Case, chunk: int, floors: Floors) -> tuple[float, float]:
    """Seconds of the case's products, and of its attention."""
    decodes = [(1, case.context - case.shared)] * case.decodes + [(1, case.shared)]
    if not case.prompt:
        return floors.linear(case.decodes, case.decodes).median, floors.attention(decodes)
    linear = attention = 0.0
    for done in range(0, case.prompt, chunk):
        size = min(chunk, case.prompt - done)
        sampled = case.decodes + (done + size == case.prompt)
        linear += floors.linear(case.decodes + size, sampled).median
        attention += floors.attention([*decodes, (size, done + size)])
    return linear, attention


def floors_of(config: ModelConfig, threads: int) -> tuple[Floors, str]:
    """Measure a model's floors on that many threads; also return the variant of the kernels."""
    torch.set_num_threads(threads)
    machine.keep_freed_memory()  # as the runner does; else floors pay for page faults
    dtype = named_dtype(CPU_TYPES.resolve(config).dtype)
    try:
        variant = load_kernels().variant
    except KernelsUnavailableError:
        variant = "off"
    shapes = Shapes.of(ModelInfo(config).hf_config, dtype)
    return Floors(shapes, dtype, is_widened=variant in WIDENING and dtype.itemsize == 2), variant


def prompt_floors(path: Path, lengths: Sequence[int], chunk: int = CHUNK.default) -> list[float]:
    """Return the shortest time, in seconds, that this machine allows for a prompt of each length:
    that of its products and its attention, on as many threads as a server has.
    """
    floors, _ = floors_of(ModelConfig(model=str(path)), machine.default_num_threads())
    return [sum(floor(Case(0, 0, length), chunk, floors)) for length in lengths]


# What is printed.


def show_floors(floors: Floors, block_bytes: int) -> list[dict[str, Any]]:
    """Print bandwidth, the rate of large products, and the model's products by rows."""
    if block_bytes:
        print(
            f"weights in blocks: a step reads {block_bytes / 1e6:.0f} MB of them, at least "
            f"{1e3 * block_bytes / floors.bandwidth:.2f} ms; the floors are of unpacked ones"
        )
    print(
        f"read {floors.bandwidth / 1e9:.1f} GB/s, large products {floors.rate / 1e9:.0f} GFLOP/s, "
        f"KV {floors.shapes.kv_bytes_per_token / 1024:.1f} KiB a token\n"
    )
    title = "ms, with as many logits up to 64, then 1"
    table = Table({"rows": "6", "products": "12.2f", "+-": "8.2f"}, title)
    for rows in FLOOR_ROWS:
        own = floors.linear(rows, rows if rows <= 64 else 1)
        table.add({"rows": rows, "products": 1e3 * own.median, "+-": 1e3 * own.noise})
    return table.rows


def show_steps(bench: StepBench, cases: list[Case], floors: Floors, chunk: int) -> list[Any]:
    """Print each case beside its floor."""
    print()
    columns = {"step": "<30", "ms": "10.2f", "+-": "8.2f", "floor": "10.2f", "= linear": "10.2f"}
    table = Table({**columns, "+ attn": "9.2f", "x floor": "9.2f"})
    for case in cases:
        linear, attention = (1e3 * part for part in floor(case, chunk, floors))
        taken = bench.measure(case, chunk, MIN_SECONDS)
        row = {"step": case.name, "ms": 1e3 * taken.median, "+-": 1e3 * taken.noise}
        row |= {"floor": linear + attention, "= linear": linear, "+ attn": attention}
        table.add(row | {"x floor": 1e3 * taken.median / (linear + attention)})
    return table.rows


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


@program.command(words=MODEL, threads=THREADS, cases=NAMED_CASES, chunk=CHUNK)
def main(args: Args) -> dict[str, Any]:
    """Measure floors, and steps against them."""
    threads = args.threads or machine.default_num_threads()
    config = ModelConfig(model=str(path := model_path(args.model)))
    info, resolved = ModelInfo(config), CPU_TYPES.resolve(config)
    floors, variant = floors_of(config, threads)
    shapes, name = floors.shapes, str(named_dtype(resolved.dtype)).removeprefix("torch.")
    print(f"{args.model}: {name}, kernels {variant}, {threads} threads\n")
    is_in_blocks = CpuPlace().multiplies_blocks and info.source.packs_embedding
    block_bytes = num_weight_bytes(resolved, info, CpuPlace()) if is_in_blocks else 0
    rows = show_floors(floors, block_bytes)
    fitting = _fitting(chosen(CASES, args.cases), info, shapes.kv_bytes_per_token)
    bench = StepBench(
        path,
        threads=args.threads,
        num_kv_tokens=max(case.num_kv_tokens for case in fitting),
        kv_bytes_per_token=shapes.kv_bytes_per_token,
    )
    steps = show_steps(bench, fitting, floors, args.chunk)
    bench.runner.close()
    if not 1 / MAX_DRIFT < (drift := floors.drift()) < MAX_DRIFT:
        print(f"Not to be trusted: a floor now takes {drift:.2f} times as long.")
    about = {"dtype": name, "kernels": variant, "threads": threads, "block_bytes": block_bytes}
    about |= {"bandwidth_gb_s": floors.bandwidth / 1e9, "gflop_s": floors.rate / 1e9}
    return {**about, "floors": rows, "steps": steps, "drift": drift}


if __name__ == "__main__":
    program.main()
