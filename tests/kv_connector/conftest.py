"""What tests of connectors have in common."""

import pytest

from aioserve.features.kv_connector import OffloadingConnector


@pytest.fixture
def at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors load what they have, though a tiny model would compute it sooner: what the
    scheduler says of step times is not heard.
    """
    unknown = property(lambda _: None, lambda _, __: None)
    monkeypatch.setattr(OffloadingConnector, "step_time", unknown)
