"""Settings of access: keys, TLS, CORS, limits on connections."""

import re
from typing import Annotated, Literal

from msgspec import Meta

from aioserve.config.section import (
    PositiveFloat,
    PositiveInt,
    Section,
    doc,
)
from aioserve.errors import ConfigError


class AccessConfig(Section, frozen=True, kw_only=True):
    """Access to the server: keys, TLS, CORS, admin port and limits of connections."""

    api_keys_file: Annotated[
        str | None,
        doc(
            "file of API keys, added to those of AIOSERVE_API_KEYS: YAML with a name and limits "
            "for each, or text with one key per line (default: no key is required)"
        ),
    ] = None
    without_keys: Annotated[
        Literal["local", "refuse", "open"],
        doc(
            "access to a server that has no API keys; local: any machine may send requests, only "
            "this one may use the admin routes and the page; refuse: the server does not start; "
            "open: everything is open to every machine"
        ),
    ] = "local"
    cache_per_key: Annotated[
        bool,
        doc(
            "prefix caching: share cached prefixes only among requests with the same API key, or "
            "the same cache_salt, so that timing tells nothing about other clients' prompts"
        ),
    ] = False
    protect_metrics: Annotated[
        bool, doc("require an API key for GET /metrics too, if there are keys")
    ] = False
    admin_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        doc(
            "separate port for the admin routes, which --port then no longer serves; 0: any free "
            "port (default: no separate port)"
        ),
    ] = None
    admin_host: Annotated[str, doc("address of --admin-port")] = "127.0.0.1"
    uds: Annotated[str | None, doc("Unix socket to listen on, instead of host and port")] = None
    ssl_certfile: Annotated[
        str | None,
        doc("TLS: file of the server's certificate chain; without it the server speaks plain HTTP"),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        doc(
            "TLS: file of the certificate's private key (default: in the certificate's file); "
            "AIOSERVE_SSL_KEYFILE_PASSWORD decrypts it"
        ),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        doc("TLS: CA file; clients must show a certificate signed by one of these (default: none)"),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...], doc("CORS: origin whose pages may call this server, or '*'; repeatable")
    ] = ()
    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|(\*\.)?[^\s/:@*\[\]]+)$")], ...],
        doc(
            "Host header: name under which clients may call this server, besides its addresses and "
            "localhost; *.example.com: all subdomains, '*': any; repeatable (default: any with "
            "keys, TLS or a Unix socket; else none, and beyond loopback the names of a local "
            "network)"
        ),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], doc("CORS: method that these pages may use; repeatable (default: any)")
    ] = ()
    allowed_headers: Annotated[
        tuple[str, ...], doc("CORS: header that these pages may send; repeatable (default: any)")
    ] = ()
    allow_credentials: Annotated[
        bool, doc("CORS: let these pages send cookies and client certificates")
    ] = False
    max_connections: Annotated[
        PositiveInt,
        doc(
            "most open connections, over all API workers; beyond it the longest idle one is closed"
        ),
    ] = 4096
    max_header_bytes: Annotated[
        int, doc("size limit of a request line and its headers, in bytes", ge=1024, le=2**24)
    ] = 65_536
    header_timeout: Annotated[
        PositiveFloat, doc("seconds from the first byte of a request to the end of its headers")
    ] = 20.0
    body_timeout: Annotated[
        PositiveFloat, doc("seconds from the end of the headers to the end of the body")
    ] = 60.0
    max_bodies_mib: Annotated[
        PositiveInt,
        doc(
            "memory limit in MiB for request bodies still being received, of all API workers "
            "together (each worker allows at least --max-body-mib); beyond it all but small "
            "requests are refused with 503"
        ),
    ] = 512
    keep_alive_timeout: Annotated[
        PositiveFloat,
        doc("seconds for which a connection may be idle; a proxy in front needs a smaller value"),
    ] = 75.0
    send_timeout: Annotated[
        PositiveFloat,
        doc("close a connection whose client reads nothing of its response for this many seconds"),
    ] = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s\"'\[,]+", origin):
                raise ConfigError(
                    f"access.allowed_origins: {origin!r} is no origin: '*', or scheme://host:port "
                    "without a path; of several, one a flag"
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "access.allow_credentials needs origins by name: with '*' any page could act for "
                "the user who opens it"
            )
