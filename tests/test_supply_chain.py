"""What is installed is what was pinned, and no line of ours leads to a stranger's package."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from aioserve.support.process import way_out
from tests import processes

ROOT = Path(__file__).parents[1]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_every_pin_has_hashes(path: Path) -> None:
    """So that pip refuses a file that was exchanged under the same version."""
    lines = path.read_text().splitlines()
    pins = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z0-9]", line)]
    assert pins
    for i in pins:
        assert re.match(r"[\w.-]+(\[[a-z,]+\])?==\S+ ", lines[i]), lines[i]
        assert lines[i + 1].strip().startswith("--hash=sha256:"), lines[i]


def test_no_line_installs_the_package_of_another_project() -> None:
    """The name `aioserve` on the package index belongs to somebody else's web framework."""
    tracked = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()
    wrong = re.compile(r"pip install [^\n`]*\baioserve(?!-engine)(\[|\s|$|['\"])|\baioserve\[[a-z]")
    found = [
        f"{name}: {match[0]}"
        for name in tracked
        if Path(name).suffix in {".py", ".md", ".yaml", ".ipynb", ".toml", ""}
        and name not in ("CHANGELOG.md", "tests/test_supply_chain.py")
        and (ROOT / name).is_file()
        for match in wrong.finditer((ROOT / name).read_text(errors="replace"))
    ]
    assert found == []


def test_a_missing_package_is_named_by_what_pip_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioserve.support.process.CLONE", Path("/nowhere"))
    assert way_out(ModuleNotFoundError(name="zmq.asyncio")).endswith("-m pip install pyzmq")
    assert way_out(ModuleNotFoundError(name="msgspec")).endswith("-m pip install msgspec")


def test_a_citation_names_the_project_as_its_package_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert citation["authors"] == project["authors"]
    assert (
        f"## {project['version']} ({citation['date-released']})"
        in (ROOT / "CHANGELOG.md").read_text()
    )


def test_the_file_about_security_leads_to_the_page_that_says_how_to_report() -> None:
    (link,) = re.findall(r"\]\(([^)#]+)#reporting\)", (ROOT / "SECURITY.md").read_text())
    assert "\n## Reporting\n" in (ROOT / link).read_text()


def bill_of(*names: str) -> dict[str, Any]:
    done = processes.run(sys.executable, str(ROOT / "requirements/sbom.py"), *names)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_bill_of_materials_has_every_pin_with_all_of_its_hashes() -> None:
    names = [path.name for path in REQUIREMENTS]
    components = bill_of(*names)["components"]
    text = "".join(path.read_text() for path in REQUIREMENTS)
    found = {(part["name"].lower(), part["version"]) for part in components}
    assert found == {
        (name.lower(), version)
        for name, version in re.findall(r"^([\w.-]+?)(?:\[[a-z,]+\])?==([^\s;]+)", text, re.M)
    }
    hashes = {
        each["content"]
        for part in components
        for reference in part["externalReferences"]
        for each in reference["hashes"]
    }
    assert hashes == set(re.findall(r"sha256:([0-9a-f]{64})", text))


def test_the_bill_of_materials_is_the_same_each_time_and_refers_to_what_is_in_it() -> None:
    document = bill_of()
    assert document == bill_of()
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", document["serialNumber"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    root = document["metadata"]["component"]
    assert (root["name"], root["version"]) == (project["name"], project["version"])
    refs = [root["bom-ref"], *(part["bom-ref"] for part in document["components"])]
    assert len(refs) == len(set(refs))
    assert [each["ref"] for each in document["dependencies"]] == refs
    assert document["dependencies"][0]["dependsOn"] == refs[1:]
    assert "pkg:pypi/torch@" in "".join(refs)
    assert document["serialNumber"] != bill_of("runtime.txt", "ray.txt")["serialNumber"]
