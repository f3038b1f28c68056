"""Predictions of vLLM's runs beside what was measured: tables, CSV files, pictures and the page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from aioserve.errors import ConfigError
from aioserve.lab.cards.measured import EXTRA, databases
from aioserve.lab.reproduce.vllm.runs import (
    BLOCK_TOKENS,
    NUM_FITTED,
    Floats,
    MeasuredRun,
    Prediction,
)
from aioserve.lab.reproduce.vllm.simulators import (
    BY_CARD,
    ONE_DEEP,
    OURS,
    RUNS,
    STAGES,
    Predicted,
    Row,
    Simulator,
    csv_text,
    open_picture,
    table_of_simulators,
)
from aioserve.lab.reproduce.vllm.stages import ALL_STAGES, METRICS, Engine, Experiment, card_options
from aioserve.lab.terminal import in_columns
from aioserve.runner.step_times import make_step_times

#: What the page calls each measure of a request.
MEASURES = {"e2e": "end to end", "ttft": "time to first token", "tpot": "time per token"}
QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
REQUEST_COLUMNS = (
    "request",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "queued_s",
    "first_token_s",
    "last_token_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
)


class RunError(msgspec.Struct, frozen=True):
    """How far one measure of a run is off; shares, not percent."""

    measure: str
    measured_s: float
    predicted_s: float
    median_of_requests: float  # of the errors of single requests, without their signs
    p90_of_requests: float
    quantiles: dict[str, float]  # errors of quantiles over the requests

    @property
    def mean(self) -> float:
        """The relative error of the predicted mean: 0.1 is 10% too long."""
        return self.predicted_s / self.measured_s - 1


def run_errors(prediction: Prediction) -> list[RunError]:
    """Return the errors of a run whose outcome is given; else nothing."""
    run = prediction.run
    if run.served is None:
        return []
    measured = run.served.measures(run.requests)
    predicted = prediction.served.measures(run.requests)
    found = []
    for name in MEASURES:
        there, ours = measured[name], predicted[name]
        off = np.abs(ours / there - 1)
        quantiles = {
            label: float(np.percentile(ours, q) / np.percentile(there, q) - 1)
            for label, q in QUANTILES.items()
        }
        found.append(
            RunError(
                name,
                float(there.mean()),
                float(ours.mean()),
                float(np.median(off)),
                float(np.percentile(off, 90)),
                quantiles,
            )
        )
    return found


def render_run(prediction: Prediction) -> str:
    """Return the table of one run for a terminal."""
    run, words = prediction.run, "kept back" if prediction.run.served is None else "given"
    times = prediction.times
    host = f"host {times.host_ms:.2f} ms a step, {times.cold_ms:.1f} ms more for the first step"
    if times.fitted_to:
        host += f", fitted to the first {NUM_FITTED} requests of {times.fitted_to}"
    lines = [
        f"{run.name}: {len(run.requests)} requests, outcome {words}; {host}; "
        f"{prediction.preemptions} preemptions"
    ]
    if run.served is None:
        lines.append(f"{'':20}  {'mean':>8}  {'p50':>8}  {'p90':>8}  {'p99':>8}")
        for name, values in prediction.served.measures(run.requests).items():
            numbers = [values.mean(), *np.percentile(values, list(QUANTILES.values()))]
            lines.append(f"{MEASURES[name] + ', s':20}" + "".join(f"  {x:8.4g}" for x in numbers))
        lines.append(f"{'last token at, s':20}  {prediction.served.last.max():8.1f}")
        return "\n".join(lines)
    lines.append(
        f"{'':20}  {'measured':>8}  {'predicted':>9}  {'mean':>7}  {'p50':>7}  {'p90':>7}  "
        f"{'p99':>7}  {'request p50':>11}  {'request p90':>11}"
    )
    for error in run_errors(prediction):
        quantiles = "".join(f"  {100 * x:+6.1f}%" for x in error.quantiles.values())
        lines.append(
            f"{MEASURES[error.measure] + ', s':20}  {error.measured_s:8.4g}  "
            f"{error.predicted_s:9.4g}  {100 * error.mean:+6.1f}%{quantiles}  "
            f"{100 * error.median_of_requests:10.1f}%  {100 * error.p90_of_requests:10.1f}%"
        )
    return "\n".join(lines)


def requests_csv(prediction: Prediction) -> str:
    """Return the prediction of each request, in seconds from the first arrival of the trace."""
    served, requests = prediction.served, prediction.run.requests
    measures = served.measures(requests)
    lines = []
    for i, request in enumerate(requests):
        times = (served.queued[i], served.first[i], served.last[i])
        durations = (measures["ttft"][i], measures["tpot"][i], measures["e2e"][i])
        lines.append(
            [
                i,
                f"{request.arrival:.4f}",
                request.prompt_tokens,
                request.output_tokens,
                *(f"{x:.4f}" for x in times),
                f"{durations[0]:.4f}",
                f"{durations[1]:.6f}",
                f"{durations[2]:.4f}",
            ]
        )
    return csv_text(REQUEST_COLUMNS, lines)


# Experiments by stages.


def as_rows(
    experiments: Sequence[Experiment], found: Sequence[Mapping[tuple[int, str], float]]
) -> dict[Row, float]:
    """Return milliseconds by experiment, stage and metric, in the order of the files."""
    return {
        (experiment.id, stage, metric): own[stage, metric]
        for experiment, own in zip(experiments, found, strict=True)
        for stage in (ALL_STAGES, *range(len(experiment.stages)))
        for metric in METRICS
    }


def stages_csv(experiments: Sequence[Experiment], predicted: Predicted, measured: Predicted) -> str:
    """Return the predictions of all rows, beside what is given of them."""
    head = ["id", "model", "stage", "metric", "predicted_ms", "measured_ms", "error"]
    lines = []
    models = {experiment.id: experiment.model for experiment in experiments}
    for row, ms in predicted.items():
        there = measured.get(row)
        known = ["", ""] if there is None else [f"{there:g}", f"{ms / there - 1:.4f}"]
        lines.append([row[0], models[row[0]], row[1], row[2], f"{ms:.3f}", *known])
    return csv_text(head, lines)


def _means_of(
    experiment: Experiment, predicted: Predicted, measured: Predicted, metrics: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the stages of an experiment, and the means of each with their errors, in words."""
    for stage in (ALL_STAGES, *range(len(experiment.stages))):
        cells = []
        for metric in metrics:
            row = (experiment.id, stage, metric)
            ms, there = predicted[row], measured.get(row)
            error = "" if there is None else f" ({_signed(ms / there - 1)})"
            cells.append(f"{ms:.1f}{error}")
        yield "all" if stage == ALL_STAGES else str(stage), cells


