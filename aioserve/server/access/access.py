"""What one process lets in: its settings, certificates, the keys it knows, and what was refused.

Knows no request; `gate` says what a request may ask for by its own key.
"""

import logging
import os
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioserve.config import AccessConfig, EngineConfig
from aioserve.engine import AsyncEngine
from aioserve.errors import ConfigError
from aioserve.server.access.keys import (
    ENVIRONMENT,
    Accounts,
    Entrance,
    Key,
    Keyring,
    Rights,
    read_keys,
)

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


logger = logging.getLogger(__name__)

Refusals = Counter[tuple[str, str]]  # by reason, and the name of a key or ""


class Access:
    """The access to an engine, here or elsewhere: its keys, and what they may take."""

    def __init__(self, settings: AccessConfig, keys: Sequence[Key], entrance: Entrance) -> None:
        self.settings = settings
        self.keyring = Keyring(keys)
        self.entrance = entrance
        self.refusals: Refusals = Counter()
        self.body_bytes = 0  # of bodies of which some is still to come
        self._roots = read_roots(settings)
        self.tls = make_context(settings)

    @property
    def is_open_to_all(self) -> bool:
        """Whether a client without a key may do what an operator may: it has shown a certificate,
        or the settings insist.
        """
        return self.settings.ssl_ca_certs is not None or self.settings.without_keys == "open"

    def take(self, keys: Sequence[Key]) -> None:
        """These keys from now on, and what is in the files of the certificate. Raises
        `ConfigError`: then the certificate is as before. A key that is gone is gone all the same.
        """
        self.keyring = Keyring(keys)
        self.read_certificate()

    def read_certificate(self) -> None:
        """Again, for connections from now on. Raises `ConfigError`: then nothing has changed."""
        if self.tls is None:
            return
        if read_roots(self.settings) != self._roots:  # a context takes roots, and forgets none
            raise ConfigError(
                f"{self.settings.ssl_ca_certs} has changed: the CAs of client certificates cannot "
                "change while the server runs: restart it"
            )
        make_context(self.settings)  # tries it out: a half loaded context serves no client
        load(self.tls, self.settings)


ACCESS = web.AppKey("ACCESS", Access)


class MainAccess(Access):
    """The access in the engine's process, which reads the keys and counts for all workers."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `ConfigError` for keys or certificates that cannot be read, or if no key could
        reach the admin routes.
        """
        keys = _read(config)
        self.accounts = Accounts(self._rights_of)
        super().__init__(config.access, keys, self.accounts)
        self._config = config
        #: Called with the keys after they were read again.
        self.on_reload: Callable[[Sequence[Key]], None] = lambda keys: None
        self.metrics = AccessMetrics(self)

    def count_for(self, engine: AsyncEngine) -> None:
        """Charge keys with the tokens that it computes for them, and be among its metrics."""
        engine.metrics.of_server = self.metrics
        engine.metrics.on_tokens = self.accounts.charge

    def reload(self) -> None:
        """Read keys and certificate again, for what comes from now on. Raises `ConfigError`: then
        what was known before stays.
        """
        keys = _read(self._config)
        if bool(keys) != bool(self.keyring):
            raise ConfigError(
                "keys: a running server cannot change between keys and no keys: restart it"
            )
        had_operator = any(key.admin for key in self.keyring.keys)
        if self.settings.admin_port is not None and had_operator:
            if not any(key.admin for key in keys):
                raise ConfigError(
                    "keys: no key has 'admin: true' any more, so access.admin_port would answer "
                    "every client: this cannot change while the server runs"
                )
        self.read_certificate()  # first: what makes no sense changes nothing
        self.keyring = Keyring(keys)
        logger.info("there are %d keys now", len(keys))
        self.on_reload(keys)

    def _rights_of(self, name: str) -> Rights:
        return self.keyring.named.get(name) or Rights()  # the key is gone since


class AccessMetrics(Collector):
    """The metrics of keys, and of what was refused, of the whole server."""

    def __init__(self, access: MainAccess) -> None:
        self.access = access
        #: What workers have refused. Set before a scrape.
        self.elsewhere: Refusals = Counter()

    def collect(self) -> Iterator[Metric]:
        """Metrics of refused requests and of what each key used, for one scrape."""
        refused = CounterMetricFamily(
            "aioserve_requests_refused",
            "Requests answered with an error, by reason and key",
            labels=["reason", "key"],
        )
        for (reason, name), count in (self.access.refusals + self.elsewhere).items():
            refused.add_metric([reason, name], count)
        yield refused
        if not self.access.keyring:
            return
        tokens = CounterMetricFamily(
            "aioserve_key_tokens", "Tokens of prompts and outputs, by key", labels=["key"]
        )
        running = GaugeMetricFamily(
            "aioserve_key_requests_running",
            "Sequences of requests that run, of keys that have limits",
            labels=["key"],
        )
        for key in self.access.keyring.keys:
            tokens.add_metric([key.name], self.access.accounts.num_tokens[key.name])
            if key.is_counted:
                running.add_metric([key.name], self.access.accounts.num_running(key.name))
        yield tokens
        yield running


def _read(config: EngineConfig) -> list[Key]:
    keys = read_keys(config.access.api_keys_file)
    if not keys and config.access.without_keys == "refuse":
        raise ConfigError(
            "the server has no keys, and access.without_keys is 'refuse': give keys by "
            f"{ENVIRONMENT} or access.api_keys_file, or serve clients without a key by "
            "--without-keys local"
        )
    if config.access.cache_per_key and not keys:
        raise ConfigError("access.cache_per_key is on, which has no effect: there are no keys")
    salted = [key.name for key in keys if key.cache_salt is not None]
    if salted and not config.access.cache_per_key:
        raise ConfigError(
            f"key {salted[0]!r} has a cache_salt, which has no effect: access.cache_per_key is off"
        )
    is_shared = config.server.enable_admin and config.access.admin_port is None
    if keys and is_shared and not any(key.admin for key in keys):
        raise ConfigError(
            "server.enable_admin is on, but no key may use the admin routes: give a key of "
            "access.api_keys_file 'admin: true', or move these routes to access.admin_port"
        )
    return keys
