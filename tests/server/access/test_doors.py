"""Where a server listens: encrypted, on a Unix socket, with a port for operators; and what it says
of certificates and paths that cannot be.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
from contextlib import AsyncExitStack

import aiohttp
import pytest
from msgspec.structs import replace

from aioserve.config import AccessConfig, EngineConfig
from aioserve.engine import AsyncEngine
from aioserve.errors import ConfigError
from aioserve.server.access import connections
from aioserve.server.access.access import Access, MainAccess
from aioserve.server.access.accounts import Accounts
from aioserve.server.access.certificates import PASSWORD, make_context
from aioserve.server.access.keys import Key, Rights
from aioserve.server.app import listening
from aioserve.server.loading import answering_while_loading
from aioserve.server.sockets import bind_unix, open_doors
from tests.processes import PATIENCE
from tests.server.access.conftest import ADMIN, ANN
from tests.server.serving import SIMULATED


def certify(folder, name="server", *options):
    """A certificate of itself, for 127.0.0.1, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 -subj /CN=x"
    alone = ["-addext", "subjectAltName=IP:127.0.0.1", *(options or ["-noenc"])]
    files = ["-out", str(cert), "-keyout", str(key)]
    subprocess.run([*command.split(), *files, *alone], check=True, capture_output=True)
    return str(cert), str(key)


@contextlib.asynccontextmanager
async def serving(**settings):
    """The URL, the doors, and who is let in."""
    enable_admin = settings.pop("enable_admin", False)
    config = replace(
        SIMULATED,
        access=AccessConfig(**settings),
        server=replace(SIMULATED.server, port=0 if "uds" not in settings else 8000),
    )
    config = replace(config, server=replace(config.server, enable_admin=enable_admin))
    doors, access = open_doors(config), MainAccess(config)
    try:
        async with AsyncEngine(config) as engine, listening(engine, doors, access=access) as url:
            yield url, doors, access
    finally:
        doors.close()


async def status(url, method="GET", *, connector=None, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
        session.request(method, url) as response,
    ):
        return response.status


async def test_with_a_certificate_connections_are_encrypted_and_a_new_one_is_taken(tmp_path):
    cert, key = certify(tmp_path)
    async with serving(ssl_certfile=cert, ssl_keyfile=key) as (url, _, access):
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=cert)
        for tls, is_known in ((trusting, True), (ssl.create_default_context(), False)):
            asking = status(f"{url}/health", connector=aiohttp.TCPConnector(ssl=tls))
            if is_known:
                assert await asking == 200
            else:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await asking
        certify(tmp_path)
        access.reload()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(f"{url}/health", connector=aiohttp.TCPConnector(ssl=trusting))
        trusting = ssl.create_default_context(cafile=cert)
        assert await status(f"{url}/health", connector=aiohttp.TCPConnector(ssl=trusting)) == 200
        (tmp_path / "server.pem").write_text("nonsense")
        with pytest.raises(ConfigError, match=r"cannot load a certificate from .*server\.pem"):
            access.reload()
        assert await status(f"{url}/health", connector=aiohttp.TCPConnector(ssl=trusting)) == 200


async def test_who_shakes_no_hands_is_one_of_the_connections_and_makes_room(tmp_path):
    cert, key = certify(tmp_path)
    tls = ssl.create_default_context(cafile=cert)
    settings = {"ssl_certfile": cert, "ssl_keyfile": key, "max_connections": 3}
    async with serving(**settings) as (url, doors, access), AsyncExitStack() as stack:
        silent = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection(*doors.public[0].getsockname())
            stack.callback(writer.close)
            silent.append(reader)
        async with asyncio.timeout(PATIENCE):
            assert await status(f"{url}/health", connector=aiohttp.TCPConnector(ssl=tls)) == 200
            assert await silent[0].read() == b""
        assert access.refusals["idle_connection_closed", ""] >= 18


async def test_handshakes_that_fail_are_counted_and_told(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    cert, key = certify(tmp_path)
    async with serving(ssl_certfile=cert, ssl_keyfile=key) as (_, doors, access):
        cases = (b"", 0.1), (b"GET / HTTP/1.1\r\n\r\n", PATIENCE)
        for number, (sent, seconds) in enumerate(cases, 1):
            monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", seconds)
            reader, writer = await asyncio.open_connection(*doors.public[0].getsockname())
            writer.write(sent)
            async with asyncio.timeout(PATIENCE):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                while access.refusals["tls_handshake", ""] < number:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            writer.close()
    assert "its TLS handshake has failed: it took more than 0.1 s" in caplog.text
    assert "its TLS handshake has failed: HTTP_REQUEST" in caplog.text
    assert "Traceback" not in caplog.text


async def test_clients_must_show_a_certificate_where_their_roots_are_named(tmp_path):
    cert, key = certify(tmp_path)
    own, own_key = certify(tmp_path, "client")
    settings = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": own}
    async with serving(**settings) as (url, _, access):
        tls = ssl.create_default_context(cafile=cert)
        with pytest.raises((aiohttp.ClientError, OSError)):
            await status(f"{url}/health", connector=aiohttp.TCPConnector(ssl=tls))
        tls.load_cert_chain(own, own_key)
        assert await status(f"{url}/health", connector=aiohttp.TCPConnector(ssl=tls)) == 200
        access.reload()
        certify(tmp_path, "client")  # the one that was trusted would stay so
        with pytest.raises(ConfigError, match=r"client\.pem has changed"):
            access.reload()


async def test_a_worker_that_cannot_read_the_certificate_knows_the_new_keys_all_the_same(tmp_path):
    cert, key = certify(tmp_path)
    known, new = (Key(name=name, sha256=name[0] * 64) for name in ("ann", "ben"))
    settings = AccessConfig(ssl_certfile=cert, ssl_keyfile=key)
    access = Access(settings, [known], Accounts(lambda name: Rights()))
    (tmp_path / "server.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match="cannot load a certificate"):
        access.take([new])
    assert access.keyring.keys == (new,)


async def test_while_the_model_is_loaded_answers_are_encrypted_as_well(tmp_path):
    cert, key = certify(tmp_path)
    config = EngineConfig(
        server=replace(SIMULATED.server, port=0),
        access=AccessConfig(ssl_certfile=cert, ssl_keyfile=key),
    )
    doors, tls = open_doors(config), make_context(config.access)
    port = doors.public[0].getsockname()[1]
    async with answering_while_loading(doors.all, shares_port=False, tls=tls):
        trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=cert))
        assert await status(f"https://127.0.0.1:{port}/ready", connector=trusting) == 503
        # Nobody is held up by a client that never says hello: that is waited for a minute.
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.05)
        before = asyncio.all_tasks()
    entering = [task for task in before & asyncio.all_tasks() if not task.done()]
    assert entering == [asyncio.current_task()]
    silent.close()
    doors.close()


