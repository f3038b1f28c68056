"""The command `doctor`: what this machine has and lacks, with the line that brings it.

Words and the exit code; what is looked at stands in `hardware` and `packages`.
"""

import importlib
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aioserve.arguments import EXIT_FAILED, Parser
from aioserve.console.finding import Finding, ok
from aioserve.errors import ConfigError
from aioserve.model_source.downloads import DOWNLOADS, downloaded
from aioserve.version import __version__

#: What changes how aioserve runs. None of them holds a secret.
VARIABLES = (
    "AIOSERVE_MODELS",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "PYTHONASYNCIODEBUG",
)


class Diagnosis(msgspec.Struct, frozen=True):
    """The JSON that `doctor --json` prints."""

    version: str  # of aioserve
    is_well: bool  # nothing is missing
    findings: list[Finding]


def run_doctor(argv: Sequence[str]) -> int:
    """`python -m aioserve doctor [--json]`; returns 0 if nothing is missing, else 1."""
    parser = Parser(
        "doctor",
        description="Check this machine: packages, instruction sets, kernels, memory, GPUs. "
        "Prints what is missing, with the command that installs it.",
        epilog="Exit codes: 0 if nothing is missing, 1 if something is. Notes list what is "
        "optional.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    diagnosis = examine()
    print(_as_json(diagnosis) if arguments.json else _as_text(diagnosis))
    return 0 if diagnosis.is_well else EXIT_FAILED


def examine() -> Diagnosis:
    """Look at everything. Takes as long as the import of torch."""
    from aioserve.console import hardware, packages
    from aioserve.runner.devices import num_cuda_devices

    findings = [
        ok("aioserve", f"{__version__}, in {Path(__file__).parents[1]}"),
        ok("python", f"{platform.python_version()}, {sys.executable}"),
        hardware.look_at_system(),
        hardware.look_at_cpu(),
        hardware.look_at_kernels(),
        hardware.look_at_compiler(),
        hardware.look_at_memory(),
        hardware.look_at_files(),
        hardware.look_at_cards(),
        _look_at_event_loop(),
        *packages.look_at_packages(num_cuda_devices() > 0),
        *_look_at_models(),
        *_look_at_variables(),
    ]
    return Diagnosis(__version__, all(f.state != "missing" for f in findings), findings)


def _look_at_event_loop() -> Finding:
    try:
        version = importlib.import_module("uvloop").__version__
    except ImportError as error:
        text = f"asyncio's own, slower: {error}"
        if sys.platform == "win32":
            return ok("event loop", text)
        return Finding(name="event loop", state="missing", text=text, remedy="pip install uvloop")
    return ok("event loop", f"uvloop {version}")


def _look_at_models() -> list[Finding]:
    found = [ok("model embedded", "in the package")]
    for name, download in DOWNLOADS.items():
        title = f"model {name}"
        try:
            found.append(ok(title, str(downloaded(name))))
        except ConfigError:
            text, remedy = f"not fetched: {download.about}", f"python -m aioserve fetch {name}"
            found.append(Finding(name=title, state="note", text=text, remedy=remedy))
    return found


def _look_at_variables() -> list[Finding]:
    there = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return [ok("environment", " ".join(there))] if there else []


def _as_json(diagnosis: Diagnosis) -> str:
    return msgspec.json.format(msgspec.json.encode(diagnosis)).decode()


def _as_text(diagnosis: Diagnosis) -> str:
    """A line for each finding, and one below it for its remedy."""
    width = max(len(finding.name) for finding in diagnosis.findings)
    lines = []
    for finding in diagnosis.findings:
        lines.append(f"{finding.state:7}  {finding.name:{width}}  {finding.text}")
        if finding.remedy is not None:
            lines.append(f"{'':7}  {'':{width}}  -> {finding.remedy}")
    states = [finding.state for finding in diagnosis.findings]
    missing, notes = states.count("missing"), states.count("note")
    lines += ["", f"missing: {missing or 'nothing'}; can be added: {notes or 'nothing'}"]
    return "\n".join(lines)
