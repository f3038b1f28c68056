"""Settings of the HTTP server and its processes."""

from typing import Annotated, Literal

from aioserve.config.section import (
    DEFAULT_CHAT_TOKENS,
    LogLevel,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    doc,
)


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
        bool, doc("accept requests with fields that this server does not know, and ignore these")
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
        doc("seconds after which a hung step means a dead engine: all requests fail; null: never"),
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
