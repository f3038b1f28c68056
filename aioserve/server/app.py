"""The application and its life: start engine and site, serve until a signal, drain, stop.

Knows nothing about what handlers do, nor which there are.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import math
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from socket import socket
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from aioserve.config import EngineConfig
from aioserve.engine import AsyncEngine, EngineClient
from aioserve.engine.builder import check_policies
from aioserve.engine.chat.chat_format import ChatFormat, check_formats, say_format
from aioserve.errors import ConfigError
from aioserve.server.access.access import ACCESS, Access, MainAccess
from aioserve.server.access.connections import Connections, Site, allow_connections
from aioserve.server.access.gate import check_key
from aioserve.server.access.origins import HOSTS, Hosts, check_caller, check_exposure
from aioserve.server.images import IMAGES, Images
from aioserve.server.loading import Loading, answering_while_loading
from aioserve.server.middleware import (
    HTTP_COUNTS,
    HttpCounts,
    add_request_id,
    answer_errors,
    note_requests,
    say_when_to_come_again,
)
from aioserve.server.process import Signals, notify, tell_that_the_loop_turns
from aioserve.server.routes import Routes, open_apis
from aioserve.server.running import (
    CHAT_FORMAT,
    DOCUMENT,
    ENGINE,
    NEEDS,
    RESPONSES,
    RUNNING,
    TOKEN_TEXTS,
    Responses,
    ResponseStore,
    RunningResponses,
)
from aioserve.server.sockets import ListenSockets, cannot_listen, open_doors, url_of
from aioserve.support.arguments import EXIT_ENGINE_DEAD
from aioserve.support.tokens import TokenTexts

if TYPE_CHECKING:
    from aioserve.server.openapi import OpenAPIDocument

logger = logging.getLogger(__name__)

# Seconds for handlers to write what is left after the engine has ended all streams.
HANDLER_TIMEOUT = 1.0

# Room for several prompts of full length: a token is 4 characters of English, 7 as a number, and 18
# where characters are escaped.
BODY_BYTES_PER_TOKEN = 32
MAX_DEFAULT_BODY_MIB = 16

# Seconds that the loop may go on while the runner's thread wants the GIL to begin or end a step.
# Python's 5 ms are as long as the step of a small model. On 2 cores, 256 streams of a 3M model got
# 1.2 times the tokens/s with one compute thread (1.1 with two steps in flight), as many with two.
SWITCH_INTERVAL = 1e-4

# The thresholds of Python's garbage collector: the number of new objects after which it examines
# the youngest generation, then the number of collections of one generation after which it examines
# the next. Python's own are 700, 10 and 10. With these a request paid 7 us in place of 25 (16 at
# once, simulated). The longest collection of the youngest generation took 1.7 ms in place of 0.8,
# and that of the second 2.8 ms in place of 2.2 (a busy Xeon).
COLLECTED_AT = 3000, 3, 10


def build_app(
    engine: EngineClient,
    responses: Responses | None = None,
    running: RunningResponses | None = None,
    access: Access | None = None,
    counts: HttpCounts | None = None,
    *,
    is_for_operators: bool = False,
) -> web.Application:
    """Return the routes in front of a started engine, which stays its caller's. `responses` are
    those that can be asked for again, `running` those that are being made, `access` the keys,
    `counts` how requests were answered; by default, of this application. `is_for_operators`: it is
    the one on a port of theirs.
    """
    access = access or open_access(engine)
    cors: tuple[Middleware, ...] = ()
    if access.settings.allowed_origins:
        from aioserve.server.access.cors import answer_preflights, tell_origin

        cors = (answer_preflights,)
    max_bytes = max_body_mib(engine) * 2**20
    app = web.Application(
        middlewares=[
            *(note_requests, answer_errors, check_caller),
            *cors,
            check_key,
        ],
        client_max_size=max_bytes,
    )
    app[ENGINE] = engine
    app[ACCESS] = access
    app[HOSTS] = Hosts(engine.config, app[ACCESS], is_for_operators=is_for_operators)
    app[RESPONSES] = responses or ResponseStore()
    app[RUNNING] = running or RunningResponses(engine)
    app[HTTP_COUNTS] = counts or HttpCounts()
    app[TOKEN_TEXTS] = TokenTexts(engine.model_info.tokenizer)
    app[IMAGES] = Images(engine.config.images)
    app.on_cleanup.append(lambda _: app[IMAGES].close())
    app[CHAT_FORMAT] = ChatFormat.of(engine.model_info.tokenizer, engine.config)
    app.on_cleanup.append(_close_chat_format)
    app.on_response_prepare.extend((add_request_id, say_when_to_come_again))
    if cors:
        app.on_response_prepare.append(tell_origin)
    if not is_for_operators:
        open_apis(app, max_bytes)
        app[HTTP_COUNTS].more.append(app[CHAT_FORMAT].malformed.tell)
    routes = Routes.of(engine.config, is_for_operators=is_for_operators)
    needs = routes.add_to(app)
    if engine.config.access.protect_metrics:
        needs["/metrics"] = "key"
    if is_for_operators:
        for path, needed in needs.items():
            if needed in ("admin_key", "looker"):
                needs[path] = "admin_key_if_any"
    app[NEEDS] = needs
    app[DOCUMENT] = _document(engine, routes, needs if access.keyring else {})
    return app


async def _close_chat_format(app: web.Application) -> None:
    app[CHAT_FORMAT].close()


def _document(
    engine: EngineClient, routes: Routes, needs: Mapping[str, str]
) -> Callable[[], bytes]:
    """Return what gives the OpenAPI document, which is made when it is first asked for."""

    @functools.cache
    def document() -> "OpenAPIDocument":
        from aioserve.server.openapi import OpenAPIDocument

        return OpenAPIDocument(
            routes.all,
            lambda: (*engine.config.model.served_names, *engine.adapters.paths),
            ignores_unknown=engine.config.server.ignore_unknown_fields,
            needs=needs,
        )

    return lambda: document().encoded()


def open_access(engine: EngineClient) -> MainAccess:
    """Return the keys and limits of the settings; an engine of this process counts their tokens and
    has their metrics. Raises `ConfigError`.
    """
    access = MainAccess(engine.config)
    if isinstance(engine, AsyncEngine):
        access.count_for(engine)
    return access


def max_body_mib(engine: EngineClient) -> int:
    """Return the setting, or what prompts of this model need: bodies are decoded in one go, on the
    loop, because the decoder keeps the GIL. A MiB of token ids takes some 20 ms.
    """
    given = engine.config.server.max_body_mib
    if given is not None:
        return given
    needed = math.ceil(BODY_BYTES_PER_TOKEN * engine.max_model_len / 2**20)
    images = 0 if engine.media.refuses_images else engine.config.images.max_image_mib
    return min(needed, MAX_DEFAULT_BODY_MIB) + math.ceil(images * 4 / 3)  # base64


@contextlib.asynccontextmanager
async def listening(
    engine: EngineClient,
    doors: ListenSockets | Sequence[socket],
    responses: Responses | None = None,
    running: RunningResponses | None = None,
    access: Access | None = None,
    counts: HttpCounts | None = None,
) -> AsyncIterator[str]:
    """Serve `engine` on bound sockets inside the block; yields the URL. For the rest see
    `build_app`.

    Raises `ConfigError` if another process took the port in the meantime.
    """
    doors = doors if isinstance(doors, ListenSockets) else ListenSockets([*doors], [])
    access, counts = access or open_access(engine), counts or HttpCounts()
    most = math.ceil(access.settings.max_connections / (engine.config.server.api_workers or 1))
    connections = Connections(access.settings, most, access.refusals)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(connections.close)
        for sockets, is_for_operators in ((doors.public, False), (doors.admin, True)):
            if not sockets:
                continue
            app = build_app(
                *(engine, responses, running, access, counts), is_for_operators=is_for_operators
            )
            runner = web.AppRunner(
                app,
                handler_cancellation=True,  # off by default: a client's leaving would go unnoticed
                shutdown_timeout=HANDLER_TIMEOUT,
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            assert runner.server is not None
            for sock in sockets:
                site = Site(runner.server, sock, connections, access.tls)
                try:
                    await site.start()
                except OSError as error:
                    raise cannot_listen(url_of(sock), error) from error
                stack.push_async_callback(site.stop)
        yield url_of(doors.public[0], is_encrypted=access.tls is not None)


#: Serves an engine inside its block, for clients that access lets in, and yields the URL; stops
#: what has answered so far as soon as it can listen; calls what it is given if that cannot go on,
#: and raises why at the end of the block.
MakeSite = Callable[
    [AsyncEngine, ListenSockets, MainAccess, Callable[[], None], Loading],
    contextlib.AbstractAsyncContextManager[str],
]


@contextlib.asynccontextmanager
async def site_here(
    engine: AsyncEngine,
    doors: ListenSockets,
    access: MainAccess,
    stop: Callable[[], None],
    loading: Loading,
) -> AsyncIterator[str]:
    """Serve in this process, on the engine's loop."""
    loading.stop()
    async with listening(engine, doors, access=access) as url:
        yield url


