"""The command `calibrate`: measures how long steps of a real model take here, and fits a model.

Drives the whole engine, not the runner alone: what the event loop, the scheduler and the hand-over
cost on the way belongs to a step, too. The fit is non-negative, relative, robust least squares.
Outcomes of another server will do in place of a model.
"""

import asyncio
import json
import math
import platform
import random
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig, SpeculationConfig
from aioserve.engine import AsyncEngine
from aioserve.engine.clock import clock_of
from aioserve.engine.prompt import MultimodalPrompt
from aioserve.errors import ConfigError, RequestError
from aioserve.kv_cache import Ahead
from aioserve.lab.arguments import add_json, add_output, add_settings, refuse_card, wants_json
from aioserve.lab.simulation.outcome import DelegatingRunner
from aioserve.lab.terminal import progress, say
from aioserve.lab.workloads.workload import text_tokens
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import EncoderInput
from aioserve.runner.interface import RunnerInterface
from aioserve.runner.step_times import StepTimeModel
from aioserve.scheduler.output import SchedulerOutput, StepFeatures, step_features
from aioserve.support.arguments import EXIT_INTERRUPTED, Parser

Array = npt.NDArray[np.float64]

MIN_STEPS = 8  # for six coefficients; with fewer the error would say nothing
NUM_ROUNDS = 20
# Errors beyond this multiple of the median one count linearly, not squared: a step that waited for
# something else must not set the price of tokens. Wide, because steps that take a little long are
# part of what steps take: without them every simulation would be too fast.
HUBER = 6.0
# Kinds of steps count alike, however many steps there were of each: a whole prompt is one step in a
# thousand, and the one that all requests wait for. A kind with fewer steps than this counts by its
# steps: a guess that keeps one odd step from setting a price.
MIN_STEPS_OF_A_KIND = 5


def fit_step_time(
    features: Sequence[StepFeatures], seconds: Sequence[float], source: str
) -> StepTimeModel:
    """Return the model whose relative errors over these steps, kind by kind, are least; `error`
    says how large they are, step by step.

    Coefficients of features that no step has are 0. Raises `ConfigError` if there are fewer than
    `MIN_STEPS` steps that took any time.
    """
    taken = np.asarray(seconds, dtype=np.float64)
    columns = np.column_stack([np.ones(len(taken)), np.asarray(features, dtype=np.float64)])
    columns, taken = columns[taken > 0], taken[taken > 0]
    if len(taken) < MIN_STEPS:
        raise ConfigError(
            f"cannot fit step times to {len(taken)} steps: at least {MIN_STEPS} are needed"
        )
    coefficients = _fit_robustly(columns, taken, _importance(columns))
    predicted = columns @ coefficients
    errors = np.abs(predicted / taken - 1)
    base, prefill, decode, context, attention, row = map(float, coefficients)
    return StepTimeModel(
        base_ms=1e3 * base,
        prefill_token_us=1e6 * prefill,
        decode_us=1e6 * decode,
        context_token_us=1e6 * context,
        query_context_ns=1e9 * attention,
        prefill_us=1e6 * row,
        source=source,
        error=(
            f"relative error median {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%} "
            f"over {len(taken)} steps, {predicted.sum() / taken.sum() - 1:+.1%} over their sum"
        ),
    )


def _importance(columns: Array) -> Array:
    """Return the weight of each step: kinds are prefill tokens and decodes to the next power of
    two.
    """
    kinds = np.ceil(np.log2(columns[:, 1:3] + 1))
    _, kind, counts = np.unique(kinds, axis=0, return_inverse=True, return_counts=True)
    weights: Array = 1.0 / np.maximum(counts, MIN_STEPS_OF_A_KIND)[kind.ravel()]
    return weights