def render_stages(
    experiments: Sequence[Experiment],
    predicted: Predicted,
    measured: Predicted,
    engine: Engine,
) -> str:
    """Return the means of all experiments for a terminal."""
    lines = [
        f"host {engine.host_ms:.2f} ms a step on one card, {engine.host_cards_ms:.2f} ms on "
        f"several; {engine.launch_ms:.3f} ms a layer outside of graphs; front end "
        f"{engine.front_ms:.1f} ms a request; {engine.recount:.3f} of a reply's tokens counted "
        "where the client recounts",
        f"{'experiment':16} {'model':26} {'stage':>5}"
        + "".join(f"  {name:>24}" for name in ("e2e mean, ms", "TTFT mean, ms", "ITL mean, ms")),
    ]
    metrics = ("e2e_mean", "ttft_mean", "itl_mean")
    for experiment in experiments:
        model = experiment.model.rpartition("/")[2][:26]
        for shown, cells in _means_of(experiment, predicted, measured, metrics):
            lines.append(
                f"{experiment.id:16} {model:26} {shown:>5}" + "".join(f"  {c:>24}" for c in cells)
            )
    return "\n".join(lines)


# Pictures: SVG that needs nothing but a browser.

PANEL, MARGIN = 260, 56
Scale = Callable[[float], float]


