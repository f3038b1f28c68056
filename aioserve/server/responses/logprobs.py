"""Log probabilities of a response's messages: which tokens of the reply stand in which text.

A format reads a reply into reasoning, messages and calls, and holds back what may turn out to be a
mark: tokens come before the text that they are in, and some are in none. Knows bytes of tokens and
pieces of text in their order, and no format.
"""

from collections import deque
from typing import NamedTuple

from aioserve.outputs import RequestOutput
from aioserve.server.logprob_structs import ChatTokenLogprob
from aioserve.server.logprobs import TokenTexts, chat_logprobs

_REPLACEMENT = "\ufffd"  # shown in the place of bytes that are no character
_LEAST_WINDOW = 64  # bytes that are looked at; a guess


class _Pending(NamedTuple):
    """A token of which no text has been told, or only the first bytes of it."""

    entry: ChatTokenLogprob
    size: int  # bytes that are left
    is_told: bool


class TokenQueue:
    """Tokens of a reply whose text is still to come, with their logprobs.

    All calls together take time in proportion to the reply, whatever it says: what was searched is
    taken away, and no more of it is searched than that.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._pending: deque[_Pending] = deque()
        self._raw = bytearray()  # the bytes of all that is pending

    def append(self, output: RequestOutput) -> None:
        """Add the tokens of the next output."""
        if not output.logprobs:
            return
        for entry in chat_logprobs(self._texts, output.token_ids, output.logprobs).content:
            self._pending.append(_Pending(entry, len(entry.bytes), False))
            self._raw += bytes(entry.bytes)

    def take(self, text: str) -> list[ChatTokenLogprob]:
        """The tokens that make up `text`, the next piece of the reply that is told. Tokens before
        it are dropped: they are marks. A token in two pieces belongs to the first one. Where the
        text is not what the model wrote, all pending tokens are said to be in it.
        """
        begin, end = _find(text, self._raw) or (0, len(self._raw))
        told: list[ChatTokenLogprob] = []
        position = 0
        while self._pending and position < end:
            token = self._pending.popleft()
            if position + token.size > begin and not token.is_told:
                told.append(token.entry)
            position += token.size
        if position > end:
            self._pending.appendleft(token._replace(size=position - end, is_told=True))
        del self._raw[:end]
        return told


def _find(text: str, raw: bytearray) -> tuple[int, int] | None:
    """Where in `raw` the first bytes begin and end that are shown as `text`, in which U+FFFD stands
    for bytes that are no character; None if there are none.
    """
    if _REPLACEMENT not in text:
        own = text.encode()
        begin = raw.find(own)
        return None if begin < 0 else (begin, begin + len(own))
    size = 3 * len(text) + _LEAST_WINDOW
    while size < len(raw):
        end = size
        while end > size - 3 and raw[end] & 0xC0 == 0x80:
            end -= 1  # it would stand within a character
        if found := _find_broken(text, bytes(raw[:end]), is_all=False):
            return found
        size *= 2
    return _find_broken(text, bytes(raw), is_all=True)


def _find_broken(text: str, raw: bytes, *, is_all: bool) -> tuple[int, int] | None:
    """What `_find` does. Tokenizers differ in how many U+FFFD they show for broken bytes, one for
    each byte or for each character that was begun: so a run of them is a run, and they are counted
    only where the text begins or ends. Without `is_all`, more bytes follow.
    """
    wanted = _with_short_runs(text)
    shown, places, position = [""], list[int](), 0  # where in `raw` each character begins
    for char in raw.decode(errors="surrogateescape"):
        is_byte = "\udc80" <= char <= "\udcff"
        own = _REPLACEMENT if is_byte else char
        if own != _REPLACEMENT or shown[-1] != _REPLACEMENT:
            shown.append(own)
            places.append(position)
        position += 1 if is_byte else len(char.encode())
    places.append(position)
    first = "".join(shown).find(wanted)
    if first < 0:
        return None
    last = first + len(wanted)
    begin, end = places[first], places[last]
    if text.endswith(_REPLACEMENT):
        num_shown = len(text) - len(text.rstrip(_REPLACEMENT))
        start = places[last - 1]
        sizes = _sizes_of_broken(raw[start:end])
        if len(sizes) >= num_shown:
            end = start + sum(sizes[:num_shown])
        elif not is_all and end == len(raw):
            return None
        else:
            end = min(end, start + num_shown)
    if text.startswith(_REPLACEMENT) and len(wanted) > 1:
        num_shown = len(text) - len(text.lstrip(_REPLACEMENT))
        sizes = _sizes_of_broken(raw[begin : places[first + 1]])
        begin += sum(sizes[: max(len(sizes) - num_shown, 0)])
    return begin, end


def _with_short_runs(text: str) -> str:
    """The text with one U+FFFD in the place of several in a row."""
    begun = ["", *text][:-1]
    return "".join(
        char
        for before, char in zip(begun, text, strict=True)
        if char != _REPLACEMENT or before != _REPLACEMENT
    )


def _sizes_of_broken(raw: bytes) -> list[int]:
    """The bytes that each U+FFFD stands for which a decoder of UTF-8 shows for all of these."""
    sizes, at = [], 0
    while at < len(raw):
        try:
            raw[at : at + 4].decode()
            size = 3  # U+FFFD itself
        except UnicodeDecodeError as error:
            size = error.end - error.start if error.start == 0 else 3
        sizes.append(size)
        at += size
    return sizes
