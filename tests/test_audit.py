"""`make audit` is green only if something is known of every pinned version, and nothing bad."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[1]
PINS = [
    line
    for file in (ROOT / "requirements").glob("*.txt")
    for line in file.read_text().replace("\\\n", "").splitlines()
    if line and not line.startswith("#")
]


def audit(folder: Path, told: dict[str, object], *words: str) -> tuple[int, str]:
    """With `told` of every package, in the place of what an index says that is not here."""
    (folder / "pip_audit.py").write_text(
        f"print('{json.dumps({'dependencies': [{'name': 'x', 'version': '1', **told}]})}')"
    )
    done = processes.run(
        *(sys.executable, str(ROOT / "requirements/audit.py"), *words),
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "code", "offline_code", "words"),
    [
        ({"vulns": []}, 0, 0, "0 have"),
        ({"vulns": [{"id": "CVE-1"}]}, 1, 1, "x 1 is vulnerable: CVE-1"),
        ({"skip_reason": "not found"}, 1, 0, "NOT AUDITED: 1, of which"),
    ],
)
def test_what_is_vulnerable_fails_and_what_is_not_known_fails_unless_that_was_said(
    tmp_path: Path, told: dict[str, object], code: int, offline_code: int, words: str
) -> None:
    for expected, flags in ((code, ()), (offline_code, ("--offline",))):
        found, output = audit(tmp_path, told, *flags)
        assert (found, words in output) == (expected, True)


def test_every_requirement_is_pinned_to_one_version_and_its_files() -> None:
    assert PINS
    pinned = r"[\w.-]+==[\w.+-]+( *;[^\\]*?)?(\s+--hash=sha256:[0-9a-f]{64})+( +#.*)?$"
    assert [pin for pin in PINS if not re.match(pinned, pin)] == []
