"""The certificate of a server, and those that its clients must show: TLS settings, made of files.

Loaded where there is a certificate.
"""

import os
import ssl
from pathlib import Path

from aioserve.config import AccessConfig
from aioserve.errors import ConfigError

#: Not a setting: settings are in lists of processes, in files, and on their way to workers.
PASSWORD = "AIOSERVE_SSL_KEYFILE_PASSWORD"  # noqa: S105 - the name of a variable


def make_context(settings: AccessConfig) -> ssl.SSLContext | None:
    """Return the TLS settings; None without a certificate: then connections are plain. Raises
    `ConfigError`.
    """
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load(context, settings)
    return context


def load(context: ssl.SSLContext, settings: AccessConfig) -> None:
    """Read the files, perhaps again: for connections from now on. Raises `ConfigError`."""
    assert settings.ssl_certfile is not None
    names = [settings.ssl_certfile, settings.ssl_keyfile or settings.ssl_certfile]
    try:
        # Given always: without it OpenSSL would ask at the terminal.
        context.load_cert_chain(names[0], names[1], password=os.environ.get(PASSWORD, ""))
        if settings.ssl_ca_certs is not None:
            names = [settings.ssl_ca_certs]
            context.load_verify_locations(settings.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        why = error.reason or str(error)
        raise ConfigError(
            f"cannot load a certificate from {' and '.join(dict.fromkeys(names))}: {why}; the "
            f"password of an encrypted key is in {PASSWORD}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {' or '.join(dict.fromkeys(names))}: {error.strerror}"
        ) from error


def read_roots(settings: AccessConfig) -> bytes:
    """Return what is in the file of those that clients' certificates must come from, if there is
    one. Raises `ConfigError`.
    """
    if settings.ssl_ca_certs is None:
        return b""
    try:
        return Path(settings.ssl_ca_certs).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {settings.ssl_ca_certs}: {error.strerror}") from error
