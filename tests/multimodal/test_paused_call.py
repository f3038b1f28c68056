"""Calls in pieces: they stop where they are told to, go on from there, and leave no thread."""

import threading

import pytest

from aioserve.features.multimodal.encoding_pieces import PausedCall


def counting(places: list[int], num_pauses: int) -> PausedCall[str]:
    """A call that pauses that often, and notes how often it has gone on."""

    def work() -> str:
        for number in range(num_pauses):
            call.pause()
            places.append(number)
        return "done"

    call = PausedCall(work)
    return call


def test_a_call_stops_at_the_pause_that_it_is_told() -> None:
    places: list[int] = []
    call = counting(places, 5)
    assert places == []
    for num_pauses, expected in ((1, 0), (3, 2), (2, 2), (3, 2), (4, 3)):
        call.advance(num_pauses)
        assert len(places) == expected
    assert call.finish() == "done"
    assert places == list(range(5))


def test_a_call_that_has_fewer_pauses_ends() -> None:
    places: list[int] = []
    call = counting(places, 2)
    call.advance(9)
    assert places == [0, 1]
    assert call.finish() == "done"


def test_what_a_call_raises_is_raised_at_its_end() -> None:
    def work() -> None:
        call.pause()
        raise ValueError("what is this?")

    call = PausedCall(work)
    call.advance(1)
    call.advance(2)
    with pytest.raises(ValueError, match="what is this"):
        call.finish()


@pytest.mark.parametrize("num_pauses", [0, 2, 9])
def test_a_call_that_is_dropped_goes_no_further_and_its_thread_ends(num_pauses: int) -> None:
    before, places = threading.active_count(), list[int]()
    call = counting(places, 5)
    call.advance(num_pauses)
    reached = len(places)
    call.drop()
    assert len(places) == reached
    assert threading.active_count() == before


def test_a_pause_on_another_thread_does_nothing() -> None:
    call = counting([], 2)
    call.pause()
    assert call.finish() == "done"