def _fit_robustly(columns: Array, taken: Array, importance: Array) -> Array:
    """Least squares of errors relative to the prediction, reweighted until outliers have little
    to say. Relative to what was measured, noise would make every prediction too small.
    """
    scale = taken
    weights = np.ones(len(taken))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(NUM_ROUNDS):
        before = coefficients
        factor = weights * np.sqrt(importance) / scale
        coefficients = non_negative_least_squares(columns * factor[:, None], taken * factor)
        predicted = columns @ coefficients
        scale = np.maximum(predicted, 1e-3 * taken)  # it may be 0 where nothing costs anything
        errors = np.abs(predicted - taken) / scale
        limit = max(HUBER * float(np.median(errors)), 1e-9)
        # The root, because it multiplies a row before that is squared.
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
        if np.allclose(coefficients, before, rtol=1e-6, atol=0):
            break
    return coefficients


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """Return the x >= 0 that minimizes |matrix x - target|, exactly, for a handful of columns.

    The best is an unconstrained solution over some of the columns, so all choices are tried; a
    factorization makes each of them a problem of that handful of rows.
    """
    scale = np.linalg.norm(matrix, axis=0)
    used = np.flatnonzero(scale)
    q, r = np.linalg.qr(matrix[:, used] / scale[used])
    projected = q.T @ target
    best, best_error = np.zeros(matrix.shape[1]), float(projected @ projected)
    for size in range(1, len(used) + 1):
        for chosen in map(list, combinations(range(len(used)), size)):
            x = np.linalg.lstsq(r[:, chosen], projected, rcond=1e-10)[0]
            residual = r[:, chosen] @ x - projected
            error = float(residual @ residual)
            if (x >= 0).all() and error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(matrix.shape[1]), error
                best[used[chosen]] = x / scale[used[chosen]]
    return best


# The measurement.


# Between the end of a step and the hand-over of the next, if the engine has work: more than this
# is idleness and says nothing about the step. A guess, ten times what a busy engine takes.
MAX_HANDOVER_SECONDS = 0.005
NUM_IDLE = 40  # requests that find the engine idle
IDLE_SECONDS = 0.03
IDLE_PROMPT = 100  # tokens
IMAGE_SIZES = [(224, 224), (448, 336), (640, 480)]  # width and height


class TimedStep(NamedTuple):
    """One step of a busy engine."""

    features: StepFeatures
    seconds: float  # from its hand-over to the next one's
    num_encoder_tokens: int = 0  # of images that it encodes


class StepTimer(DelegatingRunner):
    """A runner that notes what each step of another one held and how long it took."""

    def __init__(self, runner: RunnerInterface) -> None:
        super().__init__(runner)
        self.steps: list[TimedStep] = []
        self._features: StepFeatures | None = None  # of the last step
        self._num_encoder_tokens = 0  # of the last step
        self._images: dict[str, Sequence[EncoderInput]] = {}  # of requests that have some
        self._began = self._ended = 0.0

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        clock = clock_of(asyncio.get_running_loop())
        now = clock()
        if self._features is not None and 0 <= now - self._ended < MAX_HANDOVER_SECONDS:
            self.steps.append(
                TimedStep(self._features, now - self._began, self._num_encoder_tokens)
            )
        self._features = None
        if scheduler_output.total_num_scheduled_tokens:
            self._features, self._began = step_features(scheduler_output), now
            self._num_encoder_tokens = self._count_encoder_tokens(scheduler_output)
        future = super().execute_model(scheduler_output)
        future.add_done_callback(lambda _: self._note_end(clock()))
        return future

    def _count_encoder_tokens(self, output: SchedulerOutput) -> int:
        for request_id in output.finished_req_ids:
            self._images.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            if new.encoder_inputs:
                self._images[new.request_id] = new.encoder_inputs
        ahead = Ahead.of(output.parts)
        return (0 if ahead is None else ahead.num_tokens) + sum(
            self._images[request_id][index].size
            for request_id, indices in output.scheduled_encoder_inputs.items()
            for index in indices
        )

    def _note_end(self, now: float) -> None:
        self._ended = now


class Crowd(NamedTuple):
    """`num_clients` clients, each sending one request after the other, with pauses of `pause`
    seconds on average.
    """

    chunk_size: int
    num_clients: int
    mean_output_tokens: int = 30
    pause: float = 0.0


# Batches alone would find every key and value where the last step left it: in the CPU's caches.
# Between prompts that come and go, decodes of the embedded model took half as long again; in quiet
# hours, which most engines have, they did not.
CROWDS = [Crowd(chunk, clients) for chunk in (512, 2048) for clients in (2, 8, 32)]
CROWDS += [Crowd(2048, clients, 80, 0.1) for clients in (1, 4, 8)]
REQUESTS_PER_CLIENT = 4
MEDIAN_PROMPT = 200  # tokens, lognormal


class Measurements(NamedTuple):
    """The measured steps of a model on a machine."""

    steps: list[TimedStep]
    first_tokens: list[tuple[StepFeatures, float]]  # seconds to them, from an idle engine
    what: str
    is_partial: bool = False  # interrupted before the end of the plan


class Batch(NamedTuple):
    """One point of the design: a number of requests at once, with prompts of a given length."""

    chunk_size: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int


