"""Writes the hashes of all pins anew: of every file that the package index has of each version.

    python requirements/lock.py          # needs uv: pip install uv
    python requirements/lock.py test.txt docs.txt

Change a pin by hand (`name==version`, its hashes may stay as they are), then run this: pip installs
with `--require-hashes`, so that what was pinned is what comes. Versions are never chosen here.
"""

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
#: Hashes that the package index does not have: written by hand.
CPU_BUILDS = FOLDER / "torch_cpu.txt"
PIN = re.compile(r"^([A-Za-z0-9._-]+(?:\[[a-z,]+\])?==[^\s;\\]+)\s*(;[^\\]*?)?\s*\\?$", re.M)


def pins(text: str) -> list[str]:
    """The pinned versions of a file, with their markers and without hashes."""
    return [name + (f" {marker.strip()}" if marker else "") for name, marker in PIN.findall(text)]


def lock(path: Path) -> int:
    """Write the hashes of one file; returns the number of its pins."""
    text = path.read_text(encoding="utf-8")
    head = "".join(line + "\n" for line in text.splitlines() if line.startswith("#"))
    wanted = pins(text)
    command = ["uv", "pip", "compile", "--no-deps", "--generate-hashes", "--no-header", "-q"]
    command += ["--no-annotate", "--universal", "--python-version", "3.11.15", "-"]
    done = subprocess.run(
        command, input="\n".join(wanted) + "\n", text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{path.name}: {done.stderr.strip()}")
    found = pins(done.stdout)
    if len(found) != len(wanted):
        raise SystemExit(f"{path.name}: {len(wanted)} pins, of which uv knows {len(found)}")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("--")]
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return len(found)


def main(names: list[str]) -> int:
    for path in [FOLDER / name for name in names] or sorted(
        set(FOLDER.glob("*.txt")) - {CPU_BUILDS}
    ):
        print(f"{path.name}: {lock(path)} pins")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
