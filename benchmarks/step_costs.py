"""What stands around a step costs: the runner's part, KV blocks, the decision log, sampling.

    python benchmarks/step_costs.py runner [--running 1 16 64] [--case model batch]
    python benchmarks/step_costs.py blocks           # by age, and by ranks that a policy states
    python benchmarks/step_costs.py blocks --against main     # or a directory: ratios, in turns
    python benchmarks/step_costs.py log [--running 64 256] [--steps 2000]
    python benchmarks/step_costs.py between 135m     # or 0.6b, 2m, or a model directory
    python benchmarks/step_costs.py sampling         # how tokens are drawn

`runner`: decodes of one to many rows, on one thread. `model`: whole steps of the embedded model.
`batch`: the same steps with logits that are ready, so that the batch, its parts and the sampler are
left. With `--against` a case that is slower by more than `--tolerance` makes the exit code 1. Of
another revision the kernels are not there: give a directory that has them built.

`blocks`: microseconds per block of requests that come, hit and go. Requests of 32 blocks come one
after the other, and each frees its blocks before the next but three comes. `new`: none is found, so
that each block evicts one. `half`: the first 16 are found again among those of 40 prefixes. `all`:
every block is found, as none was evicted. Counted are finding, taking, making findable and freeing,
not the hashing of tokens. By ranks, each request has one of eight.

`log`: microseconds and bytes per step with a decision log, beside the same steps without one, in
turns. Steady decode, and a batch in which in every step a request leaves and one comes with a
prompt of 200 tokens. No model, no event loop; the file is written by its thread meanwhile. Medians
and 99th percentiles of `schedule()` and `update_from_output()` together. Token ids are random out
of 150,000, which no compression can do anything about.

`between`: what of a decoding step is not the model, as shares of the step. As many streams as asked
for decode through `AsyncEngine`, without HTTP. Counted are steps that hold one token of each
stream, from the beginning of one to that of the next, on a server's event loop (uvloop where it is
installed), where threads wait for Python's lock as long as in a server (0.1 ms, not 5) and garbage
is collected as seldom: *model* is the forward pass, *packing* the batch and the block tables,
*sampling* the choice of tokens, *entering* the rest of the runner's thread; *handover* is what
passes from the end of a step on that thread to the beginning of the next one: both changes of
threads, the scheduler's update and its next plan. Values are lower quartiles, as others may use the
machine; the share is of all but the model.

`sampling`: the choice of tokens from logits that are ready, by torch and numpy alone and by the
compiled library, in turns on one thread, with a look at whether the tokens are the same. Rows are
of normal numbers of deviation 2. Medians of CPU time. The last line is JSON.
"""

import asyncio
import gc
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import against
from harness import Args, Opt, Program, Table

from aioserve.config import SchedulerConfig, SpeculationConfig
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.scheduler import SchedulerInterface, load_policy

BLOCK_SIZE = 16
NO_DRAFTS = SpeculationConfig(speculative_method="none")  # every step is one token of each row

program = Program(__doc__)


# The runner. What is imported here is imported late: another checkout may not have all of it.


PROMPT_TOKENS = 32
LIFE = 64  # steps that a request stays


class RunnerCase(NamedTuple):
    """What is measured."""

    kind: str
    running: int

    @property
    def name(self) -> str:
        """The words that stand for it in the report."""
        return f"{self.kind} {self.running} run"


