"""A server that knows four keys."""

import pytest

from tests.server.conftest import start_server

__all__ = ["start_server"]

ADMIN, ANN, BEN, CARL = (f"sk-{name}-0123456789" for name in ("admin", "ann", "ben", "carl"))

KEYS = f"""
keys:
  - {{name: root, key: {ADMIN}, admin: true}}
  - {{name: ann, key: {ANN}}}
  - {{name: ben, key: {BEN}, max_requests: 1, tokens_per_minute: 200}}
  - {{name: carl, key: {CARL}, most_urgent_priority: 3}}
"""


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path