def design(max_model_len: int, max_num_seqs: int) -> list[Batch]:
    """Prompts in chunks of several sizes, decodes in batches of several sizes and contexts, and
    both together.
    """
    longest = max_model_len - 64
    batches = [
        Batch(chunk, 3, min(prompt, longest), 2)
        for chunk in (32, 128, 512, 1024)
        for prompt in (600, 2500)
    ]
    # Whole prompts: what a token costs grows with what lies in the caches beside it.
    batches += [Batch(4096, 2, min(prompt, longest), 2) for prompt in (1200, 2500, 3200, 4000)]
    batches += [
        Batch(2048, min(num_requests, max_num_seqs), min(context, longest), 40)
        for num_requests in (1, 2, 4, 8, 16, 32, 64)
        for context in (16, 400, 1500, 3500)
        if num_requests * context <= 26_000
    ]
    batches += [Batch(chunk, 12, 300, 40) for chunk in (64, 256)]  # decodes beside prompts
    batches += [Batch(2048, count, 60, 6) for count in (1, 1, 3, 10)]  # rows, rather than tokens
    return batches


def make_plan(max_model_len: int, max_num_seqs: int, *, is_quick: bool) -> list[Batch | Crowd]:
    """Return all that is measured, in no useful order; `is_quick` leaves out most of it."""
    batches = design(max_model_len, max_num_seqs)
    return [*CROWDS[::2], *batches[::3]] if is_quick else [*CROWDS, *CROWDS, *batches]


async def measure(
    config: EngineConfig,
    begin: Callable[[int], Callable[[int], object]] = lambda total: lambda more: None,
    *,
    is_quick: bool = False,
    keeps_partial: bool = False,
) -> Measurements:
    """Run the design, and some traffic, on the engine that `config` describes.

    `begin` is told how many loads there are, and what it returns how many more are done. With
    `keeps_partial`, a cancellation ends the measurement, and what was measured until then is
    returned if a model can be fitted to it. Raises `ConfigError` for a simulated runner.
    """
    if config.runner.runner != "model":
        raise ConfigError("calibrate measures a real model: runner.runner must be 'model'")
    async with _timed_engine(config) as (engine, timer):
        rng = random.Random(0)
        plan = make_plan(engine.max_model_len, config.scheduler.max_num_seqs, is_quick=is_quick)
        # A shared machine is faster in one minute than in the next: in any order, no kind of step
        # gets the blame. It also makes the past a fair sample of the time to come.
        rng.shuffle(plan)
        await _serve(engine, CROWDS[0], rng)
        timer.steps.clear()  # a first time is never like a second
        advance, num_done = begin(len(plan) + 1), 0
        first_tokens: list[tuple[StepFeatures, float]] = []
        num_steps: int | None = None  # before the engine is left idle
        try:
            for load in plan:
                if isinstance(load, Batch):
                    await _run(engine, load, rng)
                else:
                    await _serve(engine, load, rng)
                num_done += 1
                advance(1)
            await _show_images(engine, rng)
            num_steps = len(timer.steps)
            for _ in range(NUM_IDLE):
                first_tokens.append(await _first_token(engine, rng))
            num_done += 1
            advance(1)
        except asyncio.CancelledError:
            num_plain = sum(not step.num_encoder_tokens for step in timer.steps[:num_steps])
            task = asyncio.current_task()
            if not keeps_partial or num_plain < MIN_STEPS or task is None:
                raise
            task.uncancel()
        steps = timer.steps[:num_steps]
        threads = config.runner.threads or "one per core"
        what = (
            f"{config.model.served_name}, dtype {config.model.dtype}, threads: {threads}, on "
            f"{platform.processor() or platform.machine()}"
        )
        is_partial = num_done <= len(plan)
        if is_partial:
            what += f", interrupted after {num_done} of {len(plan) + 1} loads"
        return Measurements(steps, first_tokens, what, is_partial)


def calibrate(measured: Measurements) -> StepTimeModel:
    """Return the model that fits the steps best, with its error."""

    plain = [step for step in measured.steps if not step.num_encoder_tokens]
    model = fit_step_time(
        [step.features for step in plain],
        [step.seconds for step in plain],
        source=f"measured: {measured.what}, {len(measured.steps)} steps",
    )
    # What remains of a step that encodes is the encoder's.
    encoding = [
        (step.seconds - model.seconds(step.features)) / step.num_encoder_tokens
        for step in measured.steps
        if step.num_encoder_tokens
    ]
    encoder_token_us = max(1e6 * statistics.median(encoding), 0.0) if encoding else 0.0
    waking = [seconds - model.seconds(features) for features, seconds in measured.first_tokens]
    idle_ms = max(1e3 * statistics.median(waking), 0.0) if waking else 0.0
    return msgspec.structs.replace(model, idle_ms=idle_ms, encoder_token_us=encoder_token_us)