class RunnerWork:
    """An executor whose requests decode; each is replaced by the next one after `LIFE` steps."""

    def __init__(self, case: RunnerCase) -> None:
        import torch

        from aioserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
        from aioserve.model_source.info import ModelInfo
        from aioserve.runner.cpu.load import load_on_cpu

        blocks_each = -(-(PROMPT_TOKENS + LIFE + 1) // BLOCK_SIZE)
        config = EngineConfig(
            cache=CacheConfig(num_kv_blocks=case.running * blocks_each, block_size=BLOCK_SIZE),
            runner=RunnerConfig(threads=1),
            scheduler=SchedulerConfig(max_num_seqs=case.running),
            speculation=NO_DRAFTS,
        )
        info = ModelInfo(config.model)
        self._executor = load_on_cpu(config, info)
        self._blocks_each, self._running = blocks_each, case.running
        self._computed: dict[str, int] = {}  # by request, in the order of admission
        self._rows: tuple[list[str], dict[str, int]] = [], {}  # of the last step of decodes
        self._num_made = self._num_steps = self._sum = 0
        if case.kind == "batch":
            torch.manual_seed(0)
            logits = torch.rand(case.running, info.vocab_size)
            model: Any = self._executor._model
            model.forward = lambda inputs, attention: logits[: len(inputs.logits_rows)]
        self.round(LIFE)

    def round(self, num_units: int) -> tuple[float, float]:
        """Units are steps."""
        spent = 0.0
        for _ in range(num_units):
            step = self._plan()
            began = time.thread_time()
            output = self._executor.execute_model(step)
            spent += time.thread_time() - began
            self._sum += sum(map(sum, output.sampled_token_ids))
        return spent, self._sum

    def close(self) -> None:
        """Give back the model."""
        self._executor.close()

    def _plan(self) -> Any:
        """Each request one token; one joins in a step as long as rows are free."""
        from aioserve.params import SamplingParams
        from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

        ended = [name for name, count in self._computed.items() if count >= PROMPT_TOKENS + LIFE]
        for name in ended:
            del self._computed[name]
        known = dict(self._computed)
        scheduled = dict.fromkeys(known, 1)
        new_blocks = {
            name: [self._block(name, count // BLOCK_SIZE)]
            for name, count in known.items()
            if count % BLOCK_SIZE == 0
        }
        new = []
        if len(known) < self._running:
            name = str(self._num_made)
            self._num_made += 1
            tokens = [300 + (7 * self._num_made + place) % 1500 for place in range(PROMPT_TOKENS)]
            blocks = [self._block(name, place) for place in range(PROMPT_TOKENS // BLOCK_SIZE)]
            params = SamplingParams(temperature=0, ignore_eos=True)
            new = [NewRequestData(name, tokens, len(tokens), params, frozenset(), blocks, 0)]
            scheduled[name] = PROMPT_TOKENS
        for name, count in scheduled.items():
            self._computed[name] = known.get(name, 0) + count
        self._num_steps += 1
        names = list(known)
        if not new:  # as a scheduler does: steps of the same rows share their lists and dicts
            if names == self._rows[0]:
                names, scheduled = self._rows
            self._rows = names, scheduled
        cached = CachedRequestData(names, list(known.values()), new_blocks)
        total = sum(scheduled.values())
        return SchedulerOutput(self._num_steps, new, cached, scheduled, total, [], ended)

    def _block(self, name: str, place: int) -> int:
        return int(name) % self._running * self._blocks_each + place


@program.command(
    "runner",
    {},
    case=Opt(["model", "batch"], choices=["model", "batch"]),
    running=Opt([1, 16, 64], "at once"),
    steps=2000,
    **against.OPTIONS,
)
def runner(args: Args) -> tuple[dict[str, Any] | None, int]:
    """Steps of the runner."""
    if args.turns:
        against.take_turns(lambda case: RunnerWork(RunnerCase(*case)))
        return None, 0
    cases = [RunnerCase(kind, running) for kind in args.case for running in args.running]
    if args.against is not None:
        return against.report([__file__, "runner"], [(it.name, list(it)) for it in cases], args)
    table = Table({"case": "<20", "us a step": "12.1f", "us a row": "11.2f"})
    for case in cases:
        work = RunnerWork(case)
        us = 1e6 * statistics.median(work.round(1)[0] for _ in range(args.steps))
        work.close()
        table.add({"case": case.name, "us a step": us, "us a row": us / case.running})
    return {"rows": table.rows}, 0


# KV blocks.


KINDS = ("new", "half", "all")
SIZE = 32  # blocks of a request
NUM_PREFIXES = 40
NUM_HELD = 3  # requests that hold blocks beside the newest
NUM_BLOCKS = 4096


class PoolCase(NamedTuple):
    """How much of each request the pool has, and whether it evicts by rank."""

    kind: str
    by_rank: bool = False


class PoolWork:
    """A full pool of blocks, and requests that come, hit and go."""

    def __init__(self, case: PoolCase) -> None:
        from aioserve.kv_cache import BlockPool

        self.case = case
        self.pool = BlockPool(NUM_BLOCKS)
        self._rng = random.Random(1)
        self._held: deque[tuple[list[bytes], list[int]]] = deque()
        self._num_made = 0
        self._check = 0
        self._rank = None
        if case.by_rank:
            from aioserve.kv_cache.retention import Ranking  # an older checkout has none

            ranking = Ranking(self.pool)
            ranking.begin()
            self._rank = ranking.rank
        self.round(NUM_BLOCKS // SIZE)

    def _contents(self) -> list[bytes]:
        self._num_made += 1
        num_found = {"new": 0, "half": SIZE // 2, "all": SIZE}[self.case.kind]
        prefix = self._rng.randrange(NUM_PREFIXES)
        old = [b"%016d" % (prefix * SIZE + i) for i in range(num_found)]
        first = 10**9 + self._num_made * SIZE
        return old + [b"%016d" % (first + i) for i in range(SIZE - num_found)]

    def round(self, num_units: int) -> tuple[float, float]:
        """Units are requests. Returns CPU seconds, and the sum of the block ids handed out."""
        ready = [(self._contents(), self._rng.randrange(8)) for _ in range(num_units)]
        began = time.thread_time()
        for contents, rank in ready:
            self._serve(contents, rank)
        return time.thread_time() - began, self._check

    def _serve(self, contents: list[bytes], rank: int) -> None:
        pool, found = self.pool, []
        for content in contents:
            block_id = pool.lookup(content)
            if block_id is None:
                break
            found.append(block_id)
        pool.touch(found)
        new = pool.allocate(SIZE - len(found))
        pool.register(new, contents[len(found) :])
        self._check += sum(new)
        self._held.append((contents, found + new))
        if len(self._held) > NUM_HELD:
            gone, block_ids = self._held.popleft()
            pool.free(reversed(block_ids))
            if self._rank is not None:
                self._rank(gone, rank)

    def close(self) -> None:
        """Does nothing: a pool holds no resources to give back."""


def microseconds(case: PoolCase, num_rounds: int) -> float:
    """Microseconds per block, the median of the rounds."""
    work = PoolWork(case)
    gc.collect()
    gc.disable()
    rounds = [work.round(100)[0] for _ in range(num_rounds)]
    gc.enable()
    return 1e6 * statistics.median(rounds) / (100 * SIZE)


@program.command("blocks", {}, case=Opt(KINDS, choices=KINDS), **against.OPTIONS)
def blocks(args: Args) -> tuple[dict[str, Any] | None, int]:
    """Requests that take and free KV blocks."""
    if args.turns:
        against.take_turns(lambda case: PoolWork(PoolCase(*case)))
        return None, 0
    if args.against is not None:
        cases = [(kind, list(PoolCase(kind))) for kind in args.case]
        return against.report([__file__, "blocks"], cases, args)
    table = Table({"us per block": "<12", "by age": "10.3f", "by rank": "10.3f"})
    for kind in args.case:
        by_age, by_rank = (microseconds(PoolCase(kind, it), args.rounds) for it in (False, True))
        table.add({"us per block": kind, "by age": by_age, "by rank": by_rank})
    return {"rows": table.rows}, 0


# The decision log.


LOGGED_PROMPT = 200  # tokens
VOCAB_SIZE = 150_000


class LoggedLoad:
    """A scheduler that is kept at `num_running` running requests."""

    def __init__(self, num_running: int, num_steps: int, path: Path | None) -> None:
        self.rng = random.Random(0)
        self.max_model_len = LOGGED_PROMPT + num_steps + 200
        blocks_each = -(-self.max_model_len // BLOCK_SIZE)
        config = SchedulerConfig(
            policy="fcfs",
            max_num_seqs=num_running,
            max_num_batched_tokens=self.max_model_len + LOGGED_PROMPT * num_running,
        )
        from aioserve.lab.decision_log.recorder import LogWriter, RecordingScheduler

        make: Any = load_policy("fcfs")
        if path is not None:
            make = partial(RecordingScheduler, make, sink=LogWriter(path))
        self.scheduler: SchedulerInterface = make(
            config,
            KVCacheManager(num_running * blocks_each, BLOCK_SIZE),
            max_model_len=self.max_model_len,
            clock=lambda: 0.0,
        )
        self.num_added = 0
        for _ in range(num_running):
            self.add()

    def add(self) -> None:
        spec = RequestSpec(
            f"req-{self.rng.getrandbits(128):032x}",
            [self.rng.randrange(VOCAB_SIZE) for _ in range(LOGGED_PROMPT)],
            SamplingParams(),
            arrival_time=float(self.num_added),
        )
        self.scheduler.add_request(Request(spec))
        self.num_added += 1

    def step(self, has_churn: bool) -> float:
        """Plan a step and take in a result; seconds of both."""
        began = time.perf_counter()
        self.scheduler.expire_requests()
        output = self.scheduler.schedule()
        seconds = time.perf_counter() - began
        req_ids = list(output.num_scheduled_tokens)
        sampled = [[self.rng.randrange(VOCAB_SIZE)] for _ in req_ids]
        result = ModelRunnerOutput(req_ids, sampled)
        began = time.perf_counter()
        self.scheduler.update_from_output(output, result)
        seconds += time.perf_counter() - began
        if has_churn:
            self.scheduler.finish_requests(req_ids[0], RequestStatus.FINISHED_STOPPED)
            self.add()
        return seconds


def measure_log(num_running: int, num_steps: int, has_churn: bool, folder: Path) -> dict[str, Any]:
    path = folder / "log"
    plain, logged = (LoggedLoad(num_running, num_steps, it) for it in (None, path))
    for load in (plain, logged):
        for _ in range(50):
            load.step(has_churn)
    logged.scheduler._sink.flush()  # type: ignore[attr-defined]
    time.sleep(0.2)
    size = path.stat().st_size
    times = [(plain.step(has_churn), logged.step(has_churn)) for _ in range(num_steps)]
    logged.scheduler.shutdown()
    without, with_log = (sorted(1e6 * t for t in column) for column in zip(*times, strict=True))
    return {
        "running": num_running,
        "batch": "changing" if has_churn else "steady",
        "without_us": round(statistics.median(without), 1),
        "with_us": round(statistics.median(with_log), 1),
        "cost_us": round(statistics.median(with_log) - statistics.median(without), 1),
        "p99_cost_us": round(with_log[int(0.99 * num_steps)] - without[int(0.99 * num_steps)], 1),
        "bytes_per_step": round((path.stat().st_size - size) / num_steps, 1),
    }


@program.command("log", running=[64, 256], steps=2000)
def log(args: Args) -> dict[str, Any]:
    """Steps with a decision log."""
    names = ("without_us", "with_us", "cost_us", "p99_cost_us", "bytes_per_step")
    table = Table({"running": "8", "batch": "10", **dict.fromkeys(names, "16.1f")})
    with tempfile.TemporaryDirectory() as folder:
        for num_running in args.running:
            for has_churn in (False, True):
                table.add(measure_log(num_running, args.steps, has_churn, Path(folder)))
    return {"rows": table.rows}


# Between two steps.


PARTS = MODEL, PACKING, SAMPLING, ENTERING, HANDOVER = (
    *("model", "packing", "sampling", "entering", "handover"),
)
INPUT_TOKENS = 64
GOAL = 0.03  # share of a step


class StepClock:
    """Seconds of the parts of steady steps, on the thread of the runner."""

    def __init__(self, executor: Any, streams: int) -> None:
        self.steps: list[dict[str, float]] = []
        self._streams, self._ended = streams, 0.0
        self._spent: dict[str, float] = defaultdict(float)
        self._execute = executor.execute_in_mode
        vars(executor)["execute_in_mode"] = self._step
        vars(executor)["choose"] = self._timed(SAMPLING, executor.choose)
        for part, owner, name in (
            (MODEL, executor._model, "forward"),
            (PACKING, executor._batch, "apply"),
            (PACKING, executor._batch, "prepare"),
            (PACKING, executor._backend, "prepare"),
        ):
            vars(owner)[name] = self._timed(part, getattr(owner, name))

    def _step(self, output: Any) -> ModelRunnerOutput:
        began = time.perf_counter()
        self._spent.clear()
        result: ModelRunnerOutput = self._execute(output)
        now = time.perf_counter()
        counts = output.num_scheduled_tokens
        is_steady = len(counts) == self._streams == output.total_num_scheduled_tokens
        if is_steady and self._ended:
            inside = now - began
            rest = inside - sum(self._spent.values())
            handover = {ENTERING: rest, HANDOVER: began - self._ended}
            self.steps.append({**self._spent, **handover})
        self._ended = now if is_steady else 0.0
        return result

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._spent[part] += time.perf_counter() - began

        return call


async def measure_parts(path: Path, streams: int, args: Args) -> dict[str, Any]:
    """Milliseconds of each part, and the share of all but the model."""
    from aioserve import AsyncEngine
    from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig
    from aioserve.engine.builder import make_runner
    from aioserve.model_source.info import ModelInfo

    blocks = streams * -(-(INPUT_TOKENS + args.steps + 1) // BLOCK_SIZE)
    config = EngineConfig(
        model=ModelConfig(model=str(path)),
        cache=CacheConfig(num_kv_blocks=2 * blocks),
        runner=RunnerConfig(threads=args.threads),
        scheduler=SchedulerConfig(pipeline_depth=args.pipeline_depth),
        speculation=NO_DRAFTS,
    )
    runner: Any = make_runner(config, ModelInfo(config.model))
    params = SamplingParams(max_tokens=args.steps, temperature=0, ignore_eos=True)

    async def one(number: int) -> None:
        prompt = [16 + (number * 7919 + i) % 1900 for i in range(INPUT_TOKENS)]
        async for _ in engine.generate(prompt, params):
            pass

    async with AsyncEngine(config, runner=runner) as engine:
        clock = StepClock(runner._executor, streams)
        await asyncio.gather(*(one(number) for number in range(streams)))
    found: dict[str, Any] = {
        part: 1e3 * statistics.quantiles((step.get(part, 0.0) for step in clock.steps), n=4)[0]
        for part in PARTS
    }
    return {
        "streams": streams,
        **found,
        "share": 1 - found[MODEL] / sum(found.values()),
        "steps": len(clock.steps),
    }


@program.command(
    "between",
    words={"model": Opt(str, "a directory or file, or the name of a shape: 2m, 135m, 0.6b")},
    streams=[1, 16, 64],
    steps=Opt(200, "tokens of each stream"),
    threads=Opt(int, "default: one per physical core"),
    pipeline_depth=Opt(int, "default: as of python -m aioserve"),
)
def between(args: Args) -> dict[str, Any]:
    """What of a decoding step is not the model, in milliseconds."""
    from make_model import model_path

    from aioserve.server.app import SWITCH_INTERVAL, exempt_from_garbage_collection
    from aioserve.support.arguments import run

    path = model_path(args.model)
    exempt_from_garbage_collection()
    sys.setswitchinterval(SWITCH_INTERVAL)
    table = Table({"streams": ">8d", **dict.fromkeys(PARTS, ">11.3f"), "share": ">9.1%"})
    for streams in args.streams:
        table.add(run(measure_parts(path, streams, args)))
    met = all(row["share"] < GOAL for row in table.rows)
    return {"rows": table.rows, "goal": GOAL, "met": met}


# The choice of tokens.


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "0.6, top-p 0.95, top-k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "min-p 0.05": {"min_p": 0.05},
}


def measure_sampling(way: str, rows: int, args: Args) -> dict[str, Any]:
    """Microseconds of CPU time for a row, without the library and with it."""
    import numpy as np
    import torch

    from aioserve.runner.batch.sampling_columns import SamplingColumns
    from aioserve.runner.cpu import sampler
    from aioserve.scheduler.output import NewRequestData

    torch.set_num_threads(1)
    logits = torch.randn(rows, args.vocab, generator=torch.Generator().manual_seed(0)) * 2
    columns = SamplingColumns(rows, args.vocab)
    for row in range(rows):
        params = SamplingParams(seed=row, **WAYS[way])
        columns.set(row, NewRequestData(str(row), [0], 1, params, frozenset(), [], 0))
    compiled = vars(sampler)["load_chooser"]
    loaders = {"torch": lambda: None, "compiled": compiled}
    spent, tokens = defaultdict[str, list[float]](list), defaultdict[str, list[list[int]]](list)
    for number in range(args.rounds):
        inputs = columns.select(np.arange(rows), np.full(rows, 10 + number))
        for name in sorted(loaders, reverse=bool(number % 2)):
            vars(sampler)["load_chooser"] = loaders[name]
            began = time.thread_time()
            found = sampler.sample(logits, inputs)
            spent[name].append(1e6 * (time.thread_time() - began) / rows)
            tokens[name].append(found.token_ids.tolist())
    vars(sampler)["load_chooser"] = compiled
    before, after = (statistics.median(spent[name]) for name in loaders)
    same = "yes" if tokens["torch"] == tokens["compiled"] else "no"
    ratio = after / before
    return {
        "us a row": way,
        "rows": rows,
        "torch": before,
        "compiled": after,
        "ratio": ratio,
        "same": same,
    }


@program.command("sampling", rows=[1, 64], vocab=Opt(49_152, "tokens that are known"), rounds=5)
def sampling(args: Args) -> dict[str, Any]:
    """The choice of tokens from logits that are ready."""
    numbers = {"torch": ">10.1f", "compiled": ">10.1f", "ratio": ">8.3f"}
    table = Table({"us a row": "<28", "rows": ">5d", **numbers, "same": ">6"})
    for way in WAYS:
        for rows in args.rows:
            table.add(measure_sampling(way, rows, args))
    return {"rows": table.rows}


if __name__ == "__main__":
    program.main()
