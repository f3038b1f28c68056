"""Which tokens of a reply are reasoning: counted token by token, between marks in their text.

Agrees with the reasoning parser of `formats`, which reads the same reply as text. Knows tokens by
their bytes; knows nothing about budgets.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

#: Tokens at the end of a prompt that may hold the start mark: no mark of a template is longer.
PROMPT_END_TOKENS = 16

_SPACE = b" \t\r\n"


class Marks(Protocol):
    """The texts with which reasoning begins and ends."""

    @property
    def start(self) -> str:
        """The text with which reasoning begins."""

    @property
    def end(self) -> str:
        """The text with which reasoning ends."""

    @property
    def is_implied(self) -> bool:
        """Whether a reply begins inside of reasoning, though no text says so."""

    @property
    def is_repeated(self) -> bool:
        """Whether reasoning may begin again after its end, and anywhere in a reply."""


class TokensState(NamedTuple):
    """The state of a reply's count: what `save` gives and `restore` takes."""

    is_begun: bool
    is_over: bool
    num_tokens: int
    recent: tuple[bytes, ...]


class ReasoningTokens:
    """A counter of the reasoning tokens of one reply.

    A token counts if a byte of it stands behind the start mark and before the end mark: tokens that
    hold nothing but a mark, or a part of it, do not.
    """

    def __init__(
        self, marks: Marks, pieces: Mapping[int, bytes], prompt_token_ids: Iterable[int]
    ) -> None:
        """`pieces`: bytes by token id. `prompt_token_ids`: the prompt, or the last of it, in which
        reasoning may have begun.
        """
        self._start, self._end, self._pieces = marks.start.encode(), marks.end.encode(), pieces
        self._is_repeated = marks.is_repeated
        before = b"".join(pieces[token_id] for token_id in prompt_token_ids).rstrip(_SPACE)
        is_closed = before.endswith(self._end)
        #: Whether reasoning has begun; of what may begin again, whether it goes on.
        self.is_begun = before.endswith(self._start) or (marks.is_implied and not is_closed)
        self.is_over = False  # no token that comes is reasoning
        self.count = 0  # reasoning tokens so far
        # Bytes of the last tokens, in which a mark may have begun.
        self._recent: tuple[bytes, ...] = ()

    @property
    def is_inside(self) -> bool:
        """Whether the next token is reasoning, unless a mark ends in it."""
        return self.is_begun and not self.is_over

    @property
    def num_certain(self) -> int:
        """Reasoning tokens so far without those that may turn out to be of the end mark."""
        if not self.is_inside:
            return self.count
        text = b"".join(self._recent)
        begin, at, count = 0, len(text) - len(_held(text, self._end)), self.count
        for own in self._recent:
            count -= begin >= at
            begin += len(own)
        return count

    def append(self, token_id: int) -> None:
        """Read the next token of the reply."""
        if self.is_over:
            return
        piece = self._pieces[token_id]
        if not self.is_begun:
            piece = self._begin(piece)
            if not piece:
                return
        self._count(piece)

    def _begin(self, piece: bytes) -> bytes:
        """Look for the start mark; the bytes of the token that stand behind it."""
        if self._is_repeated:
            return self._begin_anywhere(b"".join((*self._recent, piece)))
        text = b"".join((*self._recent, piece)).lstrip(_SPACE)
        if text != self._start and self._start.startswith(text):
            self._recent = (text,)
            return b""
        self._recent = ()
        self.is_begun, self.is_over = True, not text.startswith(self._start)
        return b"" if self.is_over else text[len(self._start) :]

    def _begin_anywhere(self, text: bytes) -> bytes:
        before, mark, behind = text.partition(self._start)
        self.is_begun = bool(mark)
        self._recent = () if mark else (_held(before, self._start),)
        return behind

    def _count(self, piece: bytes) -> None:
        self.count += 1
        recent = (*self._recent, piece)
        text = b"".join(recent)
        at = text.find(self._end)
        if at >= 0:
            self.is_begun, self.is_over, begin = not self._is_repeated, not self._is_repeated, 0
            self._recent = (text[at + len(self._end) :],) if self._is_repeated else ()
            for own in recent:
                self.count -= begin >= at  # nothing of it stands before the mark
                begin += len(own)
            return
        # What may be the beginning of the mark is kept.
        num_kept, num_bytes = len(_held(text, self._end)), len(text)
        while recent and num_bytes - len(recent[0]) >= num_kept:
            num_bytes -= len(recent[0])
            recent = recent[1:]
        self._recent = recent

    def save(self) -> TokensState:
        """Return where the reply stands now, for `restore` to go back to."""
        return TokensState(self.is_begun, self.is_over, self.count, self._recent)

    def restore(self, state: TokensState) -> None:
        """Go back to where `save` was called."""
        self.is_begun, self.is_over, self.count, self._recent = state


def _held(text: bytes, mark: bytes) -> bytes:
    """The longest end of `text` that is a beginning of `mark`, and not all of it."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((mark[:n] for n in sizes if text.endswith(mark[:n])), b"")
