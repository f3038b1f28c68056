"""Ranks count who is better on average, and their ranges leave to chance what it can explain."""

import math
from statistics import fmean

import numpy as np
import pytest

from aioserve.lab.comparison.measures import IN_TIME
from aioserve.lab.zoo.cost import Cost
from aioserve.lab.zoo.page import (
    against_in_words,
    as_document,
    render_board,
    render_page,
    render_policy,
)
from aioserve.lab.zoo.standing import (
    MEASURES,
    OVERALL,
    WORKLOADS,
    Entry,
    Results,
    Scores,
    key,
    leaderboard,
    measured_file,
    pair_p_value,
    ranks_of,
    read_results,
    surely_less,
)

TTFT = next(row for row in MEASURES if row.label == "TTFT mean, ms")
BUSY = next(row for row in MEASURES if row.label == "busy, %")


def scores(in_time: list[float], ttft: list[float]) -> Scores:
    """The same on every workload; all other measures are undefined."""
    undefined = {key(row): [math.nan] * len(in_time) for row in MEASURES}
    return {w: {**undefined, "in_time": in_time, "ttft.mean": ttft} for w in WORKLOADS}


def results(**policies: Scores) -> Results:
    cost = Cost(1234.0, 1000, 10_000, 600.0, "a machine")
    return Results(policies={name: Entry("", of, cost) for name, of in policies.items()})


FIVE = results(
    best=scores([0.91, 0.81, 0.95, 0.88, 0.90], [1.0, 2.0, 1.5, 1.2, 1.0]),
    # On every seed less than the best by about as much: seeds differ more than policies do.
    second=scores([0.86, 0.77, 0.90, 0.82, 0.85], [0.5, 1.0, 0.7, 0.6, 0.5]),
    noisy=scores([0.95, 0.60, 0.99, 0.70, 0.95], [0.9, 2.5, 1.2, 1.5, 0.8]),
    worst=scores([0.20, 0.10, 0.30, 0.20, 0.15], [9.0, 9.5, 9.2, 9.1, 9.3]),
)


def test_a_policy_that_is_better_on_every_seed_is_surely_ahead_and_a_noisy_one_is_not() -> None:
    board = {standing.name: standing.overall for standing in leaderboard(FIVE)}
    assert list(board) == ["best", "second", "noisy", "worst"]
    assert (board["best"].rank, board["best"].best, board["best"].worst) == (1, 1, 2)
    assert (board["second"].rank, board["second"].best, board["second"].worst) == (2, 2, 3)
    assert (board["noisy"].rank, board["noisy"].best, board["noisy"].worst) == (3, 1, 3)
    assert str(board["worst"]) == "4"
    assert board["best"].value == pytest.approx(0.89)
    assert against_in_words(FIVE, "best") == [
        "better than: second, worst",
        "not told apart from: noisy",
    ]


def test_less_time_to_first_token_is_better_and_what_is_neither_has_no_rank() -> None:
    ranks = ranks_of(FIVE, "chat", TTFT)
    assert {name: rank.rank for name, rank in ranks.items()} == {
        **{"second": 1, "best": 2, "noisy": 3, "worst": 4}
    }
    assert not ranks_of(FIVE, "chat", BUSY)
    assert not ranks_of(FIVE, "chat", next(row for row in MEASURES if row.measure == "gap"))


def test_equal_policies_share_the_better_place() -> None:
    same = results(a=scores([0.5, 0.6], [1, 1]), b=scores([0.5, 0.6], [1, 1]))
    assert [str(standing.overall) for standing in leaderboard(same)] == ["1 (1 to 2)"] * 2


def test_of_one_seed_there_are_ranks_without_ranges() -> None:
    one = FIVE.only(1)
    overall = {standing.name: standing.overall for standing in leaderboard(one)}
    assert {name: str(rank) for name, rank in overall.items()} == {
        **{"noisy": "1", "best": "2", "second": "3", "worst": "4"}
    }
    assert "1 seed, so that ranks have no ranges" in render_board(one)