def draw_requests(predictions: Sequence[Prediction]) -> str:
    """Return predicted against measured seconds of each request, a panel for each given run and
    measure.
    """
    given = [prediction for prediction in predictions if prediction.run.served is not None]
    width = MARGIN + len(MEASURES) * (PANEL + MARGIN)
    height = 30 + len(given) * (PANEL + 2 * MARGIN)
    parts = [open_picture(width, height)]
    for line, prediction in enumerate(given):
        run = prediction.run
        assert run.served is not None
        measured = run.served.measures(run.requests)
        predicted = prediction.served.measures(run.requests)
        top = 40 + line * (PANEL + 2 * MARGIN)
        parts.append(f'<text x="{MARGIN}" y="{top - 18}">{run.name}</text>')
        for column, (name, title) in enumerate(MEASURES.items()):
            left = MARGIN + column * (PANEL + MARGIN)
            parts += _panel(title + ", s", measured[name], predicted[name], left, top)
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, measured: Floats, predicted: Floats, left: float, top: float) -> list[str]:
    most = float(max(measured.max(), predicted.max())) * 1.03
    least = 0.0 if measured.min() < most / 3 else float(min(measured.min(), predicted.min())) * 0.97

    def along(value: float) -> float:
        return PANEL * (value - least) / (most - least)

    bottom = top + PANEL
    parts = [
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{PANEL}" height="{PANEL}" fill="none" '
        'class="grid"/>',
        f'<line class="line" x1="{left:.0f}" y1="{bottom:.0f}" x2="{left + PANEL:.0f}" '
        f'y2="{top:.0f}"/>',
        f'<text class="small" x="{left + 6:.0f}" y="{top + 16:.0f}">{title}</text>',
        f'<text class="small" x="{left + PANEL:.0f}" y="{bottom + 30:.0f}" '
        'text-anchor="end">measured</text>',
        f'<text class="small" x="{left - 6:.0f}" y="{top - 4:.0f}">predicted</text>',
    ]
    for i in range(3):
        value = least + (most - least) * (i + 1) / 4
        at = along(value)
        parts.append(
            f'<text class="small" x="{left + at:.0f}" y="{bottom + 15:.0f}" text-anchor="middle">'
            f"{value:.3g}</text>"
            f'<text class="small" x="{left - 5:.0f}" y="{bottom - at + 4:.0f}" text-anchor="end">'
            f"{value:.3g}</text>"
        )
    parts += [
        f'<circle class="point" cx="{left + along(x):.1f}" cy="{bottom - along(y):.1f}" r="2.2"/>'
        for x, y in zip(measured, predicted, strict=True)
    ]
    return parts


# The KV cache: blocks that vLLM reported, and those of the card here.


#: What the package calls the cards of the runs of `vllm-rtx`; it has no others of them.
CARDS = {"RTXPRO6000": "rtx_pro_6000_server"}
BLOCK_HEAD = ["runs", "model", "cards", "step, tokens", "vLLM", "here", "difference"]


class KvBlocks(msgspec.Struct, frozen=True):
    """The KV blocks, of 16 tokens, of runs with one model on as many cards."""

    data: str  # the set
    runs: tuple[str, ...]
    model: str
    num_cards: int
    step_tokens: int  # of the largest step
    reported: int | None  # None: the run does not say
    ours: int | None  # None: for the reason `why`
    why: str = ""

    @property
    def difference(self) -> float | None:
        """Ours against what the run had, as a share."""
        if self.reported is None or self.ours is None:
            return None
        return self.ours / self.reported - 1


def compare_blocks(
    experiments: Sequence[Experiment], runs: Sequence[MeasuredRun]
) -> list[KvBlocks]:
    """Return the blocks of all experiments and runs, those of experiments that differ in their load
    alone in one line. Raises `ConfigError` if the package is missing.
    """
    found: list[KvBlocks] = []
    with TemporaryDirectory() as scratch:
        for each in experiments:
            ours, why = _held(card_options(each, Path(scratch)), each.max_num_batched_tokens)
            line = KvBlocks(
                STAGES,
                (each.id,),
                each.model,
                each.tensor_parallel,
                each.max_num_batched_tokens,
                each.kv_blocks,
                ours,
                why,
            )
            same = [i for i, k in enumerate(found) if _alike(k) == _alike(line)]
            if same:
                [place] = same
                line = msgspec.structs.replace(line, runs=(*found[place].runs, each.id))
                found[place] = line
            else:
                found.append(line)
    return found + [_of_run(run) for run in runs]


def _alike(line: KvBlocks) -> KvBlocks:
    return msgspec.structs.replace(line, runs=())


