"""The command `check`: a contract on files of one's own, in a pytest that has no other settings.

Knows what the contracts need and which words pytest takes; knows no rule.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory

from aioserve.errors import ConfigError
from aioserve.support.arguments import EXIT_FAILED, Parser, count, mapping

PLUGIN = "aioserve.testing.plugin"
KINDS = ("policy", "router", "autoscaler", "format", "step-times")
SAMPLED = ("policy", "format")  # kinds whose number of random examples can be stated
EXIT_BROKEN = 1  # pytest's, of a rule that is broken


def run_check(words: Sequence[str]) -> int:
    """`aioserve check`; returns the exit code: 1 for a broken rule. Raises `ConfigError` where
    pytest or hypothesis is missing.
    """
    arguments = _parser().parse_args(words)
    if arguments.options is not None and arguments.kind == "format":
        raise ConfigError("--options: a format has none")
    if arguments.examples and arguments.kind not in SAMPLED:
        raise ConfigError(
            f"--examples is for {' and '.join(SAMPLED)}: the contract of kind {arguments.kind} has "
            "a number of its own"
        )
    more = [] if arguments.options is None else [json.dumps(arguments.options)]
    flag = f"--aioserve-{arguments.kind}"
    given = [word for spec in arguments.what for word in (flag, spec)]
    given += [word for text in more for word in (f"{flag}-options", text)]
    given += ["--aioserve-examples", str(arguments.examples)] if arguments.examples else []
    given += ["--maxfail=999"] if arguments.all else []
    with TemporaryDirectory() as folder:
        done = subprocess.run([*contract_command(folder), *given], check=False)
    return done.returncode if done.returncode in (0, EXIT_BROKEN) else EXIT_FAILED


def contract_command(folder: str) -> list[str]:
    """Return the command of a pytest whose settings are in `folder`, an empty one, so that those of
    the user's project change nothing. Raises `ConfigError` where pytest or hypothesis is missing.
    """
    for name in ("pytest", "hypothesis"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                "the contract needs pytest and hypothesis: pip install pytest hypothesis"
            )
    settings = Path(folder, "pytest.ini")
    # No rule is a coroutine, and plugins that the user's environment has would warn of this file.
    # A summary (-rN: none) would name rules by a path through the empty folder.
    unused = " ".join(f"-p no:{name}" for name in ("cacheprovider", "asyncio", "schemathesis"))
    settings.write_text(f"[pytest]\naddopts = -rN --noconftest {unused}\n")
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={folder}", "-c", str(settings)]
    if not any(point.value == PLUGIN for point in entry_points(group="pytest11")):
        command += ["-p", PLUGIN]  # aioserve is on the path and not installed
    return command


def _parser() -> Parser:
    parser = Parser(
        "check",
        description="Run the contract on policies: whether they keep every rule at every step of "
        "random traffic. Of a broken rule the report says how, with a short program that shows it. "
        "Exit code 1: a rule is broken.",
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="POLICY",
        help="path/to/file.py, path/to/file.py:Class, package.module:Class or an installed name",
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="policy",
        help="contract to run: that of policies, routers, autoscalers, formats of replies, or "
        "sources of step times",
    )
    parser.add_argument(
        "--options", type=mapping, metavar="JSON", help="options of the policies, a JSON object"
    )
    parser.add_argument(
        "--examples",
        type=count,
        metavar="N",
        help="random sequences of requests at each depth of the pipeline, or random replies of a "
        "format (default: 100)",
    )
    parser.add_argument(
        "--all", action="store_true", help="go on after the first broken rule of a policy"
    )
    return parser
