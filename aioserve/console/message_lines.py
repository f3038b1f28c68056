"""Messages from lines: of a terminal with readline's history and Tab, or of a pipe.

A line that ends in a backslash goes on, and so does all between two lines of three quotes. Knows
nothing of what messages are for.
"""

import sys
from collections.abc import Callable, Iterable

from aioserve.console.terminal_keys import hearing_interrupts

PROMPT, MORE = "> ", "... "
QUOTES = '"""'

#: A line without its end, after a prompt is shown. Raises `EOFError`.
ReadLine = Callable[[str], str]


def read_message(read_line: ReadLine) -> str:
    """The next one. Raises `EOFError` if there is no more; inside a message, that ends it."""
    line = read_line(PROMPT)
    if line.strip().startswith(QUOTES):
        return _quoted(line.strip().removeprefix(QUOTES), read_line)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = read_line(MORE)
        except EOFError:
            line = ""
    return "\n".join([*lines, line])


def _quoted(line: str, read_line: ReadLine) -> str:
    lines = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        try:
            line = read_line(MORE)
        except EOFError:
            return "\n".join(lines).strip("\n")
    return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")


def read_from_pipe(prompt: str) -> str:
    """A line of stdin, read without showing a prompt."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def read_from_terminal(prompt: str) -> str:
    """A line of a person, edited as readline has it. Raises `KeyboardInterrupt` at a Ctrl-C."""
    with hearing_interrupts():
        return input(prompt)


def complete_by(complete: Callable[[str, str], Iterable[str]]) -> None:
    """Have Tab offer what `complete` gives for a line up to the word, and the word."""
    try:
        import readline
    except ImportError:  # Python was built without it
        return

    def offer(word: str, index: int) -> str | None:
        before = readline.get_line_buffer()[: readline.get_begidx()]
        found = [one for one in complete(before, word) if one.startswith(word)]
        return found[index] if index < len(found) else None

    readline.set_completer_delims(" ")  # a slash and a path are parts of words
    readline.set_completer(offer)
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
