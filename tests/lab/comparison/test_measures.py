"""Measures against values that were computed by hand."""

from array import array
from math import isnan

import msgspec
import numpy as np
import pytest

from aioserve.errors import ConfigError
from aioserve.lab.comparison.knee import Bound
from aioserve.lab.comparison.measures import Reader, RunMeasures, block_numbers, quantile
from aioserve.lab.simulation.outcome import RequestOutcome, RunOutcome
from aioserve.lab.slo import ServiceLevels, Slo, StatedSlo
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest

WORKLOAD = Workload(
    "hand-made",
    (
        WorkloadRequest(0.0, (Piece(1, 10),), 3, user="a"),
        WorkloadRequest(1.0, (Piece(2, 20),), 1, user="b"),
        WorkloadRequest(2.0, (Piece(3, 30),), 5, user="b"),
    ),
)


def outcome() -> RunOutcome:
    """a: 3 tokens; b: one token; b again: timed out after two."""
    run = RunOutcome(3)
    rows = [(0.0, [1.0, 1.5, 3.0], "length"), (1.0, [2.0], "length"), (2.0, [4.0, 5.0], "timeout")]
    for result, (arrival, times, reason) in zip(run.requests, rows, strict=True):
        result.arrival, result.finish_reason = arrival, reason
        result.token_times, result.end = array("d", times), times[-1]
    run.requests[0].num_cached_tokens = 4
    run.end, run.num_scheduled_tokens, run.num_preemptions = 5.0, 60, 2
    return run


def measures(slo: str | None = None) -> RunMeasures:
    return RunMeasures(outcome(), WORKLOAD, None if slo is None else ServiceLevels(Slo.parse(slo)))


def test_durations_of_requests() -> None:
    found = measures()
    assert found.ttft.tolist() == [1.0, 1.0, 2.0]
    assert found.tpot[0] == 1.0
    assert isnan(found.tpot[1])  # one token has no time per further token
    assert found.e2e[:2].tolist() == [3.0, 1.0]
    assert isnan(found.e2e[2])  # it never came to its end
    assert found.gaps.tolist() == [0.5, 1.0, 1.5]
    assert found.gap_counts.sum() == 3
    assert found.finish_reasons == {"length": 2, "timeout": 1}


def test_totals_of_a_run() -> None:
    totals = measures("e2e=2").totals
    assert totals["output_tokens_per_second"] == 6 / 5
    assert totals["total_tokens_per_second"] == 66 / 5
    assert totals["prefix_hit_share"] == 4 / 60
    # 10 - 4 + 2 for the first and 20 for the second were needed; 60 were computed.
    assert totals["wasted_tokens"] == 32
    assert totals["preemptions"] == 2
    assert totals["unfinished"] == 1
    assert totals["good_share"] == pytest.approx(1 / 3)
    assert totals["goodput_per_second"] == 1 / 5


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ("ttft=1", [1, 1, 0]),
        ("tpot=0.9", [0, 1, 0]),  # a single token misses no time per token
        ("ttft=5, tpot=5, e2e=2", [0, 1, 0]),
        ("ttft=100", [1, 1, 0]),  # what did not finish is never good
    ],
)
def test_goodput_counts_requests_within_all_limits(slo: str, good: list[int]) -> None:
    assert measures(slo).is_good.tolist() == good


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=0.5s", Slo(ttft=0.5)),
        ("ttft=500ms, tpot=50 ms", Slo(ttft=0.5, tpot=0.05)),
        ("gap=0.2,e2e=60s,program=1e3ms", Slo(gap=0.2, e2e=60, program=1)),
    ],
)
def test_a_limit_may_say_its_unit(text: str, slo: Slo) -> None:
    assert Slo.parse(text) == slo
    assert Bound.parse("gap:p99=200ms") == Bound.parse("gap:p99=0.2s") == ("gap", "p99", 0.2)


