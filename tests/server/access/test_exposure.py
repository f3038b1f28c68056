"""A server that other machines can reach, and who could operate it."""

import logging
import sys

import pytest
from msgspec.structs import replace

from aioserve.config import AccessConfig, ServerConfig
from aioserve.errors import ConfigError
from aioserve.server.access.access import MainAccess
from aioserve.server.access.origins import check_exposure
from aioserve.server.sockets import open_doors
from tests import processes
from tests.server.access.conftest import ANN
from tests.server.serving import SIMULATED


def start(server, access):
    """As far as it takes to know who could do what; raises as a start does."""
    config = replace(
        SIMULATED, server=ServerConfig(port=0, **server), access=AccessConfig(**access)
    )
    letting_in = MainAccess(config)
    doors = open_doors(config)
    try:
        check_exposure(letting_in, doors, has_admin=config.server.enable_admin)
    finally:
        doors.close()


FAR, ADMIN_FAR = {"host": "0.0.0.0"}, {"host": "0.0.0.0", "enable_admin": True}


@pytest.mark.parametrize(
    ("server", "access"),
    [
        (ADMIN_FAR, {}),
        ({"enable_admin": True}, {"admin_port": 0, "admin_host": "0.0.0.0"}),
        (ADMIN_FAR, {"admin_port": 0, "admin_host": "0.0.0.0", "api_keys_file": "users"}),
    ],
)
def test_operators_routes_are_not_for_other_machines_unless_keys_or_the_settings_say_so(
    tmp_path, server, access
):
    (tmp_path / "users").write_text(ANN)
    if "api_keys_file" in access:
        access = {**access, "api_keys_file": str(tmp_path / "users")}
    with pytest.raises(ConfigError, match=r"every client that reaches http://0\.0\.0\.0:"):
        start(server, access)


def test_with_an_operators_key_or_a_port_of_this_machine_they_may_be_there(keys_file, tmp_path):
    start(ADMIN_FAR, {"api_keys_file": str(keys_file)})
    start(ADMIN_FAR, {"admin_port": 0})
    start({"enable_admin": True}, {})
    config = replace(
        SIMULATED,
        server=ServerConfig(enable_admin=True),
        access=AccessConfig(uds=str(tmp_path / "a.sock")),
    )
    doors = open_doors(config)
    check_exposure(MainAccess(config), doors, has_admin=True)
    doors.close()


def test_a_server_that_is_open_to_other_machines_says_so(caplog, keys_file):
    for server, access, told in (
        (ADMIN_FAR, {"without_keys": "open"}, "reaches it, admin routes included: there are"),
        (FAR, {}, "serves every client that reaches it: there are no keys"),
        (FAR, {"api_keys_file": str(keys_file)}, None),
        ({}, {}, None),
    ):
        caplog.clear()
        start(server, access)
        assert [told in line for line in caplog.messages] == [True] * (told is not None)
        assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_a_server_may_insist_on_keys(keys_file, monkeypatch):
    monkeypatch.delenv("AIOSERVE_API_KEYS", raising=False)
    with pytest.raises(ConfigError, match="without_keys is 'refuse': give keys by AIOSERVE_API"):
        start({}, {"without_keys": "refuse"})
    start({}, {"without_keys": "refuse", "api_keys_file": str(keys_file)})


def test_the_command_ends_with_a_line_before_it_loads_anything():
    command = (sys.executable, "-m", "aioserve", "--runner", "simulated", "--port", "0")
    result = processes.run(*command, "--host", "0.0.0.0", "--enable-admin")
    assert result.returncode == 2
    assert "--without-keys open" in result.stderr.splitlines()[-1]
