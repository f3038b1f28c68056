"""Comparisons: what is said about equal and unequal configurations, and how it is shown."""

import json
import re
from typing import Any

import msgspec
import pytest

from aioserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import ConfigError
from aioserve.lab.comparison.candidates import Candidate, other_differences
from aioserve.lab.comparison.document import Document, compare, encode
from aioserve.lab.comparison.measures import NOISE
from aioserve.lab.comparison.report import render_html
from aioserve.lab.comparison.words import headline, remarks, render_table
from aioserve.lab.slo import Slo, StatedSlo
from aioserve.lab.workloads.synthetic import ClosedLoop, WorkloadSpec, generate
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest

SPEC = msgspec.convert(
    {
        "arrivals": {"kind": "poisson", "rate": 20},
        "num_requests": 60,
        "classes": [
            {
                "name": "chat",
                "share": 0.8,
                "prompt": {"kind": "lognormal", "median": 60},
                "output": {"kind": "uniform", "min": 5, "max": 40},
            },
            {
                "name": "long </script>",
                "share": 0.2,
                "prompt": {"kind": "constant", "value": 3000},
                "output": {"kind": "constant", "value": 10},
            },
        ],
    },
    WorkloadSpec,
)
WORKLOADS = [generate(SPEC, seed) for seed in range(3)]


def candidate(name: str, policy: str = "fcfs", **cache: Any) -> Candidate:
    return Candidate(
        name,
        EngineConfig(
            cache=CacheConfig(**cache),
            scheduler=SchedulerConfig(policy=policy),
            runner=RunnerConfig(runner="simulated"),
        ),
    )


@pytest.fixture(scope="module")
def document() -> Document:
    candidates = [candidate("whole"), candidate("chunked", "chunked_prefill")]
    return compare(candidates, WORKLOADS, slo=[StatedSlo(None, Slo(ttft=0.5))])


def differences(document: Document, measure: str) -> dict[str, Any]:
    found: dict[str, Any] = document["results"][1]["against_first"]["differences"][measure]
    return found


def test_a_configuration_is_not_distinguishable_from_itself() -> None:
    document = compare(
        [candidate("a"), candidate("b")], WORKLOADS, slo=[StatedSlo(None, Slo(ttft=0.5))]
    )
    for measure in ("ttft", "tpot", "e2e", "gap", "totals"):
        for difference in differences(document, measure).values():
            assert difference["is_nothing"]
    table = render_table(document)
    assert "the same" in table
    assert "better" not in table
    assert "worse" not in table


def test_the_gaps_of_whole_and_chunked_prompts_are_told_apart(document: Document) -> None:
    gap = differences(document, "gap")["p99"]
    assert gap["is_distinguishable"]
    assert gap["high"] < -0.05
    assert re.search(r"gap p99.*better", render_table(document))


def test_the_table_says_in_words_what_is_noise(document: Document) -> None:
    in_words = [line for line in render_table(document).splitlines() if NOISE in line]
    assert in_words
    for measure in ("ttft", "tpot", "e2e"):
        for difference in differences(document, measure).values():
            inside = difference["low"] <= 0 <= difference["high"]
            assert difference["is_distinguishable"] != inside


def test_the_same_seeds_give_the_same_json_byte_for_byte(document: Document) -> None:
    candidates = [candidate("whole"), candidate("chunked", "chunked_prefill")]
    again = compare(candidates, WORKLOADS, slo=[StatedSlo(None, Slo(ttft=0.5))])
    assert encode(again) == encode(document)
    assert json.loads(encode(document))["workload"]["seeds"] == [0, 1, 2]


def test_configurations_that_differ_in_more_than_the_policy_are_pointed_out() -> None:
    first, second = candidate("a"), candidate("b", "priority", num_kv_blocks=1024)
    assert other_differences(first.config, second.config) == [
        "cache.num_kv_blocks (None against 1024)"
    ]
    document = compare([first, second], WORKLOADS[:1])
    assert (
        "a and b differ in more than the policy: cache.num_kv_blocks (None against 1024)."
        in render_table(document)
    )
    assert "differ in more than the policy" in render_html(document)


def test_options_that_two_policies_have_with_different_values_are_pointed_out() -> None:
    first = candidate("a", "chunked_prefill")
    assert other_differences(first.config, candidate("b", "fair").config) == [
        "scheduler.options.chunk_size (512 against None)"
    ]
    text = render_table(compare([first, candidate("b", "fair")], WORKLOADS[:1]))
    above = text[: text.index("95% interval")]
    assert "a and b differ in more than the policy: scheduler.options.chunk_size" in above


def test_the_report_is_one_file_that_names_no_other(document: Document) -> None:
    page = render_html(document)
    addresses = set(re.findall(r"https?://[^\s\"'<]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.search(r"\b(src|href|@import|url\()", page)
    assert page.count("</script>") == 2  # the client called "long </script>" ends none
    data = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert len(json.loads(data[1])["results"]) == 2


def test_no_card_of_the_report_is_wider_than_a_small_screen(document: Document) -> None:
    assert not re.search(r"minmax\(\d+px", render_html(document))


def test_a_closed_loop_says_how_many_clients_not_how_many_seconds() -> None:
    closed = generate(
        msgspec.structs.replace(SPEC, arrivals=ClosedLoop(clients=16), num_requests=60), name="w"
    )
    at_once = Workload("w", tuple(WorkloadRequest(0.0, (Piece(i, 9),), 5) for i in range(3)))
    assert [headline(compare([candidate("a")], [w])) for w in (closed, at_once)] == [
        "w: 60 requests from 16 clients who wait for each reply, in virtual time; "
        "clients allow 2,048 tokens a reply",
        "w: 3 requests at once, in virtual time; clients allow 2,048 tokens a reply",
    ]


def test_every_estimate_lies_in_its_interval(document: Document) -> None:
    num_intervals = 0
    for statistics in document["results"][1]["against_first"]["differences"].values():
        for difference in statistics.values():
            if difference["low"] is not None:
                num_intervals += 1
                assert difference["low"] <= difference["value"] <= difference["high"]
    assert num_intervals > 15


def test_requests_that_never_finished_are_counted_and_said() -> None:
    requests = [WorkloadRequest(0.0, (Piece(i, 500),), 50, timeout=0.3) for i in range(30)]
    document = compare([candidate("a"), candidate("b")], [Workload("w", tuple(requests))])
    assert document["results"][0]["totals"]["unfinished"] > 0
    assert any("did not finish" in remark for remark in remarks(document))


def test_clipping_is_said_and_without_it_a_long_request_is_refused() -> None:
    long = Workload("w", (WorkloadRequest(0.0, (Piece(1, 5000),), 10),))
    stated = Candidate(
        "a", msgspec.structs.replace(EngineConfig(), scheduler=SchedulerConfig(policy="fcfs"))
    )
    assert "max_model_len is 5010" in compare([stated], [long])["notes"][0]
    assert compare([stated], [long], clip=True)["notes"] == [
        "1 requests were shortened to 4096 tokens."
    ]
    small = candidate("a", num_kv_blocks=50)
    with pytest.raises(ConfigError, match=r"request 0 with 5000 prompt \+ 10 output"):
        compare([small], [long])


def test_victims_are_the_requests_that_grew_most(document: Document) -> None:
    victims = document["results"][1]["against_first"]["victims"]
    slowdowns = [victim["slowdown"] for victim in victims]
    assert slowdowns == sorted(slowdowns, reverse=True)
    assert slowdowns[0] > 1.5
    assert victims[0]["e2e"] == pytest.approx(slowdowns[0] * victims[0]["e2e_first"], rel=1e-3)