def test_a_limit_that_must_have_been_meant_in_ms_gets_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for right in ("ttft=0.5,tpot=0.05", "ttft=500ms", "ttft=500s", "e2e=3600,program=90000"):
        Slo.parse(right)
    Bound.parse("gap:p99=0.2")
    assert capsys.readouterr().err == ""
    for wrong in ("ttft=500", "e2e=60,tpot=50", "gap=200"):
        Slo.parse(wrong)
        assert "ms for milliseconds" in capsys.readouterr().err, wrong
    Bound.parse("ttft:p99=500")
    assert "is 500 seconds: write 500ms" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("", "ttft", "ttft=soon", "tftt=1", "ttft=0", "deadline=false", "ttft=5m", "ttft=s"),
        *("ttft=nan", "ttft=inf", "ttft=-1s", "ttft=", "deadline=500ms"),
    ],
)
def test_a_bad_slo_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLO"):
        Slo.parse(text)


def test_the_largest_gap_and_the_timeout_of_a_request_are_limits_too() -> None:
    late = msgspec.structs.replace(WORKLOAD.requests[0], timeout=2.5)
    workload = msgspec.structs.replace(WORKLOAD, requests=(late, *WORKLOAD.requests[1:]))

    def good(text: str) -> list[float]:
        return RunMeasures(outcome(), workload, ServiceLevels(Slo.parse(text))).is_good.tolist()

    assert good("gap=1.4") == [0, 1, 0]  # gaps of 0.5 and 1.5; one token has none
    assert good("gap=1.5") == [1, 1, 0]
    assert good("deadline") == [0, 1, 0]  # 3 s are more than 2.5; the second states no timeout


def test_each_class_is_held_to_its_own_limits_and_the_worst_is_told() -> None:
    kinds = ("chat", "batch", "none")
    requests = [
        msgspec.structs.replace(request, kind=kind)
        for request, kind in zip(WORKLOAD.requests, kinds, strict=True)
    ]
    workload = msgspec.structs.replace(WORKLOAD, requests=tuple(requests))
    levels = ServiceLevels(None, {"chat": Slo(ttft=0.5), "batch": Slo(e2e=60)})
    found = RunMeasures(outcome(), workload, levels)
    assert found.is_good.tolist()[:2] == [0, 1]
    assert isnan(found.is_good[2])  # no limits hold for its class: it is not counted
    assert found.totals["good_share"] == 0.5
    assert found.totals["worst_class_share"] == 0
    assert found.totals["goodput_per_second"] == 1 / 5


def test_the_command_goes_before_the_workload_and_a_class_before_all() -> None:
    own = {"chat": Slo(ttft=1), "batch": Slo(e2e=60), "none": None}
    stated = [StatedSlo.parse("chat:ttft=0.5,gap=0.2")]
    levels = ServiceLevels.of(stated, own)
    assert levels is not None
    assert levels.of_class("chat") == Slo(ttft=0.5, gap=0.2)
    assert levels.of_class("batch") == Slo(e2e=60)
    assert levels.of_class("none") is None
    levels = ServiceLevels.of([*stated, StatedSlo.parse("tpot=1")], own)
    assert levels is not None
    assert levels.of_class("batch") == Slo(tpot=1)
    assert str(levels) == (
        "all others: TPOT within 1 s; chat: TTFT within 0.5 s and largest gap within 0.2 s"
    )
    assert ServiceLevels.of([], {"chat": None}) is None


def test_a_class_that_the_workload_does_not_have_is_refused_with_those_it_has() -> None:
    stated = [StatedSlo.parse("chta:ttft=0.5")]
    with pytest.raises(ConfigError, match="no class 'chta'; it has batch, chat"):
        ServiceLevels.of(stated, {"chat": None, "batch": None})
    with pytest.raises(ConfigError, match="it has no classes"):
        ServiceLevels.of(stated, {})
    with pytest.raises(ConfigError, match="given twice"):
        ServiceLevels.of([StatedSlo.parse("chat:ttft=1")] * 2, {"chat": None})