def fit_logs(paths: Sequence[str]) -> StepTimeModel:
    """Return the model that fits the steps of decision logs best: of aioserve's servers, or of
    vLLM's under `aioserve.vllm.Recorder`, on one machine with one model. Raises `ConfigError`.
    """
    from aioserve.lab.decision_log.reader import Chronicle, DecisionLog

    features: list[StepFeatures] = []
    seconds: list[float] = []
    for path in paths:
        log = DecisionLog(path)
        log.header.check_is_whole()
        chronicle = Chronicle(log.header)
        for record in log:
            if (step := chronicle.feed(record)) is not None:
                features.append(step.features)
                seconds.append(step.seconds)
    names = ", ".join(Path(path).name for path in paths)
    return fit_step_time(
        features, seconds, f"fitted to the {len(features)} steps of decision log {names}"
    )


def write_profile(model: StepTimeModel, path: str) -> None:
    """Write a profile as YAML that `--profile` reads. Raises `ConfigError` if the file cannot be
    written.
    """
    try:
        with open(path, "wb") as file:
            file.write(b"# Made by: python -m aioserve calibrate\n" + msgspec.yaml.encode(model))
    except OSError as error:
        raise ConfigError(f"cannot write profile {path}: {error.strerror}") from error


@asynccontextmanager
async def _timed_engine(
    config: EngineConfig,
) -> AsyncIterator[tuple[AsyncEngine, StepTimer]]:
    from aioserve.engine.builder import make_runner
    from aioserve.model_source.info import ModelInfo

    scheduler = msgspec.structs.replace(
        config.scheduler, policy="chunked_prefill", options={}, pipeline_depth=1
    )
    cache = msgspec.structs.replace(config.cache, enable_prefix_caching=False)
    speculation = SpeculationConfig(speculative_method="none")  # a step has the tokens of the batch
    config = msgspec.structs.replace(
        config, scheduler=scheduler, cache=cache, speculation=speculation
    )
    timer = StepTimer(make_runner(config, ModelInfo(config.model)))
    async with AsyncEngine(config, runner=timer) as engine:
        yield engine, timer


async def _run(engine: AsyncEngine, batch: Batch, rng: random.Random) -> None:
    engine.switch_policy("chunked_prefill", {"chunk_size": batch.chunk_size})
    params = SamplingParams(max_tokens=batch.output_tokens, temperature=0, ignore_eos=True)
    vocab_size = engine.model_info.vocab_size

    async def one() -> None:
        prompt = text_tokens(rng.getrandbits(64), batch.prompt_tokens, vocab_size)
        async for _ in engine.generate(prompt, params):
            pass

    await asyncio.gather(*(one() for _ in range(batch.num_requests)))


async def _serve(engine: AsyncEngine, crowd: Crowd, rng: random.Random) -> None:
    engine.switch_policy("chunked_prefill", {"chunk_size": crowd.chunk_size})
    vocab_size, longest = engine.model_info.vocab_size, engine.max_model_len // 2

    async def client() -> None:
        for _ in range(REQUESTS_PER_CLIENT):
            num_tokens = min(int(rng.lognormvariate(math.log(MEDIAN_PROMPT), 1)) + 1, longest)
            prompt = text_tokens(rng.getrandbits(64), num_tokens, vocab_size)
            max_tokens = min(int(rng.expovariate(1 / crowd.mean_output_tokens)) + 1, longest)
            params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
            async for _ in engine.generate(prompt, params):
                pass
            if crowd.pause:
                await asyncio.sleep(rng.expovariate(1 / crowd.pause))

    await asyncio.gather(*(client() for _ in range(crowd.num_clients)))


async def _show_images(engine: AsyncEngine, rng: random.Random) -> None:
    """Images of several sizes, alone and together, if the model sees."""
    if engine.media.refuses_images:
        return
    engine.switch_policy("chunked_prefill", {"chunk_size": 2048})
    random_pixels = np.random.default_rng(rng.getrandbits(32)).integers
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)

    async def one(width: int, height: int) -> None:
        image = random_pixels(0, 256, (height, width, 3), dtype=np.uint8)
        prompt = MultimodalPrompt(f"{engine.media.image_placeholder} What is this?", [image])
        with suppress(RequestError):  # larger than the settings allow
            async for _ in engine.generate(prompt, params):
                pass

    for width, height in IMAGE_SIZES:
        for num_images in (1, 1, 1, 3):
            await asyncio.gather(*(one(width, height) for _ in range(num_images)))


