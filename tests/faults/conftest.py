"""Tells, at the end, how many faults were injected, and where."""

import json
from collections import Counter

import pytest

from aioserve.engine import step_loop

NAME = "injected"


@pytest.fixture
def injected(record_property) -> Counter[str]:
    """To be counted in; what it holds at the end of the test is told."""
    counts: Counter[str] = Counter()
    yield counts
    record_property(NAME, json.dumps(counts))


@pytest.fixture(autouse=True)
def all_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults come faster here than a log should tell of them."""
    monkeypatch.setattr(step_loop, "LOG_SECONDS", 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown" or not hasattr(report, "when"):
                for name, value in getattr(report, "user_properties", ()):
                    counts.update(json.loads(value) if name == NAME else {})
    if counts:
        parts: Counter[str] = Counter()
        for fault, count in counts.items():
            parts[fault.partition(" ")[0].rstrip(":").partition(":")[0]] += count
        told = ", ".join(f"{part} {count}" for part, count in parts.most_common())
        terminalreporter.write_line(f"{counts.total()} faults injected: {told}")
