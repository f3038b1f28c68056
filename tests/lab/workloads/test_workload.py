"""Workloads are data: the same tokens for the same names, cutting, scaling, clipping, refusing."""

import pytest

from aioserve.errors import ConfigError
from aioserve.lab.workloads.workload import (
    Piece,
    Workload,
    WorkloadRequest,
    build_prompt,
    text_name,
    text_tokens,
)

THREE = Workload(
    "three",
    (
        WorkloadRequest(0.0, (Piece(1, 10),), 5),
        WorkloadRequest(2.0, (Piece(1, 10), Piece(9, 5, reply_of=0), Piece(2, 3)), 5, follows=0),
        WorkloadRequest(4.0, (Piece(3, 20),), 5),
    ),
)


def test_equal_names_are_equal_tokens_and_others_differ_from_the_start() -> None:
    assert text_tokens(7, 100, 2048) == text_tokens(7, 100, 2048)
    assert text_tokens(7, 40, 2048) == text_tokens(7, 100, 2048)[:40]
    starts = {tuple(text_tokens(text_name("a", i), 4, 2048)) for i in range(1000)}
    assert len(starts) == 1000


def test_token_ids_stay_inside_the_vocabulary_and_off_the_special_ones() -> None:
    ids = text_tokens(3, 10_000, 50)
    assert (min(ids), max(ids)) == (16, 49)
    assert max(text_tokens(3, 100, 8)) == 7  # too small to spare any


def test_a_reply_is_part_of_the_next_prompt_and_filled_up_if_it_was_cut_short() -> None:
    prompt = build_prompt(THREE.requests[1], 2048, {0: [5, 6, 7]})
    assert prompt[:10] == text_tokens(1, 10, 2048)
    assert prompt[10:13] == [5, 6, 7]
    assert prompt[13:15] == text_tokens(9, 2, 2048)
    assert len(prompt) == THREE.requests[1].num_prompt_tokens == 18


def test_scaling_moves_arrivals_and_leaves_pauses() -> None:
    assert [r.arrival for r in THREE.scaled(0.5).requests] == [0.0, 2.0, 2.0]
    with pytest.raises(ConfigError, match="time scale must be above 0, got 0"):
        THREE.scaled(0)


def test_cutting_keeps_conversations_whole_and_renumbers_them() -> None:
    assert [r.arrival for r in THREE.cut(start=3).requests] == [1.0]
    first = THREE.cut(duration=1)
    assert len(first.requests) == 2  # the second turn comes with the first
    assert first.requests[1].follows == 0
    assert len(THREE.cut(limit=1).requests) == 1
    with pytest.raises(ConfigError, match="no request of three is left"):
        THREE.cut(start=100)


def test_clipping_shortens_prompts_from_the_end_and_counts() -> None:
    clipped, count = THREE.clipped(12)
    assert count == 3
    assert all(r.num_tokens <= 12 for r in clipped.requests)
    assert [r.num_prompt_tokens for r in clipped.requests] == [7, 7, 7]
    assert THREE.clipped(100) == (THREE, 0)


def test_what_can_never_fit_is_refused_with_the_first_such_request_and_its_numbers() -> None:
    THREE.check_fits(25)
    with pytest.raises(ConfigError) as refusal:
        THREE.check_fits(20)
    assert str(refusal.value) == (
        "three: 2 of 3 requests can never run; the first is request 1 with 18 prompt + 5 output "
        "= 23 tokens, but max_model_len allows 20 (--clip shortens them)"
    )
