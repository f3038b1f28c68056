"""The command `doctor`: what this machine has and lacks, with the line that brings it.

Reads metadata of distributions and imports none of them: a broken one is another check's finding.
Of the machine it asks what the server asks when it starts.
"""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from aioserve.errors import ConfigError
from aioserve.kernels.library import (
    ENVIRONMENT_VARIABLE,
    VARIANTS,
    KernelsUnavailableError,
    choose_variant,
    cpu_flags,
    open_library,
    usable_variants,
)
from aioserve.model_source.downloads import DOWNLOADS, downloaded
from aioserve.runner.cpu import machine
from aioserve.runner.devices import num_cuda_devices
from aioserve.support import __version__
from aioserve.support.arguments import EXIT_FAILED, Parser

if TYPE_CHECKING:
    from packaging.requirements import Requirement


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of looking for `name`, and what to do about it.

    `missing`: aioserve does not run without it, or uses this machine worse than it could.
    `note`: it can be added for what it says.
    """

    name: str
    state: Literal["ok", "note", "missing"]
    text: str
    remedy: str | None = None


def ok(name: str, text: str) -> Finding:
    """Return a finding of something that is as it should be."""
    return Finding(name=name, state="ok", text=text)


def note(name: str, text: str, remedy: str | None = None) -> Finding:
    """Return a finding of something that can be added."""
    return Finding(name=name, state="note", text=text, remedy=remedy)


def missing(name: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that is lacking, with the line that brings it."""
    return Finding(name=name, state="missing", text=text, remedy=remedy)


OURSELVES = "aioserve-engine"  # the distribution; what is imported is `aioserve`

#: What the extras of pyproject.toml bring, but for what our own tests need.
EXTRAS = {
    "cards": "step times of measured cards in simulations",
    "completion": "Tab in a shell",
    "gguf": "models in GGUF files, such as smollm2",
    "gpu": "attention of flashinfer on CUDA cards",
    "images": "models that see",
    "otel": "traces for OpenTelemetry",
    "policies": "the contract of policies, by the command check",
    "ray": "replicas by Ray Serve",
    "vllm": "vLLM's own scheduler in comparisons",
}

_TOOLKIT = "/usr/local/cuda"  # where NVIDIA's installer puts it

# Named with their versions, since reports of faults ask for them.
_TELLING = ("torch", "transformers", "aiohttp", "msgspec", "uvloop")


def look_at_packages(has_card: bool) -> list[Finding]:
    """Return the packages that are needed, then the extras, of which `gpu` is missing if
    `has_card`.
    """
    try:
        import packaging.requirements  # noqa: F401
    except ImportError:
        return [missing("packages", "packaging is not installed", _line(["packaging"]))]
    try:
        importlib.metadata.distribution(OURSELVES)
    except importlib.metadata.PackageNotFoundError:
        text = "aioserve runs from a folder and is not installed: what it needs is not known"
        return [missing("packages", text, "pip install -e .")]
    needed = _needs(OURSELVES, "", set())
    return [_needed(needed), *(_extra(name, has_card) for name in sorted(EXTRAS))]


def _needed(needed: list["Need"]) -> Finding:
    wrong = [need for need in needed if need.complaint]
    if wrong:
        text = "; ".join(need.complaint for need in wrong)
        return missing("packages", text, _line(need.wanted for need in wrong))
    versions = {need.name: need.version for need in needed}
    told = [f"{name} {versions[name]}" for name in _TELLING if name in versions]
    return ok("packages", f"all {len(versions)} that are needed: {', '.join(told)}, ...")


def _extra(name: str, has_card: bool) -> Finding:
    wrong = [need for need in _needs(OURSELVES, name, set()) if need.complaint]
    title, purpose = f"extra {name}", EXTRAS[name]
    if not wrong:
        return ok(title, purpose)
    find = missing if name == "gpu" and has_card else note
    text = f"for {purpose}: {'; '.join(need.complaint for need in wrong)}"
    return find(title, text, _line(need.wanted for need in wrong))


