"""Addresses are taken, or refused in one line."""

import socket

import pytest

from aioserve.errors import ConfigError
from aioserve.server.sockets import bind


def close(sockets):
    for sock in sockets:
        sock.close()


def test_all_addresses_of_a_host_share_one_port():
    sockets = bind("localhost", 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    assert sockets[0].getsockname()[0] == "127.0.0.1"
    close(sockets)


def test_ipv6_alone_works_where_the_machine_has_it():
    try:
        sockets = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    assert [sock.family for sock in sockets] == [socket.AF_INET6]
    close(sockets)


def test_a_port_in_use_is_told_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 300, "a..b"])
def test_a_host_that_is_not_ours_is_told_by_name(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:80"):
        bind(host, 80)
