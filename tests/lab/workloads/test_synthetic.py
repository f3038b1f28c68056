"""Invented traffic: the same for a seed, and as its description says."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import msgspec
import pytest

from aioserve.errors import ConfigError
from aioserve.lab.workloads.synthetic import WorkloadSpec, generate, read_spec
from aioserve.lab.workloads.workload import WorkloadRequest

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


PROGRAM: dict[str, Any] = {
    "stages": [
        {},
        {
            "width": {"kind": "constant", "value": 3},
            "pause_seconds": {"kind": "uniform", "min": 1, "max": 2},
        },
        {"output": {"kind": "constant", "value": 7}},
    ],
    "pause_seconds": {"kind": "constant", "value": 5},
}


def test_a_program_fans_out_joins_and_holds_what_was_said() -> None:
    requests = generate(spec(classes=[CLASS | {"program": PROGRAM}], num_requests=10)).requests
    plan, *parts, join = requests[5:]
    assert plan.waits_for == ()
    assert [part.waits_for for part in parts] == [(5,)] * 3
    assert join.waits_for == (6, 7, 8)
    assert all(1 <= part.arrival <= 2 for part in parts)
    assert (join.arrival, join.output_tokens) == (5, 7)
    assert {request.program for request in requests[5:]} == {5}
    reply = plan.pieces[0], parts[0].pieces[1]
    assert all(part.pieces[:2] == reply for part in parts)
    assert len({part.pieces[-1].text for part in parts}) == 3
    assert [piece.reply_of for piece in join.pieces] == [-1, 5, 6, 7, 8, -1]


def test_in_a_closed_loop_a_client_waits_for_all_of_its_program() -> None:
    wide = {"stages": PROGRAM["stages"][:2]}
    arrivals = {"kind": "closed", "clients": 1}
    classes = [CLASS | {"program": wide}]
    requests = generate(spec(arrivals=arrivals, num_requests=8, classes=classes)).requests
    assert requests[4].waits_for == (1, 2, 3)
    assert requests[4].program == 4


@pytest.mark.parametrize("kind", ["program", "session"])
def test_a_client_that_leaves_has_a_shorter_reply_and_asks_nothing_more(kind: str) -> None:
    turns = {"kind": "constant", "value": 4}
    session = {"turns": turns, "think_seconds": turns, "abort": 1.0}
    own = {"program": PROGRAM | {"abort": 1.0}} if kind == "program" else {"session": session}
    requests = generate(spec(classes=[CLASS | own], num_requests=400)).requests
    by_start: dict[int, list[WorkloadRequest]] = {}
    for request in requests:
        by_start.setdefault(request.session, []).append(request)
    assert all(sum(r.aborts for r in of_one) == 1 for of_one in [*by_start.values()][:-1])
    assert {len(of_one) for of_one in [*by_start.values()][:-1]} <= {1, 2, 3, 4, 5}
    stopped = [r.output_tokens for r in requests if r.aborts]
    others = [r.output_tokens for r in requests if not r.aborts]
    assert 0 < sum(stopped) / len(stopped) < sum(others) / max(len(others), 1)


def test_a_class_with_a_program_and_a_session_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    path.write_text(
        "arrivals: {kind: poisson, rate: 1}\nnum_requests: 9\nclasses:\n"
        "  - name: a\n    prompt: {kind: constant, value: 9}\n"
        "    output: {kind: constant, value: 9}\n    program: {stages: [{}]}\n"
        "    session:\n      turns: {kind: constant, value: 2}\n"
        "      think_seconds: {kind: constant, value: 2}\n"
    )
    with pytest.raises(ConfigError, match="class a has a program, and so no session"):
        read_spec(path)


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
    if not path.stem.startswith("zoo-"):  # which are simulated on a larger machine
        # So are crowds, for a fleet: 8,000 tokens of prompt and 300 of reply.
        workload.check_fits(8320 if path.stem == "crowds" else 4096)
    # That of agents runs live as well, for minutes.
    assert len(workload.requests) >= (100 if path.stem == "agent_sessions" else 400)


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
