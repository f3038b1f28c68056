"""Runs of vLLM that were measured request by request, predicted from tables of operators.

The runs are those of LLMServingSim (casys-kaist/LLMServingSim, MIT): ShareGPT at ten requests a
second on an RTX 4090 and on RTX PRO 6000 cards. A prediction has the run's arrivals and lengths,
the engine's arguments, the tables of the card, and two numbers of the machine, fitted to another
part: what its host adds to a step, and how much longer the first step of a run takes.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.config.load import LIKE
from aioserve.errors import ConfigError, one_line
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.simulation.run import simulated
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, text_name

Floats = npt.NDArray[np.float64]

#: What the tables do not say of the models: of their `config.json`.
SHAPES: dict[str, dict[str, int]] = {
    "meta-llama/Llama-3.1-8B": {"num_hidden_layers": 32, "hidden_size": 4096},
    "Qwen/Qwen3-32B": {"num_hidden_layers": 64, "hidden_size": 5120},
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
#: The link of two RTX PRO 6000 cards over PCIe as NCCL uses it, measured by LLMServingSim.
LINK = {"link_gb_s": 16.37, "link_us": 16.1}
#: Where a run does not state how many blocks it had: more than its requests can fill.
PLENTY_OF_BLOCKS = 60_000
BLOCK_TOKENS = 16  # of vLLM's KV cache, and of ours
MOST_REQUEST_TOKENS = 32768
#: Requests of a given run to which the times of its machine are fitted: the first of them.
NUM_FITTED = 100
MOST_HOST_MS = 4.0
HOST_STEPS = 6  # halvings of the range in which it lies: 0.06 ms are left


class Request(msgspec.Struct, frozen=True):
    """One request of a trace. Times are in seconds from the first request's arrival."""

    arrival: float
    prompt_tokens: int
    output_tokens: int


class Served(msgspec.Struct, frozen=True):
    """The times of the requests of a run, in the order of the trace, in seconds."""

    queued: Floats  # when the engine saw each request: at the end of the step that it came in
    first: Floats  # its first token
    last: Floats  # its last token

    def measures(self, requests: Sequence[Request]) -> dict[str, Floats]:
        """Return `ttft`, `tpot` and `e2e` of each request in seconds, from when it was queued, as
        the publisher counts them.
        """
        replies = np.array([request.output_tokens for request in requests])
        return {
            "e2e": self.last - self.queued,
            "ttft": self.first - self.queued,
            "tpot": (self.last - self.first) / (replies - 1),
        }


class MeasuredRun(msgspec.Struct, frozen=True):
    """One run: what came, on what, and what became of it, if that is given."""

    name: str
    requests: list[Request]
    engine: dict[str, Any]  # the arguments of vLLM
    blocks: int | None  # of the KV cache, if stated
    served: Served | None  # None: kept back

    @property
    def machine(self) -> str:
        """The card, which runs of one machine share."""
        return self.name.partition("-")[0]

    @property
    def model(self) -> str:
        """The model's name on a hub."""
        return str(self.engine["model"])


def read_runs(folder: Path) -> list[MeasuredRun]:
    """Return the runs in a folder, those with outcomes first. Raises `ConfigError` that names the
    file and what is wrong in it.
    """
    found = [_read_run(path) for path in sorted(folder.glob("*/meta.json"))]
    if not found:
        raise ConfigError(f"{folder} has no runs: no folder in it has a meta.json")
    return sorted(found, key=lambda run: run.served is None)


