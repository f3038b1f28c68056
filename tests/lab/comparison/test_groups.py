"""Who gets a line of its own: clients and classes, the worst off, and the rest counted."""

from typing import Any

import msgspec
import pytest

from aioserve.config import EngineConfig, RunnerConfig, SchedulerConfig
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.document import MAX_LISTED, Document, compare, group_requests
from aioserve.lab.comparison.measures import shown_rows, verdict
from aioserve.lab.comparison.report import render_html
from aioserve.lab.comparison.words import group_tables, remarks, render_groups, render_table
from aioserve.lab.workloads.synthetic import WorkloadSpec, generate
from aioserve.lab.workloads.workload import Workload

ARRIVALS = {"kind": "poisson", "rate": 60}


def client(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "prompt": {"kind": "constant", "value": 400},
        "output": {"kind": "constant", "value": 40},
        **fields,
    }


def workloads(*classes: dict[str, Any], requests: int = 80, num_seeds: int = 4) -> list[Workload]:
    description = {"arrivals": ARRIVALS, "num_requests": requests, "classes": list(classes)}
    spec = msgspec.convert(description, WorkloadSpec)
    return [generate(spec, seed) for seed in range(num_seeds)]


def candidate(name: str, policy: str = "fair", **options: Any) -> Candidate:
    scheduler = SchedulerConfig(policy=policy, options={"chunk_size": 512, **options})
    return Candidate(
        name, EngineConfig(runner=RunnerConfig(runner="simulated"), scheduler=scheduler)
    )


@pytest.fixture(scope="module")
def tiers() -> Document:
    return compare(
        [candidate("plain"), candidate("weighted", weights={"gold": 3})],
        workloads(client("gold"), client("silver"), num_seeds=8),
    )


def test_classes_with_one_client_each_are_the_clients() -> None:
    kinds = group_requests(workloads(client("a"), client("b", users=2)))
    assert {kind: sorted(names) for kind, names in kinds.items()} == {
        "client": ["a", "b-0", "b-1"],
        "class": ["a", "b"],
    }
    assert list(group_requests(workloads(client("a"), client("b")))) == ["client"]
    assert not group_requests(workloads(client("a")))


def test_a_weighted_policy_gives_a_client_less_wait_and_its_share(tiers: Document) -> None:
    groups = [result["groups"]["client"] for result in tiers["results"]]
    assert [group["gold"]["service"]["weight"] for group in groups] == [3, 3]  # one states it
    assert groups[0]["gold"]["service"]["share"] == pytest.approx(0.5, abs=0.05)
    assert groups[1]["gold"]["service"]["share"] == pytest.approx(0.75, abs=0.05)
    assert groups[1]["gold"]["service"]["due_share"] == pytest.approx(0.75, abs=0.01)
    waits = [group["gold"]["durations"]["ttft"]["p50"] for group in groups]
    assert waits[1] < 0.7 * waits[0]
    difference = tiers["results"][1]["against_first"]["groups"]["client"]["gold"]["ttft"]["p50"]
    assert difference["is_distinguishable"]
    assert difference["value"] == pytest.approx(waits[1] - waits[0], rel=1e-4)


def test_service_by_weight_is_fairer_where_weights_are_stated(tiers: Document) -> None:
    apart = [result["totals"]["service_difference"] for result in tiers["results"]]
    assert apart[1] < apart[0]
    (row,) = [row for row in shown_rows(tiers["results"]) if row.label == "service apart max"]
    sure = {"value": -100.0, "low": -120.0, "high": -90.0, "is_distinguishable": True}
    assert verdict(sure | {"is_nothing": False}, row, 1000.0) == "better"
    assert any("configuration weighted states (gold 3)" in remark for remark in remarks(tiers))


def test_the_workload_has_the_first_word_on_weights() -> None:
    stated = workloads(client("gold", weight=2), client("silver", users=2, weight=0.5), requests=30)
    document = compare([candidate("plain"), candidate("x", weights={"gold": 9})], stated)
    expected = {"gold": 2.0, "silver-0": 0.5, "silver-1": 0.5}
    assert [result["weights"] for result in document["results"]] == [expected, expected]
    assert document["weights_stated_by"] == "the workload"


def test_configurations_that_contradict_each_other_are_measured_by_their_own_weights() -> None:
    document = compare(
        [candidate("a", weights={"gold": 2}), candidate("b", weights={"gold": 5})],
        workloads(client("gold"), client("silver"), requests=30),
    )
    assert [result["weights"] for result in document["results"]] == [{"gold": 2.0}, {"gold": 5.0}]
    assert any("each configuration states (its own)" in remark for remark in remarks(document))


def test_without_weights_nothing_is_said_of_them() -> None:
    document = compare([candidate("plain")], workloads(client("a"), client("b"), requests=30))
    assert "weight" not in render_table(document).replace("due: by weight", "").replace(
        "divided by weights", ""
    )


def test_the_worst_off_of_many_clients_are_listed_and_the_rest_counted() -> None:
    document = compare(
        [candidate("a"), candidate("b")],
        workloads(client("chat", users=12), requests=24, num_seeds=2),
    )
    (table,) = group_tables(document)
    names = list(dict.fromkeys(row.name for row in table.rows))
    assert (len(names), table.num_more) == (MAX_LISTED, 12 - MAX_LISTED)
    everybody = document["results"][0]["groups"]["client"]
    assert len(everybody) == 12  # in the JSON
    waits = {name: group["durations"]["ttft"]["p99"] for name, group in everybody.items()}
    assert set(names) == set(sorted(waits, key=lambda name: -waits[name])[:MAX_LISTED])
    assert f"and {12 - MAX_LISTED} more clients" in "\n".join(render_groups(document))


def test_one_client_has_no_table() -> None:
    document = compare([candidate("a")], workloads(client("chat"), requests=20))
    assert render_groups(document) == []


def test_the_report_has_the_tables_and_says_what_the_words_mean(tiers: Document) -> None:
    page = render_html(tiers)
    for said in (
        '"kind":"client"',
        "Time to first token: from the arrival",
        "Time per output token: the mean time",
        "Fairness as VTC has it",
    ):
        assert said in page