def _of_run(run: MeasuredRun) -> KvBlocks:
    cards = int(run.engine.get("tensor_parallel_size", 1))
    step_tokens = int(run.engine["max_num_batched_tokens"])
    card = CARDS.get(run.machine)
    ours: int | None = None
    if run.blocks is None:
        why = "the run does not say how many it had"
    elif card is None:
        known = ", ".join(sorted(databases()))
        why = f"{EXTRA} has no tables of this card, but those of {known}"
    else:
        options = {"card": card, "model": run.model, "tp": cards}
        ours, why = _held(options, step_tokens)
    return KvBlocks(RUNS, (run.name,), run.model, cards, step_tokens, run.blocks, ours, why)


def _held(options: dict[str, Any], step_tokens: int) -> tuple[int | None, str]:
    """Return how many KV blocks a card holds beside steps of at most `step_tokens` tokens, and "";
    or None, and why this is not known.
    """
    try:
        tokens = make_step_times("card", options).num_kv_tokens(step_tokens, 1)
    except ConfigError as error:
        return None, str(error)
    return (None, "the package does not say") if tokens is None else (tokens // BLOCK_TOKENS, "")


def table_of_blocks(found: Sequence[KvBlocks]) -> list[list[str]]:
    """Return a line of heads and one for each model and engine, whose blocks are known."""
    rows = [BLOCK_HEAD]
    for line in found:
        if line.difference is not None:
            rows.append([*_block_cells(line), f"{100 * line.difference:+.1f}%"])
    return rows


def _block_cells(line: KvBlocks) -> list[str]:
    model = line.model.rpartition("/")[2]
    numbers = [f"{line.step_tokens:,}", f"{line.reported or 0:,}", f"{line.ours or 0:,}"]
    return [", ".join(line.runs), model, str(line.num_cards), *numbers]


def blocks_left_out(found: Sequence[KvBlocks]) -> list[str]:
    """Return a sentence for each run of which one of the numbers is not known, and why."""
    return [
        f"{', '.join(line.runs)}: "
        + (f"vLLM had {line.reported:,} blocks; " if line.reported else "")
        + f"{line.why}."
        for line in found
        if line.difference is None
    ]


def render_blocks(found: Sequence[KvBlocks]) -> str:
    """Return the table for a terminal, and what it leaves out."""
    lines = in_columns(table_of_blocks(found), left=range(len(BLOCK_HEAD)))
    head = f"KV blocks of {BLOCK_TOKENS} tokens that vLLM reported, and those of the card here:"
    return "\n".join([head, *lines, *blocks_left_out(found)])


def blocks_csv(found: Sequence[KvBlocks]) -> str:
    """Return a line for each model and engine."""
    head = ["set", "runs", "model", "cards", "step_tokens", "reported", "ours", "difference", "why"]
    lines = []
    for line in found:
        difference = None if line.difference is None else f"{line.difference:.4f}"  # None: empty
        cells = [line.data, " ".join(line.runs), line.model, line.num_cards, line.step_tokens]
        lines.append([*cells, line.reported, line.ours, difference, line.why])
    return csv_text(head, lines)


# The page: what was measured, what was predicted, how far they are apart.


COMMAND = (
    "python -m aioserve reproduce vllm --data FOLDER --predictions benchmarks/published/vllm \\\n"
    "    --errors aioserve/lab/cards/errors.csv --page docs/predicting-vllm.md"
)
RUN_HEAD = [
    *("run", "measure", "measured, s", "predicted, s", "mean", "p50", "p90", "p99"),
    *("request p50", "request p90"),
]
STAGE_HEAD = [
    *("experiment", "model", "cards", "stage"),
    *("e2e mean, ms", "ITL mean, ms", "TTFT mean, ms"),
]
MEANS = ("e2e_mean", "itl_mean", "ttft_mean")
#: The largest errors that were aimed at, as shares: of means of a run, of the median request's end
#: to end time, and of the median over the rows of experiments.
RUN_AIMS = {"e2e": 0.01, "tpot": 0.02, "ttft": 0.03}
MEDIAN_AIM = 0.015
STAGE_AIMS = {"e2e_mean": 0.05, "itl_mean": 0.05, "ttft_mean": 0.1}


MISSING_RUNS = (
    "What is missing. The tables have decodes of equal context: where contexts differ, and "
    "between the batch sizes of the tables, the blocks of the attention kernel do not fill the "
    "card evenly. With 50 to 115 rows on the RTX PRO 6000 a step took 0.6 to 2.9 ms more than its "
    "kernels, most with 50, which the fitted host time absorbs in the mean. Here the first step "
    "alone compiles kernels; on the RTX 4090 later steps seem to as well: the first six requests "
    "wait 0.30 to 0.69 s for a first token. The time of the first step came into the model last, "
    "after the errors without it had been seen: the host's time, which then had to stand for both, "
    "put the mean end to end time on the RTX 4090 1.7% too high. The two runs that are kept back "
    "state in their `meta.json` when they began and ended: 161.0 s and 69.2 s apart, where the "
    "given ones last 0.3 to 0.5 s longer than to their last token. These two numbers were seen "
    "while the model was made, and nothing is fitted to them: Qwen3-32B ends as predicted, and "
    "Qwen3-30B-A3B 8% later, so its steps will be some percent slower than predicted."
)
MISSING_STAGES = (
    "What is missing. A tenth of each stage is simulated, from its beginning, and the numbers "
    "were fitted to a fifth. That prompts repeat is what the source says of their text; with new "
    "questions in every round, time to first token on 70B would be 20 ms longer than it was. "
    "Experiment 67 has prompts of 1,034 tokens and waits 18 ms longer for a first token than is "
    "predicted, as if its prompts were not in the cache. Attention in the tables seems to have "
    "been timed again and again on the same keys, so that small batches are read from the card's "
    "L2 cache; with 32 KV heads on one card (Llama 2) it was not timed at all, and is priced as "
    "that of 8 heads with four times the context. Mixtures of experts with a scale for each "
    "channel were not timed either. The shared expert of Llama 4 is not in the package and not in "
    "`aioserve`, whose steps with more rows come out 5% short; `aioserve --card` has it. "
    "Qwen2.5-7B comes out a tenth short in both: of the 6.4 ms of a step, 4.5 are products that "
    "are 37,888 and 18,944 wide, and the tables have no width between 16,384 and 51,200. That "
    "its host cannot prepare a step in less than 7.0 ms would explain as much; no other given "
    "experiment has steps as short."
)


class Results(msgspec.Struct):
    """All that one call of the command has found."""

    engine: Engine
    runs: list[Prediction] = msgspec.field(default_factory=list)
    experiments: list[Experiment] = msgspec.field(default_factory=list)
    predicted: dict[Row, float] = msgspec.field(default_factory=dict)
    measured: dict[Row, float] = msgspec.field(default_factory=dict)
    simulators: list[Simulator] = msgspec.field(default_factory=list)
    kv_blocks: list[KvBlocks] = msgspec.field(default_factory=list)


def render_page(results: Results, name: str) -> str:
    """Return the page in Markdown; its pictures are called after `name`."""
    parts = [
        "# Runs of vLLM, predicted",
        "A policy is chosen on a simulator for a card that is rented later, so a simulator has to "
        "say how right it is. This page has runs of vLLM that others measured and published, "
        "beside what the lab predicts for them. Where the outcome is not given here, the "
        "predictions are written down before anybody has compared them, in "
        "`benchmarks/published/vllm`. One command makes the page, the pictures and the files:",
        f"```bash\n{COMMAND}\n```",
        "`FOLDER` holds the published data, which are not part of this repository: `vllm-rtx` "
        "from casys-kaist/LLMServingSim, and `vllm-h100` from "
        "inference-sim/sim-to-real-accuracy-validation. The second needs the package "
        "`aiconfigurator-core`.",
    ]
    if results.runs or results.predicted:
        parts += _aims(results)
    if results.runs:
        parts += _runs(results, name)
    if results.predicted:
        parts += _stages(results)
    if results.simulators:
        parts += _simulators(results, name)
    if results.kv_blocks:
        parts += _kv_blocks(results)
    return "\n\n".join(parts) + "\n"


def _aims(results: Results) -> list[str]:
    """Return the table of what was aimed at before anything was predicted, and what came out."""
    rows = []
    for prediction in results.runs:
        errors = {error.measure: error for error in run_errors(prediction)}
        for measure, aim in RUN_AIMS.items():
            if errors:
                words = f"{MEASURES[measure]}, mean"
                rows.append(_aim(prediction.run.name, words, abs(errors[measure].mean), aim))
        if errors:
            median = errors["e2e"].median_of_requests
            words = f"{MEASURES['e2e']}, median of single requests"
            rows.append(_aim(prediction.run.name, words, median, MEDIAN_AIM))
    for simulator in results.simulators:
        if (simulator.name, simulator.data) == (OURS, STAGES):
            for metric, aim in STAGE_AIMS.items():
                score = simulator.scores[metric]
                words = f"{metric}, median of {score.rows} rows"
                rows.append(_aim(STAGES, words, score.median, aim))
    if not rows:
        return []
    return [
        "## What was aimed at",
        "These limits were set before anything was predicted. The errors, without their signs, are "
        "those of the tables below, of runs whose outcome is given; whether they hold of the runs "
        "that are kept back is not known here.",
        _table(["run or set", "error", "at most", "is", ""], rows),
        "The first step of a run was fitted apart from the host's time only after these errors had "
        "been seen: before that, the mean end to end time on the RTX 4090 was 1.7% off.",
    ]


def _aim(name: str, words: str, error: float, aim: float) -> list[str]:
    verdict = "reached" if error <= aim else "missed"
    return [name, words, f"{100 * aim:.1f}%", f"{100 * error:.1f}%", verdict]


def _runs(results: Results, name: str) -> list[str]:
    fitted = {p.times.fitted_to: p.times for p in results.runs if p.times.fitted_to}
    hosts = "; ".join(
        f"{times.host_ms:.2f} ms a step and {times.cold_ms:.1f} ms from {run}"
        for run, times in sorted(fitted.items())
    )
    parts = [
        "## Request by request",
        "vLLM 0.19 with ShareGPT at ten requests a second. Step times are sums of the measured "
        "operators of the card ([`operators`](step-times.md)): dense layers straight between "
        "neighbouring sizes, at the size to which a CUDA graph pads the step; attention axis by "
        "axis, straight in rows and context and as a power of the chunk; norms, rotations and "
        "activations without the start of a kernel, as a compiler fuses them. The engine schedules "
        "as vLLM does: running requests first, chunks of 2,048 tokens, no blocks kept free, two "
        "steps under way. Two numbers for each machine are fitted, what its host adds to a step, "
        "and how much longer the first step of a run takes, in which kernels are compiled: "
        f"{hosts}. The first is fitted to the mean end to end time of the first {NUM_FITTED} "
        "requests of that run, the second to the time to first token of its first request. "
        "Nothing is fitted to a run that is kept back.",
        "Errors of means and quantiles over the requests, and of single requests without their "
        "signs:",
        _table(
            RUN_HEAD,
            [
                [
                    prediction.run.name,
                    MEASURES[error.measure],
                    f"{error.measured_s:.4g}",
                    f"{error.predicted_s:.4g}",
                    _signed(error.mean),
                    *(_signed(x) for x in error.quantiles.values()),
                    f"{100 * error.median_of_requests:.1f}%",
                    f"{100 * error.p90_of_requests:.1f}%",
                ]
                for prediction in results.runs
                for error in run_errors(prediction)
            ],
        ),
        f"![Predicted against measured, by request]({name}-requests.svg)",
    ]
    kept = [prediction for prediction in results.runs if prediction.run.served is None]
    if kept:
        rows = []
        for prediction in kept:
            measures = prediction.served.measures(prediction.run.requests)
            for measure, values in measures.items():
                numbers = [float(values.mean()), *np.percentile(values, [50, 90, 99])]
                cells = [f"{x:.4g}" for x in numbers]
                rows.append([prediction.run.name, MEASURES[measure], *cells])
            last = f"{prediction.served.last.max():.1f}"
            rows.append([prediction.run.name, "last token of the run", last, "", "", ""])
        parts += [
            "Predicted, with the outcome kept back. Assumed beyond what the files say: two RTX PRO "
            "6000 cards exchange 16.37 GB/s in each direction and take 16.1 us more for a phase of "
            "a collective, as LLMServingSim measured with NCCL; a layer on two cards has two sums "
            "over them, in two phases each. Engines that share experts go step by step together "
            "and get equal shares of the rows, a router of experts is even, and each layer gathers "
            "the rows and scatters them back.",
            _table(["run", "measure", "mean, s", "p50, s", "p90, s", "p99, s"], rows),
        ]
        parts.append(MISSING_RUNS)
    return parts


def _stages(results: Results) -> list[str]:
    engine = results.engine
    rows = []
    for experiment in results.experiments:
        model, cards = experiment.model.rpartition("/")[2], str(experiment.tensor_parallel)
        for shown, cells in _means_of(experiment, results.predicted, results.measured, MEANS):
            rows.append([experiment.id, model, cards, shown, *cells])
    return [
        "## By stages of a load",
        "vLLM 0.15 on H100 cards under inference-perf. Step times are those of "
        "aiconfigurator-core 0.12, for vLLM 0.24. What inference-perf's source says of the load: "
        "gaps are exponential and scaled to the stage; users take turns in one shuffled order; "
        "each sends the system prompt of its group and its own question. Assumed: what was said "
        "before is not sent again, since latencies do not grow from round to round; lengths are "
        "those listed, and every reply has its full length. A user's prompt is the same in every "
        "round, so the prefix cache has all of it but the end.",
        "Five numbers are fitted to the six given experiments, and hold for all: "
        f"{engine.host_ms:.2f} ms of host for a step on one card (median over the stages of what a "
        f"token took beyond the kernels); {engine.host_cards_ms:.2f} ms on several; "
        f"{engine.launch_ms:.3f} ms for a layer that is launched outside of CUDA graphs, which "
        "holds for Llama 4 (first stage of experiment 17); "
        f"{engine.front_ms:.1f} ms between client and engine for a request (median over the stages "
        f"of time to first token); and {engine.recount:.3f} of a reply's tokens, as the client "
        "counted the replies of Llama 2 anew from their text (first stage of 20260217-155451). The "
        "rows with an error below are of these six. `--fit` fits them anew.",
        _table(
            STAGE_HEAD,
            rows,
        ),
        MISSING_STAGES,
    ]


def _simulators(results: Results, name: str) -> list[str]:
    """Return the table of simulators."""
    head, *rows = table_of_simulators(results.simulators)
    return [
        "## Simulators, over the same rows",
        f"The median of the absolute errors over the given rows: of `{STAGES}`, with five other "
        f"simulators whose predictions were published beside the measurements, and of `{RUNS}`, "
        "with LLMServingSim, which published the runs; its errors are those that it states of "
        "itself. A simulator that left rows out is compared over those that it has: below each "
        "stand ours over the same rows. Compare no lines with different numbers of rows. "
        f"In `{RUNS}` itl is TPOT. `{BY_CARD}` is what the lab's commands say: the "
        "tables of the [card](cards.md), with the host's time per step and the launches outside of "
        f"CUDA graphs; to both of ours in `{STAGES}` the front end and the count of tokens are "
        "added, as above. "
        f"`{ONE_DEEP}` plans each step when the one before has ended, with all else alike, and "
        "misses times to first token by more, as its lines show: a request that comes in while a "
        "step runs waits for the next one as well, which asynchronous scheduling has planned "
        "already. Five numbers of ours are fitted to these experiments, as said above, and two for "
        "each machine to the runs; what the others were fitted to is not "
        "stated beside their predictions. The heads of reports on such cards state the errors "
        f"of `{BY_CARD}`. `benchmarks/published/vllm/simulators.csv` also has the means of the "
        "errors.",
        _table(head, rows),
        f"![Median errors of simulators]({name}-simulators.svg)",
    ]


def _kv_blocks(results: Results) -> list[str]:
    """Return the table of the KV cache."""
    head, *rows = table_of_blocks(results.kv_blocks)
    return [
        "## The KV cache",
        "Blocks of 16 tokens that vLLM reported, and those that the memory of the [card](cards.md) "
        "holds here, at `gpu_memory_utilization` 0.9, where nothing sets `cache.num_kv_blocks`. "
        "The predictions above have the blocks that vLLM reported.",
        _table(head, rows),
        *blocks_left_out(results.kv_blocks),
    ]


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}%"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
