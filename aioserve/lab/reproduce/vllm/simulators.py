"""How far simulators are off on measured rows, each beside ours on exactly the same rows.

A row is a run or an experiment, a stage of it, and a metric. As a table for a terminal, in Markdown
and as CSV, as a picture, and as the file of errors that heads of reports on cards state.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from aioserve.errors import ConfigError
from aioserve.lab.cards.engines import RunError as HeadError
from aioserve.lab.cards.measured import EXTRA
from aioserve.lab.reproduce.vllm.stages import METRICS

OURS = "aioserve"
BY_CARD = "aioserve --card"
ONE_DEEP = f"{BY_CARD}, one step deep"
#: The sets of measured runs, by the names of their folders.
RUNS, STAGES = "vllm-rtx", "vllm-h100"
#: Of what the errors of each set are: the source of step times, the engine, the runs, the cards.
H100 = (
    EXTRA,
    "vllm",
    "stages of runs of vLLM 0.15 (host fitted on them, two steps under way)",
    "h100_sxm",
)
RTX = ("operator tables", "vllm", "runs of vLLM 0.19 (host fitted)", "RTX4090 RTXPRO6000")
#: The time per token of a request is called so in one set, and otherwise in the other.
ALIKE = {"itl_mean": "tpot_mean"}
NO_ERROR = "-"
#: Decimal digits of the shares in files; tables and heads state these numbers in percent.
DIGITS = 4

Row = tuple[str, int, str]  # run or experiment, stage, metric
Predicted = Mapping[Row, float]
Errors = Mapping[Row, float]  # without their signs, as shares


class Score(msgspec.Struct, frozen=True):
    """The errors of one metric over `rows` rows."""

    rows: int
    median: float
    mape: float  # their mean


class Simulator(msgspec.Struct, frozen=True):
    """One simulator on one set of runs: its scores by metric, and ours over the same rows."""

    name: str
    data: str
    scores: dict[str, Score]
    beside: dict[str, dict[str, Score]] = {}  # by our name; of ours none

    @property
    def rows(self) -> int:
        """The number of rows of the metric that has the most."""
        return max(score.rows for score in self.scores.values())


def errors_of(predicted: Predicted, measured: Predicted) -> dict[Row, float]:
    """Return absolute errors as shares, of the rows that were predicted, without experiments of
    which nothing was measured. Raises `ConfigError` for another row that was not measured.
    """
    given = {experiment for experiment, _, _ in measured}
    own = {row: ms for row, ms in predicted.items() if row[0] in given}
    if lost := sorted(own.keys() - measured.keys()):
        raise ConfigError(f"{_words(lost[0])} was predicted, and was not measured")
    return {row: abs(ms / measured[row] - 1) for row, ms in own.items()}


def _words(row: Row) -> str:
    experiment, stage, metric = row
    return f"{metric} of experiment {experiment}, stage {stage},"


def simulators(data: str, errors: Mapping[str, Errors]) -> list[Simulator]:
    """Return how far each simulator is off, by its errors; each that is not ours with two of ours
    beside it, over the rows of that simulator alone. Raises `ConfigError` if one of ours lacks such
    a row: scores of other rows would stand side by side.
    """
    ours = {name: errors[name] for name in (OURS, BY_CARD) if name in errors}
    found = []
    for name, own in errors.items():
        beside = {}
        for mine, of in ours.items() if not name.startswith(OURS) else ():
            if lost := sorted(own.keys() - of.keys()):
                raise ConfigError(f"{_words(lost[0])} is a row of {name}, and {mine} lacks it")
            beside[mine] = _scores({row: of[row] for row in own})
        if own:
            found.append(Simulator(name, data, _scores(own), beside))
    return found


def _scores(errors: Errors) -> dict[str, Score]:
    by_metric: dict[str, list[float]] = {}
    for (_, _, metric), error in errors.items():
        by_metric.setdefault(metric, []).append(error)
    return {
        metric: Score(len(of), float(np.median(of)), float(np.mean(of)))
        for metric, of in by_metric.items()
    }


def csv_text(head: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Return the text of a CSV file: the names of columns in `head`, then `lines`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *lines])
    return out.getvalue()


def simulators_csv(found: Sequence[Simulator]) -> str:
    """Return a line for each simulator, set and metric; behind its errors, ours over the same
    rows.
    """
    head = ["set", "simulator", "metric", "rows", "median_error", "mape"]
    for name in ("aioserve", "card"):
        head += [f"{name}_{number}" for number in ("rows", "median_error", "mape")]
    lines = []
    for simulator in found:
        for metric, score in simulator.scores.items():
            cells = [simulator.data, simulator.name, metric, *_numbers(score)]
            for mine in (OURS, BY_CARD):
                cells += _numbers(simulator.beside.get(mine, {}).get(metric))
            lines.append(cells)
    return csv_text(head, lines)


def _numbers(score: Score | None) -> list[str]:
    if score is None:
        return ["", "", ""]
    return [str(score.rows), f"{score.median:.{DIGITS}f}", f"{score.mape:.{DIGITS}f}"]


def heads_csv(found: Sequence[Simulator]) -> str:
    """Return what heads of reports on cards state, as `lab.cards.engines` reads it: the errors of
    `--card` on the rows of `vllm-h100`, and those of operator tables on the runs of `vllm-rtx`.
    """
    lines = []
    for data, name, words in ((STAGES, BY_CARD, H100), (RUNS, OURS, RTX)):
        for simulator in found:
            if (simulator.data, simulator.name) == (data, name):
                for metric, score in simulator.scores.items():
                    line = HeadError(*words, metric, score.rows, round(score.median, DIGITS))
                    lines.append(msgspec.structs.astuple(line))
    return csv_text(HeadError.__struct_fields__, lines)


def _lines(found: Sequence[Simulator]) -> Iterator[tuple[str, Simulator, Mapping[str, Score]]]:
    """Yield each simulator, and after it ours over its rows: names, whose rows, and scores."""
    for simulator in found:
        yield simulator.name, simulator, simulator.scores
        for name, scores in simulator.beside.items():
            yield f"{name}, the same rows", simulator, scores


def _cells(scores: Mapping[str, Score]) -> list[str]:
    """Return the median errors under `METRICS`, in percent."""
    own = [scores.get(metric) or scores.get(ALIKE.get(metric, "")) for metric in METRICS]
    return [NO_ERROR if score is None else _percent(score) for score in own]


def _percent(score: Score) -> str:
    """Return the median error as the heads of reports say it: of the number in the files."""
    return f"{round(score.median, DIGITS):.1%}"


def render_simulators(found: Sequence[Simulator]) -> str:
    """Return the median errors of all simulators for a terminal, in percent."""
    lines = [f"{'simulator':32} {'set':9} {'rows':>4}" + "".join(f"  {m:>9}" for m in METRICS)]
    for name, simulator, scores in _lines(found):
        indent = "" if name == simulator.name else "  "
        cells = "".join(f"  {cell:>9}" for cell in _cells(scores))
        lines.append(f"{indent + name:32} {simulator.data:9} {simulator.rows:>4}{cells}")
    return "\n".join(lines)


def table_of_simulators(found: Sequence[Simulator]) -> list[list[str]]:
    """Return the same as cells, below a line of heads."""
    rows = [["simulator", "set", "rows", *METRICS]]
    for name, simulator, scores in _lines(found):
        shown = name if name != simulator.name else f"**{name}**"
        rows.append([shown, simulator.data, str(simulator.rows), *_cells(scores)])
    return rows


# A picture: SVG that needs nothing but a browser.


STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}"
    ".grid{stroke:#ddd}.line{stroke:#999;stroke-dasharray:4 3}.point{fill:#4078c0;opacity:.45}"
    ".bar{fill:#4078c0}.other{fill:#b8b8b8}"
)
LINE, LEFT, SPAN = 20, 290, 480


def open_picture(width: float, height: float) -> str:
    """Return the begin of an SVG with the style of this command's pictures."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img"><style>{STYLE}</style><rect width="{width:.0f}" height="{height:.0f}" '
        'fill="#fff"/>'
    )