def _read_run(path: Path) -> MeasuredRun:
    meta = _json(path.read_text("utf-8"), path)
    try:
        engine, workload = meta["engine_kwargs"], Path(meta["dataset_path"]).stem
        blocks = meta.get("kv_cache", {}).get("num_gpu_blocks")
        model = engine["model"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: it lacks {error}") from error
    if model not in SHAPES:
        raise ConfigError(f"{path}: unknown model {model}; known: {', '.join(SHAPES)}")
    log = path.with_name("requests.jsonl")
    if log.is_file():
        return _with_outcomes(path.parent.name, engine, blocks, log)
    traces = path.parents[1]
    trace = traces / f"{workload}.jsonl.gz"
    if not trace.is_file():  # models of one family share a tokenizer, and so a trace
        family = workload.split("-")[1]
        trace = next(iter(sorted(traces.glob(f"*-{family}-*.jsonl.gz"))), trace)
    lines = _read_lines(trace, ("arrival_time_ns", "input_toks", "output_toks"))
    start = lines[0][0]
    requests = [Request(1e-9 * (ns - start), int(n), int(m)) for ns, n, m in lines]
    return MeasuredRun(path.parent.name, requests, engine, blocks, None)


def _with_outcomes(name: str, engine: dict[str, Any], blocks: int | None, log: Path) -> MeasuredRun:
    fields = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    lines = np.array(_read_lines(log, (*fields, "input_toks", "output_toks")))
    arrival, queued, first, last, prompts, replies = lines.T
    # Arrivals are of another clock: the request that was queued soonest says how far apart.
    arrival = arrival + (queued - arrival).min()
    start = arrival[0]
    requests = [
        Request(float(at - start), int(n), int(m))
        for at, n, m in zip(arrival, prompts, replies, strict=True)
    ]
    served = Served(queued - start, first - start, last - start)
    return MeasuredRun(name, requests, engine, blocks, served)


def _read_lines(path: Path, names: Sequence[str]) -> list[list[float]]:
    """Return these numbers of each line of a file of JSON objects."""
    unpack: Any = gzip.open if path.suffix == ".gz" else open
    found = []
    try:
        with unpack(path, "rt", encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                line = _json(text, f"{path}:{number}")
                try:
                    found.append([float(line[name]) for name in names])
                except (KeyError, TypeError, ValueError) as error:
                    raise ConfigError(f"{path}:{number}: expected numbers {names}") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not found:
        raise ConfigError(f"{path} has no requests")
    return found


def _json(text: str, where: object) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error


class MachineTimes(msgspec.Struct, frozen=True):
    """The times that a machine takes beside the kernels of its card, in milliseconds."""

    host_ms: float  # for each step
    cold_ms: float = 0.0  # more for the first step of a run, which compiles kernels
    fitted_to: str = ""  # the run to whose first requests both were fitted; "": stated


class Prediction(msgspec.Struct, frozen=True):
    """A run, and what the lab says of it."""

    run: MeasuredRun
    served: Served
    times: MachineTimes
    preemptions: int


def predict(
    folder: Path,
    *,
    times: MachineTimes | None = None,
    num_jobs: int = 1,
    report: Callable[[str], None] = lambda words: None,
) -> list[Prediction]:
    """Return the predictions of all runs in a folder whose `operators` has the tables. The host of
    each machine, and the first step of its runs, are fitted to the first requests of the first of
    its runs that is given, unless `times` states them. Raises `ConfigError`.
    """
    runs = read_runs(folder)
    with TemporaryDirectory() as scratch:
        for model, shape in SHAPES.items():
            place = Path(scratch) / model
            place.mkdir(parents=True)
            (place / "config.json").write_text(json.dumps(shape), "utf-8")
        fitted: dict[str, MachineTimes] = {}
        for run in runs:
            if times is not None:
                fitted.setdefault(run.machine, times)
            elif run.served is not None and run.machine not in fitted:
                report(f"fitting the host of {run.name}")
                fitted[run.machine] = _fit_machine(folder, Path(scratch), run)
            if run.machine not in fitted:
                raise ConfigError(f"{folder} has no given run on {run.machine} to fit its host to")
        report("predicting the runs")
        wanted = [
            (make_config(folder, Path(scratch), run, fitted[run.machine]), as_workload(run), None)
            for run in runs
        ]
        outcomes = simulate_all(wanted, num_jobs, lambda count: None)
        return [
            Prediction(run, _served(outcome), fitted[run.machine], outcome.num_preemptions)
            for run, outcome in zip(runs, outcomes, strict=True)
        ]


def _fit_machine(folder: Path, scratch: Path, run: MeasuredRun) -> MachineTimes:
    """Return the times of the machine of a given run: of its first step, what the first request's
    time to first token had beyond the kernels; of the host, what makes the first requests take as
    long end to end, in the mean, as they did. Neither is less than 0.
    """
    assert run.served is not None
    measured = run.served.measures(run.requests)
    wanted = measured["e2e"][:NUM_FITTED].mean()

    def simulate(times: MachineTimes) -> dict[str, Floats]:
        config = make_config(folder, scratch, run, times)
        outcome = next(simulate_all([(config, as_workload(run), None)], 1, lambda count: None))
        return _served(outcome).measures(run.requests)

    beyond = float(measured["ttft"][0] - simulate(MachineTimes(0.0))["ttft"][0])
    cold_ms = round(max(1e3 * beyond, 0.0), 1)

    def excess(host_ms: float) -> float:
        served = simulate(MachineTimes(host_ms, cold_ms))
        return float(served["e2e"][:NUM_FITTED].mean() - wanted)

    low, high = 0.0, MOST_HOST_MS
    if excess(low) >= 0:
        return MachineTimes(low, cold_ms, run.name)
    for _ in range(HOST_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return MachineTimes((low + high) / 2, cold_ms, run.name)


def as_workload(run: MeasuredRun) -> Workload:
    """Return what came. Every prompt is a text of its own, and the length of each reply is stated
    as its limit, as it was to vLLM.
    """
    return Workload(
        run.name,
        tuple(
            WorkloadRequest(
                request.arrival,
                (Piece(text_name("prompt", 0, place), request.prompt_tokens),),
                request.output_tokens,
                max_tokens=request.output_tokens,
            )
            for place, request in enumerate(run.requests)
        ),
        is_trace=True,
    )


def make_config(folder: Path, scratch: Path, run: MeasuredRun, times: MachineTimes) -> EngineConfig:
    """Return an engine that schedules as vLLM does, on the tables of the run's card. Several
    engines that share experts go step by step together: they are one with as many seats as all.
    """
    engine = run.engine
    ranks = engine.get("data_parallel_size", 1)
    parallel = engine.get("tensor_parallel_size", 1)
    name = f"{run.machine}-{run.model.replace('/', '-')}-bf16-tp{parallel}"
    options: dict[str, Any] = {
        "tables": str(folder / "operators" / name),
        "model": str(scratch / run.model),
        "tensor_parallel": parallel,
        "ranks": ranks,
        "host_ms": times.host_ms,
        "cold_ms": times.cold_ms,
        **(LINK if ranks * parallel > 1 else {}),
    }
    budget = ranks * engine["max_num_batched_tokens"]
    return simulated(
        vllm_like(
            max_num_seqs=ranks * engine["max_num_seqs"],
            max_num_batched_tokens=budget,
            num_kv_blocks=run.blocks or PLENTY_OF_BLOCKS,
            settings=[("runner.profile", "operators"), ("runner.profile_options", options)],
        )
    )


def vllm_like(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_kv_blocks: int,
    settings: Sequence[tuple[str, Any]],
) -> EngineConfig:
    """Return the settings under which this project's scheduler decides as vLLM's does by default:
    first come, first served in chunks, running requests first, with the preset `like: vllm`; two
    steps under way, as its asynchronous scheduling has them.
    """
    overrides: list[tuple[str, Any]] = [
        ("scheduler.policy", "chunked_prefill"),
        ("scheduler.options", {"chunk_size": max_num_batched_tokens}),
        ("scheduler.max_num_batched_tokens", max_num_batched_tokens),
        ("scheduler.max_num_seqs", max_num_seqs),
        ("scheduler.max_waiting_requests", 10**6),
        ("scheduler.pipeline_depth", 2),
        ("cache.num_kv_blocks", num_kv_blocks),
        *LIKE["vllm"],
        ("model.max_model_len", min(MOST_REQUEST_TOKENS, BLOCK_TOKENS * num_kv_blocks)),
        *settings,
    ]
    return EngineConfig.load(None, overrides)


def _served(outcome: RunOutcome) -> Served:
    arrival, first, last = outcome.served_times("a simulated run")
    # A request is seen when the next step is planned.
    planned = np.array(outcome.steps.planned)
    place = np.searchsorted(planned, arrival - 1e-9).clip(max=len(planned) - 1)
    return Served(np.maximum(planned[place], arrival), first, last)
