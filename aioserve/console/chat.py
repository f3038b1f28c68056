"""The command `chat`: a conversation with a running server, in a terminal or through a pipe.

Reads lines, shows replies as they come, and stops them at Ctrl-C. What was said, and what slash
commands do, is known elsewhere.
"""

import asyncio
import io
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from urllib.parse import urlsplit

import aiohttp

from aioserve.arguments import Parser
from aioserve.client import AsyncClient
from aioserve.console.conversation import SAMPLING, Conversation
from aioserve.console.history import History, history_file
from aioserve.console.message_lines import (
    complete_by,
    read_from_pipe,
    read_from_terminal,
    read_message,
)
from aioserve.console.slash import COMMANDS, Quit, run_command
from aioserve.console.terminal_keys import keeping_keys
from aioserve.console.wrapping import WordWrap
from aioserve.errors import AioserveError, ConfigError, EngineDeadError, RequestError
from aioserve.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from aioserve.server.model_card import ModelCard

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "AIOSERVE_API_KEY"
LOADING_SECONDS = 0.5  # until a server that loads is asked again

#: Sampling for a model that recommends none: at temperature 1, with no token cut off, small models
#: talk nonsense. A guess between what other programs begin with.
CALM = SamplingDefaults(temperature=0.7, top_p=0.95)

# A reply may hold what would drive the terminal: shown, as ^[ for escape, instead of done.
CONTROL = {code: f"^{chr(code ^ 0x40)}" for code in (*range(32), 127) if code not in (9, 10)}
CONTROL |= {code: f"\\x{code:x}" for code in range(0x80, 0xA0)}


def run_chat(argv: Sequence[str]) -> int:
    """`python -m aioserve chat [URL]`; returns 0. Raises `AioserveError` if no server is there,
    and of a pipe also for a message that is not answered.
    """
    arguments = _parser().parse_args(argv)
    if "://" not in arguments.url and not arguments.url.startswith("unix:"):
        raise ConfigError(f"expected a URL such as {DEFAULT_URL}, got {arguments.url!r}")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are no text, and the other way round
    with asyncio.Runner() as runner:
        url = arguments.url.rstrip("/").removesuffix("/v1")  # as other clients want it
        client = AsyncClient(url, model=arguments.model, api_key=os.environ.get(KEY_VARIABLE))
        conversation = Conversation(client)
        conversation.system = arguments.system or ""
        try:
            for assignment in arguments.sampling:
                name, _, value = assignment.partition("=")
                conversation.set_sampling(name, value)
        except RequestError as error:
            raise ConfigError(f"--sampling: {error}") from error
        try:
            with keeping_keys():
                keeps_history = not arguments.no_history
                return _Chat(conversation, runner, keeps_history=keeps_history).run()
        except EngineDeadError as error:  # of another process: exit code 3 is for one's own
            raise AioserveError(str(error)) from error
        finally:
            runner.run(client.close())


def _parser() -> Parser:
    parser = Parser(
        "chat",
        description="Talk to a running server: replies appear as they come. A line that begins "
        "with a slash is for this program: /help lists what there is.",
        epilog="Without a terminal, each message of stdin is answered on stdout, and the first "
        f"failure ends it. The key of the server is taken from {KEY_VARIABLE}.",
    )
    parser.add_argument(
        "url", nargs="?", metavar="URL", default=DEFAULT_URL, help="URL of the server"
    )
    parser.add_argument("--model", help="model or LoRA adapter on the server (default: its model)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--sampling",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=f"sampling parameter; repeatable; names: {', '.join(SAMPLING)}",
    )
    parser.add_argument(
        "--no-history",
        action="store_true",
        help="neither read nor write the history file of typed lines: "
        "~/.local/state/aioserve/chat_history",
    )
    return parser


