"""Measured runs of vLLM, predicted: on small data in the form in which they are published."""

import csv
import gzip
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aioserve.errors import ConfigError
from aioserve.lab.cards.engines import errors_of_runs, read_errors
from aioserve.lab.cards.measured import EXTRA, PACKAGE
from aioserve.lab.reproduce.commands import run_reproduce
from aioserve.lab.reproduce.vllm import runs, stages
from aioserve.lab.reproduce.vllm.simulators import (
    BY_CARD,
    OURS,
    Score,
    Simulator,
    errors_of,
    heads_csv,
    render_simulators,
    simulators,
    simulators_csv,
    table_of_simulators,
)
from aioserve.lab.reproduce.vllm.words import (
    KvBlocks,
    as_rows,
    blocks_csv,
    blocks_left_out,
    compare_blocks,
    run_errors,
    table_of_blocks,
)
from tests.lab.cards.test_operators import write_tables

ROOT = Path(__file__).parents[3]
MODEL = "meta-llama/Llama-3.1-8B"
NAME = "CARD-Llama-3.1-8B"


def write_run(folder: Path, name: str = NAME) -> None:
    """Write a run whose outcome is kept back: 40 requests, on the tables of a card."""
    tables = folder / "operators"
    tables.mkdir(exist_ok=True)
    write_tables(tables)
    for kind in ("dense", "attention", "per_sequence"):
        target = tables / f"CARD-{MODEL.replace('/', '-')}-bf16-tp1-{kind}.csv"
        (tables / f"card-{kind}.csv").rename(target)
    engine = {"model": MODEL, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    meta = {
        "engine_kwargs": engine,
        "dataset_path": "workloads/trace.jsonl",
        "kv_cache": {"num_gpu_blocks": 400},
    }
    (folder / name).mkdir()
    (folder / name / "meta.json").write_text(json.dumps(meta))
    lines = [
        json.dumps({"arrival_time_ns": 10**6 * 7 * i, "input_toks": 90 + i, "output_toks": 20 + i})
        for i in range(40)
    ]
    with gzip.open(folder / "trace.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))


def give_outcome(folder: Path, host_ms: float, name: str = NAME, cold_ms: float = 0.0) -> None:
    """Write what the lab says of a run with this host as if it had been measured."""
    times = runs.MachineTimes(host_ms, cold_ms)
    [prediction] = [p for p in runs.predict(folder, times=times) if p.run.name == name]
    served, lines = prediction.served, []
    for i, request in enumerate(prediction.run.requests):
        line = {
            "input_toks": request.prompt_tokens,
            "output_toks": request.output_tokens,
            "arrival_time": 1e9 + request.arrival,  # of another clock than the others
            "queued_ts": 500 + served.queued[i],
            "first_token_ts": 500 + served.first[i],
            "last_token_ts": 500 + served.last[i],
        }
        lines.append(json.dumps(line))
    (folder / name / "requests.jsonl").write_text("\n".join(lines))


def test_a_host_is_found_again_and_the_run_predicted(tmp_path: Path) -> None:
    write_run(tmp_path)
    give_outcome(tmp_path, 1.5)
    [prediction] = runs.predict(tmp_path)
    assert prediction.times.host_ms == pytest.approx(1.5, abs=0.1)
    assert prediction.times.fitted_to == NAME
    for error in run_errors(prediction):
        assert abs(error.mean) < 0.05
        assert error.median_of_requests < 0.05


def test_a_first_step_that_compiles_kernels_is_no_time_of_the_host(tmp_path: Path) -> None:
    write_run(tmp_path)
    give_outcome(tmp_path, 1.5, cold_ms=400.0)
    [prediction] = runs.predict(tmp_path)
    assert prediction.times.cold_ms == pytest.approx(400, abs=5)
    assert prediction.times.host_ms == pytest.approx(1.5, abs=0.1)
    for error in run_errors(prediction):
        assert abs(error.mean) < 0.05


def test_a_run_that_is_kept_back_has_the_host_of_its_machine(tmp_path: Path) -> None:
    write_run(tmp_path)
    give_outcome(tmp_path, 1.5)
    for path in (tmp_path / "operators").iterdir():
        path.unlink()
    write_run(tmp_path, "CARD-later")
    given, kept = runs.predict(tmp_path)
    assert kept.run.served is None
    assert kept.times == given.times
    assert kept.times.fitted_to == NAME
    assert run_errors(kept) == []


def test_a_machine_without_a_given_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    with pytest.raises(ConfigError, match="no given run on CARD to fit its host to"):
        runs.predict(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", r"meta.json: it lacks 'engine_kwargs'"),
        ("{", r"meta.json: "),
        (
            '{"engine_kwargs": {"model": "mine"}, "dataset_path": "t.jsonl"}',
            "unknown model mine; known: meta-llama/Llama-3.1-8B",
        ),
    ],
)
def test_a_bad_meta_is_named(tmp_path: Path, text: str, words: str) -> None:
    write_run(tmp_path)
    (tmp_path / NAME / "meta.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        runs.read_runs(tmp_path)


def test_a_request_without_its_times_is_named_by_line(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / NAME / "requests.jsonl").write_text('{"arrival_time": 1}')
    with pytest.raises(ConfigError, match=r"requests.jsonl:1: expected numbers"):
        runs.read_runs(tmp_path)


def test_the_command_writes_a_prediction_of_each_request(tmp_path: Path) -> None:
    data = tmp_path / "vllm-rtx"
    data.mkdir()
    write_run(data)
    give_outcome(data, 1.0)
    page = tmp_path / "page.md"
    words = ["--data", str(tmp_path), "--predictions", str(tmp_path / "out"), "--page", str(page)]
    assert run_reproduce(["vllm", *words]) == 0
    with (tmp_path / "out" / f"{NAME}.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["output_tokens"]) for line in lines] == [20 + i for i in range(40)]
    for line in lines:
        e2e = float(line["last_token_s"]) - float(line["queued_s"])
        assert float(line["e2e_s"]) == pytest.approx(e2e, abs=2e-4)
    assert f"| {NAME} | end to end |" in page.read_text()
    [[limit, error, verdict]] = [
        line.strip("| ").split(" | ")[2:]
        for line in page.read_text().splitlines()
        if line.startswith(f"| {NAME} | end to end, mean |")
    ]
    assert limit == "1.0%"
    assert verdict == ("reached" if float(error[:-1]) <= 1 else "missed")
    assert (tmp_path / "page-requests.svg").read_text().count("<circle") == 3 * 40


@pytest.mark.parametrize(
    ("words", "error"),
    [(["vllm-a100"], "unknown set vllm-a100"), ([], "neither a folder vllm-rtx nor")],
)
def test_what_is_not_there_is_refused(tmp_path: Path, words: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        run_reproduce(["vllm", *words, "--data", str(tmp_path)])


# Experiments by stages.

#: A card on which every token of a step takes as long, and every step as long again.
SOURCE = """
from aioserve.runner.step_times import StepTimeOptions, StepTimeSource

class Mine(StepTimeSource):
    class Options(StepTimeOptions, frozen=True, kw_only=True):
        model: str
        tensor_parallel: int = 1
        launch_ms: float = 0.0

    def seconds(self, features, prefills):
        least = 1e-3 * 48 * self.options.launch_ms * ("Scout" in self.options.model)
        tokens = features.num_prefill_tokens + features.num_decodes
        return max(4e-3 + 2e-5 * tokens, least)
"""
SCOUT = "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic"


def make_experiment(name: str, model: str = "m", cards: int = 1) -> stages.Experiment:
    """Return a small experiment of two stages with two groups of two users."""
    load = stages.SharedPrefix(2, 2, 32, 64, 30)
    both = [stages.Stage(4.0, 20.0), stages.Stage(8.0, 20.0)]
    return stages.Experiment(name, model, cards, 16, 256, 500, load, both, "given")


@pytest.fixture
def source(tmp_path: Path) -> str:
    """The step times of the tests, as a file of a user."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return f"{path}:Mine"


def test_a_load_is_drawn_as_inference_perf_draws_it() -> None:
    workload, stage_of = stages.as_workload(make_experiment("a"), share=1.0)
    requests = workload.requests
    assert [int((stage_of == i).sum()) for i in (0, 1)] == [80, 160]
    assert requests[79].arrival == pytest.approx(20.0)  # gaps are scaled to the stage
    assert requests[-1].arrival == pytest.approx(40.0)
    # Four users in turn, from the first one again in each stage; each asks the same each time.
    assert requests[0].pieces == requests[4].pieces == requests[80].pieces
    assert len({request.pieces for request in requests}) == 4
    assert len({request.pieces[0] for request in requests}) == 2


def test_the_engine_that_made_a_run_is_found_again(source: str) -> None:
    experiments = [
        make_experiment("one"),
        make_experiment("two", cards=2),
        make_experiment("eager", SCOUT, 2),
        make_experiment("recounted", stages.RECOUNTED),
    ]
    engine = stages.Engine(0.4, 1.5, 0.5, 2.0, 0.8)
    made = stages.predict(experiments, engine, source=source)
    measured = {e.id: rows for e, rows in zip(experiments, made, strict=True)}
    found = stages.fit(experiments, measured, source=source)
    assert found.host_ms == pytest.approx(engine.host_ms, rel=0.5, abs=0.3)
    assert found.host_cards_ms == pytest.approx(engine.host_cards_ms, rel=0.3)
    assert found.launch_ms == pytest.approx(engine.launch_ms, rel=0.1)
    assert found.recount == pytest.approx(engine.recount)
    again = stages.predict(experiments, found, source=source)
    for there, ours in zip(made, again, strict=True):
        assert ours[-1, "e2e_mean"] == pytest.approx(there[-1, "e2e_mean"], rel=0.1)


def test_a_client_sees_the_front_end_in_every_request(source: str) -> None:
    experiment = make_experiment("a")
    without = stages.Engine(0.0, 0.0, 0.0, 0.0, 1.0)
    with_front = msgspec.structs.replace(without, front_ms=5.0)
    [before] = stages.predict([experiment], without, source=source)
    [after] = stages.predict([experiment], with_front, source=source)
    for metric in ("e2e_mean", "e2e_p99", "ttft_mean", "ttft_p90"):
        assert after[0, metric] - before[0, metric] == pytest.approx(5.0)
    assert after[0, "itl_mean"] - before[0, "itl_mean"] == pytest.approx(5.0 / 30)


def test_simulators_are_compared_on_the_rows_that_are_given() -> None:
    row, other, kept = ("a", -1, "e2e_mean"), ("a", 0, "e2e_mean"), ("b", -1, "e2e_mean")
    measured = {row: 100.0, other: 100.0}
    ours = {row: 110.0, other: 96.0, kept: 7.0}
    predictions = {OURS: ours, "other": {row: 300.0}}
    errors = {name: errors_of(own, measured) for name, own in predictions.items()}
    [mine, theirs] = simulators("vllm-h100", errors)
    assert (mine.rows, theirs.rows) == (2, 1)
    assert mine.scores["e2e_mean"].mape == pytest.approx(0.07)
    assert mine.scores["e2e_mean"].median == pytest.approx(np.median([0.1, 0.04]))
    assert theirs.scores["e2e_mean"].mape == pytest.approx(2.0)
    assert "ttft_mean" not in theirs.scores


def test_ours_stands_beside_a_simulator_over_the_rows_that_it_has() -> None:
    rows = [("a", stage, "e2e_mean") for stage in range(4)]
    errors = {
        OURS: dict(zip(rows, (0.1, 0.2, 0.3, 0.4), strict=True)),
        BY_CARD: dict(zip(rows, (0.5, 0.6, 0.7, 0.8), strict=True)),
        "other": {rows[0]: 0.9, rows[3]: 0.7},
    }
    [mine, card, other] = simulators("vllm-h100", errors)
    assert (mine.scores["e2e_mean"].rows, mine.beside, card.beside) == (4, {}, {})
    assert other.beside[OURS]["e2e_mean"].rows == 2
    assert other.beside[OURS]["e2e_mean"].median == pytest.approx(0.25)
    assert other.beside[BY_CARD]["e2e_mean"].mape == pytest.approx(0.65)
    found = [mine, card, other]
    lines = list(csv.DictReader(simulators_csv(found).splitlines()))
    [line] = [x for x in lines if (x["simulator"], x["metric"]) == ("other", "e2e_mean")]
    assert (line["rows"], line["aioserve_rows"], line["aioserve_median_error"]) == (
        "2",
        "2",
        "0.2500",
    )
    assert line["card_median_error"] == "0.6500"
    names = [row[0] for row in table_of_simulators(found)]
    assert names[-3:] == ["**other**", "aioserve, the same rows", "aioserve --card, the same rows"]
    assert "aioserve, the same rows" in render_simulators(found)


def test_no_row_is_left_out_where_simulators_are_compared() -> None:
    row, other = ("a", -1, "e2e_mean"), ("a", 0, "ttft_mean")
    with pytest.raises(ConfigError, match="ttft_mean of experiment a, stage 0, was predicted, and"):
        errors_of({row: 1.0, other: 2.0}, {row: 1.0})
    for ours in ({OURS: {row: 0.1}}, {OURS: {row: 0.1, other: 0.2}, BY_CARD: {row: 0.1}}):
        with pytest.raises(ConfigError, match=r"is a row of another, and aioserve.* lacks it"):
            simulators("vllm-h100", {**ours, "another": {row: 0.3, other: 0.4}})


def test_heads_of_reports_have_the_errors_of_the_card_alone() -> None:
    row = ("a", -1, "e2e_mean")
    found = simulators("vllm-h100", {OURS: {row: 0.1}, BY_CARD: {row: 0.2}, "other": {row: 0.3}})
    found += simulators("vllm-rtx", {OURS: {row: 0.4}})
    lines = list(csv.DictReader(heads_csv(found).splitlines()))
    assert [(line["cards"], line["engine"], float(line["median_error"])) for line in lines] == [
        ("h100_sxm", "vllm", 0.2),
        ("RTX4090 RTXPRO6000", "vllm", 0.4),
    ]


def published_lines() -> list[dict[str, str]]:
    """The lines of the table of simulators that is published."""
    path = ROOT / "benchmarks" / "published" / "vllm" / "simulators.csv"
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_shipped_errors_are_those_of_the_published_table() -> None:
    own = [line for line in published_lines() if line["simulator"] in (OURS, BY_CARD)]
    known = {(x["set"], x["simulator"], x["metric"]): float(x["median_error"]) for x in own}
    assert set(known) >= {("vllm-h100", BY_CARD, "e2e_mean"), ("vllm-rtx", OURS, "tpot_p99")}
    shipped = {}
    for error in read_errors():
        which = ("vllm-h100", BY_CARD) if "h100" in error.cards else ("vllm-rtx", OURS)
        shipped[*which, error.metric] = error.median_error
    heads = {key: error for key, error in known.items() if key[1] != OURS or key[0] == "vllm-rtx"}
    assert len(heads) == 7 + 12
    assert shipped == heads
    assert len(read_errors()) == len(heads)


def test_the_page_rounds_the_numbers_of_the_published_table_as_heads_of_reports_do() -> None:
    found: dict[tuple[str, str], Simulator] = {}
    for line in published_lines():
        key = line["set"], line["simulator"]
        own = found.setdefault(key, Simulator(key[1], key[0], {}, {}))
        for name, scores, column in (
            ("", own.scores, ""),
            (OURS, own.beside.setdefault(OURS, {}), "aioserve_"),
            (BY_CARD, own.beside.setdefault(BY_CARD, {}), "card_"),
        ):
            if line[f"{column}rows"]:
                numbers = (float(line[f"{column}{kind}"]) for kind in ("median_error", "mape"))
                scores[line["metric"]] = Score(int(line[f"{column}rows"]), *numbers)
            elif name and not scores:
                del own.beside[name]
    page = (ROOT / "docs" / "predicting-vllm.md").read_text()
    rows = table_of_simulators(list(found.values()))
    assert len(rows) > 15
    for row in rows:
        assert f"| {' | '.join(row)} |" in page
    cards = (ROOT / "docs" / "cards.md").read_text().replace("\n> ", " ")
    assert errors_of_runs(EXTRA, "h100_sxm, vllm 0.15") in cards


# The KV cache.


def test_blocks_are_compared_where_both_are_known() -> None:
    known = KvBlocks("vllm-h100", ("1", "2"), "org/model", 2, 2048, 1000, 900)
    unknown = KvBlocks("vllm-rtx", ("X-run",), "org/other", 1, 2048, 500, None, "no tables")
    assert known.difference == pytest.approx(-0.1)
    head, line = table_of_blocks([known, unknown])
    assert dict(zip(head, line, strict=True)) == {
        "runs": "1, 2",
        "model": "model",
        "cards": "2",
        "step, tokens": "2,048",
        "vLLM": "1,000",
        "here": "900",
        "difference": "-10.0%",
    }
    assert blocks_left_out([known, unknown]) == ["X-run: vLLM had 500 blocks; no tables."]
    lines = list(csv.DictReader(blocks_csv([known, unknown]).splitlines()))
    assert [line["difference"] for line in lines] == ["-0.1000", ""]


def test_the_page_of_cards_has_the_blocks_that_the_command_printed() -> None:
    page = (ROOT / "docs" / "cards.md").read_text()
    with (ROOT / "benchmarks" / "published" / "vllm" / "kv_blocks.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["difference"]]
    assert len(lines) > 5
    for line in lines:
        numbers = f"{int(line['reported']):,} | {int(line['ours']):,}"
        assert f"| {numbers} | {100 * float(line['difference']):+.1f}% |" in page


def two_alike() -> list[stages.Experiment]:
    """Two experiments of the same model on the same card."""
    experiment = make_experiment("a", "Qwen/Qwen2.5-7B-Instruct")
    return [experiment, make_experiment("b", experiment.model)]


def test_without_their_package_blocks_of_h100s_are_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    [line] = compare_blocks(two_alike(), [])
    assert "which is not installed" in line.why
    assert (line.ours, line.runs) == (None, ("a", "b"))


def test_blocks_of_a_card_without_tables_are_left_out_with_the_reason(tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE)
    write_run(tmp_path)
    line, other = compare_blocks(two_alike(), runs.read_runs(tmp_path))
    assert line.ours is not None
    assert 50_000 < line.ours < 80_000
    assert line.runs == ("a", "b")
    assert "no tables of this card" in other.why


def test_rows_stand_in_the_order_of_the_files(source: str) -> None:
    experiment = make_experiment("a")
    found = stages.predict([experiment], stages.ENGINE, share=0.5, source=source)
    rows = list(as_rows([experiment], found))
    assert rows[0] == ("a", -1, "e2e_mean")
    assert len(rows) == 3 * len(stages.METRICS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[{}]", "experiments.json: .*id"),
        ("[", "experiments.json: "),
    ],
)
def test_bad_experiments_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "experiments.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        stages.read_experiments(tmp_path)


def test_bad_measurements_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    path.write_text("id,stage,metric,measured_ms\na,0,e2e_mean,slow\n")
    with pytest.raises(ConfigError, match=r"measured.csv:2: could not convert"):
        stages.read_measured(path)
    path.write_text("id,stage,metric\n")
    with pytest.raises(ConfigError, match="lacks the column measured_ms"):
        stages.read_measured(path)


def test_h100s_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    experiment = make_experiment("a", "Qwen/Qwen2.5-7B-Instruct")
    with pytest.raises(ConfigError, match="pip install aiconfigurator-core"):
        stages.predict([experiment], stages.ENGINE)


def test_h100s_are_predicted_with_their_package() -> None:
    pytest.importorskip(PACKAGE)
    experiment = make_experiment("a", "Qwen/Qwen2.5-7B-Instruct")
    [rows] = stages.predict([experiment], stages.ENGINE)
    assert 100 < rows[-1, "e2e_mean"] < 1000
