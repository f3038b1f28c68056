"""Predictions of vLLM's runs as tables, CSV files and pictures, beside what was measured."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from aioserve.lab.reproduce.vllm.runs import NUM_FITTED, Floats, Prediction
from aioserve.lab.reproduce.vllm.simulators import Predicted, Row, open_picture
from aioserve.lab.reproduce.vllm.stages import ALL_STAGES, METRICS, Engine, Experiment

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
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(REQUEST_COLUMNS)
    for i, request in enumerate(requests):
        times = (served.queued[i], served.first[i], served.last[i])
        durations = (measures["ttft"][i], measures["tpot"][i], measures["e2e"][i])
        writer.writerow(
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
    return out.getvalue()


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
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["id", "model", "stage", "metric", "predicted_ms", "measured_ms", "error"])
    models = {experiment.id: experiment.model for experiment in experiments}
    for row, ms in predicted.items():
        there = measured.get(row)
        known = ["", ""] if there is None else [f"{there:g}", f"{ms / there - 1:.4f}"]
        writer.writerow([row[0], models[row[0]], row[1], row[2], f"{ms:.3f}", *known])
    return out.getvalue()


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
    for experiment in experiments:
        for stage in (ALL_STAGES, *range(len(experiment.stages))):
            cells = []
            for metric in ("e2e_mean", "ttft_mean", "itl_mean"):
                row = (experiment.id, stage, metric)
                there, ms = measured.get(row), predicted[row]
                error = "" if there is None else f" ({100 * (ms / there - 1):+.1f}%)"
                cells.append(f"{ms:.1f}{error}")
            model = experiment.model.rpartition("/")[2][:26]
            shown = "all" if stage == ALL_STAGES else str(stage)
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
