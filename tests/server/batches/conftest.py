"""Batches that are looked for at once: what waits for seconds in a server waits for less here."""

import pytest

from aioserve.apis.batches import runner


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """New batches are found, and lines that had to wait are run again, within a few hundredths."""
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(runner, "MAX_WAIT", 0.05)
