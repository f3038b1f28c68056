"""Thirteen experiments with vLLM 0.15 on H100 cards, predicted by stages of their load.

The load is that of inference-perf (kubernetes-sigs/inference-perf, `shared_prefix`): users take
turns, each with one system prompt for its group and one question of its own, which it asks anew in
every round. Step times are those of `ForwardTimes`, and four numbers are fitted to some.
"""

import csv
import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, one_line
from aioserve.lab.cards.measured import PACKAGE, quiet
from aioserve.lab.reproduce.vllm.runs import vllm_like
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.simulation.run import simulated
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, text_name
from aioserve.runner.step_times import Prefills, StepTimeOptions, StepTimeSource
from aioserve.scheduler.output import StepFeatures

Floats = npt.NDArray[np.float64]
METRICS = ("e2e_mean", "e2e_p90", "e2e_p99", "itl_mean", "ttft_mean", "ttft_p90", "ttft_p99")
ALL_STAGES = -1
#: Where step times come from: a source that takes the options of `ForwardTimes`.
SOURCE = "aioserve.lab.reproduce.vllm.stages:ForwardTimes"
#: Element types of a card's tables, of models whose weights are not of the type that their
#: configuration states: of experts the nearest that was measured has a scale for each block.
FP8 = {
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": {
        "weights": "fp8",
        "experts": "fp8_block",
        "attention": "bfloat16",
    }
}
#: Of each stage this part is simulated, from its beginning: the load is the same until its end.
SIMULATED_SHARE = 0.1
#: The model whose replies the client counted anew from their text, and found shorter: its
#: tokenizer joins pieces of random text. Others kept their number.
RECOUNTED = "meta-llama/Llama-2-7b-hf"


class Engine(msgspec.Struct, frozen=True):
    """The times of the engine and its front end beside the card's kernels, the same for every
    experiment, in milliseconds.
    """

    host_ms: float  # for each step, of an engine on one card
    host_cards_ms: float  # for each step, of an engine that tells several cards' processes
    launch_ms: float  # for a layer that is launched kernel by kernel, outside of CUDA graphs
    front_ms: float  # for each request: HTTP, tokens, and the client
    recount: float  # share of the reply's tokens that the client counts of `RECOUNTED`


#: As `fit` finds them on the six given experiments (`reproduce vllm --fit` prints them).
ENGINE = Engine(host_ms=0.0, host_cards_ms=1.4, launch_ms=0.345, front_ms=7.6, recount=0.783)


class SharedPrefix(msgspec.Struct, frozen=True):
    """Lengths in tokens, and how many groups of users there are."""

    num_unique_system_prompts: int
    num_users_per_system_prompt: int
    system_prompt_len: int
    question_len: int
    output_len: int
    enable_multi_turn_chat: bool = False

    @property
    def num_users(self) -> int:
        """How many users all groups have together."""
        return self.num_unique_system_prompts * self.num_users_per_system_prompt


class Stage(msgspec.Struct, frozen=True):
    """A stretch of a run in which requests arrive at one rate."""

    rate: float
    duration: float

    def num_requests(self, share: float) -> int:
        """Return the requests of a share of the stage, from its beginning."""
        return max(int(self.rate * self.duration * share), 1)


class Experiment(msgspec.Struct, frozen=True):
    """One experiment: a model, an engine, a load."""

    id: str
    model: str
    tensor_parallel: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    shared_prefix: SharedPrefix
    stages: list[Stage]
    measured: str

    @property
    def is_given(self) -> bool:
        """Whether the measured outcome is among the published files."""
        return self.measured == "given"


Rows = Mapping[tuple[int, str], float]  # milliseconds by stage and metric


def read_experiments(folder: Path) -> list[Experiment]:
    """Return the experiments of a folder. Raises `ConfigError`."""
    path = folder / "experiments.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Experiment])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {one_line(error)}") from error


def read_measured(path: Path) -> dict[str, dict[tuple[int, str], float]]:
    """Return what was measured, by experiment. Raises `ConfigError`."""
    found: dict[str, dict[tuple[int, str], float]] = {}
    for where, row in _read_csv(path, ("id", "stage", "metric", "measured_ms")):
        try:
            own = found.setdefault(row["id"], {})
            own[int(row["stage"]), row["metric"]] = float(row["measured_ms"])
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    return found


