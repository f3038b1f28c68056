"""What a CUDA card gives, against what it could: steps, overlap, graphs, the server, a peer.

    python benchmarks/gpu.py                  # both shapes, about 10 minutes, no network needed
    python benchmarks/gpu.py --shapes 0.6b    # one of them
    python benchmarks/gpu.py --rehearse       # tiny, on the CPU: shows that the script runs

Weights are random and made on the card. A floor is the bytes that a step must move at the copy
rate measured here, or its arithmetic at the rate of a large product, whichever takes longer. The
last line is JSON. docs/gpu.md says what the columns mean.
"""

import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from harness import Args, LoadShape, Opt, Program, percentile
from make_model import SHAPES, configuration, write_tokenizer
from steps import BLOCK_SIZE, GREEDY, Shapes, new_request, plan

from aioserve import AsyncEngine
from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.gpu.cuda.device import Device
from aioserve.gpu.cuda.executor import StepExecutor
from aioserve.gpu.cuda.fused import CudaPlace
from aioserve.gpu.cuda.load import make_executor
from aioserve.gpu.cuda.runner import OverlappedRunner
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.attention.bridge import ATTN_IMPLEMENTATION
from aioserve.runner.loader import prepare_model
from aioserve.scheduler.output import NewRequestData, SchedulerOutput

#: As the generation_config.json of chat models asks.
SAMPLED = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, ignore_eos=True)


program = Program(__doc__)


class Size(NamedTuple):
    """How much is measured."""

    batches: tuple[int, ...] = (1, 32, 128, 256)
    context: int = 1024
    prefill: int = 8192
    mixed: tuple[int, int] = (128, 512)  # decodes, prompt tokens
    steps: int = 60
    clients: int = 256
    num_requests: int = 1024
    input_tokens: int = 512
    output_tokens: int = 128
    of_loads: int = 1  # W1 to W5 have their streams and tokens divided by it


REHEARSAL = Size((1, 4), 40, 100, (3, 20), 12, 4, 8, 20, 6, 32)


class Ceilings(NamedTuple):
    """Of this card, now."""

    bytes_per_second: float  # of a copy, both directions counted
    flops_per_second: float  # of a product of 8192 x 8192 matrices in bfloat16


