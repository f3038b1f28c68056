"""The program that renders chat templates, in a process of its own: `template_renderer` runs it.

It reads a template and what that is given from a socket, and writes the text or what was raised.
Each answer has its limit of CPU time, kept by the kernel; the process has one of memory. It ends
when its socket does. Imports nothing of aioserve: it starts in the time that Jinja takes.
"""

import json
import os
import signal
import socket
import struct
import sys
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template

HEAD = struct.Struct("<cdQ")  # what it is, seconds of CPU time, bytes that follow

# What is asked, and what is answered.
RENDER, NAMES = b"R", b"N"
TEXT, REFUSAL, TOO_LONG, TOO_LARGE = b"T", b"F", b"L", b"M"

FIRST = 2**15  # bytes that are sent with their head; what is larger is not copied for that
MAX_MESSAGE = 1_000  # characters of what a template raises


class TooLongError(Exception):
    """Raised where a template makes a text that is longer than allowed."""


def main(file: int, max_text: int, max_bytes: int) -> None:
    """Answer until the other end is closed."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Elsewhere than on Linux the system may keep no such limit.
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is doing
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what started the server may have blocked it
    _make_environment()
    with socket.socket(fileno=file) as line, line.makefile("rb") as asked:
        while len(head := asked.read(HEAD.size)) == HEAD.size:
            kind, seconds, size = HEAD.unpack(head)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer, text = _answer(kind, asked.read(size), max_text)
            try:
                data = text.encode(errors="surrogatepass")
            except MemoryError:
                answer, data = TOO_LARGE, b""
            del text
            signal.setitimer(signal.ITIMER_PROF, 0)
            line.sendall(HEAD.pack(answer, 0.0, len(data)) + data[:FIRST])
            line.sendall(memoryview(data)[FIRST:])
            if answer == TOO_LARGE:
                os._exit(1)  # what is left of it is not worth keeping


def _answer(kind: bytes, data: bytes, max_text: int) -> tuple[bytes, str]:
    try:
        source, names = json.loads(data)
        if kind == NAMES:
            return TEXT, json.dumps(_names_read(source))
        pieces, size = [], 0
        for piece in _compile(source).generate(names):
            size += len(piece)
            if size > max_text:
                raise TooLongError
            pieces.append(piece)
        return TEXT, "".join(pieces)
    except TooLongError:
        return TOO_LONG, ""
    except MemoryError:
        return TOO_LARGE, ""
    except Exception as error:  # templates raise what they like for roles they do not know
        return REFUSAL, f"{_line_of(error)}: {str(error)[:MAX_MESSAGE]}"


@lru_cache(maxsize=8)
def _compile(source: str) -> "Template":
    """Return the compiled template. Raises what Jinja does if `source` is not a template."""
    template: Template = _make_environment().from_string(source)
    return template


def _names_read(source: str) -> list[str]:
    """Return names of the variables that a template reads; none if it does not compile."""
    from jinja2 import TemplateError, meta

    try:
        return sorted(meta.find_undeclared_variables(_make_environment().parse(source)))
    except TemplateError:
        return []


def syntax_error(source: str) -> str | None:
    """Return what Jinja says of a text that is no template, with its line; None if it is one. Runs
    nothing of it.
    """
    from jinja2 import TemplateSyntaxError

    try:
        _make_environment().parse(source)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {' '.join(str(error.message).split())}"
    except (ValueError, RecursionError) as error:  # for too long a number, for too many brackets
        return str(error)
    return None


@lru_cache
def _make_environment() -> Any:
    """Jinja's sandbox as `transformers` sets it up."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what to train on: of no interest here."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    class PlainNamespace(Namespace):
        """A namespace without names that lead into Python's own."""

        def __init__(*args: Any, **attrs: Any) -> None:  # as Jinja's: `self` may be a name
            self, *given = args
            values = dict(*given, **attrs)
            for name in values:
                check_name(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"{name!r} is no name of a namespace in a chat template")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": _strftime_now,
        "dict": lambda *args, **items: dict(*args, **items),  # the class has more to offer
        "namespace": PlainNamespace,
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, for text that is no HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _line_of(error: BaseException) -> str:
    """Return where in the template it was raised, as Jinja's traceback knows."""
    line: int | None = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" in line {line}"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
