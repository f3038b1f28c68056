"""Every policy decides on three loads what it decided when they were recorded."""

import re
from collections import Counter
from pathlib import Path

import pytest

from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.request import WaitReason
from tests.golden.files import CASES, COMMAND, FOLDER, LOGGED, POLICIES, log_path, read_lines
from tests.golden.lines import difference, lines_of
from tests.golden.workloads import LOADS, record
from tests.slow import mostly_slow


def check_same(load: str, policy: str, now: list[str]) -> None:
    what = difference(read_lines(load, policy), now)
    if what is not None:
        pytest.fail(
            f"{policy} decides otherwise on {load!r}: {what}\nIf it is meant to: {COMMAND}",
            pytrace=False,
        )


@pytest.mark.parametrize(("load", "policy"), mostly_slow(CASES, but=LOGGED))
def test_a_load_that_is_run_anew_gets_the_same_decisions(
    load: str, policy: str, tmp_path: Path
) -> None:
    record(load, policy, tmp_path / "log", tmp_path)
    check_same(load, policy, lines_of(DecisionLog(tmp_path / "log")))


@pytest.mark.parametrize(("load", "policy"), LOGGED)
def test_a_log_from_then_replays_today(load: str, policy: str) -> None:
    log = DecisionLog(log_path(load, policy))
    check_same(load, policy, lines_of(log))
    divergence = replay(log).divergence
    assert divergence is None, (divergence.differences, divergence.state, COMMAND)


def test_the_loads_bring_policies_into_every_kind_of_trouble() -> None:
    lines = {case: read_lines(*case) for case in CASES}
    found: Counter[str] = Counter()
    for case in CASES:
        for line in lines[case]:
            step, *parts = line.split(" | ")
            found["drafts"] += "~" in step
            found["images"] += "&" in step
            found["cached prefix"] += re.search(r"@[1-9]", step) is not None
            for part in parts:
                kind, _, rest = part.partition(" ")
                found[kind] += 1
                found.update(f"{kind} {word.partition(':')[2]}" for word in rest.split())
    unused = {WaitReason.REMOTE_KVS, WaitReason.LEASES, WaitReason.PAUSED}  # by no shipped policy
    reasons = set(WaitReason) - unused
    wanted = {"drafts", "images", "cached prefix", "preempt", *(f"wait {r}" for r in reasons)}
    wanted |= {f"end {reason}" for reason in ("stop", "length", "abort", "timeout")}
    assert not {what for what in wanted if not found[what]}
    # No two policies decide the same, or a mistake in one of them would not be seen.
    assert len({tuple(lines[case]) for case in CASES}) == len(CASES)


def test_what_differs_is_shown_with_what_was_before() -> None:
    recorded = [f"{step} r01" for step in range(1, 30)]
    assert difference(recorded, list(recorded)) is None
    what = difference(recorded, [*recorded[:9], "10 r01+2 | wait r02:blocks", *recorded[10:]])
    assert what is not None
    first, *shown = what.splitlines()
    assert first.startswith("line 10 differs")
    assert shown[3:6] == ["    9 r01", "  - 10 r01", "  - 11 r01"]
    assert "  + 10 r01+2 | wait r02:blocks" in shown
    assert difference(recorded, recorded[:-1]) is not None
    assert difference(recorded[:-1], recorded) is not None


def test_no_file_is_left_of_a_load_or_policy_that_is_gone() -> None:
    expected = {f"{load}-{policy}.txt.gz" for load in LOADS for policy in POLICIES}
    expected |= {log_path(*case).name for case in LOGGED}
    assert {path.name for path in FOLDER.iterdir()} == expected
