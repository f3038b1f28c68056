"""What one process lets in: its settings, certificates, the keys it knows, and what was refused.

Knows no request; `gate` says what a request may ask for by its own key. `certificates`, `accounts`
and `key_metrics` are loaded where there are some, or a scrape asks.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from aiohttp import web

from aioserve.config import AccessConfig, EngineConfig
from aioserve.engine import AsyncEngine
from aioserve.errors import ConfigError
from aioserve.server.access.keys import ENVIRONMENT, Entrance, Key, Keyring, Rights, read_keys

if TYPE_CHECKING:
    import ssl

    from prometheus_client.metrics_core import Metric

    from aioserve.server.access.accounts import Accounts

logger = logging.getLogger(__name__)

Refusals = Counter[tuple[str, str]]  # by reason, and the name of a key or ""


class Access:
    """The access to an engine, here or elsewhere: its keys, and what they may take."""

    def __init__(
        self, settings: AccessConfig, keys: Sequence[Key], entrance: Entrance | None = None
    ) -> None:
        """Raises `ConfigError`. There is an `entrance` if there are keys."""
        self.settings = settings
        self.keyring = Keyring(keys)
        self._entrance = entrance
        self.refusals: Refusals = Counter()
        self.body_bytes = 0  # of bodies of which some is still to come
        self.tls: ssl.SSLContext | None = None
        if settings.ssl_certfile is not None:
            from aioserve.server.access.certificates import make_context, read_roots

            self._roots = read_roots(settings)
            self.tls = make_context(settings)

    @property
    def entrance(self) -> Entrance:
        """The entrance at which requests of keys are let in."""
        assert self._entrance is not None, "there are keys"
        return self._entrance

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
        from aioserve.server.access.certificates import load, make_context, read_roots

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
        super().__init__(config.access, _read(config))
        self._config = config
        #: Called with the keys after they were read again.
        self.on_reload: Callable[[Sequence[Key]], None] = lambda keys: None
        #: What workers have refused. Set before a scrape.
        self.refused_elsewhere: Refusals = Counter()

    @cached_property
    def accounts(self) -> "Accounts":
        """The accounts of keys; loaded where there are some."""
        from aioserve.server.access.accounts import Accounts

        return Accounts(self._rights_of)

    @property
    def entrance(self) -> Entrance:
        return self.accounts

    def count_for(self, engine: AsyncEngine) -> None:
        """Charge keys with the tokens that it computes for them, and be among its metrics."""
        engine.metrics.of_server = self
        if self.keyring:
            engine.metrics.on_tokens = self.accounts.charge

    def collect(self) -> Iterator["Metric"]:
        """Yield metrics of refused requests and of what each key used, for one scrape."""
        from aioserve.server.access.key_metrics import key_metrics

        accounts = self.accounts if self.keyring else None
        return key_metrics(self.refusals + self.refused_elsewhere, self.keyring.keys, accounts)

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