async def _first_token(engine: AsyncEngine, rng: random.Random) -> tuple[StepFeatures, float]:
    """Return one request after a pause: all that lies between asking and reading, and its
    one step.
    """
    await asyncio.sleep(IDLE_SECONDS)
    size = min(IDLE_PROMPT, engine.max_model_len // 2)
    prompt = text_tokens(rng.getrandbits(64), size, engine.model_info.vocab_size)
    clock = clock_of(asyncio.get_running_loop())
    began = clock()
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0)):
        pass
    seconds = clock() - began
    return StepFeatures.of(0, size, [(size, size)]), seconds


# The command.


def run_calibrate(argv: Sequence[str]) -> int:
    """`python -m aioserve calibrate [-o FILE]`; returns the exit code. Raises `ConfigError`."""
    refuse_card(
        argv, "calibrate measures this machine; `cards --card NAME -o FILE` writes a card's"
    )
    parser = Parser(
        "calibrate",
        description="Run a designed set of batches on a real model and fit what a step takes. "
        "Simulated runs use the result with --set runner.profile=FILE.",
        epilog="A minute and a half with the embedded model. Ctrl-C ends the measurement and fits "
        "to the loads that were measured until then. Where stdout is no terminal, the last "
        "line is JSON.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, as for serve")
    parser.add_argument(
        "--model", help="model to measure, as for serve (default: the embedded model)"
    )
    add_settings(parser)
    add_output(parser, "-o", "--output", help="file to write the profile to", metavar="FILE.yaml")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure a third of the loads: a faster, rougher profile",
    )
    parser.add_argument(
        "--outcomes",
        nargs="+",
        metavar="CSV",
        help="fit to what another server did instead: files with the columns arrival_s, client, "
        "prompt_tokens, output_tokens, ttft_s and latency_s, one row per request, of a server that "
        "runs prompts in steps of their own (LightLLM, S-LoRA, vLLM without chunked prefill)",
    )
    parser.add_argument(
        "--log",
        nargs="+",
        metavar="LOG",
        help="fit to the steps of decision logs instead: of a server with this model on this "
        "machine, or of vLLM with --scheduler-cls aioserve.vllm.Recorder",
    )
    add_json(parser)
    args = parser.parse_args(argv)
    is_partial, overrides = False, list(args.set)
    if args.model is not None:
        overrides.append(("model.model", args.model))
    if args.output is not None and not args.output.endswith((".yaml", ".yml")):
        raise ConfigError(f"a profile must be a .yaml file, got {args.output}")
    if args.outcomes is not None or args.log is not None:
        flag = "--log" if args.outcomes is None else "--outcomes"
        if args.outcomes is not None and args.log is not None:
            raise ConfigError("--outcomes and --log each fit to files of their own: give one")
        if args.quick or args.config is not None or overrides:
            raise ConfigError(f"{flag} fits to files: give no model, settings or --quick with it")
        model = _fit(args.outcomes) if args.log is None else fit_logs(args.log)
    else:
        config = EngineConfig.load(args.config, overrides)
        with ExitStack() as stack:
            measured = asyncio.run(
                measure(
                    config,
                    lambda total: stack.enter_context(progress(total, "loads", "Measuring loads")),
                    is_quick=args.quick,
                    keeps_partial=True,
                )
            )
        is_partial = measured.is_partial
        model = calibrate(measured)
    for name, value in msgspec.structs.asdict(model).items():
        print(f"{name:20} {value:.4g}" if isinstance(value, float) else f"{name:20} {value}")
    if args.output is not None:
        write_profile(model, args.output)
        print(f"written to {args.output}")
    if wants_json(args):
        print(json.dumps(msgspec.to_builtins(model)))
    if is_partial:
        say("aioserve: interrupted: the profile is of the loads that were measured until then")
        return EXIT_INTERRUPTED
    return 0


def _fit(paths: Sequence[str]) -> StepTimeModel:
    """Fit to the outcomes in files, and print what is each file's own."""
    from aioserve.lab.outcomes import fit_outcomes, read_outcomes

    logs = [read_outcomes(path) for path in paths]
    num_requests = sum(map(len, logs))
    model, sessions = fit_outcomes(logs, f"fitted to {num_requests} outcomes of another server")
    for path, session in zip(paths, sessions, strict=True):
        print(
            f"{path}: runner.step_host_factor {session.host_factor:.4g}, runner.step_cold_ms "
            f"{session.cold_ms:.4g}, error of decodes {session.error:.2%}"
        )
    return model
