"""What all commands share on the command line: one-line errors, defaults in --help, exit codes.

Also the types of flags, and the event loop. Knows argparse. Knows no command and no setting.
"""

import argparse
import asyncio
import re
import types
import typing
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import msgspec

from aioserve.errors import did_you_mean

EXIT_FAILED = 1
EXIT_USAGE = 2  # argparse's, also for configurations that cannot work
EXIT_ENGINE_DEAD = 3
EXIT_INTERRUPTED = 130  # a shell's, for SIGINT

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop where that is installed."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        from uvloop import new_event_loop

        loop_factory = new_event_loop
    except ImportError:  # no wheel for this platform: asyncio's own loop
        pass
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(coroutine)


class Parser(argparse.ArgumentParser):
    """Errors in one line: the usage of forty flags would bury them."""

    #: Set where a shell asks what may follow: is given the parser, and ends the process.
    instead_of_parsing: ClassVar[Callable[[argparse.ArgumentParser], NoReturn] | None] = None

    def __init__(self, command: str, **options: Any) -> None:
        """The parser of `aioserve COMMAND`; `options` are those of `ArgumentParser`."""
        options = {"allow_abbrev": False, "formatter_class": _Formatter, **options}
        super().__init__(prog=f"aioserve {command}".strip(), **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        if (instead := type(self).instead_of_parsing) is not None:
            instead(self)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown, colon, words = message.partition("unrecognized arguments: ")
        if colon and not unknown:
            flag = words.split()[0].partition("=")[0]
            message += did_you_mean(flag, re.findall(r"--[\w-]+", self.format_help()))
        elif choice := re.search(r"invalid choice: '(.*?)'", message):
            message += did_you_mean(choice[1], ())
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Formatter(argparse.HelpFormatter):
    """A formatter that says every default which the help of an argument does not say itself."""

    def add_argument(self, action: argparse.Action) -> None:
        default, text = action.default, action.help or ""
        is_switch = isinstance(default, bool)  # off unless it is named
        is_plain = default in (None, argparse.SUPPRESS, [], {}) or is_switch
        if not is_plain and text != argparse.SUPPRESS and "default:" not in text:
            action.help = f"{text} (default: %(default)s)".lstrip()
        super().add_argument(action)


class TakesArguments(Protocol):
    """A parser, or a group of its arguments."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an option or argument, as `ArgumentParser.add_argument` does, and return it."""


def read_annotation(annotation: Any) -> tuple[Any, str]:
    """Return the type under `Annotated` and `| None`, and the description on the way there."""
    description = ""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation, *notes = typing.get_args(annotation)
            descriptions = [n.description for n in notes if isinstance(n, msgspec.Meta)]
            description = next(filter(None, descriptions), description)
        elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
            annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
        else:
            return annotation, description


def assignment(text: str) -> tuple[str, str]:
    """Return the name and the value of `SECTION.NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals or not all(name.split(".")) or "." not in name:
        raise argparse.ArgumentTypeError(f"expected SECTION.NAME=VALUE, got {text!r}")
    return name, value


def output_file(text: str) -> str:
    """Return a file that can be written, or begun: found out before the work, not after it."""
    from aioserve.support.files import why_not_writable

    if why := why_not_writable(text):
        raise argparse.ArgumentTypeError(f"cannot write {text}: {why}")
    return text


def count(text: str) -> int:
    """Return the type of an argument that is a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """Return the type of an argument that is a whole number, 0 included."""
    return 0 if text == "0" else count(text)


def positive(text: str) -> float:
    """Return the type of an argument that is a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def mapping(text: str) -> dict[str, Any]:
    """Return the type of an argument that is a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from error
