"""The command line: which command runs, what is said of its errors, exit codes.

Loads the command that is asked for alone; neither the server nor torch before it runs, so that
`--help` is quick.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from aioserve.errors import AioserveError, ConfigError, EngineDeadError, did_you_mean
from aioserve.support.arguments import EXIT_ENGINE_DEAD, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from aioserve.support.process import way_out

EXIT_UNREAD = 141  # a shell's, for SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. One line on stderr says what went wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _dispatch(words)
        finally:
            sys.stdout.flush()  # not at exit: a reader that has gone is noticed here
    except AioserveError as error:
        print(f"aioserve: error: {error}", file=sys.stderr)  # noqa: T201
        if isinstance(error, ConfigError):
            return EXIT_USAGE
        return EXIT_ENGINE_DEAD if isinstance(error, EngineDeadError) else EXIT_FAILED
    except ModuleNotFoundError as error:
        print(f"aioserve: error: {way_out(error)}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    except KeyboardInterrupt:
        if not words or words[0] not in TOOLS:  # before the server took charge of signals
            return 0
        print("aioserve: interrupted", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return EXIT_UNREAD


def _dispatch(words: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        from aioserve.cli.completion import answer_shell
        from aioserve.cli.serve import build_parser

        answer_shell([SERVE], TOOLS, build_parser, lambda name: _load_tool(name)([]))
    first, rest = (words[0], words[1:]) if words else ("", [])
    if first in TOOLS:
        return _load_tool(first)(rest)
    if first and not first.startswith("-") and first != SERVE:
        known = [SERVE, *TOOLS]
        raise ConfigError(
            f"unknown command {first!r}{did_you_mean(first, known)}; there are {', '.join(known)}"
        )
    # Not a positional of argparse: after a misspelt flag it would be blamed for the value.
    from aioserve.cli.serve import run_serve

    return run_serve(rest if first == SERVE else words)


#: The command that runs where none is named.
SERVE = "serve"

# Commands with arguments of their own: module and function, which returns the exit code.
TOOLS = {
    "compare": "aioserve.lab.comparison.commands:run_compare",
    "search": "aioserve.lab.search:run_search",
    "sweep": "aioserve.lab.comparison.sweep:run_sweep",
    "mispredict": "aioserve.lab.mispredict:run_mispredict",
    "evaluate": "aioserve.lab.evaluate.evaluator:run_evaluate",
    "evolve": "aioserve.lab.evolve:run_evolve",
    "bench": "aioserve.lab.bench:run_bench",
    "calibrate": "aioserve.lab.calibration:run_calibrate",
    "reproduce": "aioserve.lab.reproduce.commands:run_reproduce",
    "cards": "aioserve.lab.cards.commands:run_cards",
    "zoo": "aioserve.lab.zoo.commands:run_zoo",
    "check": "aioserve.lab.check:run_check",
    "certify": "aioserve.lab.certify:run_certify",
    "replay": "aioserve.lab.logs:run_replay",
    "trace": "aioserve.lab.logs:run_trace",
    "chat": "aioserve.cli.chat:run_chat",
    "completion": "aioserve.cli.completion:run_completion",
    "doctor": "aioserve.cli.doctor:run_doctor",
    "settings": "aioserve.cli.settings:run_settings",
    "fetch": "aioserve.model_source.downloads:run_fetch",
}


def _load_tool(name: str) -> Callable[[Sequence[str]], int]:
    module, _, function = TOOLS[name].partition(":")
    tool: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return tool
