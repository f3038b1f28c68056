"""Workloads are data: the same tokens for the same names, cutting, scaling, clipping, refusing."""

import msgspec
import pytest

from aioserve.errors import ConfigError
from aioserve.lab.workloads.workload import (
    Failure,
    Incidents,
    Piece,
    Straggler,
    Workload,
    WorkloadRequest,
    build_images,
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


def test_cuts_and_copies_keep_what_a_program_waits_for() -> None:
    requests = (
        WorkloadRequest(0.0, (Piece(1, 5),), 5),
        WorkloadRequest(1.0, (Piece(2, 5),), 5, program=1),
        WorkloadRequest(0.5, (Piece(3, 5),), 5, follows=1, program=1),
        WorkloadRequest(0.5, (Piece(4, 5),), 5, follows=1, program=1),
        WorkloadRequest(0.2, (Piece(5, 5),), 5, follows=2, after=(3,), program=1),
    )
    workload = Workload("test", requests)
    assert [r.waits_for for r in workload.cut(start=0.5).requests] == [(), (0,), (0,), (1, 2)]
    twice = workload.times(2).requests
    assert twice[9].waits_for == (7, 8)
    with pytest.raises(ValueError, match="follows none"):
        WorkloadRequest(0.0, (Piece(1, 5),), 5, after=(0,))


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


def test_images_are_where_their_pieces_are() -> None:
    pieces = (Piece(1, 10), Piece(7, 4, is_image=True), Piece(2, 3), Piece(8, 5, is_image=True))
    load = Workload("seen", (WorkloadRequest(0.0, pieces, 5),))
    own, copy = (build_images(r) for r in load.times(2).requests)
    assert [(item.position, item.end) for item in own] == [(10, 14), (17, 22)]
    assert [item.content_hash for item in own] != [item.content_hash for item in copy]
    assert load.largest_image == 5
    clipped, _ = load.clipped(25)
    assert [item.end for item in build_images(clipped.requests[0])] == [14]
    with pytest.raises(ConfigError, match="seen: it has images, and so on"):
        load.refuse_images("so on")
    THREE.refuse_images("never")


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


def test_copies_are_other_crowds_with_their_own_texts_and_conversations_at_other_times() -> None:
    """Of four seconds and two crowds, the second comes two later; what is behind the end wraps."""
    both = THREE.times(2)
    assert [r.arrival for r in both.requests] == [0.0, 2.0, 4.0, 2.0, 2.0, 2.0]
    assert [r.follows for r in both.requests] == [-1, 0, -1, -1, 3, -1]
    assert both.requests[4].pieces[1].reply_of == 3
    assert both.requests[:3] == THREE.requests
    first, second = (build_prompt(both.requests[i], 2048, {}) for i in (0, 3))
    assert len(first) == len(second)
    assert first != second


def test_of_conversations_only_those_of_so_many_turns_are_kept() -> None:
    talk = tuple(
        WorkloadRequest(0.0, (Piece(1, 10),), 5, follows=follows, session=session)
        for session, follows in ((9, -1), (8, -1), (8, 1))
    )
    kept = Workload("talk", talk).conversations(2)
    assert [r.session for r in kept.requests] == [8, 8]
    assert kept.requests[1].follows == 0
    with pytest.raises(ConfigError, match="three has no conversation of 2 turns"):
        THREE.conversations(2)


def test_incidents_move_with_the_workload() -> None:
    incidents = Incidents(
        failures=(Failure(replica=0, at=1.0), Failure(replica=1, at=3.0, down=5.0)),
        stragglers=(Straggler(replica=2, slowdown=2.0),),
    )
    workload = msgspec.structs.replace(THREE, incidents=incidents)
    assert workload.scaled(0.5).incidents.failures[1] == Failure(replica=1, at=1.5, down=5.0)
    cut = workload.cut(start=2.0).incidents
    assert cut.failures == (Failure(replica=1, at=1.0, down=5.0),)
    assert cut.stragglers == incidents.stragglers
