"""`make fuzz SECONDS=600`: each target in turn for its share of the time, from a new seed.

Prints how many cases there were, and each finding with the file that holds its case.
"""

import hashlib
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser
from pathlib import Path

from tests.fuzz.harness import CORPUS, Finding, Runner
from tests.fuzz.targets import TARGETS

SLOW_SECONDS = 2.0  # whoever looks may want to know what takes as long


def main() -> int:
    parser = ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="in all")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--found", type=Path, default=Path("build/fuzz"), help="for its cases")
    args = parser.parse_args()
    names = args.targets or list(TARGETS)
    print(f"seed {args.seed}, {args.seconds / len(names):.0f} s for each of {len(names)} targets")
    num_findings = sum(
        run(name, args.seed, args.seconds / len(names), args.found / name) for name in names
    )
    return 1 if num_findings else 0


def run(name: str, seed: int, seconds: float, folder: Path) -> int:
    """One target; returns how many different findings there were."""
    with tempfile.TemporaryDirectory() as made:
        target = TARGETS[name](Path(made))
        runner = Runner(target, seed)
        findings: dict[str, Finding] = {}
        until = time.monotonic() + seconds
        for case in runner.cases():
            _keep(case, folder / "last")  # of which is known if it ends the process
            finding = runner.run(case)
            if finding is not None and finding.place not in findings:
                findings[finding.place] = finding
                _tell(name, finding, folder)
            if time.monotonic() > until:
                break
        try:
            target.close()
        except AssertionError as error:
            findings["close"] = Finding(b"", str(error), error)
            print(f"{name}: at the end: {error}")
    if runner.slowest > SLOW_SECONDS:
        _keep(runner.slowest_case, folder / "slowest")
    print(
        f"{name:10} {runner.num_cases:8,} cases, {runner.num_refused:8,} refused, slowest "
        f"{runner.slowest:.2f} s, {len(findings)} findings{target.told and '; ' + target.told}",
        flush=True,
    )
    return len(findings)


def _keep(case: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(case)


def _tell(name: str, finding: Finding, folder: Path) -> None:
    path = folder / hashlib.sha256(finding.case).hexdigest()[:12]
    _keep(finding.case, path)
    print(f"{name}: {finding.what}\n  {path}: copy it to {CORPUS / name} once it is mended")
    if finding.error is not None:
        for frame in traceback.extract_tb(finding.error.__traceback__)[-4:]:
            print(f"    {frame.filename}:{frame.lineno} in {frame.name}")


if __name__ == "__main__":
    sys.exit(main())