def test_a_certificate_that_cannot_be_read_is_told_before_anything_is_loaded(tmp_path, monkeypatch):
    cert, key = certify(tmp_path, "locked", "-passout", "pass:s3cret")
    with pytest.raises(ConfigError, match=f"password of an encrypted key is in {PASSWORD}"):
        make_context(AccessConfig(ssl_certfile=cert, ssl_keyfile=key))
    monkeypatch.setenv(PASSWORD, "s3cret")
    assert make_context(AccessConfig(ssl_certfile=cert, ssl_keyfile=key)) is not None
    with pytest.raises(ConfigError, match=r"cannot read .*none\.pem: No such file"):
        make_context(AccessConfig(ssl_certfile=str(tmp_path / "none.pem")))
    with pytest.raises(ConfigError, match=r"cannot load a certificate from .*locked\.key"):
        make_context(AccessConfig(ssl_certfile=key))
    assert make_context(AccessConfig()) is None


async def test_a_unix_socket_serves_and_is_gone_afterwards(tmp_path):
    path = str(tmp_path / "a.sock")
    async with serving(uds=path) as (url, _, _):
        assert url == f"unix:{path}"
        assert await status("http://x/health", connector=aiohttp.UnixConnector(path)) == 200
        with pytest.raises(ConfigError, match="another server listens there"):
            bind_unix(path)
    assert not await asyncio.to_thread(os.path.exists, path)


def test_a_path_is_taken_over_from_a_dead_server_and_from_nothing_else(tmp_path):
    path = str(tmp_path / "a.sock")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    sock = bind_unix(path)
    sock.close()
    bind_unix(path).close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="it exists and is not a socket"):
        bind_unix(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot listen on .*: No such file"):
        bind_unix(str(tmp_path / "no/where"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("has_operator", [True, False])
async def test_operators_routes_can_have_a_port_of_their_own(keys_file, has_operator):
    if not has_operator:
        keys_file.write_text(keys_file.read_text().replace(", admin: true", ""))
    settings = {"enable_admin": True, "admin_port": 0, "api_keys_file": str(keys_file)}
    async with serving(**settings) as (url, doors, access):
        own = f"http://127.0.0.1:{doors.admin[0].getsockname()[1]}"
        reset = "/admin/reset_prefix_cache"
        assert await status(url + reset, "POST", key=ADMIN) == 404
        assert await status(own + reset, "POST", key=ADMIN) == 200
        assert await status(own + reset, "POST", key=ANN) == (403 if has_operator else 200)
        assert await status(own + reset, "POST") == (401 if has_operator else 200)
        if has_operator:  # else its port would be all that protects them, from one day to the next
            keys_file.write_text(f"keys: [{{name: ann, key: {ANN}}}]")
            with pytest.raises(ConfigError, match="no key has 'admin: true' any more"):
                access.reload()
            assert await status(own + reset, "POST") == 401
        assert await status(f"{own}/health") == 200
        assert await status(f"{own}/v1/models", key=ADMIN) == 404
        assert await status(f"{url}/v1/models", key=ANN) == 200
        assert await status(f"{own}/") == 200  # the page goes with them
        assert await status(f"{url}/") == 401
        assert await status(f"{url}/watch/steps", key=ADMIN) == 404
        assert await status(f"{own}/watch/steps", "HEAD") == (401 if has_operator else 200)


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("access", {"ssl_keyfile": "x"}, "ssl_keyfile is 'x', .*no access.ssl_certfile"),
        ("access", {"admin_port": 1}, "admin_port is 1, .*server.enable_admin is off"),
        ("access", {"admin_host": "::"}, "admin_host is '::', .*no access.admin_port"),
        ("access", {"allow_credentials": True}, "allow_credentials .*no access.allowed_origins"),
        ("server", {"port": 1}, "server.port is 1, .*access.uds says where"),
    ],
)
def test_a_setting_of_doors_without_effect_is_refused(section, fields, message):
    config = EngineConfig(access=AccessConfig(uds="x" if section == "server" else None))
    config = replace(config, **{section: replace(getattr(config, section), **fields)})
    with pytest.raises(ConfigError, match=message):
        config.check_effects()
