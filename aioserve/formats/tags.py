"""How a family writes calls as tags: the layout of a call, for what reads, writes and binds it.

Plain data, and the text that it makes of a call. Knows no family.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aioserve.formats.reply_format import SaidCall

NAME = re.compile(r'[^<>"\n]*')  # of a function or an argument


class Tags(NamedTuple):
    """Texts as chat templates write them, with their space; reading them, space between tags does
    not count.
    """

    wrapper: tuple[str, str]  # around a call; around all calls of a reply if `is_block`
    call: tuple[str, str, str]  # before the name, behind it, behind the arguments
    parameter: tuple[str, str, str]  # before the name, between name and value, behind the value
    gap: str  # between content and calls
    separator: str = ""  # between calls
    is_block: bool = False
    #: For `parameter[1]` where that says if the value is a text: what says so, what denies it.
    middles: tuple[str, str] | None = None
    #: What may stand there as well when it is read.
    other_middles: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()  # parts of these texts that are special tokens by themselves
    has_python: bool = False  # it writes True, False and None for true, false and null

    @property
    def opening(self) -> str:
        return self.wrapper[0].strip()

    @property
    def closing(self) -> str:
        return self.wrapper[1].strip()

    @property
    def name_end(self) -> str:
        return self.call[1].strip()

    @property
    def call_ends(self) -> tuple[str, ...]:
        """What ends a call, the last of them what is around it, too."""
        own = self.call[2].strip()
        return (own, self.closing) if own else (self.closing,)

    @property
    def value_end(self) -> str:
        return self.parameter[2].strip()

    @property
    def has_lines(self) -> bool:
        """Whether a line break after the tag and one before its end are no part of the value."""
        return self.parameter[1].endswith("\n")

    def middle(self, is_text: bool) -> str:
        """What stands between the name and the value of an argument."""
        return self.parameter[1] if self.middles is None else self.middles[not is_text]

    @property
    def read_middles(self) -> tuple[str, ...]:
        """All that may stand there, without the space at its end."""
        own = self.middles or (self.parameter[1].rstrip(),)
        return (*own, *self.other_middles)

    @property
    def markers(self) -> tuple[str, ...]:
        """Every tag, or the beginning of one before a name, and the tokens in them."""
        own = (*self.wrapper, *self.call, *self.parameter, *self.read_middles, *self.tokens)
        texts = [text.strip() for text in own if re.search(r"\w", text)]
        return tuple(dict.fromkeys(text for text in texts if not text.startswith('"')))

    def wrapped(self, calls: Sequence[str]) -> str:
        """The text of calls that are written."""
        if not calls:
            return ""
        if self.is_block:
            calls = [self.separator.join(calls)]
        before, after = self.wrapper
        return self.separator.join(f"{before}{call}{after}" for call in calls)

    def written(self, call: SaidCall, said: Callable[[Any], str]) -> str:
        """One call; `said` writes a value that is no text. Raises `ValueError` for a name or a text
        in which a tag would end.
        """
        for name in (call.name, *call.arguments):
            if not name.strip() or not NAME.fullmatch(name):
                raise ValueError(f"a name that cannot stand in a tag: {name!r}")
        pieces = [self.call[0], call.name, self.call[1]]
        for name, value in call.arguments.items():
            is_text = isinstance(value, str)
            if is_text and self.value_end in value:
                raise ValueError(
                    f"a text with {self.value_end} in it, where that ends it: {value!r}"
                )
            pieces += [self.parameter[0], name, self.middle(is_text)]
            pieces += [value if is_text else said(value), self.parameter[2]]
        return "".join([*pieces, self.call[2]])
