"""The settings of the HTTP server: its processes, access, files and batches, scores."""

import re
from typing import Annotated, Literal

from msgspec import Meta

from aioserve.config.sections import (
    DEFAULT_CHAT_TOKENS,
    LogLevel,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    doc,
)
from aioserve.errors import ConfigError


class ServerConfig(Section, frozen=True, kw_only=True):
    """Settings of the HTTP server."""

    host: Annotated[str, doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, doc("port to listen on; 0: any free port", ge=0, le=65535)] = 8000
    api_workers: Annotated[
        int,
        doc(
            "API worker processes: HTTP, chat templates and tokenization run in them; 0: all in "
            "the engine's process",
            ge=0,
            le=256,
        ),
    ] = 0
    worker_timeout: Annotated[
        float,
        doc(
            "kill and restart an API worker that is unresponsive for this many seconds",
            gt=0,
            le=86400,
        ),
    ] = 30.0
    max_body_mib: Annotated[
        PositiveInt | None,
        doc("largest request body in MiB (default: from the model's length limit, 1 to 16)"),
    ] = None
    ignore_unknown_fields: Annotated[
        bool, doc("accept requests with unknown fields, and ignore these fields")
    ] = False
    enable_admin: Annotated[
        bool,
        doc(
            "admin routes: serve POST /admin/... and /v1/load_lora_adapter, which reads any path "
            "on this machine"
        ),
    ] = False
    page: Annotated[bool, doc("scheduler page: serve it at GET /, with its data at /watch/...")] = (
        True
    )
    tool_call_parser: Annotated[
        str,
        doc(
            "tool-call format of the model: a name of docs/tools.md, package.module:Class or "
            "file.py:Class; none: refuse tools; auto: detected in its chat template"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        doc(
            "reasoning format of the model: a name of docs/tools.md, or a format that marks "
            "reasoning; auto: detected in its chat template"
        ),
    ] = "auto"
    reasoning_budget_message: Annotated[
        str, doc("text before the end mark of reasoning that a thinking budget forces")
    ] = ""
    default_chat_tokens: Annotated[
        PositiveInt | None,
        doc(
            "most tokens of a chat reply if neither the request nor the model's generation config "
            "sets a limit; null: up to the context length"
        ),
    ] = DEFAULT_CHAT_TOKENS
    drain_timeout: Annotated[
        NonNegativeFloat,
        doc("seconds that running requests have to finish after SIGTERM or Ctrl-C"),
    ] = 5.0
    exit_on_dead_engine: Annotated[
        bool, doc("exit the process with code 3 when the engine has died")
    ] = True
    hung_step_seconds: Annotated[
        float,
        doc(
            "seconds after which a step counts as hung; GET /ready says so, and the log says where",
            gt=0,
        ),
    ] = 60.0
    dead_step_seconds: Annotated[
        PositiveFloat | None,
        doc(
            "seconds after which the engine is dead because of a hung step: all requests fail; "
            "null: never"
        ),
    ] = 600.0
    hung_loop_seconds: Annotated[
        float,
        doc(
            "seconds for which the event loop may be blocked, as by an endless loop in a policy, "
            "before the log says where",
            gt=0,
        ),
    ] = 10.0
    dead_loop_seconds: Annotated[
        PositiveFloat | None,
        doc(
            "seconds after which a server with a blocked event loop exits with code 3, or by "
            "SIGALRM if C code keeps all Python code from running; null: never"
        ),
    ] = 120.0
    log_level: Annotated[LogLevel, doc("lowest level that is logged")] = "info"
    log_format: Annotated[Literal["text", "json"], doc("log format; json: one object per line")] = (
        "text"
    )
    otlp_traces_endpoint: Annotated[
        str | None,
        doc(
            "OpenTelemetry endpoint for request traces, OTLP over HTTP: "
            "http://localhost:4318/v1/traces (default: no tracing)"
        ),
    ] = None
    log_prompts: Annotated[
        bool, doc("log prompts word for word; otherwise no text of a prompt is logged")
    ] = False


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
    max_queue_share: Annotated[
        float,
        doc(
            "share of --max-waiting-requests and --max-waiting-tokens that waiting sequences of "
            "one API key may take; more of that key are refused with 429, and not those of others",
            gt=0,
            le=1,
        ),
    ] = 0.5
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


class BatchConfig(Section, frozen=True, kw_only=True):
    """Files and batches of clients: where they are kept, and limits."""

    batch_dir: Annotated[
        str | None,
        doc(
            "directory for files and batches; it turns on /v1/files and /v1/batches, and a "
            "server that starts with it again continues unfinished batches (default: off)"
        ),
    ] = None
    batch_concurrency: Annotated[
        PositiveInt, doc("most lines of batches in the engine at once")
    ] = 32
    max_batch_file_mib: Annotated[PositiveInt, doc("size limit of an uploaded file, in MiB")] = 200
    max_batch_lines: Annotated[PositiveInt, doc("most lines of a batch")] = 50_000
    max_batches: Annotated[
        PositiveInt,
        doc(
            "most unfinished batches of an API key, or of a server without keys; processes that "
            "share --batch-dir count separately, so batches that arrive at the same moment may "
            "exceed the limit by one per further process"
        ),
    ] = 16
    max_batch_gib: Annotated[
        PositiveFloat,
        doc(
            "disk limit of --batch-dir in GiB; beyond it uploads and new batches are refused, and "
            "running batches wait"
        ),
    ] = 20.0
    max_batch_share: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        doc("share of --max-batch-gib that the files and batches of one API key may take"),
    ] = 0.5
    batch_file_days: Annotated[
        PositiveFloat, doc("days after which files, and batches that have ended, are deleted")
    ] = 30.0
    batch_fsync_seconds: Annotated[
        NonNegativeFloat,
        doc(
            "seconds of a batch's results that a power failure may lose, so that their lines "
            "run again; 0: none. A crash of the process loses none"
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_dir is not None:
            return
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            if (value := getattr(self, name)) != default:
                raise ConfigError(
                    f"batches.{name} is {value!r}, which has no effect: there is no "
                    "batches.batch_dir"
                )


class ScoringConfig(Section, frozen=True, kw_only=True):
    """Scores and rankings of documents by the first token of a decoder model's answer."""

    score_template: Annotated[
        str,
        doc(
            "prompt of /v1/score and /v1/rerank: qwen3_reranker, or a file with {query}, "
            "{document} and optionally {instruction}; auto: detected in the chat template; "
            "none: no prompt"
        ),
    ] = "auto"
    score_labels: Annotated[
        str, doc("the two compared tokens, separated by a comma, the negative one first")
    ] = "no,yes"
    score_instruction: Annotated[str, doc("instruction for requests without one")] = (
        "Given a web search query, retrieve relevant passages that answer the query"
    )
