"""Invented traffic: the same for a seed, and as its description says."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

import msgspec
import pytest

from aioserve.errors import ConfigError
from aioserve.lab.workloads.synthetic import WorkloadSpec, generate, read_spec

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs/workloads").glob("*.yaml"))

CLASS = {
    "name": "chat",
    "prompt": {"kind": "lognormal", "median": 100, "sigma": 0.5, "max": 400},
    "output": {"kind": "uniform", "min": 10, "max": 30},
}


def spec(**fields: object) -> WorkloadSpec:
    whole = {"arrivals": {"kind": "poisson", "rate": 50}, "num_requests": 4000, "classes": [CLASS]}
    return msgspec.convert(whole | fields, WorkloadSpec)


def gaps(workload: WorkloadSpec, seed: int = 0) -> list[float]:
    times = [0.0, *(r.arrival for r in generate(workload, seed).requests)]
    return [b - a for a, b in pairwise(times)]


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    assert generate(spec(), 3) == generate(spec(), 3)
    assert generate(spec(), 3).requests != generate(spec(), 4).requests


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    found = gaps(spec())
    assert fmean(found) == pytest.approx(1 / 50, rel=0.05)
    assert stdev(found) == pytest.approx(1 / 50, rel=0.1)


def test_gamma_arrivals_keep_the_rate_and_come_in_bursts() -> None:
    found = gaps(spec(arrivals={"kind": "gamma", "rate": 50, "cv": 3}))
    assert fmean(found) == pytest.approx(1 / 50, rel=0.15)
    assert stdev(found) / fmean(found) == pytest.approx(3, rel=0.2)


def test_on_off_arrivals_pause() -> None:
    on_off = {"kind": "on_off", "rate_on": 100, "on_seconds": 1, "off_seconds": 3}
    requests = generate(spec(arrivals=on_off)).requests
    assert all(r.arrival % 4 < 1 for r in requests)
    assert requests[-1].arrival == pytest.approx(160, rel=0.1)  # 25 a second on average


def test_lengths_follow_their_distributions() -> None:
    requests = generate(spec()).requests
    prompts = [r.num_prompt_tokens for r in requests]
    assert median(prompts) == pytest.approx(100, rel=0.05)
    assert max(prompts) <= 400
    assert (min(r.output_tokens for r in requests), max(r.output_tokens for r in requests)) == (
        10,
        30,
    )


def test_shares_users_priorities_and_timeouts_reach_the_requests() -> None:
    rare = CLASS | {"name": "batch", "share": 0.25, "users": 4, "priority": 5, "timeout": 9.0}
    requests = generate(spec(classes=[CLASS, rare])).requests
    users = Counter(r.user for r in requests)
    assert users["chat"] / len(requests) == pytest.approx(0.8, abs=0.03)
    assert set(users) == {"chat", "batch-0", "batch-1", "batch-2", "batch-3"}
    assert {(r.priority, r.timeout) for r in requests if r.user != "chat"} == {(5, 9.0)}


def test_popular_prefixes_are_shared_by_more_requests() -> None:
    prefixes = {"count": 4, "length": {"kind": "constant", "value": 50}, "zipf": 1.0}
    requests = generate(spec(classes=[CLASS | {"prefixes": prefixes}])).requests
    uses = [n for _, n in Counter(r.pieces[0] for r in requests).most_common()]
    assert [n / len(requests) for n in uses] == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.03)


def test_each_turn_of_a_conversation_holds_all_that_was_said_before() -> None:
    session = {
        "turns": {"kind": "constant", "value": 3},
        "think_seconds": {"kind": "constant", "value": 7},
    }
    requests = generate(spec(classes=[CLASS | {"session": session}], num_requests=9)).requests
    first, second, third = requests[3:6]
    assert (first.follows, second.follows, third.follows) == (-1, 3, 4)
    assert (second.arrival, third.arrival) == (7, 7)
    assert second.pieces[:1] == first.pieces
    assert third.pieces[: len(second.pieces)] == second.pieces
    assert second.pieces[1].reply_of == 3
    assert second.pieces[1].length == first.output_tokens


def test_images_come_before_the_text_and_some_again() -> None:
    tokens = {"kind": "uniform", "min": 20, "max": 60}
    images = {"share": 0.25, "tokens": tokens, "count": 5}
    requests = generate(spec(classes=[CLASS | {"images": images}])).requests
    seen = [r.pieces[0] for r in requests if r.pieces[0].is_image]
    assert len(seen) / len(requests) == pytest.approx(0.25, abs=0.03)
    assert len(set(seen)) == 5
    assert all(20 <= piece.length <= 60 for piece in seen)
    assert not any(r.pieces[-1].is_image for r in requests)
    new = generate(spec(classes=[CLASS | {"images": {"tokens": tokens}}])).requests
    assert len({r.pieces[0] for r in new}) == len(new)


def test_classes_may_arrive_by_a_clock_of_their_own() -> None:
    own = CLASS | {"name": "steady", "arrivals": {"kind": "poisson", "rate": 5}}
    requests = generate(spec(classes=[CLASS, own])).requests
    assert Counter(r.user for r in requests)["steady"] / 4000 == pytest.approx(5 / 55, rel=0.2)
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)


def test_in_a_closed_loop_each_client_waits_for_its_answer_and_thinks() -> None:
    think = {"kind": "uniform", "min": 1, "max": 2}
    arrivals = {"kind": "closed", "clients": 3, "think_seconds": think}
    requests = generate(spec(arrivals=arrivals, num_requests=10)).requests
    assert [r.follows for r in requests] == [-1, -1, -1, 0, 1, 2, 3, 4, 5, 6]
    assert [r.arrival for r in requests[:3]] == [0, 0, 0]
    assert all(1 <= r.arrival <= 2 for r in requests[3:])


def test_in_a_closed_loop_a_client_ends_one_conversation_before_the_next() -> None:
    two = {"kind": "constant", "value": 2}
    session = {"turns": two, "think_seconds": {"kind": "constant", "value": 7}}
    arrivals = {"kind": "closed", "clients": 2}
    workload = spec(arrivals=arrivals, num_requests=8, classes=[CLASS | {"session": session}])
    requests = generate(workload).requests
    assert [r.follows for r in requests] == [-1, 0, -1, 2, 1, 4, 3, 6]
    assert [r.arrival for r in requests] == [0, 7, 0, 7, 0, 7, 0, 7]


def test_a_duration_ends_the_arrivals() -> None:
    requests = generate(spec(num_requests=None, duration=10.0)).requests
    assert len(requests) == pytest.approx(500, rel=0.2)
    assert requests[-1].arrival < 10


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_workloads_that_ship_fit_the_embedded_model(path: Path) -> None:
    workload = generate(read_spec(path))
    workload.check_fits(4096)
    assert len(workload.requests) >= 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: []", "classes"),
        ("num_requests: 0", "num_requests"),
        ("surprise: 1", "surprise"),
        ("arrivals: {kind: tidal, rate: 3}", "tidal"),
        ("arrivals: {kind: poisson, rate: -3}", "arrivals"),
        ("[", "workload"),
    ],
)
def test_a_bad_description_is_refused_by_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "w.yaml"
    whole = {"num_requests": 5, "arrivals": {"kind": "poisson", "rate": 1}, "classes": [CLASS]}
    if ":" in text:
        whole |= msgspec.yaml.decode(text)
        text = msgspec.yaml.encode(whole).decode()
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_spec(path)


def test_a_description_without_end_or_arrivals_or_with_twins_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    poisson = {"kind": "poisson", "rate": 1}
    closed = {"kind": "closed", "clients": 2}
    for whole, message in (
        ({"arrivals": poisson, "classes": [CLASS]}, "num_requests, duration"),
        ({"num_requests": 5, "classes": [CLASS]}, "arrivals are missing"),
        ({"num_requests": 5, "arrivals": poisson, "classes": [CLASS, CLASS]}, "same name"),
        ({"duration": 5, "arrivals": closed, "classes": [CLASS]}, "has no duration"),
        (
            {"num_requests": 5, "arrivals": closed, "classes": [CLASS | {"arrivals": poisson}]},
            "leaves no arrivals",
        ),
    ):
        path.write_bytes(msgspec.yaml.encode(whole))
        with pytest.raises(ConfigError, match=message):
            read_spec(path)