def test_the_board_and_a_policy_are_told_in_lines_of_their_numbers() -> None:
    lines = render_board(FIVE).splitlines()
    assert lines[2].split() == [
        *("1", "(1", "to", "2)", "best"),
        *["89.0"] * (len(WORKLOADS) + 1),
        "1,234",
    ]
    text = render_policy(FIVE, "second")
    assert text.startswith("second: rank 2 (2 to 3) of 4, 84.0% in time over all workloads\n")
    assert (
        "1,234 microseconds of CPU per schedule() with 1,000 running and 10,000 waiting, 2.1 "
        in text
    )
    [row] = [line for line in text.splitlines() if line.startswith("TTFT mean, ms")]
    assert row.split()[3:5] == ["660.0", "(1)"]
    assert "gap p99" not in text  # undefined everywhere
    assert OVERALL not in WORKLOADS
    assert IN_TIME.good == 1


def test_a_board_has_prices_where_an_hour_of_the_machine_has_one() -> None:
    stored = read_results(measured_file("h100-llama-3.1-8b"))
    [name, *_] = [standing.name for standing in leaderboard(stored)]
    seconds = [
        1e6 / fmean(stored.policies[name].scores[w]["output_tokens_per_second"]) for w in WORKLOADS
    ]
    price = fmean(seconds) * 2.5 / 3600
    [head, first, *_] = render_board(stored, 2.5).splitlines()[2:]
    assert head.endswith("J a token  price, 1M")
    assert first.split()[-1] == f"{price:.3f}"
    assert f"{price:.3f}" in render_page(stored, [], 2.5)
    found = as_document(stored, [], 2.5)["price_per_million_output"]
    assert isinstance(found, dict)
    assert found[name] == pytest.approx(price)
    for text in (render_board(stored), render_page(stored, [])):
        assert "price" not in text


def test_of_many_equal_policies_seldom_one_pair_differs_by_holm() -> None:
    """Twelve of them on five seeds, 200 times: a pair alone is called different in 5% of cases, and
    some pair of the 66 in far more of them.
    """
    rng = np.random.default_rng(0)
    families = pairs = 0
    for _ in range(200):
        seeds = rng.normal(size=5)
        values = {f"p{i}": list(seeds + rng.normal(size=5)) for i in range(12)}
        families += any(surely_less(values).values())
        pairs += bool(surely_less({name: values[name] for name in ("p0", "p1")})["p0"])
        pairs += bool(surely_less({name: values[name] for name in ("p0", "p1")})["p1"])
    assert families / 200 <= 0.07
    assert 0.02 <= pairs / 200 <= 0.09


def test_holm_goes_on_from_the_clearest_pair_with_a_milder_level() -> None:
    """Three pairs have p-values of 0.0144, 0.0209 and 0.0394. The first is below a third of 5%, the
    second below a half, the third below 5%, so all are told apart; Bonferroni's correction, which
    asks each for a third, would tell one.
    """
    values = {"a": [0.0] * 4, "b": [0.8, 1.0, 1.2, 1.9], "c": [2.2, 1.8, 4.6, 4.4]}
    low, middle, high = sorted(pair_p_value(values[a], values[b]) for a, b in ("ab", "ac", "bc"))
    assert low < 0.05 / 3 < middle < 0.05 / 2 < high < 0.05
    assert surely_less(values) == {"a": set(), "b": {"a"}, "c": {"a", "b"}}


def test_what_is_undefined_equal_or_of_one_seed_is_told_apart_from_nothing() -> None:
    nan = float("nan")
    assert surely_less({"a": [1.0], "b": [2.0]}) == {"a": set(), "b": set()}
    assert surely_less({"a": [1.0, 2.0], "b": [1.0, 2.0]}) == {"a": set(), "b": set()}
    assert surely_less({"a": [nan, 2.0], "b": [1.0, 5.0]}) == {"a": set(), "b": set()}
    assert surely_less({"a": [1.0, 2.0], "b": [2.0, 3.0]}) == {"a": set(), "b": {"a"}}
