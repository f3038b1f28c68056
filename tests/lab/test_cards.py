"""Measured cards: ready profiles without the package, tables of any card with it."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from aioserve.cli.main import main
from aioserve.errors import ConfigError
from aioserve.lab.cards.engines import depth_of, errors_of_runs, host_of, least_ms_of
from aioserve.lab.cards.tables import (
    CardTables,
    TableOptions,
    TableStepTimes,
    rising_curve,
    rising_grid,
    write_tables,
)
from aioserve.lab.zoo import standing
from aioserve.runner.step_times import StepTimeSource, available_profiles, make_step_times
from aioserve.scheduler.output import StepFeatures
from aioserve.testing.step_times import StepTimesContract, StepTimesSubject
from tests.lab.traffic import record

READY = "h100-llama-3.1-8b"
SMALL = TableOptions(
    machine="a toy",
    source="invented",
    tables=CardTables(
        dense_ms=rising_curve((1, 100, 1000), (5, 6, 30)),
        head_ms=rising_curve((1, 100), (1, 2)),
        prefill_ms=rising_grid((1, 100, 1000), (0, 1000), ((1, 1), (2, 3), (20, 40))),
        decode_ms=rising_grid((1, 100), (10, 1000), ((1, 2), (3, 30))),
        kv_tokens=((512, 9000), (2048, 8000)),
    ),
)

LAUNCHED = msgspec.structs.replace(SMALL, least_ms=9)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class TestTables(StepTimesContract):
    """The tables of a toy."""

    @pytest.fixture
    def subject(self) -> StepTimesSubject:
        return StepTimesSubject(TableStepTimes(SMALL), "a toy")


class TestLaunchedTables(StepTimesContract):
    """The tables of a toy whose kernels take 9 ms to launch."""

    @pytest.fixture
    def subject(self) -> StepTimesSubject:
        return StepTimesSubject(TableStepTimes(LAUNCHED), "a toy")


def milliseconds(decodes: int, context: int, *prefills: tuple[int, int]) -> float:
    rows = [(n, before + n) for n, before in prefills]
    features = StepFeatures.of(decodes, decodes * context + sum(end for _, end in rows), rows)
    return 1e3 * TableStepTimes(SMALL).seconds(features, rows)


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert milliseconds(1, 10) == pytest.approx(5 + 1 + 1)
    assert milliseconds(100, 505) == pytest.approx(6 + 2 + (3 + 30) / 2)
    assert milliseconds(0, 0, (100, 500)) == pytest.approx(6 + 1 + 2.5)
    # two prompts share one launch of 1 ms, and a step with both kinds pays for both
    assert milliseconds(0, 0, (50, 0), (50, 0)) == pytest.approx(6 + 1 + 1 / 99 + 1 + 2 * 0.7, 0.1)
    mixed = milliseconds(1, 10, (99, 0))
    assert mixed == pytest.approx(6 + 1 + 1 / 99 + 1 + milliseconds(0, 0, (99, 0)) - 7, 0.02)


def test_a_step_is_padded_to_the_next_size_of_a_graph() -> None:
    padded = TableStepTimes(SMALL).from_options(
        {"tables": _plain(SMALL)["tables"], "graph_sizes": [100]}
    )
    one, hundred = StepFeatures(0, 1, 10, 0), StepFeatures(0, 100, 1000, 0)
    assert 1e3 * padded.seconds(one, ()) == pytest.approx(6 + 1 + 1)
    assert padded.seconds(hundred, ()) == TableStepTimes(SMALL).seconds(hundred, ())


def _plain(options: TableOptions) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = msgspec.to_builtins(options)
    return found


def test_no_step_is_shorter_than_the_launches_of_its_kernels(tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(write_tables(LAUNCHED, "a toy"))
    launched, plain = make_step_times(str(path), {}), TableStepTimes(SMALL)
    few, many = StepFeatures(0, 1, 10, 0), StepFeatures(0, 90, 90_000, 0)
    assert 1e3 * plain.seconds(few, ()) < 9
    assert 1e3 * launched.seconds(few, ()) == pytest.approx(9)
    assert launched.seconds(many, ()) == plain.seconds(many, ()) > 9e-3


def test_layers_of_llama_4_alone_are_launched_one_by_one() -> None:
    llama_4 = "Llama4ForConditionalGeneration"
    assert least_ms_of("vllm", "0.24.0", llama_4, 48) == pytest.approx(0.345 * 48)
    assert least_ms_of("vllm", "0.24.0", "LlamaForCausalLM", 48) == 0
    assert least_ms_of("vllm", "0.9.0", llama_4, 48) == 0
    assert least_ms_of("trtllm", "1.2", llama_4, 48) == 0


def test_measured_times_that_fall_are_evened_out() -> None:
    assert rising_curve((1, 2, 3, 4), (1, 4, 2, 9)).ms == (1, 3, 3, 9)
    assert rising_grid((1, 2), (1, 2), ((1, 5), (3, 2))).ms == ((1, 5), (3, 5))


def test_written_tables_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(write_tables(SMALL, "a toy"))
    again = make_step_times(str(path), {"host_ms": 2})
    assert (again.machine, again.source, again.rates.host_ms) == ("a toy", "invented", 2)
    step = StepFeatures(0, 7, 700, 0)
    assert again.seconds(step, ()) == TableStepTimes(SMALL).seconds(step, ())
    assert again.num_kv_tokens(1280, 1) == 8500


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dense_ms", {"at": [1, 1], "ms": [1, 2]}, "at must have rising numbers"),
        ("dense_ms", {"at": [1, 2], "ms": [1]}, "at has 2 places and ms 1 values"),
        ("head_ms", {"at": [1, 2], "ms": [2, 1]}, "ms must not fall"),
        ("decode_ms", {"by": [1], "at": [1, 2], "ms": [[1]]}, "a line for each place of by"),
        ("prefill_ms", {"by": [1, 2], "at": [1], "ms": [[2], [1]]}, "ms must not fall"),
    ],
)
def test_bad_tables_are_refused(field: str, value: object, message: str) -> None:
    tables = {**_plain(SMALL)["tables"], field: value}
    with pytest.raises(ConfigError, match=message):
        make_step_times("tables", {"tables": tables})


def test_a_comparison_says_which_card_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "fcfs", "--workload", "mixed", "--limit", "20", "--seeds", "1"]
    assert main([*words, "--card", READY, "--card", "l40s-llama-3.1-8b"]) == 0
    said = capsys.readouterr().out
    assert f"fcfs {READY}" in said
    assert "Meta-Llama-3.1-8B on h100_sxm, vllm 0.24.0" in said
    assert "Meta-Llama-3.1-8B on l40s" in said
    assert "measured operators of aiconfigurator-core" in said
    assert re.search(r"against their source: median .*largest", said)
    # How right such predictions were of whole runs, as the published comparison has it.
    published = Path(__file__).parents[2] / "benchmarks" / "published" / "vllm" / "simulators.csv"
    with published.open(newline="") as file:
        [row] = [
            row
            for row in csv.DictReader(file)
            if row["simulator"] == "aioserve --card" and row["metric"] == "ttft_mean"
        ]
    assert f"mean TTFT {float(row['median_error']):.1%}" in said
    assert said.count("no run on this card has been compared") == 1  # of the L40S


def test_a_comparison_of_no_machine_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "fcfs", "--workload", "mixed", "--limit", "5", "--seeds", "1"]
    default = "default profile, not your machine: calibrate, or give --card"
    assert main(words) == 0
    assert default in capsys.readouterr().out
    assert main([*words, "--set", "runner.profile=zoo-1"]) == 0
    said = capsys.readouterr().out
    assert default not in said
    assert "profile zoo-1 says: computed from data sheets" in said
    assert main([*words, "--set", "runner.step_base_ms=3"]) == 0
    assert default not in capsys.readouterr().out


@pytest.mark.parametrize(("profile", "host_ms"), [(READY, 0.0), ("h100x4-llama-3.1-70b-fp8", 1.4)])
def test_a_card_has_the_host_of_its_engine_unless_it_is_stated(
    profile: str, host_ms: float
) -> None:
    assert make_step_times(profile, {}).rates.host_ms == host_ms
    assert make_step_times(profile, {"host_ms": 0.3}).rates.host_ms == 0.3
    assert host_of("vllm", "0.24.0", 4 if host_ms else 1)[0] == host_ms
    assert host_of("trtllm", "1.2", 4) == (0.0, "no run of trtllm 1.2 has been compared")


def test_errors_of_one_engine_are_not_stated_of_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["compare", "fcfs", "--workload", "mixed", "--limit", "5", "--seeds", "1"]
    other = "h200-llama-3.1-70b-fp8-trtllm"
    assert main([*words, "--card", other]) == 0
    said = capsys.readouterr().out
    assert "known of vLLM alone: no run of TensorRT-LLM has been compared" in said
    assert "So predicted" not in said
    assert "0 ms of the engine's host (no run of trtllm" in said
    assert main([*words, "--card", other, "--set", "runner.step_host_ms=2"]) == 0
    assert "and 2 ms of the engine's host: measured" in capsys.readouterr().out


def test_the_head_says_on_what_the_host_of_a_card_was_fitted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["compare", "fcfs", "--workload", "mixed", "--limit", "5", "--seeds", "1"]
    assert main([*words, "--card", "h100x4-llama-3.1-70b-fp8"]) == 0
    said = capsys.readouterr().out
    assert "1.4 ms of the engine's host (fitted to one run on four H100 of vLLM 0.15" in said
    assert "So predicted" in said


def test_no_run_was_compared_with_tables_of_another_source() -> None:
    assert TableStepTimes(SMALL).errors_of_runs() == ""
    assert "on this card" not in errors_of_runs("operator tables x", "RTX4090-Llama")
    assert "on this card" in errors_of_runs("operator tables x", "MI300X-Llama")


def test_whose_steps_tables_are_is_stated_and_not_read_from_words(tmp_path: Path) -> None:
    def said(machine: str, engine: str) -> str:
        tables = {"source": "measured operators of aiconfigurator-core", "machine": machine}
        path = tmp_path / "toy.yaml"
        path.write_text(
            write_tables(msgspec.structs.replace(SMALL, **tables, engine=engine), "a toy")
        )
        return make_step_times(str(path), {}).errors_of_runs()

    assert "no run of SGLang has been compared" in said("a card", "sglang")
    assert "no run of mine has been compared" in said("a card", "mine")
    assert said("a card, sglang 0.5", "vllm").startswith("So predicted")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--card", "h100-llama-3.1"], "unknown step-time profile 'h100-llama-3.1'"),
        (["--card-model", "x/y"], "--card-model is for a card: give --card NAME"),
        (["--card", READY, "--live"], "--card is simulated: give it without --live"),
    ],
)
def test_a_card_that_there_is_not_is_refused(
    words: list[str], message: str, refused: Callable[[list[str], str], None]
) -> None:
    refused(["compare", "fcfs", "--workload", "mixed", *words], message)


def test_the_simulated_pool_is_that_of_the_card() -> None:
    from aioserve.config import EngineConfig
    from aioserve.lab.simulation.stepped_engine import Blueprint

    config = EngineConfig.load(None, [("runner.profile", READY), ("cache.block_size", 16)])
    blueprint = Blueprint(config)
    assert blueprint.runner_info.num_kv_blocks == pytest.approx(27_300, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        ([("runner.profile", READY)], 2),
        ([("runner.profile", READY), ("scheduler.pipeline_depth", 1)], 1),
        ([("runner.profile", READY), ("runner.simulated_draft_tokens", 3)], 1),
        ([("runner.profile", "h200-llama-3.1-70b-fp8-trtllm")], 1),
        ([], 1),
    ],
    ids=["vllm", "stated", "drafts", "trtllm", "no card"],
)
def test_a_card_of_an_asynchronous_engine_has_two_steps_under_way(
    settings: list[tuple[str, object]], depth: int
) -> None:
    from aioserve.config import EngineConfig
    from aioserve.lab.simulation.stepped_engine import Blueprint

    assert Blueprint(EngineConfig.load(None, settings)).config.scheduler.depth == depth


def test_a_first_token_waits_for_the_step_that_is_planned_already() -> None:
    """Two steps under way are what `scheduler.pipeline_depth: 2` is, and no less than one."""
    from aioserve.config import EngineConfig
    from aioserve.lab.simulation.run import simulate
    from aioserve.lab.workloads.synthetic import WorkloadSource

    workload = WorkloadSource(path="mixed", limit=40).load(1)
    found = {}
    for depth in (None, 1, 2):
        config = EngineConfig.load(
            "chunked_prefill", [("runner.profile", READY), ("scheduler.pipeline_depth", depth)]
        )
        requests = simulate(config, workload).requests
        found[depth] = [request.token_times[0] - request.arrival for request in requests]
    assert found[None] == found[2]
    assert sum(found[2]) > 1.1 * sum(found[1])


def test_groups_of_a_fleet_have_cards_policies_and_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "replicas: 3\ngroups:\n"
        f"  - {{replicas: 1, card: {READY}, policy: chunked_prefill, options: {{chunk_size: 256}},"
        " price_per_hour: 4}\n"
        "  - {replicas: 2, card: toy.yaml, price_per_hour: 1}\nrouters: [round_robin]\n"
    )
    # a tenth of an ordinary card's decode, and 100 W
    (tmp_path / "toy.yaml").write_text(
        write_tables(SMALL, "a toy").replace("busy_watts: 0", "busy_watts: 100")
    )
    words = ["compare", "fcfs", "--workload", "mixed", "--limit", "30", "--seeds", "1"]
    found = tmp_path / "found.json"
    assert main([*words, "--fleet", str(fleet), "--json", str(found)]) == 0
    said = capsys.readouterr().out
    assert "h100_sxm" in said
    assert "on a toy: invented" in said
    totals = json.loads(found.read_text())["results"][0]["totals"]
    assert totals["joules_per_output_token"] > 0
    hours = 1e6 / totals["output_tokens_per_second"] / 3600
    assert totals["price_per_million_output"] == pytest.approx(6 * hours, rel=1e-3)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("card: nowhere", "unknown step-time profile 'nowhere'"),
        ("policy: fcfss", "unknown policy 'fcfss'"),
        ("policy: chunked_prefill, options: {chunk: 3}", "options of .*chunk"),
        ("options: {chunk_size: 3}", "options of a group are of its policy: give policy as well"),
        ("card_tp: 2", "card_tp of a group is of its card: give card as well"),
    ],
)
def test_a_group_that_cannot_be_is_refused(
    group: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(f"replicas: 2\ngroups: [{{replicas: 2, {group}}}]\n")
    words = ["compare", "fcfs", "--workload", "mixed", "--limit", "3", "--fleet", str(fleet)]
    assert main(words) != 0
    assert re.search(message, capsys.readouterr().err)


def test_an_engine_alone_has_a_price_and_draws_power(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = ["compare", "fcfs", "--workload", "mixed", "--limit", "20", "--seeds", "1"]
    words += ["--card", READY, "--price-per-hour", "3", "--json", str(found)]
    assert main(words) == 0
    totals = json.loads(found.read_text())["results"][0]["totals"]
    hours = 1e6 / totals["output_tokens_per_second"] / 3600
    assert totals["price_per_million_output"] == pytest.approx(3 * hours, rel=1e-3)
    # at most 700 W for as long as a million tokens take
    assert 0 < totals["joules_per_output_token"] <= 700 * 3600 * hours / 1e6 * 1.001


def test_a_sweep_says_what_tokens_and_requests_cost_under_each_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, page = tmp_path / "found.json", tmp_path / "found.html"
    words = ["sweep", "chunked_prefill", "--workload", "mixed", "--limit", "40", "--seeds", "2"]
    words += ["--set", "scheduler.options.chunk_size=64,1024", "--card", READY]
    files = ["--json", str(found), "--html", str(page)]
    assert main([*words, "--price-per-hour", "3", *files]) == 0
    said = capsys.readouterr().out
    assert "J per output token" in said
    assert "J per request" in said
    assert "the price of a million output tokens" in said
    rows = [line.split() for line in said.splitlines()]
    lines = {row[0]: row for row in rows if row and row[0] in ("64", "1024")}
    results = {each["name"]: each["totals"] for each in json.loads(found.read_text())["results"]}
    for name, totals in results.items():
        costs = [totals["joules_per_output_token"], totals["joules_per_request"]]
        costs.append(totals["price_per_million_output"])
        assert [float(word) for word in lines[name][-3:]] == pytest.approx(costs, rel=0.02)
    assert results["64"]["joules_per_request"] > results["1024"]["joules_per_request"]
    assert "price, 1M output" in page.read_text()
    assert main(words) == 0  # without a price there is none
    assert "price" not in capsys.readouterr().out


def test_a_sweep_over_rates_says_what_tokens_and_requests_cost_at_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, page = tmp_path / "found.json", tmp_path / "found.html"
    words = ["sweep", "fcfs", "chunked_prefill", *SEARCH, "--limit", "40", "--seeds", "2"]
    words += ["--rates", "5,40", "--card", READY, "--price-per-hour", "3"]
    assert main([*words, "--json", str(found), "--html", str(page)]) == 0
    said = capsys.readouterr().out
    for label in ("J per output token", "J per request", "price, 1M output"):
        assert label in said
        assert label in page.read_text()
    for curve in json.loads(found.read_text())["curves"]:
        idle, busy = curve["points"]  # an hour has its price, busy or not
        assert idle["price_per_million_output"] > 2 * busy["price_per_million_output"] > 0
        assert busy["joules_per_request"] > busy["joules_per_output_token"] > 0
    assert main(["sweep", "fcfs", *SEARCH, "--seeds", "1", "--rates", "5"]) == 0
    said = capsys.readouterr().out
    assert "price" not in said
    assert "J per" not in said


def test_a_search_chooses_by_the_energy_of_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", "chunked_prefill", "--workload", "mixed", "--limit", "40", "--seeds", "2"]
    words += ["--set", "scheduler.options.chunk_size=32,1024", "--by", "joules_per_output_token"]
    assert main([*words, "--card", READY]) == 0
    assert "chunk_size=1024" in capsys.readouterr().out
    assert main(words) != 0
    assert "Energy needs the watts of the machine" in capsys.readouterr().err


SEARCH = ["--workload", "mixed", "--limit", "150", "--slo", "ttft=0.5,gap=0.06"]


def test_a_search_says_how_many_cards_a_workload_needs_and_what_a_day_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    words = ["search", "fcfs", "chunked_prefill", *SEARCH, "--time-scale", "0.2"]
    words += ["--goodput", "0.9"]
    words += ["--replicas", "16", "--price-per-hour", "2", "--json", str(found)]
    assert main([*words, "--card", READY, "--card", "l40s-llama-3.1-8b"]) == 0
    needs = json.loads(found.read_text())
    assert [need["name"] for need in needs] == [
        f"{policy} {card}"
        for card in (READY, "l40s-llama-3.1-8b")
        for policy in ("fcfs", "chunked_prefill")
    ]
    chunked = needs[1]
    assert chunked["replicas"] < needs[3]["replicas"]  # an L40S is slower than an H100
    assert chunked["price_per_day"] == 48 * chunked["replicas"]
    assert 0 < chunked["kwh_per_day"] <= 0.7 * 24 * chunked["replicas"]
    for need in needs:
        met = {attempt["replicas"]: attempt["is_met"] for attempt in need["attempts"]}
        if need["replicas"] is not None:
            assert met[need["replicas"]]
            assert need["replicas"] == 1 or met[need["replicas"] - 1] is False
    said = capsys.readouterr().out
    assert "Meta-Llama-3.1-8B on h100_sxm" in said
    assert "price a day" in said


def test_a_fleet_of_two_cards_is_multiplied_whole(tmp_path: Path) -> None:
    found, fleet = tmp_path / "found.json", tmp_path / "fleet.yaml"
    fleet.write_text(
        "replicas: 3\ngroups:\n"
        f"  - {{replicas: 1, card: {READY}, price_per_hour: 4}}\n"
        "  - {replicas: 2, card: l40s-llama-3.1-8b, price_per_hour: 1}\n"
    )
    words = ["search", "chunked_prefill", *SEARCH, "--time-scale", "0.3", "--goodput", "0.5"]
    words += ["--fleet", str(fleet)]
    assert main([*words, "--replicas", "12", "--json", str(found)]) == 0
    (need,) = json.loads(found.read_text())
    assert {attempt["replicas"] % 3 for attempt in need["attempts"]} == {0}
    assert need["price_per_day"] == 24 * 6 * need["replicas"] / 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chunked_prefill"], "several configurations are searched with --replicas only"),
        (["--price-per-hour", "3"], "--price-per-hour is for --replicas"),
        (["--replicas", "4", "--price-per-hour", "nan"], "must be a number of at least 0, got nan"),
        (["--replicas", "4", "--price-per-hour", "-1"], "must be a number of at least 0, got -1"),
        (["--replicas", "4", "--by", "e2e:mean"], "--by plays no part beside --replicas"),
        (["--replicas", "4", "--set", "scheduler.max_num_seqs=1,2"], "give --set one value each"),
        (["--card", READY, "--card", "l40s-llama-3.1-8b"], "one --card at a time"),
    ],
)
def test_a_search_for_replicas_refuses_what_it_would_not_use(
    words: list[str], message: str, refused: Callable[[list[str], str], None]
) -> None:
    refused(["search", "fcfs", *words, *SEARCH], message)


def test_recorded_traffic_is_replayed_on_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, toy = tmp_path / "log", tmp_path / "toy.yaml"
    record(path, num_requests=150, policy="chunked_prefill")
    toy.write_text(write_tables(SMALL, "a toy"))

    def replayed(*words: str) -> dict[str, dict[str, float]]:
        assert main(["replay", str(path), *words]) == 0
        table, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
        assert "on a toy" in table
        found: dict[str, dict[str, float]] = json.loads(last)
        return found

    found = replayed("--card", str(toy))
    assert found["simulated"]["preemptions"] > 0
    assert found["what_if"]["preemptions"] == 0  # the toy holds 8,000 tokens
    slower = tmp_path / "slower.yaml"
    slower.write_text(toy.read_text().replace("host_ms: 0", "host_ms: 50"))
    again = replayed("--card", str(slower), "--policy", "fcfs")
    assert again["what_if"]["gap p50 ms"] > found["what_if"]["gap p50 ms"] + 40
    cold = tmp_path / "cold.yaml"
    cold.write_text(toy.read_text().replace("host_ms: 0", "host_ms: 0\ncold_ms: 5000"))
    late = replayed("--card", str(cold), "--policy", "chunked_prefill")
    assert late["what_if"]["TTFT p99 ms"] > found["what_if"]["TTFT p99 ms"] + 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "http://127.0.0.1:1"], "bench measures a server that runs"),
        (["calibrate"], "calibrate measures this machine"),
        (["trace", "log"], "trace shows a log as it was written"),
        (["reproduce", "vtc"], "a published result is of its own machine"),
    ],
)
def test_a_card_is_refused_where_it_means_nothing(
    words: list[str], message: str, refused: Callable[[list[str], str], None]
) -> None:
    refused([*words, "--card", READY], f"--card plays no part here: {message}")


@pytest.mark.slow  # every workload of the standard, three times
def test_the_zoo_is_run_on_a_card_with_energy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "NUM_HALVINGS", 1)
    monkeypatch.setattr(standing, "LEAST_SCALE", 0.5)  # so that few requests come at once
    found = tmp_path / "found.json"
    assert main(["zoo", "fcfs", "--card", READY, "--quick", "--json", str(found)]) == 0
    said = capsys.readouterr().out
    assert "on meta-llama/Meta-Llama-3.1-8B on h100_sxm" in said
    assert "J a token" in said
    scores = json.loads(found.read_text())["policies"]["fcfs"]["scores"]
    for of_workload in scores.values():
        [joules] = of_workload["joules_per_output_token"]
        assert 0 < joules < 10


# What follows needs the package.


@pytest.fixture(scope="module")
def package() -> None:
    pytest.importorskip("aiconfigurator_core", reason="needs pip install aiconfigurator-core")


def test_without_the_package_a_card_names_its_install_line() -> None:
    import importlib.util

    if importlib.util.find_spec("aiconfigurator_core") is not None:
        pytest.skip("the package is there")
    with pytest.raises(ConfigError, match=r"pip install 'aioserve-engine\[cards\]'"):
        make_step_times("card", {"card": "h100_sxm", "model": "Qwen/Qwen3-8B"})


def test_a_ready_profile_plans_as_deep_as_its_engine_does() -> None:
    depths = {}
    for profile in available_profiles():
        made = make_step_times(profile, {})
        engine = re.search(r", (vllm|trtllm|sglang) ([\d.]+)", made.machine)
        if engine is not None:
            depths[profile] = made.pipeline_depth
            assert made.pipeline_depth == depth_of(*engine.groups()), profile
    assert set(depths.values()) == {1, 2}


@pytest.mark.usefixtures("package")
def test_a_measured_card_is_its_ready_profile() -> None:
    made = make_step_times("card", {"card": "h100_sxm", "model": "meta-llama/Llama-3.1-8B"})
    ready = make_step_times(READY, {})
    for step in (StepFeatures(0, 64, 64_000, 0), StepFeatures(0, 3, 40, 0)):
        assert made.seconds(step, ()) == pytest.approx(ready.seconds(step, ()), rel=0.002)
    assert made.num_kv_tokens(2048, 1) == ready.num_kv_tokens(2048, 1)
    again = make_step_times("card", {"card": "h100_sxm", "model": "meta-llama/Llama-3.1-8B"})
    assert again.error == made.error


@pytest.mark.usefixtures("package")
def test_several_cards_have_the_host_of_an_engine_with_several() -> None:
    options = {"card": "h100_sxm", "model": "meta-llama/Llama-3.1-8B", "tp": 2}
    assert make_step_times("card", options).rates.host_ms == 1.4
    assert make_step_times("card", {**options, "host_ms": 0}).rates.host_ms == 0


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"card": "h100"}, "no tables of card 'h100' .did you mean 'h100_sxm'.*it has those of"),
        ({"card": "l4"}, "no tables of card 'l4' .*those of a100_sxm, b200_sxm"),
        ({"card": "h100_sxm", "model": "x/y"}, "no configuration of model 'x/y'.* one of: "),
        ({"card": "b60", "engine": "sglang"}, "no tables of b60 under sglang; .* under vllm"),
        ({"card": "h100_sxm", "version": "0.1"}, "no whole tables of h100_sxm under vllm 0.1"),
        ({"card": "h100_sxm", "weights": "fp9"}, "no element type 'fp9' .*weights may be bfloat16"),
        ({"card": "a100_sxm", "weights": "nvfp4"}, "no step times of .*nvfp4"),
        ({"card": "h100_sxm", "tp": 3}, "num_heads 32 should be divisible by tp_size 3"),
        ({"card": "h100_sxm", "tp": 4, "ep": 3}, "ep must divide tp, which is 4, got 3"),
        ({"card": "h100_sxm", "model": "./config.json"}, "there is no config.json of a model at"),
        ({"card": "l40s", "model": "meta-llama/Llama-3.1-70B"}, "no KV budget"),
    ],
)
def test_what_was_not_measured_is_refused_by_what_there_is(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_step_times("card", {"model": "meta-llama/Llama-3.1-8B", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("package")
def test_the_kv_cache_is_nearly_what_vllm_reported() -> None:
    options = {"card": "h100_sxm", "model": "meta-llama/Llama-3.1-70B-Instruct", "tp": 4}
    held = make_step_times("card", options).num_kv_tokens(2048, 128)
    assert held is not None
    assert held / 16 == pytest.approx(30_425, rel=0.06)


def write_llama_2(folder: Path, kv_heads: int) -> str:
    """Write the `config.json` of Llama-2-7B with this number of KV heads."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.usefixtures("package")
