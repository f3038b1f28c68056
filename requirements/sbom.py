"""Prints what a release is installed with, as a software bill of materials (CycloneDX 1.6, JSON).

    python requirements/sbom.py                       # what `make serve` installs
    python requirements/sbom.py runtime.txt ray.txt   # with what ray.txt pins

Each pinned package is a component with its version, its package URL and the SHA-256 of every file
that pip accepts. Equal pins give equal output: there is no time and no random number in it. It says
what is pinned, not what a machine has: NVIDIA's libraries, whose versions torch pins, are missing.
Licences are missing too, since pins do not state them.
"""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple
from uuid import NAMESPACE_URL, uuid5

FOLDER = Path(__file__).parent
DEFAULT = ("runtime.txt", "torch_cpu.txt")
_PIN = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(\[[a-z,]+\])?==(?P<version>[^\s;\\]+)(?P<hashes>[^\n]*(\n\s+--hash[^\n]*)*)",
    re.M,
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class Pin(NamedTuple):
    """A pinned package, with the SHA-256 of its files."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def url(self) -> str:
        """The package URL, which is the name of the component."""
        return f"pkg:pypi/{re.sub(r'[-_.]+', '-', self.name).lower()}@{self.version}"


def read_pins(path: Path) -> list[Pin]:
    """Return the pins of a requirements file."""
    return [
        Pin(match["name"], match["version"], tuple(_HASH.findall(match["hashes"])))
        for match in _PIN.finditer(path.read_text(encoding="utf-8"))
    ]


def bill(project: dict[str, Any], pins: list[Pin]) -> dict[str, Any]:
    """Return the document: the project of pyproject.toml, and what it is installed with. Pins of
    one version in several files are one component.
    """
    merged: dict[str, Pin] = {}
    for pin in pins:
        known = merged.get(pin.url, pin._replace(hashes=()))
        hashes = {*known.hashes, *pin.hashes}
        merged[pin.url] = pin._replace(hashes=tuple(sorted(hashes)))
    pins = sorted(merged.values(), key=lambda pin: pin.url)
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    root = {
        "type": "application",
        "bom-ref": own,
        "name": project["name"],
        "version": project["version"],
        "description": project["description"],
        "licenses": [{"license": {"id": project["license"]}}],
        "purl": own,
    }
    components = [
        {
            "type": "library",
            "bom-ref": pin.url,
            "name": pin.name,
            "version": pin.version,
            "scope": "required",
            "purl": pin.url,
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": pin.url,
                    "comment": "each hash is that of one file of this version",
                    "hashes": [{"alg": "SHA-256", "content": digest} for digest in pin.hashes],
                }
            ],
        }
        for pin in pins
    ]
    told = json.dumps([root, components], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, told)}",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        "dependencies": [
            {"ref": own, "dependsOn": [pin.url for pin in pins]},
            *({"ref": pin.url} for pin in pins),
        ],
    }


def main(names: list[str]) -> int:
    """Print the document of these files."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text("utf-8"))["project"]
    pins = [pin for name in names or DEFAULT for pin in read_pins(FOLDER / name)]
    print(json.dumps(bill(project, pins), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