def test_quality_of_experience_is_1_less_the_area_of_late_tokens() -> None:
    reader = Reader(speed=2.0, ttft=1.0)  # expects tokens at 1.0, 1.5, 2.0; each takes 0.5 to read
    assert reader.quality(np.array([0.1, 0.2, 0.3]), 3, 0.3) == 1  # sooner is no better
    assert reader.quality(np.array([1.0, 1.5, 2.0]), 3, 2.0) == 1
    # Token 2 comes 1 s late, so token 3 is read 1 s late; reading ends at 3.5. Under the expected
    # curve are 2.25 + 1.75 + 1.25, of which two tokens lose a second each.
    late = reader.quality(np.array([1.0, 2.5, 2.5]), 3, 2.5)
    assert late == pytest.approx(1 - 2 / 5.25)
    # The last one never comes: what it would have had until the end, at 4, is lost.
    assert reader.quality(np.array([1.0, 1.5]), 3, 4.0) == pytest.approx(1 - 1.75 / 6.75)
    assert reader.quality(np.array([]), 3, 9.0) == 0
    measured = RunMeasures(outcome(), WORKLOAD, None, reader=reader)
    assert measured.totals["quality"] == pytest.approx(np.mean(measured.quality))


@pytest.mark.parametrize("text", ["0", "fast", "5,ttft=-1", "nan", "5,tpot=1"])
def test_a_bad_reading_speed_is_refused(text: str) -> None:
    assert Reader.parse("5,ttft=2") == Reader(5.0, 2.0)
    with pytest.raises(ConfigError, match="reading speed"):
        Reader.parse(text)


def test_quantiles_are_values_that_occurred() -> None:
    values = np.array([4.0, 1.0, np.nan, 3.0, 2.0])
    assert [quantile(values, q) for q in (0.25, 0.5, 0.51, 1.0)] == [1, 2, 3, 4]
    assert isnan(quantile(np.array([np.nan]), 0.5))


def test_blocks_are_consecutive_and_nearly_equal() -> None:
    blocks = block_numbers(407)
    assert (np.diff(blocks) >= 0).all()
    sizes = np.bincount(blocks)
    assert (len(sizes), sizes.min(), sizes.max()) == (20, 20, 21)
    assert block_numbers(3).tolist() == [0, 0, 0]


def test_a_request_without_tokens_has_no_durations() -> None:
    run = RunOutcome(1)
    run.requests[0] = RequestOutcome()
    run.requests[0].finish_reason = "refused"
    found = RunMeasures(run, WORKLOAD.cut(limit=1), None)
    assert isnan(found.ttft[0])
    assert isnan(found.e2e[0])
    assert len(found.gaps) == 0


def test_the_worst_client_is_one_with_enough_requests_to_have_a_share() -> None:
    """a: all of 20 within 0.5 s; b: half of 10; c: none of 9, which are too few."""
    users = ["a"] * 20 + ["b"] * 10 + ["c"] * 9
    waits = [0.1] * 20 + [0.1, 9.0] * 5 + [9.0] * 9
    requests = tuple(WorkloadRequest(0.0, (Piece(1, 10),), 1, user=user) for user in users)
    run = RunOutcome(len(users))
    for result, wait in zip(run.requests, waits, strict=True):
        result.finish_reason, result.end = "length", wait
        result.token_times = array("d", [wait])
    run.end = 9.0
    found = RunMeasures(run, Workload("hand-made", requests), ServiceLevels(Slo(ttft=0.5)))
    assert found.totals["worst_client_share"] == 0.5
    assert "in_time" not in found.totals  # one class: the share of all requests says it


def test_classes_count_alike_in_time_however_many_requests_they_have() -> None:
    """Four requests of one class, all within; two of another, one within."""
    kinds = ["chat"] * 4 + ["long"] * 2
    requests = tuple(WorkloadRequest(0.0, (Piece(1, 10),), 1, kind=kind) for kind in kinds)
    run = RunOutcome(6)
    for i, result in enumerate(run.requests):
        result.finish_reason, result.end = "length", 9.0 if i == 5 else 0.1
        result.token_times = array("d", [result.end])
    run.end = 9.0
    totals = RunMeasures(run, Workload("x", requests), ServiceLevels(Slo(ttft=0.5))).totals
    assert totals["in_time"] == (1 + 0.5) / 2
    assert totals["good_share"] == 5 / 6