def say_chat_limit(engine: AsyncEngine) -> None:
    """A line of the log if chats that state no limit end before the model's length."""
    limit = engine.config.server.default_chat_tokens
    if (
        limit
        and limit < engine.max_model_len
        and engine.model_info.sampling_defaults.max_tokens is None
    ):
        logger.info(
            "replies of chats that state no limit end after %d tokens (server.default_chat_tokens)",
            limit,
        )


#: Settings that a running server takes over with SIGHUP.
FOLLOWED = {
    "scheduler.policy",
    "scheduler.options",
    "shadow.shadow_policy",
    "shadow.shadow_options",
}


async def serve(
    config: EngineConfig,
    site: MakeSite = site_here,
    read_again: Callable[[], EngineConfig] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal drops what still runs. Whatever
    hangs, the process ends in the times of `signals` and of the server's settings. With SIGHUP the
    keys are read again, and by `read_again` the settings, for the policy and its shadow; a
    line in the log names the other changes, which wait for a restart.

    Raises `ConfigError` if the engine or the site cannot start as configured, and, after every
    client was told, `EngineDeadError` if the engine dies.
    """
    if config.model.skip_tokenizer_init:
        raise ConfigError("skip_tokenizer_init is for Python callers: a server needs the tokenizer")
    access = MainAccess(config)
    signals = Signals()  # before any code of a policy runs
    check_formats(config.server)
    check_policies(config)  # before a port is taken, and long before the model is loaded
    config.check_effects()
    allow_connections(config.access.max_connections)
    doors = open_doors(config)
    try:
        check_exposure(access, doors, has_admin=config.server.enable_admin)
        engine = AsyncEngine(config)
    except BaseException:
        doors.close()
        raise
    answering = contextlib.AsyncExitStack()
    serving = contextlib.AsyncExitStack()
    try:
        loading = await answering.enter_async_context(
            answering_while_loading(
                doors.all,
                shares_port=config.server.api_workers > 0,
                tls=access.tls,
                hosts=Hosts(config, access, is_for_operators=False),
            )
        )
        url = url_of(doors.public[0], is_encrypted=access.tls is not None)
        logger.info("%s/ready says when the model is loaded", url)
        if not await _unless(signals.first, engine.start()):
            return
        signals.has_loaded(config.server.drain_timeout)
        if config.server.exit_on_dead_engine:
            end = signals.last_resort.end
            engine.internals.end_process_with_loop(lambda why: end(EXIT_ENGINE_DEAD, why))
        exempt_from_garbage_collection()
        sys.setswitchinterval(SWITCH_INTERVAL)
        access.count_for(engine)
        async with serving:
            starting = serving.enter_async_context(
                site(engine, doors, access, signals.first.set, loading)
            )
            if not await _unless(signals.first, starting):
                return
            await answering.aclose()
            reloads = [access.reload]
            if read_again is not None:
                reloads.append(lambda: follow_settings(engine, config, read_again()))
            signals.call_on_hangup(*reloads)
            logger.info(
                "listening on %s (model %s, policy %s)",
                url,
                config.model.served_name,
                config.scheduler.policy,
            )
            notify("READY=1", f"STATUS=serves {config.model.served_name} on {url}")
            serving.callback(asyncio.create_task(tell_that_the_loop_turns()).cancel)
            say_chat_limit(engine)
            say_format(engine.model_info.tokenizer, engine.config.server)
            for sock in doors.admin:
                told = url_of(sock, is_encrypted=access.tls is not None)
                logger.info("the admin routes are on %s", told)
            if config.server.exit_on_dead_engine:
                await _unless(signals.first, engine.wait_ended())
            else:  # it answers probes and refuses
                await signals.first.wait()
            notify("STOPPING=1", "STATUS=draining")
            logger.info("draining for at most %g s", config.server.drain_timeout)
            # The site goes on listening meanwhile, so that probes and refusals say why.
            if not await _unless(signals.second, engine.shutdown(config.server.drain_timeout)):
                logger.info("second signal: dropping what still runs")
                await engine.shutdown(drain_timeout=0)
            await engine.wait_ended()  # a signal does not make a death a success
    finally:
        await answering.aclose()
        doors.close()
        await engine.shutdown(drain_timeout=0)
        gc.unfreeze()  # else some extension modules complain at exit about what is left of them
        if engine.errored is not None:
            signals.leave(is_dead=True)
    signals.leave(is_dead=False)
    logger.info("stopped")


def follow_settings(engine: AsyncEngine, started: EngineConfig, wanted: EngineConfig) -> None:
    """Have what of `wanted` a running engine can have, which is its policies, and log which other
    settings differ from those that the server has started with. Raises as `follow_policy` does.
    """
    follow_policy(engine, wanted)
    if waiting := waiting_changes(started, wanted):
        logger.warning("SIGHUP: these changes wait for a restart: %s", ", ".join(waiting))


def waiting_changes(started: EngineConfig, wanted: EngineConfig) -> list[str]:
    """Return the settings that differ and that no running server can change, as `section.name`."""
    return [
        f"{section}.{name}"
        for section in started.__struct_fields__
        for name in getattr(started, section).__struct_fields__
        if f"{section}.{name}" not in FOLLOWED
        and getattr(getattr(started, section), name) != getattr(getattr(wanted, section), name)
    ]


def follow_policy(engine: AsyncEngine, wanted: EngineConfig) -> None:
    """Have the policy and the shadow policy of `wanted`, with their options. What is a file is read
    again. Raises `ConfigError` or `PolicyError`; what cannot work changes nothing.
    """
    new, old = wanted.scheduler, engine.config.scheduler
    if (new.policy, new.options) != (old.policy, old.options) or ".py" in new.policy:
        engine.switch_policy(new.policy, new.options)
    shadow, before = wanted.shadow, engine.config.shadow
    policy = shadow.shadow_policy
    asked, had = (policy, shadow.shadow_options), (before.shadow_policy, before.shadow_options)
    if asked != had or ".py" in (policy or ""):
        engine.switch_shadow(policy, shadow.shadow_options)


def exempt_from_garbage_collection() -> None:
    """Keep what was loaded so far out of full garbage collections, which would examine it each
    time, and collect after more new objects than by default (`COLLECTED_AT`).

    With torch and transformers imported it took 270 ms (CPython 3.11, AMD EPYC), felt by every
    running stream; with their objects frozen, less than one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AT)
    gc.enable()  # a start may do without


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Run `work`, cancelled when `event` is set first. Whether it finished; raises what it does."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for pending in (task, waiter):
            pending.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)