def look_at_attention_kernels(has_card: bool, cuda: str | None) -> list[Finding]:
    """Return where flashinfer's kernels come from on a machine with a card; nothing without a card,
    flashinfer or a torch that uses the card. `cuda` is the version for which torch is built, such
    as `12.9`; None: it is built for the CPU.
    """
    versions = dict.fromkeys(("flashinfer-python", "flashinfer-jit-cache"), "")
    for name in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    of_python, of_cache = versions.values()
    if not (has_card and of_python and cuda):
        return []
    title = "attention kernels"
    if of_cache.partition("+")[0] == of_python:
        return [ok(title, f"compiled ones of flashinfer-jit-cache {of_cache}")]
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), _TOOLKIT)
    nvcc = shutil.which("nvcc") or next(
        (path for home in toolkits if home and (path := shutil.which(f"{home}/bin/nvcc"))), None
    )
    lacking = [
        name for name, path in (("nvcc", nvcc), ("ninja", shutil.which("ninja"))) if not path
    ]
    if not lacking:
        return [ok(title, f"flashinfer compiles them with {nvcc} at a model's first start")]
    index = f"https://flashinfer.ai/whl/cu{cuda.replace('.', '')}"
    return [
        missing(
            title,
            f"flashinfer {of_python} compiles them at a model's first start, and "
            f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not found: unless its "
            "cache has them, plain torch computes attention, slower",
            "pip install ninja"
            if nvcc
            else f"pip install flashinfer-jit-cache=={of_python} --index-url {index}",
        )
    ]


class Need:
    """A requirement of a distribution, and what is there of it."""

    def __init__(self, requirement: "Requirement", asked_by: str) -> None:
        self.name = requirement.name
        self.wanted = f"{requirement.name}{requirement.specifier}"
        self.version = ""
        self.complaint = ""
        try:
            self.version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            self.complaint = f"{self.name} is not installed"
            if asked_by != OURSELVES:
                self.complaint += f", which {asked_by} needs"
            return
        if not requirement.specifier.contains(self.version, prereleases=True):
            self.complaint = f"{asked_by} needs {self.wanted}, and {self.version} is installed"


def _needs(distribution: str, extra: str, seen: set[tuple[str, str]]) -> list[Need]:
    """Return the needs of a distribution with an extra (`""`: none), and of its needs in turn."""
    seen.add((distribution, extra))
    found = []
    for requirement in _requirements(distribution, extra):
        need = Need(requirement, distribution)
        found.append(need)
        if need.version:
            for wanted in ("", *sorted(requirement.extras)):
                if (need.name, wanted) not in seen:
                    found += _needs(need.name, wanted, seen)
    return found


def _requirements(distribution: str, extra: str) -> Iterator["Requirement"]:
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None:
            if not extra:
                yield requirement
        elif marker.evaluate({"extra": extra}) and not (extra and marker.evaluate({"extra": ""})):
            yield requirement


def _line(wanted: Iterable[str]) -> str:
    """Return the command that installs these, by the names of the packages themselves."""
    return "pip install " + " ".join(f"'{one}'" for one in wanted)


GIB = 2**30
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
FEW_FILES, ENOUGH_FILES = 4096, 65536  # some thousand streams need more than the first

INSTALL_TORCH = "pip install --force-reinstall torch"

_COMPILERS = ("cc", "gcc", "clang")


def look_at_system() -> Finding:
    """Return the operating system, and what is not to be had on it."""
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() == "Windows":
        return missing("system", f"{text}: the server needs Unix signals", "wsl --install")
    if platform.system() != "Linux":
        return note("system", f"{text}: no compiled kernels, which need Linux")
    return ok("system", f"{text}, {' '.join(platform.libc_ver())}")


