"""What tests of connectors have in common."""

import pytest

from tests.kv_connector.serving import load_at_any_price


@pytest.fixture
def at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors load what they have, though a tiny model would compute it sooner."""
    load_at_any_price(monkeypatch)
