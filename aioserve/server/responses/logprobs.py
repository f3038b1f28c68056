"""Log probabilities of a response's messages: which tokens of the reply stand in which text.

A format reads a reply into reasoning, messages and calls, and holds back what may turn out to be a
mark: tokens come before the text that they are in, and some are in none. Knows bytes of tokens and
pieces of text in their order, and no format.
"""

import re
from collections import deque
from typing import NamedTuple

from aioserve.outputs import RequestOutput
from aioserve.server.logprob_structs import ChatTokenLogprob
from aioserve.server.logprobs import TokenTexts, chat_logprobs

_REPLACEMENT = "\ufffd".encode()  # shown in the place of bytes that are no character


class _Pending(NamedTuple):
    """A token of which no text has been told, or only the first bytes of it."""

    entry: ChatTokenLogprob
    size: int  # bytes that are left
    is_told: bool


class TokenQueue:
    """Tokens of a reply whose text is still to come, with their logprobs."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._pending: deque[_Pending] = deque()
        self._raw = b""  # the bytes of all that is pending

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
        found = _written_as(text).search(self._raw)
        begin, end = (0, len(self._raw)) if found is None else found.span()
        told: list[ChatTokenLogprob] = []
        position = 0
        while self._pending and position < end:
            token = self._pending.popleft()
            if position + token.size > begin and not token.is_told:
                told.append(token.entry)
            position += token.size
        if position > end:
            self._pending.appendleft(token._replace(size=position - end, is_told=True))
        self._raw = self._raw[end:]
        return told


def _written_as(text: str) -> re.Pattern[bytes]:
    """All bytes that are shown as `text`: U+FFFD stands for bytes that are no character."""
    pieces = text.encode().split(_REPLACEMENT)
    return re.compile(b".{1,3}?".join(map(re.escape, pieces)), re.DOTALL)