def look_at_cpu() -> Finding:
    """Return its name, the instruction sets that kernels ask for, and how many threads compute."""
    useful = frozenset[str]().union(*VARIANTS.values()) & cpu_flags()
    num_threads = machine.default_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"{num_threads} compute thread{'' if num_threads == 1 else 's'}"
    if asked := os.environ.get("OMP_NUM_THREADS"):
        threads += f" (OMP_NUM_THREADS is {asked})"
    return ok(
        "cpu",
        f"{_cpu_name()}; {usable} of {os.cpu_count()} CPUs, {threads}; "
        f"{' '.join(sorted(useful)) or 'none of the instruction sets that kernels ask for'}",
    )


def look_at_kernels() -> Finding:
    """Return which of the compiled kernels serve here, and why those."""
    try:
        variant = choose_variant()
        open_library(variant)
    except ConfigError as error:
        return missing("kernels", str(error), f"unset {ENVIRONMENT_VARIABLE}")
    except KernelsUnavailableError as error:
        return _no_kernels(str(error))
    except (ImportError, OSError) as error:  # of torch, whose threads they share
        return missing("kernels", f"torch cannot be imported: {error}", INSTALL_TORCH)
    if asked := os.environ.get(ENVIRONMENT_VARIABLE):
        text = f"{variant}, as {ENVIRONMENT_VARIABLE}={asked} wants; "
        text += f"the best here would be {usable_variants()[0]}"
        return note("kernels", text, f"unset {ENVIRONMENT_VARIABLE}")
    return ok("kernels", f"{variant}, the best here{''.join(map(_why_not, _better(variant)))}")


def look_at_compiler() -> Finding:
    """Return a C compiler: kernels are built with it at install, Triton on a card uses it at run
    time.
    """
    for name in _COMPILERS:
        if shutil.which(name):
            printed = _printed(name, "--version")
            return ok("compiler", printed.partition("\n")[0] or name)
    text = "no C compiler: a wheel brings the kernels, but a clone, and Triton on a CUDA card, "
    return note("compiler", f"{text}need one", "apt-get install gcc")


def look_at_memory() -> Finding:
    """Return what is free for weights and KV blocks."""
    total, free = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        machine.available_memory(),
    )
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        total = min(total, int(_CONTAINER_LIMIT.read_text(encoding="utf-8")))
    return ok("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB available")


def look_at_files() -> Finding:
    """Return how many files and connections may be open."""
    try:
        import resource
    except ImportError:  # not Unix
        return ok("open files", "no limit is known")
    limit, hardest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= FEW_FILES:
        return ok("open files", f"at most {limit}" if limit >= 0 else "no limit")
    can_be_raised = hardest == resource.RLIM_INFINITY or hardest > limit
    remedy = f"LimitNOFILE={ENOUGH_FILES} for systemd; docker run --ulimit nofile={ENOUGH_FILES}"
    if can_be_raised:
        remedy = f"ulimit -n {min(hardest, ENOUGH_FILES) if hardest > 0 else ENOUGH_FILES}"
    return note("open files", f"at most {limit}: each connection of a client is one", remedy)


def look_at_cards() -> Finding:
    """CUDA cards: those of the driver, and whether torch can use them."""
    count = num_cuda_devices()
    if not count:
        if listed := _printed("nvidia-smi", "-L").strip():
            text = f"nvidia-smi lists {listed.splitlines()[0]!r}, but libcuda.so.1 finds none"
            return missing("cards", text, "in a container: docker run --gpus all")
        return ok("cards", "no CUDA card; the model runs on the CPU")
    try:
        import torch
    except (ImportError, OSError) as error:
        text = f"{count} found, but torch cannot be imported: {error}"
        return missing("cards", text, INSTALL_TORCH)
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU alone"
        text = f"{count} CUDA cards, but torch {torch.__version__} is built {built}"
        return missing("cards", text, INSTALL_TORCH)
    cards = []
    for index in range(count):
        card = torch.cuda.get_device_properties(index)
        size = card.total_memory / GIB
        cards.append(f"{card.name} ({size:.0f} GiB, compute {card.major}.{card.minor})")
    return ok("cards", f"{', '.join(cards)}; torch for CUDA {torch.version.cuda}")