def draw_simulators(found: Sequence[Simulator]) -> str:
    """Return the median errors of the means, a bar for each simulator and for ours over its rows,
    on a scale of logarithms.
    """
    titles = {
        "e2e_mean": "end to end, mean",
        "itl_mean": "time per token, mean",
        "ttft_mean": "time to first token, mean",
    }
    shown = list(_lines(found))
    height = 50 + sum(30 + LINE * len(shown) for _ in titles)
    parts = [open_picture(LEFT + SPAN + 80, height)]

    def x(share: float) -> float:
        return float(SPAN * np.log10(max(100 * share, 1.0)) / 3)

    y = 24.0
    for metric, title in titles.items():
        parts.append(f'<text x="10" y="{y:.0f}">{title}: median error over the rows it has</text>')
        for name, simulator, scores in shown:
            y += LINE
            parts.append(
                f'<text class="small" x="{LEFT - 8}" y="{y:.0f}" text-anchor="end">'
                f"{name}, {simulator.data}, {simulator.rows} rows</text>"
            )
            score = scores.get(metric) or scores.get(ALIKE.get(metric, ""))
            if score is not None:
                kind = "bar" if name.startswith(OURS) else "other"
                parts.append(
                    f'<rect class="{kind}" x="{LEFT}" y="{y - 10:.0f}" '
                    f'width="{x(score.median):.1f}" height="11"/>'
                    f'<text class="small" x="{LEFT + x(score.median) + 5:.0f}" '
                    f'y="{y:.0f}">{_percent(score)}</text>'
                )
        y += 34
    return "\n".join([*parts, "</svg>", ""])
