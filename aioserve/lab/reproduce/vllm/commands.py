"""The command `reproduce vllm`: measured runs of vLLM, predicted; tables, files and a page out."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_output
from aioserve.lab.comparison.document import encode
from aioserve.lab.reproduce.vllm import runs, stages
from aioserve.lab.reproduce.vllm.simulators import (
    BY_CARD,
    ONE_DEEP,
    OURS,
    RUNS,
    STAGES,
    Row,
    Simulator,
    draw_simulators,
    errors_of,
    heads_csv,
    render_simulators,
    simulators,
    simulators_csv,
)
from aioserve.lab.reproduce.vllm.words import (
    Results,
    as_rows,
    blocks_csv,
    compare_blocks,
    draw_requests,
    render_blocks,
    render_page,
    render_run,
    render_stages,
    requests_csv,
    run_errors,
    stages_csv,
)
from aioserve.lab.terminal import paint
from aioserve.support.arguments import Parser
from aioserve.support.files import write

#: A line of what LLMServingSim says of its own error: metric, statistic, error in percent.
_OWN_ERROR = re.compile(r"(TTFT|TPOT|Latency) (Mean|Median|P90|P99)\s.*\s([+-][0-9.]+)%")
_OWN_METRICS = {"TTFT": "ttft", "TPOT": "tpot", "Latency": "e2e"}
_OWN_STATISTICS = {"Mean": "mean", "Median": "p50", "P90": "p90", "P99": "p99"}


def run_vllm(argv: Sequence[str]) -> int:
    """`python -m aioserve reproduce vllm`; returns the exit code. Raises `ConfigError`."""
    parser = Parser(
        "reproduce vllm",
        description="Predict measured runs of vLLM, and print the predictions beside what was "
        f"measured, where that is given. {RUNS}: runs request by request, from tables of operators "
        f"of their cards. {STAGES}: experiments by stages of their load on H100 cards, from the "
        "tables of aiconfigurator-core, which has to be installed for them.",
    )
    parser.add_argument("result", choices=["vllm"], help="the published result")
    parser.add_argument(
        "sets",
        nargs="*",
        metavar="SET",
        help=f"what to predict: {RUNS}, {STAGES} (default: what the folder has)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FOLDER",
        help=f"folder that has {RUNS} or {STAGES}",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help=f"fit the numbers of the engine of {STAGES} to the given experiments anew, and print "
        "them, before anything is predicted with them",
    )
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FOLDER",
        help="write the predictions to CSV files in this folder",
    )
    add_output(
        parser,
        "--errors",
        help="write the errors that heads of reports on measured cards state to this CSV file "
        "(aioserve/lab/cards/errors.csv of the checkout)",
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write a page, and its pictures beside it"
    )
    add_output(parser, "--json", help="write all numbers to this JSON file")
    arguments = parser.parse_args(argv)
    wanted = arguments.sets or [name for name in (RUNS, STAGES) if (arguments.data / name).is_dir()]
    if unknown := sorted(set(wanted) - {RUNS, STAGES}):
        raise ConfigError(f"unknown set {unknown[0]}; there are {RUNS} and {STAGES}")
    if not wanted:
        raise ConfigError(f"{arguments.data} has neither a folder {RUNS} nor a folder {STAGES}")
    results = Results(engine=stages.ENGINE)
    if RUNS in wanted:
        _predict_runs(arguments.data / RUNS, results)
    if STAGES in wanted:
        _predict_stages(arguments.data / STAGES, results, fits=arguments.fit)
        results.kv_blocks = compare_blocks(results.experiments, [p.run for p in results.runs])
        print(paint(render_blocks(results.kv_blocks)) + "\n")
    if results.simulators:
        print(paint(render_simulators(results.simulators)))
    if arguments.predictions is not None:
        _write_predictions(arguments.predictions, results)
    if arguments.errors is not None:
        write(arguments.errors, heads_csv(results.simulators).encode())
    if arguments.page is not None:
        _write_page(arguments.page, results)
    write(arguments.json, encode(_as_document(results)))
    return 0


def _predict_runs(folder: Path, results: Results) -> None:
    results.runs = runs.predict(folder, num_jobs=os.cpu_count() or 1)
    results.simulators += _simulators_of_runs(results.runs, folder)
    for prediction in results.runs:
        print(paint(render_run(prediction)) + "\n")


def _predict_stages(folder: Path, results: Results, *, fits: bool) -> None:
    experiments = stages.read_experiments(folder)
    measured = stages.read_measured(folder / "measured.csv")
    if fits:
        results.engine = stages.fit(experiments, measured, num_jobs=os.cpu_count() or 1)
        print(f"fitted: {results.engine}\n")
    found = stages.predict(experiments, results.engine, num_jobs=os.cpu_count() or 1)
    results.experiments, results.predicted = experiments, as_rows(experiments, found)
    results.measured = {
        (name, stage, metric): ms
        for name, own in measured.items()
        for (stage, metric), ms in own.items()
    }
    others = stages.read_others(folder / "other_simulators.csv")
    given = [experiment for experiment in experiments if experiment.is_given]
    predictions: dict[str, Mapping[Row, float]] = {OURS: results.predicted}
    for name, depth in ((BY_CARD, 2), (ONE_DEEP, 1)):
        by_card = stages.predict_by_card(
            given, results.engine, depth=depth, num_jobs=os.cpu_count() or 1
        )
        predictions[name] = as_rows(given, by_card)
    predictions |= others
    errors = {name: errors_of(own, results.measured) for name, own in predictions.items()}
    results.simulators += simulators(STAGES, errors)
    table = render_stages(experiments, results.predicted, results.measured, results.engine)
    print(paint(table) + "\n")


def _simulators_of_runs(predictions: Sequence[runs.Prediction], folder: Path) -> list[Simulator]:
    """Return how far off ours is on the given runs, and LLMServingSim by what it states of itself:
    for each measure and statistic, the errors over the runs.
    """
    ours: dict[Row, float] = {}
    theirs: dict[Row, float] = {}
    for prediction in predictions:
        name = prediction.run.name
        for error in run_errors(prediction):
            for statistic, value in {"mean": error.mean, **error.quantiles}.items():
                ours[name, stages.ALL_STAGES, f"{error.measure}_{statistic}"] = abs(value)
        stated = folder / name / "llmservingsim.txt"
        if prediction.run.served is None or not stated.is_file():
            continue
        for metric, statistic, percent in _OWN_ERROR.findall(stated.read_text("utf-8")):
            words = f"{_OWN_METRICS[metric]}_{_OWN_STATISTICS[statistic]}"
            theirs[name, stages.ALL_STAGES, words] = abs(float(percent)) / 100
    return simulators(RUNS, {OURS: ours, "LLMServingSim": theirs})


def _write_predictions(folder: Path, results: Results) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for prediction in results.runs:
        path = folder / f"{prediction.run.name}.csv"
        path.write_text(requests_csv(prediction), "utf-8")
    if results.predicted:
        text = stages_csv(results.experiments, results.predicted, results.measured)
        (folder / "vllm-h100.csv").write_text(text, "utf-8")
    if results.simulators:
        (folder / "simulators.csv").write_text(simulators_csv(results.simulators), "utf-8")
    if results.kv_blocks:
        (folder / "kv_blocks.csv").write_text(blocks_csv(results.kv_blocks), "utf-8")


def _write_page(path: Path, results: Results) -> None:
    path.write_text(render_page(results, path.stem), "utf-8")
    if results.runs:
        path.with_name(f"{path.stem}-requests.svg").write_text(draw_requests(results.runs), "utf-8")
    if results.simulators:
        picture = draw_simulators(results.simulators)
        path.with_name(f"{path.stem}-simulators.svg").write_text(picture, "utf-8")


def _as_document(results: Results) -> dict[str, Any]:
    def plain(row: Row, ms: float) -> dict[str, Any]:
        there = results.measured.get(row)
        return {
            **dict(zip(("id", "stage", "metric"), row, strict=True)),
            "predicted_ms": ms,
            "measured_ms": there,
            "error": None if there is None else ms / there - 1,
        }

    return {
        "runs": [
            {
                "name": prediction.run.name,
                **msgspec.to_builtins(prediction.times),
                "errors": [
                    {**msgspec.to_builtins(error), "mean": error.mean}
                    for error in run_errors(prediction)
                ],
            }
            for prediction in results.runs
        ],
        "engine": msgspec.to_builtins(results.engine),
        "experiments": [plain(row, ms) for row, ms in results.predicted.items()],
        "simulators": msgspec.to_builtins(results.simulators),
        "kv_blocks": msgspec.to_builtins(results.kv_blocks),
    }
