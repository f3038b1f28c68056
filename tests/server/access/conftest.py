"""A server that knows five keys."""

import pytest

from tests.server.conftest import start_server

__all__ = ["start_server"]

NAMES = ("admin", "ann", "ben", "carl", "dora")
ADMIN, ANN, BEN, CARL, DORA = (f"sk-{name}-0123456789" for name in NAMES)

KEYS = f"""
keys:
  - {{name: root, key: {ADMIN}, admin: true}}
  - {{name: ann, key: {ANN}}}
  - {{name: ben, key: {BEN}, max_requests: 1, tokens_per_minute: 200}}
  - {{name: carl, key: {CARL}, most_urgent_priority: 3}}
  - {{name: dora, key: {DORA}, tokens_per_minute: 2000}}
"""


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path
