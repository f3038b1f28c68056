"""Asks the advisories of the package index about every version that is pinned in requirements/.

Exits with 1 if one is known to be vulnerable, and if the advisories could not be had, because then
nothing is known. With --offline that is said and does not count. Needs requirements/audit.txt.
"""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PATIENCE = 300  # seconds for one file; each of its packages is a request


def look_up(file: Path) -> list[dict[str, object]] | str:
    """What is known of each package of the file, as pip-audit tells it; or why nothing is."""
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner=off", "--format=json"]
    command += ["--no-deps", "--disable-pip", "--requirement", str(file)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        found: list[dict[str, object]] = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE} s"
    except ValueError:
        return (done.stderr.strip().splitlines() or ["pip-audit has said nothing"])[-1]
    return found


def main(words: list[str]) -> int:
    vulnerable, unknown, num_sound = [], {}, 0
    for file in sorted(FOLDER.glob("*.txt")):
        found = look_up(file)
        if isinstance(found, str):
            unknown[file.name] = found
            continue
        for package in found:
            if "skip_reason" in package:
                unknown[str(package["name"])] = str(package["skip_reason"])
            elif package["vulns"]:
                vulnerable.append((file.name, package))
            else:
                num_sound += 1
    for name, package in vulnerable:
        ids = ", ".join(str(one["id"]) for one in package["vulns"])  # type: ignore[attr-defined]
        print(f"requirements/{name}: {package['name']} {package['version']} is vulnerable: {ids}")
    print(f"{num_sound} pins have no known vulnerability, {len(vulnerable)} have")
    if unknown:
        name, why = next(iter(unknown.items()))
        print(
            f"NOT AUDITED: {len(unknown)}, of which the index has said nothing; {name}: {why[:200]}"
        )
    return bool(vulnerable) or (bool(unknown) and "--offline" not in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