def _better(variant: str) -> list[str]:
    """Return those that would be chosen before it, the nearest first."""
    return list(VARIANTS)[: list(VARIANTS).index(variant)][::-1]


def _why_not(variant: str) -> str:
    lacking = " ".join(sorted(VARIANTS[variant] - cpu_flags()))
    return f"; {variant} needs a CPU with {lacking}" if lacking else f"; {variant} was not built"


def _no_kernels(why: str) -> Finding:
    if os.environ.get(ENVIRONMENT_VARIABLE) == "off":
        text = f"none, as {ENVIRONMENT_VARIABLE}=off wants: plain torch, slower"
        return note("kernels", text, f"unset {ENVIRONMENT_VARIABLE}")
    if platform.system() != "Linux":
        return note("kernels", f"none: {why}; plain torch, slower")
    build = "make -B install in a clone, else a wheel that `make wheel` has made"
    has_compiler = any(map(shutil.which, _COMPILERS))
    text = f"none: {why}; plain torch does their work, slower"
    return missing("kernels", text, build if has_compiler else f"apt-get install gcc; then {build}")


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _printed(*command: str) -> str:
    """Return what a program prints; nothing if it is not there, or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


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

    findings = [
        ok("aioserve", f"{__version__}, in {Path(__file__).parents[1]}"),
        ok("python", f"{platform.python_version()}, {sys.executable}"),
        look_at_system(),
        look_at_cpu(),
        look_at_kernels(),
        look_at_compiler(),
        look_at_memory(),
        look_at_files(),
        look_at_cards(),
        _look_at_event_loop(),
        *look_at_packages(num_cuda_devices() > 0),
        *look_at_attention_kernels(num_cuda_devices() > 0, _cuda_of_torch()),
        *_look_at_models(),
        *_look_at_variables(),
    ]
    return Diagnosis(__version__, all(f.state != "missing" for f in findings), findings)


def _cuda_of_torch() -> str | None:
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch.version.cuda


def _look_at_event_loop() -> Finding:
    try:
        version = importlib.import_module("uvloop").__version__
    except ImportError as error:
        text = f"asyncio's own, slower: {error}"
        if sys.platform == "win32":
            return ok("event loop", text)
        return missing("event loop", text, "pip install uvloop")
    return ok("event loop", f"uvloop {version}")


def _look_at_models() -> list[Finding]:
    found = [ok("model embedded", "in the package")]
    for name, download in DOWNLOADS.items():
        title = f"model {name}"
        try:
            found.append(ok(title, str(downloaded(name))))
        except ConfigError:
            remedy = f"python -m aioserve fetch {name}"
            found.append(note(title, f"not fetched: {download.about}", remedy))
    return found


def _look_at_variables() -> list[Finding]:
    there = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return [ok("environment", " ".join(there))] if there else []


def _as_json(diagnosis: Diagnosis) -> str:
    return msgspec.json.format(msgspec.json.encode(diagnosis)).decode()


def _as_text(diagnosis: Diagnosis) -> str:
    """Return a line for each finding, and one below it for its remedy."""
    width = max(len(finding.name) for finding in diagnosis.findings)
    lines = []
    for finding in diagnosis.findings:
        lines.append(f"{finding.state:7}  {finding.name:{width}}  {finding.text}")
        if finding.remedy is not None:
            lines.append(f"{'':7}  {'':{width}}  -> {finding.remedy}")
    states = [finding.state for finding in diagnosis.findings]
    num_missing, notes = states.count("missing"), states.count("note")
    lines += ["", f"missing: {num_missing or 'nothing'}; can be added: {notes or 'nothing'}"]
    return "\n".join(lines)
