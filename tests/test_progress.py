"""Work that lasts is told in lines where there is no terminal: a few, and the last always."""

import threading

import pytest

from aioserve.support.progress import (
    SECONDS,
    Interrupted,
    Lines,
    as_stage,
    counted,
    download_bars,
    interruptible,
    stage,
)


class Clock:
    """Passes as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_quick_stage_is_one_line() -> None:
    told: list[str] = []
    assert list(Lines("abc", "Loading", say=told.append, clock=Clock())) == ["a", "b", "c"]
    assert told == ["Loading: 3 of 3, 0.0 s"]


def test_a_stage_of_nothing_is_no_line() -> None:
    told: list[str] = []
    assert list(Lines((), "Loading", say=told.append, clock=Clock())) == []
    assert told == []


def test_a_long_stage_has_a_line_now_and_then() -> None:
    told: list[str] = []
    clock = Clock()
    for _ in Lines(range(100), "Loading", say=told.append, clock=clock):
        clock.now += SECONDS / 40
    assert told == [
        "Loading: 40 of 100, 5.0 s",
        "Loading: 80 of 100, 10.0 s",
        "Loading: 100 of 100, 12.5 s",
    ]


def test_the_end_is_told_once_where_a_line_is_due() -> None:
    told: list[str] = []
    clock = Clock()
    for _ in Lines(range(2), "Loading", say=told.append, clock=clock):
        clock.now += SECONDS / 2
    assert told == ["Loading: 2 of 2, 5.0 s"]


def test_a_stage_that_fails_tells_how_far_it_came() -> None:
    told: list[str] = []
    lines = Lines(range(9), "Loading", say=told.append, clock=Clock())
    with pytest.raises(ZeroDivisionError):
        [1 // (item - 2) for item in lines]
    assert told == ["Loading: 2 of 9, 0.0 s"]


def test_how_many_there_are_need_not_be_known() -> None:
    told: list[str] = []
    assert list(Lines(iter("ab"), "Reading", say=told.append, clock=Clock())) == ["a", "b"]
    assert told == ["Reading: 2, 0.0 s"]


def test_a_download_tells_its_bytes_meanwhile_and_its_files_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aioserve.support.progress")
    bars = download_bars()
    files = bars(total=2, desc="Fetching 2 files")
    transfer = bars(total=2_000_000, desc="Downloading bytes", unit="B", unit_scale=True)
    written = bars(total=2_000_000, desc="Reconstructing", unit="B", unit_scale=True)
    transfer.update(1_500_000)
    transfer.refresh()  # too early
    monkeypatch.setattr("aioserve.support.progress.SECONDS", 0.0)
    transfer.refresh()
    written.refresh()
    monkeypatch.undo()
    files.update(2)
    for bar in (transfer, written, files):
        bar.close()
    told = [record.message.rpartition(",")[0] for record in caplog.records]
    assert told == ["Downloading bytes: 1.50M of 2.00M", "Fetching 2 files: 2 of 2"]


def test_stages_of_an_interrupted_thread_end_before_their_next_unit() -> None:
    is_interrupted = threading.Event()
    with interruptible(is_interrupted):
        layers = stage(range(5), "Loading", "layer")
        assert [next(layers), next(layers)] == [0, 1]
        is_interrupted.set()
        with pytest.raises(Interrupted):
            next(layers)
        with pytest.raises(Interrupted), counted(5, "Loading", "layer") as count:
            count()
        with pytest.raises(Interrupted):
            as_stage(Lines, (range(5),), {"desc": "Loading"})
    assert list(stage(range(2), "Loading", "layer")) == [0, 1]  # outside the block
