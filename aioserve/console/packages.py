"""What is installed, beside what this package and those that it needs ask for.

Reads metadata of distributions and imports none of them: a broken one is another check's
finding. Knows which extras there are, and what each is for.
"""

import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aioserve.console.finding import Finding, ok

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OURSELVES = "aioserve"

#: What the extras of pyproject.toml bring, but for what our own tests need.
EXTRAS = {
    "completion": "Tab in a shell",
    "gguf": "models in GGUF files, such as smollm2",
    "gpu": "attention of flashinfer on CUDA cards",
    "images": "models that see",
    "otel": "traces for OpenTelemetry",
    "ray": "replicas by Ray Serve",
}

# Named with their versions, since reports of faults ask for them.
_TELLING = ("torch", "transformers", "aiohttp", "msgspec", "uvloop")


def look_at_packages(has_card: bool) -> list[Finding]:
    """The packages that are needed, then the extras, of which `gpu` is missing if `has_card`."""
    try:
        import packaging.requirements  # noqa: F401
    except ImportError:
        return [_missing("packages", "packaging is not installed", ["packaging"])]
    try:
        importlib.metadata.distribution(OURSELVES)
    except importlib.metadata.PackageNotFoundError:
        text = "aioserve runs from a folder and is not installed: what it needs is not known"
        return [Finding(name="packages", state="missing", text=text, remedy="pip install -e .")]
    needed = _needs(OURSELVES, "", set())
    return [_needed(needed), *(_extra(name, has_card) for name in sorted(EXTRAS))]


def _needed(needed: list["Need"]) -> Finding:
    wrong = [need for need in needed if need.complaint]
    if wrong:
        text = "; ".join(need.complaint for need in wrong)
        return _missing("packages", text, [need.wanted for need in wrong])
    versions = {need.name: need.version for need in needed}
    told = [f"{name} {versions[name]}" for name in _TELLING if name in versions]
    return ok("packages", f"all {len(versions)} that are needed: {', '.join(told)}, ...")


def _extra(name: str, has_card: bool) -> Finding:
    wrong = [need for need in _needs(OURSELVES, name, set()) if need.complaint]
    title, purpose = f"extra {name}", EXTRAS[name]
    if not wrong:
        return ok(title, purpose)
    return Finding(
        name=title,
        state="missing" if name == "gpu" and has_card else "note",
        text=f"for {purpose}: {'; '.join(need.complaint for need in wrong)}",
        remedy=f"pip install '{OURSELVES}[{name}]'",
    )


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
    """Of it with an extra (`""`: with none), and of all that those need in turn."""
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


def _missing(name: str, text: str, wanted: Sequence[str]) -> Finding:
    quoted = " ".join(f"'{one}'" for one in wanted)
    return Finding(name=name, state="missing", text=text, remedy=f"pip install {quoted}")