class Steps:
    """Steps by hand on a loaded executor."""

    def __init__(self, executor: StepExecutor, vocab_size: int) -> None:
        self.executor = executor
        self._vocab_size = vocab_size
        self._blocks_per_row = 0
        self._lengths: dict[str, int] = {}
        self._num_steps = 0
        self._params = GREEDY

    def seat(
        self, num_rows: int, context: int, num_steps: int, params: SamplingParams = GREEDY
    ) -> None:
        """Requests that have `context` tokens in the KV pool, and room for `num_steps` more."""
        self._params = params
        self._blocks_per_row = -(-(context + num_steps + 2) // BLOCK_SIZE)
        self._lengths = {f"r{i}": context for i in range(num_rows)}
        new = []
        for i, name in enumerate(self._lengths):
            tokens = [(7 * i + 13 * j) % self._vocab_size for j in range(context)]
            new.append(self._new(name, tokens, i, context - 1))
        self._finish(self.executor.launch(self._output(new, {}, dict.fromkeys(self._lengths, 1))))

    def leave(self) -> None:
        """Everybody goes."""
        self.executor.launch(plan(0, [], {}, {}, [*self._lengths, "prompt"]))
        self._lengths = {}

    def decode(self, prompt: int = 0) -> SchedulerOutput:
        """The next token of everybody, beside a new prompt of `prompt` tokens."""
        cached = dict(self._lengths)
        counts = dict.fromkeys(cached, 1)
        self._lengths = {name: length + 1 for name, length in cached.items()}
        new = []
        if prompt:
            tokens = [(11 * j) % self._vocab_size for j in range(prompt)]
            new = [self._new("prompt", tokens, len(cached), 0)]
            counts["prompt"] = prompt
        return self._output(new, cached, counts)

    def _new(self, name: str, tokens: list[int], index: int, computed: int) -> NewRequestData:
        width = max(self._blocks_per_row, -(-len(tokens) // BLOCK_SIZE))
        first = index * self._blocks_per_row
        blocks = list(range(first, first + width))
        return new_request(name, tokens, computed, blocks, self._params)

    def _output(
        self, new: list[NewRequestData], cached: dict[str, int], counts: dict[str, int]
    ) -> SchedulerOutput:
        self._num_steps += 1
        return plan(self._num_steps, new, cached, counts)

    def _finish(self, launched: Any) -> None:
        self.executor.finish(launched)

    def seconds(self, num_steps: int, depth: int, prompt: int = 0) -> float:
        """Median wall time of a step in a row of them, with `depth` of them in flight."""
        in_flight: deque[Any] = deque()
        ends = []
        for step in [self.decode(prompt) for _ in range(num_steps)]:
            in_flight.append(self.executor.launch(step))
            if len(in_flight) == depth:
                self._finish(in_flight.popleft())
                ends.append(time.perf_counter())
        while in_flight:
            self._finish(in_flight.popleft())
        gaps = [after - before for before, after in pairwise(ends)]
        return statistics.median(gaps[1:])

    def busy_seconds(self, num_steps: int) -> float | None:
        """What a step takes of the device when nothing keeps it waiting: queued behind a sleep."""
        if not torch.cuda.is_available():
            return None
        times: list[float] = []
        for _ in range(num_steps):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(40_000_000)  # clock cycles: about 20 ms, longer than a launch
            begin.record()
            launched = self.executor.launch(self.decode())
            end.record()
            self._finish(launched)
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)


def measure_ceilings(device: Device, is_rehearsal: bool) -> Ceilings:
    place = device.torch_device
    size = 1 << (24 if is_rehearsal else 31)
    source = torch.ones(size, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    edge = 256 if is_rehearsal else 8192
    a = torch.randn(edge, edge, dtype=torch.bfloat16, device=place)
    out = torch.empty_like(a)
    return Ceilings(
        2 * size / _timed(lambda: target.copy_(source)),
        2 * edge**3 / _timed(lambda: torch.mm(a, a, out=out)),
    )


def _timed(work: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of `work` on the device."""
    times: list[float] = []
    for _ in range(repeats + 3):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


class Floor:
    """The least time of a step of one shape."""

    def __init__(self, shapes: Shapes, ceilings: Ceilings) -> None:
        self._shapes = shapes
        self._ceilings = ceilings
        self._body = sum(outputs * inputs for outputs, inputs in shapes.products)
        self._head = shapes.head[0] * shapes.head[1]

    def seconds(self, decodes: int, context: int, prompt: int = 0) -> float:
        """Weights once, K and V of all, logits written and read; or the arithmetic."""
        shapes, rows = self._shapes, decodes + bool(prompt)
        moved = 2 * (self._body + self._head) + 4 * rows * shapes.head[0]
        moved += (decodes * context + prompt) * shapes.kv_bytes_per_token
        flops = 2 * self._body * (decodes + prompt) + 2 * self._head * rows
        flops += shapes.attention_flops * (decodes * context + prompt * prompt // 2)
        return max(moved / self._ceilings.bytes_per_second, flops / self._ceilings.flops_per_second)


def write_directory(shape: str, path: Path, num_positions: int) -> Path:
    """Configuration and tokenizer; the weights are made where they are used."""
    config = configuration(shape, num_positions)
    config.save_pretrained(path)
    write_tokenizer(path, config.vocab_size)
    return path


def random_module(path: Path, device: torch.device) -> Any:
    """Weights as a fresh model has them, bfloat16, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path),
            dtype=torch.bfloat16,
            attn_implementation=ATTN_IMPLEMENTATION,
        )
    return module.eval()


def measure_peer(module: Any, size: Size, vocab_size: int) -> dict[str, Any]:
    """Tokens a second of continuous batching in transformers, on the same weights."""
    from transformers import GenerationConfig

    has_flash = find_spec("flash_attn_interface") is not None or find_spec("flash_attn") is not None
    implementation = "flash_attention_3" if has_flash else "sdpa"
    num_requests = size.num_requests if has_flash else min(size.num_requests, 64)
    inputs = [
        [(7 * i + 13 * j) % vocab_size for j in range(size.input_tokens)]
        for i in range(num_requests)
    ]
    settings = GenerationConfig(
        max_new_tokens=size.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    try:
        module.set_attn_implementation(implementation)
        began = time.perf_counter()
        outputs = module.generate_batch(inputs, generation_config=settings)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.generated_tokens) for output in outputs.values())
        if not tokens:
            raise RuntimeError("it generated nothing")
    except Exception as error:  # whatever it lacks here: said, not hidden
        return {"attention": implementation, "error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        module.set_attn_implementation(ATTN_IMPLEMENTATION)
    return {
        "attention": implementation,
        "requests": num_requests,
        "output_tokens_per_second": tokens / seconds,
    }


class Lent:
    """An executor that a runner does not close, as it goes on when the runner has ended."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def close(self) -> None:
        """Do nothing: the lender closes the executor."""


def lend(executor: StepExecutor) -> OverlappedRunner:
    """Return a runner of `executor`, which the caller attaches again to go on."""
    lent: Any = Lent(executor)
    return OverlappedRunner(lambda: lent)


async def measure_server(
    executor: StepExecutor, config: EngineConfig, size: Size, vocab_size: int
) -> dict[str, Any]:
    """The whole HTTP server under a closed loop of clients in another process."""
    from aioserve.server.app import listening
    from aioserve.server.sockets import bind

    async with (
        AsyncEngine(config, runner=lend(executor)) as engine,
        listening(engine, bind("127.0.0.1", 0)) as url,
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aioserve", "bench", url, "--prompts", "ids"),
            *("--vocab-size", str(vocab_size), "--concurrency", str(size.clients)),
            *("--input-tokens", str(size.input_tokens)),
            *("--output-tokens", str(size.output_tokens)),
            *("--num-requests", str(size.num_requests), "--warmup", str(size.clients)),
            stdout=asyncio.subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        out, _ = await process.communicate()
    result: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return result


async def measure_load(
    loaded: "Loaded", shape: LoadShape, params: SamplingParams
) -> dict[str, float]:
    """Send a closed loop to an engine in this process, as token ids and without HTTP, behind a
    warm-up of one request of each stream.
    """
    executor, vocab_size = loaded.executor, loaded.vocab_size
    rng, names = random.Random(0), list[str]()
    ttfts, gaps = list[float](), list[float]()
    params = msgspec.structs.replace(params, max_tokens=shape.output_tokens, detokenize=False)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    async with AsyncEngine(loaded.config, runner=lend(executor)) as engine:

        async def stream(prefix: list[int], count: int) -> None:
            for _ in range(count):
                names.append(f"request {len(names)}")
                spans, last = ttfts, time.perf_counter()
                prompt = prefix + tokens(shape.input_tokens)
                async for output in engine.generate(prompt, params, request_id=names[-1]):
                    if output.token_ids:
                        now = time.perf_counter()
                        spans.append(now - last)
                        spans, last = gaps, now

        async def streams(count: int) -> float:
            prefix = tokens(shape.prefix_tokens)
            ttfts.clear()
            gaps.clear()
            began = time.perf_counter()
            await asyncio.gather(*(stream(prefix, count) for _ in range(shape.streams)))
            return time.perf_counter() - began

        await streams(1)
        seconds = await streams(shape.per_stream)
    executor.attach()  # this thread is the one that launches again
    executor.launch(plan(0, [], {}, {}, names))  # drops requests that are left
    return {
        "tokens/s": shape.streams * shape.per_stream * shape.output_tokens / seconds,
        "TTFT p50 ms": 1e3 * percentile(ttfts, 50),
        "gap p50 ms": 1e3 * percentile(gaps, 50),
        "gap p99 ms": 1e3 * percentile(gaps, 99),
    }


class Loaded(NamedTuple):
    """A model of random weights on a device, ready for steps."""

    executor: StepExecutor
    config: EngineConfig
    floor: Floor
    vocab_size: int
    start_seconds: float  # of everything but the weights


def load_shape(
    shape: str,
    device: Device,
    ceilings: Ceilings,
    size: Size,
    folder: Path,
    use_module: Callable[[Any, int], None] = lambda module, vocab_size: None,
) -> Loaded:
    """Make the weights and load them as a server does. `use_module` may use the module before its
    layers are fused.
    """
    num_positions = size.prefill + size.context
    path = write_directory(shape, folder / shape, num_positions)
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="bfloat16"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(
            max_num_seqs=max(*size.batches, size.clients),
            max_num_batched_tokens=num_positions,
            pipeline_depth=2,
        ),
        runner=RunnerConfig(),
    )
    info = ModelInfo(config.model)
    card = device.card()
    module = random_module(path, device.torch_device)
    use_module(module, info.vocab_size)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with torch.inference_mode():
        place = CudaPlace(
            device.torch_device,
            has_triton=find_spec("triton") is not None and device.torch_device.type == "cuda",
        )
        model = prepare_model(module, config.model, info, place)
        began = time.perf_counter()
        executor = make_executor(config, info, model, device, card)
        seconds = time.perf_counter() - began
    floor = Floor(Shapes.of(info.hf_config, torch.bfloat16), ceilings)
    return Loaded(executor, config, floor, info.vocab_size, seconds)


def measure_shape(
    shape: str, device: Device, ceilings: Ceilings, size: Size, folder: Path, has_peer: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": [], "peer": None}

    def ask_peer(module: Any, vocab_size: int) -> None:
        if has_peer:
            found["peer"] = measure_peer(module, size, vocab_size)

    executor, config, floor, vocab_size, found["start_seconds"] = load_shape(
        shape, device, ceilings, size, folder, ask_peer
    )
    with torch.inference_mode():
        steps = Steps(executor, vocab_size)

        def note(name: str, decodes: int, seconds: float, prompt: int = 0, **more: Any) -> None:
            least = floor.seconds(decodes, size.context, prompt)
            entry = {
                "name": name,
                "ms": 1e3 * seconds,
                "floor_ms": 1e3 * least,
                "of_floor": least / seconds,
                **more,
            }
            found["steps"].append(entry)
            idle = more.get("idle")
            print(
                f"{shape:5} {name:36} {entry['ms']:9.3f} ms   floor {entry['floor_ms']:8.3f}   "
                f"{entry['of_floor']:.2f}" + ("" if idle is None else f"   idle {idle:.1%}"),
                flush=True,
            )

        def decodes(
            batch: int,
            name: str,
            depth: int,
            *,
            with_idle: bool = False,
            params: SamplingParams = GREEDY,
        ) -> None:
            steps.seat(batch, size.context, 2 * size.steps, params)
            seconds = steps.seconds(size.steps, depth)
            busy = steps.busy_seconds(size.steps // 3) if with_idle else None
            idle = None if busy is None else max(0.0, 1 - busy / seconds)
            note(f"decode {batch}{name}", batch, seconds, idle=idle)
            steps.leave()

        for batch in size.batches:
            decodes(batch, "", 2, with_idle=True)
        for batch in size.batches:
            decodes(batch, ", sampled", 2, params=SAMPLED)
        for batch in size.batches:
            decodes(batch, ", no overlap", 1)
        steps.seat(size.mixed[0], size.context, 2 * size.steps)
        seconds = steps.seconds(size.steps // 2, 2, size.mixed[1])
        note("decode {} + prefill {}".format(*size.mixed), size.mixed[0], seconds, size.mixed[1])
        steps.leave()
        note(f"prefill {size.prefill}", 0, steps.seconds(8, 2, size.prefill), size.prefill)
        steps.leave()
    server = asyncio.run(measure_server(executor, config, size, vocab_size))
    found["server"] = server
    with torch.inference_mode():
        executor.attach()
        executor.forget_graphs()
        for batch in size.batches:
            decodes(batch, ", no graphs", 2)
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "triton", "flashinfer"):
        if find_spec(name) is not None:
            found[name] = __import__(name).__version__
    return found


def make_device(is_rehearsal: bool) -> Device:
    if is_rehearsal:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.runner.cuda.fake_device import FakeDevice

        device: Device = FakeDevice(eagerness=1)
        return device
    if not torch.cuda.is_available():
        sys.exit("no CUDA card here; --rehearse runs the script on the CPU")
    from aioserve.gpu.cuda.cuda_device import CudaDevice

    return CudaDevice()


@program.command(
    shapes=Opt(["0.6b", "8b"], choices=SHAPES),
    no_peer=Opt(False, "without transformers' own batching"),
    rehearse=Opt(False, "tiny, on the CPU"),
)
def main(args: Args) -> dict[str, Any]:
    """All measurements of each shape."""
    size = REHEARSAL if args.rehearse else Size()
    shapes = ["2m"] if args.rehearse else args.shapes
    device = make_device(args.rehearse)
    ceilings = measure_ceilings(device, args.rehearse)
    card = device.card()
    print(
        f"{card.name}: copy {ceilings.bytes_per_second / 1e12:.2f} TB/s, "
        f"bfloat16 {ceilings.flops_per_second / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    report: dict[str, Any] = {
        "card": card.name,
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "ceilings": ceilings._asdict(),
        "is_rehearsal": args.rehearse,
    }
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            found = measure_shape(
                shape, device, ceilings, size, Path(folder), has_peer=not args.no_peer
            )
            report[shape] = found
            served = found["server"]["totals"]["output_tokens_per_second"]
            print(f"{shape:5} server, {size.clients} clients: {served:.0f} output tokens/s")
            print(f"{shape:5} transformers: {found['peer']}", flush=True)
    return report


if __name__ == "__main__":
    program.main()