class _Chat:
    """The loop between a person, or a pipe, and the server."""

    def __init__(
        self, conversation: Conversation, runner: asyncio.Runner, *, keeps_history: bool
    ) -> None:
        self._conversation, self._runner = conversation, runner
        self._history = History(history_file()) if keeps_history else None
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._read_line = read_from_terminal if self._is_terminal else read_from_pipe

    def run(self) -> int:
        """Until there is no more to read, or to say. Returns the exit code."""
        client = self._conversation.client
        cards = self._runner.run(_meet(client))
        defaults = cards[0].sampling
        self._conversation.defaults = CALM if defaults == NO_DEFAULTS else defaults
        if self._is_terminal:
            model = client.model or cards[0].id
            _note(
                f"{model} at {client.base_url}; {self._conversation.defaults} unless you /set it; "
                "/help lists commands, Ctrl-D leaves"
            )
            complete_by(_complete)
            if self._history is not None and (why := self._history.recall()) is not None:
                _note(why)
        try:
            return self._converse()
        finally:
            kept = self._history is None or not self._is_terminal or self._history.keep()
            if isinstance(kept, str):
                _note(kept)

    def _converse(self) -> int:
        num_interrupts = 0
        while True:
            try:
                message = self._read()
                num_interrupts = 0
                self._answer(message)
            except (EOFError, Quit):
                if self._is_terminal:
                    print()
                return 0
            except KeyboardInterrupt:
                num_interrupts += 1
                if not self._is_terminal:
                    raise
                if num_interrupts == 2:
                    return 0
                _note("Ctrl-C again leaves")
            except AioserveError as error:
                if not self._is_terminal:
                    raise
                _note(str(error))

    def _read(self) -> str:
        try:
            return read_message(self._read_line)
        except KeyboardInterrupt:
            print()  # after what was half typed
            raise

    def _answer(self, message: str) -> None:
        """To a command here, to anything else by the model."""
        if message.startswith("/") and not message.startswith("//"):
            told = self._runner.run(run_command(self._conversation, message))
            _note(told)
        elif message.strip():
            had_template = self._conversation.has_template
            try:
                self._runner.run(self._show_reply(message.removeprefix("/")))
            finally:
                print(flush=True)
            reply = self._conversation.replies[-1]
            if reply.finish_reason not in (None, "stop"):
                _note(f"ended by: {reply.finish_reason}")
            if had_template and not self._conversation.has_template:
                _note("the model has no chat template: it goes on with the text so far")

    async def _show_reply(self, message: str) -> None:
        wrap = WordWrap(shutil.get_terminal_size().columns - 1)
        try:
            async with aclosing(self._conversation.ask(message)) as texts:
                async for text in texts:
                    shown = wrap.feed(text.translate(CONTROL)) if self._is_terminal else text
                    print(shown, end="", flush=True)
        finally:
            print(wrap.end(), end="", flush=True)


async def _meet(client: AsyncClient) -> list[ModelCard]:
    """The models of the server, as soon as it serves."""
    is_told = False
    while True:
        try:
            return await client.models()
        except EngineDeadError as error:
            if "being loaded" not in str(error):
                raise _how_to_start(client.base_url, error) from error
            if not is_told:
                _note("the model is being loaded; Ctrl-C leaves")
            is_told = True
            await asyncio.sleep(LOADING_SECONDS)


def _how_to_start(url: str, error: EngineDeadError) -> AioserveError:
    """With what is to be done, if nothing listens there."""
    if not isinstance(error.__cause__, aiohttp.ClientConnectorError):
        return error
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return AioserveError(f"{error}. Is a server started there, with --host and this port?")
    port = f" --port {parts.port}" if parts.port not in (None, 8000) else ""
    start = f"python -m aioserve{port}"
    return AioserveError(
        f"no server listens at {url}. Start one in another terminal: {start}, or, with a model "
        f"that can talk: python -m aioserve fetch smollm2 && {start} --model smollm2"
    )


def _complete(before: str, word: str) -> Iterable[str]:
    """What may follow at a terminal: commands, then their words."""
    match before.split():
        case []:
            return [f"/{name}" for name in COMMANDS]
        case ["/set", *_]:
            return [f"{name}=" for name in SAMPLING]
        case ["/policy"]:
            from aioserve.scheduler import available_policies

            return available_policies()
    return ()


def _note(text: str) -> None:
    """Beside the conversation: what a pipe reads are replies alone."""
    sys.stdout.flush()
    text = text.translate(CONTROL)
    print(text if "\n" in text else f"[{text}]", file=sys.stderr, flush=True)
