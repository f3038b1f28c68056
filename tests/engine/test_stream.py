"""RequestStream: one reader, bounded memory, a defined end."""

import asyncio
from collections.abc import Callable

import pytest

from aioserve.engine.stream import RequestStream
from aioserve.errors import RequestFailedError
from aioserve.outputs import FinishReason, RequestOutput


def delta(text: str, index: int = 0, finish_reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(
        request_id="r", index=index, text=text, token_ids=[1], finish_reason=finish_reason
    )


async def test_a_slow_reader_gets_merged_deltas_and_loses_nothing() -> None:
    stream = RequestStream("r", 1, abort=lambda: None)
    for text in "abc":
        stream.put(delta(text))
    stream.put(delta("d", finish_reason=FinishReason.STOP))
    outputs = [output async for output in stream]
    assert [(o.text, o.token_ids, o.finish_reason) for o in outputs] == [
        ("abcd", [1, 1, 1, 1], FinishReason.STOP)
    ]


async def test_a_waiting_reader_gets_each_delta_as_it_comes() -> None:
    stream = RequestStream("r", 1, abort=lambda: None)
    texts = []

    async def read() -> None:
        async for output in stream:
            texts.append(output.text)

    reader = asyncio.create_task(read())
    for text in "ab":
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.put(delta(text))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.put(delta("c", finish_reason=FinishReason.STOP))
    await reader
    assert texts == ["a", "b", "c"]


async def test_the_stream_ends_after_all_samples() -> None:
    stream = RequestStream("r", 2, abort=lambda: None)
    stream.put(delta("a", 0, FinishReason.STOP))
    assert (await anext(stream)).index == 0
    stream.put(delta("b", 1, FinishReason.LENGTH))
    assert [o.index async for o in stream] == [1]


async def test_leaving_the_block_aborts_only_what_is_unfinished() -> None:
    aborts: list[int] = []
    async with RequestStream("r", 1, abort=lambda: aborts.append(1)) as stream:
        stream.put(delta("a", finish_reason=FinishReason.STOP))
    assert aborts == []
    async with RequestStream("r", 1, abort=lambda: aborts.append(1)) as stream:
        stream.put(delta("a"))
    stream.close()
    assert aborts == [1]


async def test_an_error_comes_after_what_was_pending() -> None:
    stream = RequestStream("r", 1, abort=lambda: None)
    stream.put(delta("a"))
    stream.fail(RequestFailedError("boom"))
    assert (await anext(stream)).text == "a"
    with pytest.raises(RequestFailedError, match="boom"):
        await anext(stream)


async def test_closing_wakes_a_reader_that_waits() -> None:
    stream = RequestStream("r", 1, abort=lambda: None)
    reader = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    stream.close()
    assert await reader is None


async def test_what_is_taken_at_once_is_not_queued_and_the_rest_keeps_its_order() -> None:
    told: list[str] = []
    has_room = True

    def take(output: RequestOutput) -> bool:
        if has_room:
            told.append(output.text)
        return has_room

    stream = RequestStream("r", 1, abort=lambda: None)
    stream.offer_to(take)
    stream.put(delta("a"))
    has_room = False
    stream.put(delta("b"))
    has_room = True
    stream.put(delta("c"))  # not before what is pending
    assert told == ["a"]
    told.append((await anext(stream)).text)
    stream.put(delta("d"))
    stream.put(delta("e", finish_reason=FinishReason.STOP))  # the reader has to hear of the end
    told += [output.text async for output in stream]
    assert told == ["a", "bc", "d", "e"]


async def test_a_reader_that_waits_sleeps_through_what_is_taken_and_hears_an_error() -> None:
    stream = RequestStream("r", 1, abort=lambda: None)
    stream.offer_to(lambda output: True)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.put(delta("a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not reader.done()
    stream.fail(RequestFailedError("boom"))
    with pytest.raises(RequestFailedError, match="boom"):
        await reader


@pytest.mark.parametrize("error", [ValueError("planted"), asyncio.CancelledError("planted")])
async def test_an_offer_that_raises_is_made_once_and_loses_nothing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises: who delivers goes on, and the log tells."""
    offers: list[str] = []

    def take(output: RequestOutput) -> bool:
        offers.append(output.text)
        raise error

    stream = RequestStream("r", 1, abort=lambda: None)
    stream.offer_to(take)
    stream.put(delta("a"))
    assert (await anext(stream)).text == "a"
    stream.put(delta("b"))
    assert (await anext(stream)).text == "b"
    assert offers == ["a"]
    assert "planted" in caplog.text


async def test_a_text_is_taken_unless_an_earlier_delta_is_pending() -> None:
    stream = RequestStream("r", 2, abort=lambda: None)
    told: list[tuple[int, str]] = []
    has_room = True

    def taker(index: int) -> Callable[[str], bool]:
        def take(text: str) -> bool:
            if has_room:
                told.append((index, text))
            return has_room

        return take

    assert not stream.put_text(0, "a")  # nobody asked for it
    for index in (0, 1):
        stream.offer_texts_to(index, taker(index))
    assert stream.put_text(0, "a")
    assert stream.put_text(1, "b")
    has_room = False
    assert not stream.put_text(0, "c")
    stream.put(delta("c"))
    has_room = True
    assert not stream.put_text(0, "d")  # not before what is pending
    stream.put(delta("d"))
    assert (await anext(stream)).text == "cd"
    assert stream.put_text(0, "e")
    assert told == [(0, "a"), (1, "b"), (0, "e")]


@pytest.mark.parametrize("error", [ValueError("planted"), asyncio.CancelledError("planted")])
async def test_a_text_whose_taker_raises_is_queued_with_all_after_it(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    offers: list[str] = []

    def take(text: str) -> bool:
        offers.append(text)
        raise error

    stream = RequestStream("r", 1, abort=lambda: None)
    stream.offer_texts_to(0, take)
    assert not stream.put_text(0, "a")
    assert not stream.put_text(0, "b")
    assert offers == ["a"]
    assert "planted" in caplog.text
