"""Predictions of vLLM's runs as tables, CSV files and pictures, beside what was measured."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from aioserve.lab.cards.engines import RunError as HeadError
from aioserve.lab.cards.measured import EXTRA
from aioserve.lab.reproduce.vllm.runs import NUM_FITTED, Floats, Prediction
from aioserve.lab.reproduce.vllm.stages import ALL_STAGES, METRICS, Engine, Experiment

#: What the page calls each measure of a request.
MEASURES = {"e2e": "end to end", "ttft": "time to first token", "tpot": "time per token"}
QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
OURS = "aioserve"
BY_CARD = "aioserve --card"
NO_ERROR = "-"
#: Of what the errors of each set are: the source of step times, the engine, the runs, the cards.
H100 = (EXTRA, "vllm", "stages of runs of vLLM 0.15 (host fitted on them)", "h100_sxm")
RTX = ("operator tables", "vllm", "runs of vLLM 0.19 (host fitted)", "RTX4090 RTXPRO6000")
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
    host = f"host {prediction.host_ms:.2f} ms a step"
    if prediction.fitted_to:
        host += f", fitted to the first {NUM_FITTED} requests of {prediction.fitted_to}"
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

Row = tuple[str, int, str]  # experiment, stage, metric
Predicted = Mapping[Row, float]


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


def errors_of(predicted: Predicted, measured: Predicted) -> dict[str, list[float]]:
    """Return absolute errors as shares, by metric, of the rows that both have."""
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for row, there in measured.items():
        if row in predicted and row[2] in found:
            found[row[2]].append(abs(predicted[row] / there - 1))
    return found


class Simulator(msgspec.Struct, frozen=True):
    """One line of the table of simulators: errors by metric, as shares; None where it has none."""

    name: str
    rows: int  # of how many rows of a mean it is
    median: dict[str, float | None]
    mape: dict[str, float | None]


def simulators(predictions: Mapping[str, Predicted], measured: Predicted) -> list[Simulator]:
    """Return how far each simulator is off on the rows that are given."""
    found = []
    for name, predicted in predictions.items():
        errors = errors_of(predicted, measured)
        found.append(
            Simulator(
                name,
                len(errors["e2e_mean"]),
                {m: float(np.median(e)) if e else None for m, e in errors.items()},
                {m: float(np.mean(e)) if e else None for m, e in errors.items()},
            )
        )
    return found


def simulators_csv(found: Sequence[Simulator], runs: Sequence[Mapping[str, Any]]) -> str:
    """Return one line for each simulator, set and metric: the errors of `vllm-h100`'s rows, and of
    the means of `vllm-rtx`'s runs.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["set", "simulator", "metric", "rows", "median_error", "mape"])
    for simulator in found:
        for metric in METRICS:
            median, mape = simulator.median[metric], simulator.mape[metric]
            if median is not None and mape is not None:
                numbers = [simulator.rows, f"{median:.4f}", f"{mape:.4f}"]
                writer.writerow(["vllm-h100", simulator.name, metric, *numbers])
    for line in runs:
        numbers = [line["rows"], f"{line['median']:.4f}", f"{line['mape']:.4f}"]
        writer.writerow(["vllm-rtx", line["simulator"], line["metric"], *numbers])
    return out.getvalue()


def heads_csv(found: Sequence[Simulator], runs: Sequence[Mapping[str, Any]]) -> str:
    """Return what heads of reports on cards state, as `lab.cards.engines` reads it: the errors of
    `--card` on the rows of `vllm-h100`, and those of operator tables on the runs of `vllm-rtx`.
    """
    lines = [
        HeadError(*H100, metric, simulator.rows, round(median, 4))
        for simulator in found
        if simulator.name == BY_CARD
        for metric, median in simulator.median.items()
        if median is not None
    ]
    lines += [
        HeadError(*RTX, line["metric"], line["rows"], round(line["median"], 4))
        for line in runs
        if line["simulator"] == OURS
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HeadError.__struct_fields__)
    writer.writerows(msgspec.structs.astuple(line) for line in lines)
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


def render_simulators(found: Sequence[Simulator]) -> str:
    """Return the median errors of all simulators for a terminal, in percent."""
    lines = [f"{'simulator':26} {'rows':>5}" + "".join(f"  {m:>9}" for m in METRICS)]
    for simulator in found:
        cells = "".join(
            f"  {NO_ERROR:>9}" if x is None else f"  {100 * x:8.1f}%"
            for x in simulator.median.values()
        )
        lines.append(f"{simulator.name:26} {simulator.rows:>5}{cells}")
    return "\n".join(lines)


# Pictures: SVG that needs nothing but a browser.

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}"
    ".grid{stroke:#ddd}.line{stroke:#999;stroke-dasharray:4 3}.point{fill:#4078c0;opacity:.45}"
    ".bar{fill:#4078c0}.other{fill:#b8b8b8}"
)
PANEL, MARGIN = 260, 56
Scale = Callable[[float], float]


def draw_requests(predictions: Sequence[Prediction]) -> str:
    """Return predicted against measured seconds of each request, a panel for each given run and
    measure.
    """
    given = [prediction for prediction in predictions if prediction.run.served is not None]
    width = MARGIN + len(MEASURES) * (PANEL + MARGIN)
    height = 30 + len(given) * (PANEL + 2 * MARGIN)
    parts = [_open(width, height)]
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


def draw_simulators(found: Sequence[Simulator]) -> str:
    """Return the median errors of the means, a bar for each simulator, on a scale of logarithms."""
    shown = ("e2e_mean", "itl_mean", "ttft_mean")
    titles = ("end to end, mean", "time per token, mean", "time to first token, mean")
    row, left, span = 20, 250, 480
    height = 50 + sum(30 + row * len(found) for _ in shown)
    parts = [_open(left + span + 80, height)]

    def x(share: float) -> float:
        return float(span * np.log10(max(100 * share, 1.0)) / 3)

    y = 24.0
    for metric, title in zip(shown, titles, strict=True):
        parts.append(f'<text x="10" y="{y:.0f}">{title}: median error over the given rows</text>')
        for simulator in found:
            y += row
            error = simulator.median[metric]
            parts.append(
                f'<text class="small" x="{left - 8}" y="{y:.0f}" text-anchor="end">'
                f"{simulator.name}, {simulator.rows} rows</text>"
            )
            if error is not None:
                kind = "bar" if simulator.name == OURS else "other"
                parts.append(
                    f'<rect class="{kind}" x="{left}" y="{y - 10:.0f}" width="{x(error):.1f}" '
                    f'height="11"/><text class="small" x="{left + x(error) + 5:.0f}" '
                    f'y="{y:.0f}">{100 * error:.1f}%</text>'
                )
        y += 34
    return "\n".join([*parts, "</svg>", ""])


def _open(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img"><style>{STYLE}</style><rect width="{width:.0f}" height="{height:.0f}" '
        'fill="#fff"/>'
    )
