"""The command `chat`: a conversation with a running server, in a terminal or through a pipe.

Reads lines, shows replies as they come, and stops them at Ctrl-C. In this order: keys of the
terminal, lines broken between words, messages from lines, history, the conversation, slash
commands, and the command itself.
"""

import asyncio
import io
import os
import select
import shutil
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from aioserve.client import AsyncClient
from aioserve.config.load import parse_option
from aioserve.errors import AioserveError, ConfigError, EngineDeadError, RequestError, did_you_mean
from aioserve.outputs import FinishReason
from aioserve.params import NO_DEFAULTS, RANGES, SamplingDefaults, SamplingParams
from aioserve.server.protocol import ModelCard
from aioserve.support.arguments import Parser

_NUDGE_SECONDS = 0.05  # between two interruptions of a wait that has missed a Ctrl-C
_END = b"\0"  # no signal has this number


@contextmanager
def keeping_keys() -> Iterator[None]:
    """Inside the block the terminal hands on keys one by one, as readline has it while it reads.

    Between two lines readline puts the terminal back into the mode that it found. In the usual one
    the kernel collects whole lines, and takes a Ctrl-D for itself: typed while a reply streams, it
    would reach nothing. Nor may a Ctrl-C throw away what was typed before it, as it usually does:
    readline, told that there is a key, would wait for the next one, and hear no signal until then.
    `discard_keys` throws it away instead, with what was typed until the reply has stopped. Where
    there is no terminal of that kind, nothing is changed.
    """
    try:
        import termios
    except ImportError:
        yield
        return
    try:
        before = termios.tcgetattr(sys.stdin)
    except (OSError, ValueError, termios.error):
        yield
        return
    by_key = [*before[:3], before[3] & ~termios.ICANON | termios.NOFLSH, *before[4:]]
    by_key[6] = list(before[6])
    by_key[6][termios.VMIN], by_key[6][termios.VTIME] = 1, 0
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, by_key)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def discard_keys() -> None:
    """Throw away what was typed until now and not read; nothing where there is no terminal of that
    kind.
    """
    try:
        import termios
    except ImportError:
        return
    with suppress(OSError, ValueError, termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


@contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Inside the block, which reads a line by `input`, a Ctrl-C is heard at once.

    readline looks for signals when one ends its wait for a key: one that comes just before the
    wait would be heard with the next key. So a thread is told of each SIGINT as it arrives, and
    interrupts the wait by a signal that does nothing else, until the block has ended. For the main
    thread alone, which has the signals.
    """
    if not hasattr(signal, "pthread_kill"):
        yield
        return
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    usual = signal.signal(signal.SIGURG, lambda number, frame: None)
    earlier = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    main = threading.get_ident()
    thread = threading.Thread(target=_nudge, args=(told, main), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        os.write(tell, _END)
        thread.join()
        signal.signal(signal.SIGURG, usual)
        os.close(told)
        os.close(tell)


def _nudge(told: int, main: int) -> None:
    """Interrupt the thread `main` again and again from the first SIGINT on that `told` tells of."""
    has_come = False
    while True:
        if select.select([told], [], [], _NUDGE_SECONDS if has_come else None)[0]:
            numbers = os.read(told, 4096)
            if _END in numbers:
                return
            has_come = has_come or signal.SIGINT in numbers
        elif has_come:
            signal.pthread_kill(main, signal.SIGURG)


TAB_STOP = 8


class WordWrap:
    """One reply. A word is shown once it is whole, so that none is ever broken at the margin."""

    def __init__(self, width: int) -> None:
        """`width` is how many columns a line may fill."""
        self._width = max(width, 1)
        self._column = 0
        self._gap = ""  # blanks that stand before the word, and nowhere if the line ends there
        self._word = ""

    def feed(self, text: str) -> str:
        """Return what can be shown after the next piece."""
        shown = []
        for char in text:
            if char == "\n":
                shown += [self._place(), char]
                self._gap, self._column = "", 0
            elif char in " \t":
                shown.append(self._place())
                self._gap += char
            else:
                self._word += char
                if _width(char) == 2:  # Chinese and Japanese have no blanks to break at
                    shown.append(self._place())
        if len(self._word) >= self._width:  # no word, but a line of something else
            shown.append(self._place())
        return "".join(shown)

    def end(self) -> str:
        """Return what was held back, as the reply ends here."""
        return self._place()

    def _place(self) -> str:
        if not self._word:
            return ""
        gap, word = self._gap, self._word
        self._gap = self._word = ""
        wide = sum(map(_width, word))
        indent = sum(TAB_STOP if char == "\t" else 1 for char in gap)
        if self._column and self._column + indent + wide > self._width:
            self._column = wide % self._width
            return f"\n{word}"
        self._column = (self._column + indent + wide) % self._width or self._width
        return gap + word


def _width(char: str) -> int:
    """Return how many columns a character fills."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


PROMPT, MORE = "> ", "... "
QUOTES = '"""'

#: A line without its end, after a prompt is shown. Raises `EOFError`.
ReadLine = Callable[[str], str]


def read_message(read_line: ReadLine) -> str:
    """Return the next one. Raises `EOFError` if there is no more; inside a message, that ends
    it.
    """
    line = read_line(PROMPT)
    if line.strip().startswith(QUOTES):
        return _quoted(line.strip().removeprefix(QUOTES), read_line)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = read_line(MORE)
        except EOFError:
            line = ""
    return "\n".join([*lines, line])


def _quoted(line: str, read_line: ReadLine) -> str:
    lines = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        try:
            line = read_line(MORE)
        except EOFError:
            return "\n".join(lines).strip("\n")
    return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")


def read_from_pipe(prompt: str) -> str:
    """Return a line of stdin, read without showing a prompt."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def read_from_terminal(prompt: str) -> str:
    """Return a line of a person, edited as readline has it. Raises `KeyboardInterrupt` at a
    Ctrl-C.
    """
    with hearing_interrupts():
        return input(prompt)


def complete_by(complete: Callable[[str, str], Iterable[str]]) -> None:
    """Have Tab offer what `complete` gives for a line up to the word, and the word."""
    try:
        import readline
    except ImportError:  # Python was built without it
        return

    def offer(word: str, index: int) -> str | None:
        before = readline.get_line_buffer()[: readline.get_begidx()]
        found = [one for one in complete(before, word) if one.startswith(word)]
        return found[index] if index < len(found) else None

    readline.set_completer_delims(" ")  # a slash and a path are parts of words
    readline.set_completer(offer)
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")


MAX_LINES = 1000


def history_file() -> Path:
    """Return where it lies: `aioserve/chat_history` in `XDG_STATE_HOME`, or in `~/.local/state`."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "aioserve" / "chat_history"


class History:
    """The lines typed in one session: recall them before the first line is read, and keep them
    after the last one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_recalled = 0

    def recall(self) -> str | None:
        """Have the arrows offer the lines of the file, if there is one. Returns why that cannot
        be, in words; None if all is well, and where Python has no readline.
        """
        try:
            import readline
        except ImportError:
            return None
        readline.set_history_length(MAX_LINES)
        try:
            readline.read_history_file(self._path)
        except FileNotFoundError:
            pass
        except (OSError, UnicodeError) as error:
            return f"earlier lines cannot be read from {self._path}: {error}"
        self._num_recalled = readline.get_current_history_length()
        return None

    def keep(self) -> str | None:
        """Add the lines of this session to the file, which keeps the last `MAX_LINES`. Returns as
        `recall` does.
        """
        try:
            import readline
        except ImportError:
            return None
        path, num_new = self._path, readline.get_current_history_length() - self._num_recalled
        if num_new <= 0:
            return None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made before readline writes, which would let all users read it.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            if hasattr(readline, "append_history_file"):  # another session may have written
                readline.append_history_file(num_new, path)
            else:
                readline.write_history_file(path)
            path.chmod(0o600)  # it may be an older one, or a new one in its place
        except OSError as error:
            return f"what was typed cannot be kept in {path}: {error.strerror or error}"
        return None


_OF_PROGRAMS = {"n", "truncate_prompt_tokens", "logprobs", "prompt_logprobs"}
#: Parameters that can be set between two replies. The rest of `SamplingParams` is for programs.
SAMPLING = (
    *(name for name in RANGES if name not in _OF_PROGRAMS),
    *("stop", "ignore_eos"),
)


class Reply(msgspec.Struct):
    """The cost of one reply; its tokens as the server counts them."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None  # None: it was stopped, or has failed
    first_text: float | None = None  # seconds after it was asked for
    seconds: float = 0.0  # until its last text
    num_first_tokens: int = 0  # those of the first text

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first text; None if all came at once."""
        if self.first_text is None or self.num_output_tokens == self.num_first_tokens:
            return None
        duration = max(self.seconds - self.first_text, 1e-6)
        return (self.num_output_tokens - self.num_first_tokens) / duration


class Conversation:
    """A chat with one model. Its messages stay when a reply is stopped or fails half-way."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.system = ""
        self.defaults = SamplingDefaults()  # of what is not set
        self.sampling: dict[str, Any] = {}  # what was set, checked
        self.has_template = True  # as long as the server does not say otherwise
        self.replies: list[Reply] = []
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Begin a new conversation; settings stay."""
        self._messages.clear()
        self.replies.clear()

    def set_sampling(self, name: str, text: str) -> None:
        """`text` as a command line has it; nothing: the default again. Raises `RequestError`."""
        if name not in SAMPLING:
            known, meant = ", ".join(SAMPLING), did_you_mean(name, SAMPLING)
            raise RequestError(f"{name!r} is no setting{meant}; the settings are {known}", name)
        others = {key: value for key, value in self.sampling.items() if key != name}
        if text:
            kinds = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
            try:
                others[name] = msgspec.convert(text, kinds[name], strict=False)
            except msgspec.ValidationError as error:
                raise RequestError(f"{name}: {error}", name) from error
            SamplingParams(**others)  # the range
        self.sampling = others

    async def ask(self, text: str) -> AsyncGenerator[str, None]:
        """Yield the reply to `text`, as it comes. Raises what `AsyncClient` raises; what was said
        before an error, or before the generator is closed, stays said.
        """
        self._messages.append({"role": "user", "content": text})
        reply, said, began = Reply(), "", time.perf_counter()
        self.replies.append(reply)
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    reply.num_prompt_tokens = output.num_prompt_tokens
                    reply.num_cached_tokens = output.num_cached_tokens
                    reply.num_output_tokens = output.num_output_tokens
                    reply.finish_reason = output.finish_reason
                    reply.seconds = time.perf_counter() - began
                    if output.text:
                        if reply.first_text is None:
                            reply.first_text = reply.seconds
                            reply.num_first_tokens = output.num_output_tokens
                        said += output.text
                        yield output.text
        finally:
            if said or reply.finish_reason is not None:
                self._messages.append({"role": "assistant", "content": said})
            else:  # it was never answered
                self._messages.pop()
                self.replies.pop()

    async def _outputs(self) -> AsyncGenerator[Any, None]:
        """Yield outputs of the chat route, or of the completions route for a model without a
        template.
        """
        params = self.defaults.fill(self.sampling)
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self._messages]
        if self.has_template:
            try:
                async with aclosing(self.client.generate(messages, params)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except RequestError as error:
                if "no chat template" not in str(error):
                    raise
                self.has_template = False
        prompt = "\n".join(message["content"] for message in messages)
        async with aclosing(self.client.generate(prompt, params)) as outputs:
            async for output in outputs:
                yield output


class Quit(Exception):
    """The user has ended the conversation."""


class Command(NamedTuple):
    """A line of /help, and what does it, given the words after the name."""

    usage: str
    about: str
    run: Callable[[Conversation, str], Awaitable[str]]


async def run_command(conversation: Conversation, line: str) -> str:
    """Return what the command of `line`, slash included, has to say. Raises `Quit`, `RequestError`,
    and what `AsyncClient` raises.
    """
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS).replace("'", "")
        raise RequestError(f"unknown command /{name}{meant}; /help lists all")
    return await COMMANDS[name].run(conversation, rest.strip())


def describe(reply: Reply) -> str:
    """Counts and times of a reply in a line."""
    cached = f" ({reply.num_cached_tokens} cached)" if reply.num_cached_tokens else ""
    counts = f"{reply.num_prompt_tokens} prompt tokens{cached}, {reply.num_output_tokens} output"
    if reply.first_text is None:
        return f"{counts}; {reply.seconds:.2f} s"
    rate = reply.tokens_per_second
    after = "" if rate is None else f", then {rate:.1f} tokens/s"
    return f"{counts}; TTFT {1e3 * reply.first_text:.0f} ms{after}; {reply.seconds:.2f} s"


async def _help(conversation: Conversation, rest: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:{width}}  {command.about}" for command in COMMANDS.values()]
    return "\n".join(
        [
            *lines,
            'A line that ends in a backslash goes on; so does all between two lines of """.',
            "Two slashes begin a message with one. Ctrl-C stops a reply, twice leaves.",
        ]
    )