def read_others(path: Path) -> dict[str, dict[tuple[str, int, str], float]]:
    """Return what other simulators said, by simulator, then by experiment, stage and metric; rows
    that a simulator left out are missing. Raises `ConfigError`.
    """
    keys = ("id", "stage_index", "metric_name")
    found: dict[str, dict[tuple[str, int, str], float]] = {}
    for where, row in _read_csv(path, keys):
        for name, text in row.items():
            if name in keys or not text:
                continue
            try:
                place = row["id"], int(row["stage_index"]), row["metric_name"]
                found.setdefault(name, {})[place] = float(text)
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from error
    return found


def _read_csv(path: Path, wanted: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if missing := [name for name in wanted if name not in (rows.fieldnames or ())]:
                raise ConfigError(f"{path}: it lacks the column {missing[0]}")
            return [(f"{path}:{rows.line_num}", row) for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def as_workload(
    experiment: Experiment, share: float = SIMULATED_SHARE, seed: int = 0
) -> tuple[Workload, npt.NDArray[np.int64]]:
    """Return the requests of a share of each stage of an experiment, and the stage of each.

    As inference-perf draws them: exponential gaps, scaled so that a stage lasts as long as it says;
    users in one shuffled order, round after round, from its beginning in every stage. A user sends
    its system prompt and its question; what was said before is not sent again.
    """
    load, rng = experiment.shared_prefix, np.random.default_rng(seed)
    num_users = load.num_users
    users = list(range(num_users))
    Random(seed).shuffle(users)
    prompts = [
        (
            Piece(
                text_name("system prompt", seed, users[place] // load.num_users_per_system_prompt),
                load.system_prompt_len,
            ),
            Piece(text_name("question", seed, place), load.question_len),
        )
        for place in range(num_users)
    ]
    requests: list[WorkloadRequest] = []
    stages: list[int] = []
    start = 0.0
    for number, stage in enumerate(experiment.stages):
        gaps = rng.exponential(1.0, stage.num_requests(share))
        times = start + share * stage.duration * np.cumsum(gaps) / gaps.sum()
        for place, time in enumerate(times):
            requests.append(
                WorkloadRequest(
                    float(time),
                    prompts[place % num_users],
                    load.output_len,
                    max_tokens=load.output_len,
                )
            )
            stages.append(number)
        start += share * stage.duration
    return Workload(experiment.id, tuple(requests), seed=seed, is_trace=True), np.array(stages)


def make_config(experiment: Experiment, engine: Engine, source: str = SOURCE) -> EngineConfig:
    """Return an engine that schedules as vLLM does, with the experiment's arguments."""
    cards = experiment.tensor_parallel
    options: dict[str, Any] = {
        "model": experiment.model,
        "tensor_parallel": cards,
        "launch_ms": engine.launch_ms,
        "host_ms": engine.host_ms if cards == 1 else engine.host_cards_ms,
    }
    return _engine(experiment, source, options)


def _engine(
    experiment: Experiment, source: str, options: dict[str, Any], depth: int = 2
) -> EngineConfig:
    return simulated(
        vllm_like(
            max_num_seqs=experiment.max_num_seqs,
            max_num_batched_tokens=experiment.max_num_batched_tokens,
            num_kv_blocks=experiment.kv_blocks,
            settings=[
                ("runner.profile", source),
                ("runner.profile_options", options),
                ("scheduler.pipeline_depth", depth),
            ],
        )
    )


def predict(
    experiments: Sequence[Experiment],
    engine: Engine,
    *,
    share: float = SIMULATED_SHARE,
    source: str = SOURCE,
    num_jobs: int = 1,
) -> list[dict[tuple[int, str], float]]:
    """Return the milliseconds that the lab predicts, in the order of the experiments, from this
    share of each of their stages.
    """
    configs = [make_config(experiment, engine, source) for experiment in experiments]
    return _predict(experiments, configs, engine, share, num_jobs)


def predict_by_card(
    experiments: Sequence[Experiment],
    engine: Engine,
    *,
    depth: int,
    num_jobs: int,
) -> list[dict[tuple[int, str], float]]:
    """Return the milliseconds that the lab predicts with `--card` alone: the tables of the card,
    and what the engine's host adds to a step, if settings do not state it; with `depth` steps under
    way. Of `engine`, the front end alone is used, and how the client counts. Raises `ConfigError`
    if the package is missing.
    """
    with TemporaryDirectory() as scratch:
        configs = [_engine(e, "card", card_options(e, Path(scratch)), depth) for e in experiments]
        return _predict(experiments, configs, engine, SIMULATED_SHARE, num_jobs)


def card_options(experiment: Experiment, scratch: Path) -> dict[str, Any]:
    """Return the options of the step-time source `card` for the card and model of an experiment;
    the `config.json` of a model that the package does not know by name is written to `scratch`.
    """
    model = MODELS.get(experiment.model, experiment.model)
    if isinstance(model, dict):
        path = scratch / experiment.model.replace("/", "-") / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(model), "utf-8")
        model = str(path)
    return {
        "card": CARD,
        "version": VERSION,
        "model": model,
        "tp": experiment.tensor_parallel,
        **FP8.get(experiment.model, {}),
    }


def _predict(
    experiments: Sequence[Experiment],
    configs: Sequence[EngineConfig],
    engine: Engine,
    share: float,
    num_jobs: int,
) -> list[dict[tuple[int, str], float]]:
    loads = [as_workload(experiment, share) for experiment in experiments]
    runs = [(config, load, None) for config, (load, _) in zip(configs, loads, strict=True)]
    found = []
    outcomes = simulate_all(runs, num_jobs, lambda count: None)
    for experiment, (_, stages), outcome in zip(experiments, loads, outcomes, strict=True):
        found.append(_rows(experiment, engine, stages, outcome))
    return found


def _rows(
    experiment: Experiment, engine: Engine, stages: npt.NDArray[np.int64], outcome: RunOutcome
) -> dict[tuple[int, str], float]:
    """Return all metrics by stage, without the first round of the users, whose prompts no cache
    has: of a whole experiment it is one request in a hundred. A client sees each time later by the
    front end; its time per token is that of the whole request, over the tokens that it counts in
    the reply.
    """
    arrival, first, last = outcome.served_times(f"experiment {experiment.id}")
    e2e, ttft = (1e3 * (times - arrival) + engine.front_ms for times in (last, first))
    load = experiment.shared_prefix
    num_users, counted = load.num_users, load.output_len
    share = engine.recount if experiment.model == RECOUNTED else 1.0
    counts = np.full(len(stages), True)
    if len(stages) > num_users:
        counts[:num_users] = False
    # A stage weighs as many requests as it has whole, of however many of them are simulated.
    weights = np.zeros(len(stages))
    for number, stage in enumerate(experiment.stages):
        own = counts & (stages == number)
        weights[own] = stage.num_requests(1.0) / max(own.sum(), 1)
    found: dict[tuple[int, str], float] = {}
    for number in (ALL_STAGES, *range(len(experiment.stages))):
        own = counts & ((stages == number) | (number == ALL_STAGES))
        for name, values in (("e2e", e2e[own]), ("ttft", ttft[own])):
            found[number, f"{name}_mean"] = float(np.average(values, weights=weights[own]))
            found[number, f"{name}_p90"] = _quantile(values, weights[own], 0.9)
            found[number, f"{name}_p99"] = _quantile(values, weights[own], 0.99)
        found[number, "itl_mean"] = found[number, "e2e_mean"] / (counted * share)
    return found


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    """Return the value below which this share of the weight lies, straight between values."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(share * weights.sum(), below, values[order]))


def fit(
    experiments: Sequence[Experiment],
    measured: Mapping[str, Rows],
    *,
    source: str = SOURCE,
    num_jobs: int = 1,
) -> Engine:
    """Return the numbers of the engine, fitted to the given experiments.

    The host's milliseconds are the median, over the stages, of what a token took beyond the card's
    kernels, with its part of the front end, which is small in replies of hundreds of tokens: of
    experiments on one card, and of those on several. The launches of layers outside of graphs are
    what is left of a token in the first stage of the experiments that have such layers. The front
    end is the median over the stages of what a first token took beyond the engine.
    Raises `ConfigError` if a kind of experiment is not among the given.
    """
    given = [experiment for experiment in experiments if experiment.is_given]
    bare = Engine(0.0, 0.0, 0.0, 0.0, 1.0)
    alone = predict(given, bare, source=source, num_jobs=num_jobs)
    per_token: dict[str, list[float]] = {"one": [], "several": [], "eager": []}
    recounts = []
    for experiment, ours in zip(given, alone, strict=True):
        there, length = measured[experiment.id], experiment.shared_prefix.output_len
        for stage in range(len(experiment.stages)):
            beyond = there[stage, "e2e_mean"] - ours[stage, "e2e_mean"]
            if experiment.model in EAGER_LAYERS:
                if stage == 0:
                    layers = EAGER_LAYERS[experiment.model]
                    per_token["eager"].append(there[stage, "e2e_mean"] / length / layers)
                continue
            kind = "one" if experiment.tensor_parallel == 1 else "several"
            per_token[kind].append(beyond / length)
        if experiment.model == RECOUNTED:
            recounts.append(there[0, "e2e_mean"] / there[0, "itl_mean"] / length)
    if missing := [kind for kind, values in per_token.items() if not values]:
        raise ConfigError(f"no experiment is given to fit an engine to: {missing[0]}")
    host = max(float(np.median(per_token["one"])), 0.0)
    cards = max(float(np.median(per_token["several"])), 0.0)
    layers = max(EAGER_LAYERS.values())
    launch = max(float(np.median(per_token["eager"])) - cards / layers, 0.0)
    engine = Engine(host, cards, launch, 0.0, float(np.median(recounts)) if recounts else 1.0)
    first = [
        measured[experiment.id][stage, "ttft_mean"] - ours[stage, "ttft_mean"]
        for experiment, ours in zip(
            given, predict(given, engine, source=source, num_jobs=num_jobs), strict=True
        )
        for stage in range(len(experiment.stages))
    ]
    return msgspec.structs.replace(engine, front_ms=max(float(np.median(first)), 0.0))


# Step times of an H100 under vLLM, asked step by step of aiconfigurator-core, whose operators are
# measured. Two effects that its tables lack are added, each as one number for all experiments.


CARD, BACKEND, VERSION = "h100_sxm", "vllm", "0.24.0"  # the oldest version that was measured whole
#: KV heads of a card up to which attention of decodes was measured.
MOST_KV_HEADS = 8
#: Estimates are kept by prompts, tokens and rows, and by context in pieces of 64 tokens.
PIECE = 64

_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def _decoder(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, kind: str = "llama"
) -> dict[str, Any]:
    """Return the `config.json` of a plain decoder; Mistral's and Yi's are Llama's in all that
    takes time.
    """
    return {
        **_COMMON,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
    }


#: The models of the experiments: their `config.json`, or their name in the package.
MODELS: Mapping[str, dict[str, Any] | str] = {
    "meta-llama/Llama-2-7b-hf": _decoder(32, 4096, 11008, 32, 32, 32000),
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen2.5-7B-Instruct": _decoder(28, 3584, 18944, 28, 4, 152064, "qwen2"),
    "mistralai/Mistral-Nemo-Instruct-2407": _decoder(40, 5120, 14336, 32, 8, 131072),
    "01-ai/Yi-34B": _decoder(60, 7168, 20480, 56, 8, 64000),
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": (
        "meta-llama/Llama-4-Scout-17B-16E-Instruct"
    ),
}
#: FP8 weights with a scale for each channel: the nearest that was measured has one for each block.
_SCOUT = {"moe_ep_size": 1, "weight_dtype": "fp8", "moe_dtype": "fp8_block"}
#: Layers whose attention is kept out of CUDA graphs, as some of it looks at a chunk of the context.
EAGER_LAYERS = {"RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": 48}


class ForwardTimes(StepTimeSource):
    """A forward pass as the package estimates it, never less than its launches take."""

    source = f"measured operators of aiconfigurator-core, {CARD} under {BACKEND} {VERSION}"
    unevenness = 0.1

    class Options(StepTimeOptions, frozen=True, kw_only=True):
        model: str  # one of `MODELS`
        tensor_parallel: int = 1
        launch_ms: float = 0.0  # of a layer that is launched kernel by kernel, outside of graphs

    def __init__(self, options: Any) -> None:
        """Raises `ConfigError` if the package is missing, or has no times of the model."""
        super().__init__(options)
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError(
                "step times of an H100 need the package aiconfigurator-core: "
                "pip install aiconfigurator-core"
            )
        config = MODELS.get(options.model)
        if config is None:
            raise ConfigError(f"unknown model {options.model}; known: {', '.join(MODELS)}")
        self.machine = f"{options.tensor_parallel} x {CARD}, {options.model}"
        self._least_ms = options.launch_ms * EAGER_LAYERS.get(options.model, 0)
        parallel = options.tensor_parallel
        with TemporaryDirectory() as scratch:
            self._model = _compile(Path(scratch) / "model", config, parallel)
            self._twin, self._share = None, 1
            if isinstance(config, dict):
                heads = config["num_key_value_heads"] // parallel
                if heads > MOST_KV_HEADS:
                    fewer = {**config, "num_key_value_heads": MOST_KV_HEADS * parallel}
                    self._twin = _compile(Path(scratch) / "twin", fewer, parallel)
                    self._share = heads // MOST_KV_HEADS
        self._known: dict[tuple[int, ...], float] = {}
        self._wider: dict[int, float] = {}

    def seconds(self, features: StepFeatures, prefills: Prefills) -> float:
        """Return the seconds of one step, by sums over its rows; steps whose sums of context lie in
        one piece take the same.
        """
        before = sum(end - n for n, end in prefills)
        context = features.num_context_tokens - sum(end for _, end in prefills)
        num_tokens, num_rows = features.num_prefill_tokens, features.num_decodes
        key = (len(prefills), num_tokens, before // PIECE, num_rows, context // PIECE)
        ms = self._known.get(key)
        if ms is None:
            prompts, _, before, _, context = key
            step = (prompts, num_tokens, before * PIECE, num_rows, context * PIECE)
            ms = self._known[key] = max(self._estimate(*step), self._least_ms)
        return 1e-3 * ms

    def _estimate(
        self, prompts: int, num_tokens: int, before: int, num_rows: int, context: int
    ) -> float:
        """Return milliseconds. With more KV heads than were measured, attention is that of the
        largest measured number at a context that is longer by the same factor, so that as many
        bytes are read.
        """
        if num_tokens and not prompts:
            prompts = 1  # draft tokens, which rows verify
        if self._twin is None:
            return _ask(self._model, prompts, num_tokens, before, num_rows, context)
        ms = _ask(self._twin, prompts, num_tokens, before, num_rows, context * self._share)
        return ms + self._wider_ms(num_tokens + num_rows if num_tokens else num_rows)

    def _wider_ms(self, num_tokens: int) -> float:
        """Return what the model takes for a prompt beyond its twin with fewer KV heads, of which
        prompts were measured.
        """
        num_tokens = max(16, num_tokens // 16 * 16)
        if num_tokens not in self._wider:
            times = [_ask(model, 1, num_tokens, 0, 0, 0) for model in (self._model, self._twin)]
            self._wider[num_tokens] = max(times[0] - times[1], 0.0)
        return self._wider[num_tokens]


def _compile(folder: Path, config: dict[str, Any] | str, parallel: int) -> Any:
    """Return the package's model of a forward pass. Raises `ConfigError` if it has none."""
    given: dict[str, Any] = {
        "schema_version": 1,
        "system_name": CARD,
        "backend": BACKEND,
        "backend_version": VERSION,
        "tp_size": parallel,
        "pp_size": 1,
        "weight_dtype": "bfloat16",
        "activation_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
    }
    if isinstance(config, str):
        given["model_name"] = config
        if "Scout" in config:
            given |= {**_SCOUT, "moe_tp_size": parallel}
    else:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        given["model_name"] = str(folder)
    with quiet():
        steps = importlib.import_module(f"{PACKAGE}.sdk.rust_engine_step")
        try:
            return steps.RustForwardPassPerfModel.from_native(given)
        except Exception as error:
            raise ConfigError(
                f"aiconfigurator-core has no step times of this model: {one_line(error)}"
            ) from error


def _ask(
    model: Any, prompts: int, num_tokens: int, before: int, num_rows: int, context: int
) -> float:
    found = model.estimate_forward_pass_time_ms(
        {
            "scheduled_requests": {
                "num_prefill_requests": prompts,
                "sum_prefill_tokens": num_tokens,
                "sum_prefill_kv_tokens": before,
                "num_decode_requests": num_rows,
                "sum_decode_kv_tokens": context,
            }
        }
    )
    return float(found)