def test_more_kv_heads_than_were_measured_read_the_bytes_of_a_longer_context(
    tmp_path: Path,
) -> None:
    wide, narrow = (
        make_step_times("card", {"card": "h100_sxm", "model": write_llama_2(tmp_path / name, n)})
        for name, n in (("wide", 32), ("narrow", 8))
    )

    def attention(times: StepTimeSource, context: int) -> float:
        """Milliseconds of 16 rows at a context, beyond those at a tenth of it."""
        long, short = (StepFeatures(0, 16, 16 * n, 0) for n in (context, context // 10))
        return 1e3 * (times.seconds(long, ()) - times.seconds(short, ()))

    assert attention(wide, 2000) == pytest.approx(attention(narrow, 8000), rel=0.03)


@pytest.mark.usefixtures("package")
def test_llama_4_has_its_shared_expert_and_projections_of_another_element_type() -> None:
    scout = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
    options = {"card": "h100_sxm", "model": scout, "tp": 2, "weights": "fp8"}
    plain = make_step_times("card", {**options, "experts": "fp8_block"})
    whole = make_step_times("card", {**options, "experts": "fp8_block", "attention": "bfloat16"})
    one, many = StepFeatures(0, 1, 500, 0), StepFeatures(0, 64, 64_000, 0)
    assert 1e3 * whole.seconds(one, ()) == pytest.approx(0.345 * 48)  # its launches
    assert whole.seconds(many, ()) > plain.seconds(many, ())
    held, less = plain.num_kv_tokens(2048, 128), whole.num_kv_tokens(2048, 128)
    assert held is not None
    assert less is not None
    projections = 48 * 5120 * 128 * (2 * 40 + 2 * 8) / 2  # bytes more of each card
    assert held - less == pytest.approx(projections / (48 * 4 * 128 * 2 * 2), rel=0.01)
    assert less / 16 == pytest.approx(1.2 * 8253, rel=0.02)  # what vLLM reported, and a fifth more