async def _set(conversation: Conversation, rest: str) -> str:
    for word in rest.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise RequestError(
                f"expected NAME=VALUE, got {word!r}; there are {', '.join(SAMPLING)}"
            )
        conversation.set_sampling(name, value)
    told = [f"{name}={value}" for name, value in conversation.sampling.items()]
    return " ".join(told) or f"nothing is set: {conversation.defaults}"


async def _system(conversation: Conversation, rest: str) -> str:
    if rest:
        conversation.system = "" if rest == "off" else rest
    return f"system prompt: {conversation.system}" if conversation.system else "no system prompt"


async def _policy(conversation: Conversation, rest: str) -> str:
    if not rest:
        raise RequestError(f"which policy? {COMMANDS['policy'].usage}")
    name, *words = rest.split()
    options: dict[str, Any] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals:
            raise RequestError(f"expected OPTION=VALUE, got {word!r}")
        options[option] = parse_option(value)
    try:
        before, _ = await conversation.client.switch_policy(name, options)
    except RequestError as error:
        if "no such path" not in str(error):
            raise
        raise RequestError("the server has no admin routes: start it with --enable-admin") from None
    return f"policy {name} from the next step on; before: {before}"


async def _stats(conversation: Conversation, rest: str) -> str:
    if not conversation.replies:
        return "no reply yet"
    replies = conversation.replies
    if len(replies) == 1:
        return f"last reply: {describe(replies[-1])}"
    totals = (
        f"{sum(reply.num_prompt_tokens for reply in replies)} prompt tokens, "
        f"{sum(reply.num_output_tokens for reply in replies)} output; "
        f"{sum(reply.seconds for reply in replies):.2f} s"
    )
    return f"last reply: {describe(replies[-1])}\nall {len(replies)}: {totals}"


async def _reset(conversation: Conversation, rest: str) -> str:
    conversation.reset()
    return "a new conversation"


async def _quit(conversation: Conversation, rest: str) -> str:
    raise Quit


COMMANDS = {
    "set": Command("/set [NAME=VALUE ...]", "sampling; NAME= is its default again", _set),
    "system": Command("/system [TEXT | off]", "the system prompt, from the next reply on", _system),
    "policy": Command(
        "/policy NAME [OPTION=VALUE ...]",
        "the scheduler policy of the server (with --enable-admin)",
        _policy,
    ),
    "stats": Command("/stats", "tokens, time to first token, tokens per second", _stats),
    "reset": Command("/reset", "forget what was said", _reset),
    "help": Command("/help", "this list", _help),
    "quit": Command("/quit", "leave, as Ctrl-D does", _quit),
}


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
        """Read and answer until there is no more to read. Returns the exit code."""
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
                discard_keys()
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
        """Run a command here, and have the model answer anything else."""
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
    """Return the models of the server, as soon as it serves."""
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
    """Return the error with what is to be done, if nothing listens there."""
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
    """Return what may follow at a terminal: commands, then their words."""
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
