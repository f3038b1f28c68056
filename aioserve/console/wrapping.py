"""Breaks the lines of a reply between words, as the reply comes in pieces.

Knows how wide characters are. Knows no terminal.
"""

import unicodedata

TAB_STOP = 8


class WordWrap:
    """One reply. A word is shown once it is whole, so that none is ever broken at the margin."""

    def __init__(self, width: int) -> None:
        """`width` is how many columns a line may fill."""
        self._width = max(width, 1)
        self._column = 0
        self._gap = ""  # blanks that stand before the word, and nowhere if the line ends there
        self._word = ""

    def feed(self, text: str) -> str:
        """What can be shown after the next piece."""
        shown = []
        for char in text:
            if char == "\n":
                shown += [self._place(), char]
                self._gap, self._column = "", 0
            elif char in " \t":
                shown.append(self._place())
                self._gap += char
            else:
                self._word += char
                if _width(char) == 2:  # Chinese and Japanese have no blanks to break at
                    shown.append(self._place())
        if len(self._word) >= self._width:  # no word, but a line of something else
            shown.append(self._place())
        return "".join(shown)

    def end(self) -> str:
        """What was held back, as the reply ends here."""
        return self._place()

    def _place(self) -> str:
        if not self._word:
            return ""
        gap, word = self._gap, self._word
        self._gap = self._word = ""
        wide = sum(map(_width, word))
        indent = sum(TAB_STOP if char == "\t" else 1 for char in gap)
        if self._column and self._column + indent + wide > self._width:
            self._column = wide % self._width
            return f"\n{word}"
        self._column = (self._column + indent + wide) % self._width or self._width
        return gap + word


def _width(char: str) -> int:
    """How many columns a character fills."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
