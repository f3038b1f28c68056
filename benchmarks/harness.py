"""What all benchmarks share: command lines, turns, medians, tables, servers, machines, drawings.

A program is a `Program` with one command or several; what a command returns is printed as the last
line of output, in JSON, with the machine that it was measured on and the options. Whether others
use the machine is read in /proc, so that needs Linux; shares are in cores: 0.1 is a tenth of one.
"""

import argparse
import asyncio
import contextlib
import inspect
import json
import math
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from xml.sax.saxutils import escape

import msgspec

ROOT = Path(__file__).parents[1]
#: Fields of configurations of transformers, by what they are for and by the name of the model.
MODELS: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("models.json").read_text(encoding="utf-8")
)
#: Prompts, and questions with their answers.
TEXTS: dict[str, Any] = json.loads(
    Path(__file__).with_name("texts.json").read_text(encoding="utf-8")
)
LIMIT = 0.1  # cores; from here on a machine is not called quiet. A guess.
_TICK = os.sysconf("SC_CLK_TCK")

Args = argparse.Namespace
K = TypeVar("K", bound=Hashable)


# The command line.


class Opt(NamedTuple):
    """An option with more than a default: a type stands for a value that may be left out."""

    default: Any
    help: str = ""
    choices: Collection[Any] | None = None


class Program:
    """A benchmark's command line, made of its docstring and of its commands' options."""

    def __init__(self, doc: str | None) -> None:
        self._parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._commands: Any = None

    def command(
        self, name: str = "", words: Mapping[str, Any] = {}, **options: Any
    ) -> Callable[[Callable[[Args], Any]], Callable[[Args], Any]]:
        """Decorate a function, perhaps async, that runs a command, or all there is without a name.

        `words` are positional. A value is a default of its own type, a list where several values
        may follow, a type where there is no default, False for a switch, or an `Opt`. A word is
        needed if it is a type. The function returns what is told as JSON, with an exit code behind
        it if that is not 0, or None.
        """

        def decorate(run: Callable[[Args], Any]) -> Callable[[Args], Any]:
            parser = self._parser
            if name:
                if self._commands is None:
                    self._commands = parser.add_subparsers(required=True, metavar="COMMAND")
                line = (run.__doc__ or "").partition("\n")[0]
                parser = self._commands.add_parser(name, help=line, description=run.__doc__)
            parser.set_defaults(run=run)
            for word, value in words.items():
                _add(parser, word, value, is_word=True)
            for option, value in options.items():
                _add(parser, "--" + option.rstrip("_").replace("_", "-"), value, is_word=False)
            return run

        return decorate

    def parse(self, words: Sequence[str] | None = None) -> Args:
        """The options of a command line; `run` is the function of its command."""
        return self._parser.parse_args(words)

    def main(self) -> None:
        """Run the command, print what it tells, and exit. SIGTERM ends it as Ctrl-C would, so that
        servers end as well.
        """
        signal.signal(signal.SIGTERM, _terminate)
        args = self.parse()
        before = machine()
        try:
            found = args.run(args)
            if inspect.iscoroutine(found):
                found = asyncio.run(found)
        except Terminated:
            sys.exit(128 + signal.SIGTERM)
        found, code = found if isinstance(found, tuple) else (found, 0)
        if found is not None:
            options = {name: value for name, value in vars(args).items() if name != "run"}
            told = {"machine": before, "options": options, **found}
            print(msgspec.json.encode(told, enc_hook=str).decode())  # NaN becomes null
        sys.exit(code)


class Terminated(KeyboardInterrupt):
    """SIGTERM came. `SystemExit` would count as a failure of the policy that the signal interrupts,
    and the program would go on.
    """


def _terminate(number: int, frame: object) -> None:
    raise Terminated


def _add(parser: argparse.ArgumentParser, name: str, value: Any, *, is_word: bool) -> None:
    given = value if isinstance(value, Opt) else Opt(value)
    default, fields = given.default, dict[str, Any]()
    if default is False:
        fields["action"] = "store_true"
    elif isinstance(default, type):
        fields |= {"type": default, "default": None}
    elif isinstance(default, Sequence) and not isinstance(default, str):
        kind = type(default[0]) if default else str
        fields |= {"type": kind, "default": list(default), "nargs": "*" if is_word else "+"}
    else:
        fields |= {"type": type(default), "default": default}
        if is_word:
            fields["nargs"] = "?"
    told = default if default is not False and not isinstance(default, type) else None
    text = given.help if told in (None, "", [], ()) else f"{given.help} (default: {_words(told)})"
    fields["help"] = argparse.SUPPRESS if given.help == argparse.SUPPRESS else text.strip()
    if given.choices is not None:
        fields["choices"] = list(given.choices)
    elif "action" not in fields:
        fields["metavar"] = name.lstrip("-").upper().replace("-", "_")
    parser.add_argument(name, **fields)


def _words(default: Any) -> str:
    parts = [default] if isinstance(default, str) or not isinstance(default, Sequence) else default
    return " ".join(str(part).replace("%", "%%") for part in parts)


# Clocks, turns, and what is made of them.


class Time(NamedTuple):
    """Seconds: the median of some runs, and half of the distance between their quartiles."""

    median: float
    noise: float


def taken(run: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds that one call takes, of the processor's time unless another clock is given."""
    began = clock()
    run()
    return clock() - began


def samples(
    run: Callable[[], object],
    repeats: int,
    min_seconds: float = 0.0,
    at_most: int = 1000,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each call: at least `repeats` of them, and until they took `min_seconds`."""
    seconds: list[float] = []
    while len(seconds) < repeats or (sum(seconds) < min_seconds and len(seconds) < at_most):
        seconds.append(taken(run, clock))
    return seconds


def summary(seconds: Sequence[float]) -> Time:
    """Median and noise of at least two values."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return Time(median, (high - low) / 2)


def timed(run: Callable[[], object], repeats: int = 5, min_seconds: float = 0.2) -> Time:
    """Median and noise of at least `repeats` calls, after one that does not count."""
    run()
    return summary(samples(run, repeats, min_seconds))


def turns(names: Sequence[K], rounds: int) -> Iterator[tuple[int, K]]:
    """Each name in each round, numbered from 0; another name goes first from round to round."""
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def by_turns(
    runs: Mapping[K, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[K, list[float]]:
    """Seconds of each call in each round, as they take turns."""
    found: dict[K, list[float]] = {name: [] for name in runs}
    for _, name in turns(list(runs), rounds):
        found[name].append(taken(runs[name], clock))
    return found


def ratio(values: Sequence[float], to: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round; NaN if there is none."""
    found = [value / base for value, base in zip(values, to, strict=True) if base]
    return statistics.median(found) if found else math.nan


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each of the rows' numbers."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def percentile(values: Sequence[float], which: float) -> float:
    """The percentile; NaN of an empty sequence."""
    place = which / 100 * (len(values) - 1)
    if not values:
        return math.nan
    low, high = (sorted(values)[round_(place)] for round_ in (math.floor, math.ceil))
    return low + (high - low) * (place - math.floor(place))


class Table:
    """Rows that are printed as they come, and kept in `rows` for the JSON.

    Columns are given by their heads, with the format of a value, `>10.2f`, whose width is that of
    the head too. What a row has beyond the columns is kept, and not printed; None is "-".
    """

    def __init__(self, columns: Mapping[str, str], title: str = "") -> None:
        self.columns, self.rows = columns, list[dict[str, Any]]()
        if title:
            print(title)
        heads = (f"{head:{self._plain(spec)}}" for head, spec in columns.items())
        print("".join(heads), flush=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Print and keep a row."""
        self.rows.append(dict(row))
        cells = []
        for head, spec in self.columns.items():
            value = row.get(head)
            if value is None or isinstance(value, str):
                spec, value = self._plain(spec), "-" if value is None else value
            cells.append(f"{value:{spec}}")
        print("".join(cells), flush=True)

    @staticmethod
    def _plain(spec: str) -> str:
        """The format of words in a column: its alignment and width."""
        width = "".join(c for c in spec.rstrip("f%d").partition(".")[0] if c.isdigit())
        return f"{'<' if spec.startswith('<') else '>'}{width}"


def told_of(limits: Mapping[str, tuple[bool, str]]) -> tuple[dict[str, Any], int]:
    """Print each limit, whether it was held, and what was seen. Return them for the JSON, and the
    exit code, which is 1 if one was missed.
    """
    for limit, (is_held, what) in limits.items():
        print(f"{'held  ' if is_held else 'MISSED'}  {limit}: {what}")
    told = {limit: {"held": is_held, "seen": what} for limit, (is_held, what) in limits.items()}
    return told, int(not all(is_held for is_held, _ in limits.values()))


# Processes and servers.


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server(NamedTuple):
    """A server that has answered."""

    url: str
    process: "subprocess.Popen[bytes]"
    start_seconds: float  # until it answered

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self.process.pid

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of the server."""
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def get(self, path: str) -> str:
        """The body of an answer."""
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return str(response.read().decode())

    def cpu_seconds(self) -> float:
        """Processor time of all its processes so far."""
        return sum(map(cpu_seconds, tree(self.pid)))


@contextlib.contextmanager
def serving(
    *words: str | Path,
    program: Sequence[str | Path] = (sys.executable, "-m", "aioserve", "--port", "{port}"),
    ready: str = "/ready",
    log: Path | None = None,
    port: int | None = None,
    end: signal.Signals = signal.SIGTERM,
    patience: float = 600.0,
    **options: Any,
) -> Iterator[Server]:
    """Start a server with more words, yield it when `ready` answers, and stop it and all that it
    started at the end. Its output goes to `log`. Raises `RuntimeError` if it does not answer.
    """
    port = port or free_port()
    command = [str(word).replace("{port}", str(port)) for word in (*program, *words)]
    options = {"cwd": ROOT, **options}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        log = log or Path(folder) / "log"
        output = stack.enter_context(log.open("ab"))
        began = time.perf_counter()
        with _sigterm_held_back():  # until what is started will be ended
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, **options
            )
            stack.callback(stop, process, end)
        url = f"http://127.0.0.1:{port}"
        while not answers(url + ready):
            if process.poll() is not None or time.perf_counter() > began + patience:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{' '.join(command)} does not serve:\n{tail}")
            time.sleep(0.02)
        yield Server(url, process, time.perf_counter() - began)


@contextlib.contextmanager
def process(*words: str | Path, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Python with these words, in a process that ends with the block."""
    with _sigterm_held_back():
        command = [sys.executable, *map(str, words)]
        started = subprocess.Popen(command, text=True, **{"cwd": ROOT, **options})
    try:
        yield started
    finally:
        started.terminate()
        started.wait()


@contextlib.contextmanager
def _sigterm_held_back() -> Iterator[None]:
    """A SIGTERM that comes in the block takes effect at its end."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for number in heard:
            signal.raise_signal(number)


def stop(process: "subprocess.Popen[Any]", end: signal.Signals = signal.SIGTERM) -> None:
    """End the group that the process leads, politely first."""
    for sign in (end, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            if sign == end:
                time.sleep(0.1)  # for its children, which end with it


def answers(url: str) -> bool:
    """Whether a server answers there, and not with an error."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def tree(pid: int) -> set[int]:
    """The process and all that it and they have started and that still run."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        if fields := _stat(path):
            children[int(fields[1])].append(int(path.parent.name))
    found, new = set(), [pid]
    while new:
        found.add(pid := new.pop())
        new += children[pid]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 of one that has ended."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) / _TICK if fields else 0.0


def main_thread_seconds(pid: int) -> float:
    """User and system time of a process's first thread so far; 0 of one that has ended."""
    fields = _stat(Path(f"/proc/{pid}/task/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) / _TICK if fields else 0.0


def process_title(pid: int) -> str:
    """The command line of a process, or the title that it has given itself."""
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def raise_descriptors(least: int) -> None:
    """Allow this process and those that it starts as many open files. Raises `ValueError` where the
    system does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY  # is -1
    if soft != endless and soft < least:
        most = endless if hard == endless else max(hard, least)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


def resident_mib(pids: set[int]) -> float:
    """Resident memory of the processes in MiB; shared pages count once, by their shares (PSS)."""
    total = 0
    for pid in pids:
        for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


# Loads.


class LoadShape(NamedTuple):
    """A closed loop: how many streams, and the tokens in and out of each."""

    streams: int
    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0  # before the input, the same for all
    per_stream: int = 2  # requests, one after the other

    @property
    def request_tokens(self) -> int:
        """Tokens of a request and its reply."""
        return self.prefix_tokens + self.input_tokens + self.output_tokens

    @property
    def words(self) -> str:
        """The shape of the load in words, for a table."""
        prefix = f"{self.prefix_tokens} shared + " if self.prefix_tokens else ""
        return f"{self.streams} streams, {prefix}{self.input_tokens} in / {self.output_tokens} out"


LOADS = {
    "W1": LoadShape(1, 128, 128, per_stream=4),
    "W2": LoadShape(16, 256, 128),
    "W3": LoadShape(4, 2048, 16),
    "W4": LoadShape(8, 64, 32, prefix_tokens=1024),
    "W5": LoadShape(64, 128, 64),
    "W6": LoadShape(256, 16, 128),  # meant for a model of 2 million parameters
    "P2": LoadShape(1, 2048, 8),  # prompts, up to the 8,192 tokens of SmolLM2
    "P4": LoadShape(1, 4096, 8),
    "P8": LoadShape(1, 8100, 8),
}


class Stream(asyncio.Protocol):
    """One request on a connection of its own: only counts what comes until the last of it."""

    last = b"data: [DONE]"  # of the answer

    def __init__(self, body: Mapping[str, Any], host: str) -> None:
        data = msgspec.json.encode(body)
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n"
            "Content-Type: application/json\r\n\r\n"
        ).encode() + data
        self._tail = b""
        self.num_bytes = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def sent(cls, url: str, body: Mapping[str, Any]) -> Self:
        """Connect and send the request; `done` is set when its answer has come."""
        host, port = url.removeprefix("http://").split(":")
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: cls(body, host), host, int(port))
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._tail = (self._tail + data)[-1024:]
        if self.last in self._tail and not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"a stream broke off: {self._tail!r}"))


async def send_streams(url: str, num_streams: int, num_tokens: int) -> None:
    """Stream `num_streams` completions at once, to their ends."""
    body = {"prompt": "Hello", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    streams = [await Stream.sent(url, body) for _ in range(num_streams)]
    await asyncio.gather(*(stream.done for stream in streams))


# The machine, and whether others use it.


class Use(NamedTuple):
    """What others took of the processor over some time, in cores."""

    others: float  # processes of this machine that are not ours
    steal: float  # the host gave to other virtual machines

    @property
    def is_quiet(self) -> bool:
        """Both are below the limit."""
        return max(self) < LIMIT

    def __str__(self) -> str:
        return f"others used {self.others:.2f} cores, {self.steal:.2f} were stolen"


class Watch:
    """Counts from its making on what others use, beside this process and the one of `pid`."""

    def __init__(self, pid: int | None = None) -> None:
        self._roots = [os.getpid()] if pid is None else [os.getpid(), pid]
        self._began, self._own = time.perf_counter(), self._own_seconds()
        self._busy, self._steal = _machine_seconds()

    def use(self) -> Use:
        """What others have used since."""
        busy, steal = _machine_seconds()
        own = self._own_seconds()
        seconds = time.perf_counter() - self._began
        mine = sum(now - self._own.get(pid, 0.0) for pid, now in own.items())
        return Use(max(0.0, (busy - self._busy - mine) / seconds), (steal - self._steal) / seconds)

    def _own_seconds(self) -> dict[int, float]:
        found = {}
        for pid in set().union(*map(tree, self._roots)):
            if fields := _stat(Path(f"/proc/{pid}/stat")):
                # Its own time and that of children that have ended.
                found[pid] = sum(map(int, fields[11:15])) / _TICK
        return found


def wait_until_quiet(most: float, window: float = 2.0) -> Use:
    """Return once a window of that many seconds is quiet, or after `most` seconds; the last use."""
    end = time.monotonic() + most
    while True:
        watch = Watch()
        time.sleep(window)
        use = watch.use()
        if use.is_quiet or time.monotonic() >= end:
            return use


def cpu_name() -> str:
    """The processor as the system names it, with its family and model."""
    text = _read(Path("/proc/cpuinfo"))
    fields = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    )
    family, model = fields.get("cpu family", "?"), fields.get("model", "?")
    return f"{fields.get('model name', 'unknown')} (family {family}, model {model})"


def revision() -> str:
    """The commit of this checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """The processor, its cores, the load on them now, and the revision that is measured there."""
    load = round(os.getloadavg()[0], 1)
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "load": load, "revision": revision()}


def _machine_seconds() -> tuple[float, float]:
    """Seconds that all cores have computed, and that were stolen from them. Interrupts are not
    counted: those of the network are no process's, and mostly ours.
    """
    fields = list(map(int, _read(Path("/proc/stat")).split("\n")[0].split()[1:9]))
    return sum(fields[:3]) / _TICK, fields[7] / _TICK


def _stat(path: Path) -> list[str]:
    """The fields from the state on, behind the name, which may have any sign in it."""
    return _read(path).rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # the process has ended
        return ""


# Panels of lines over time as one SVG file: what the docs show of long runs.


Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, TOP, GAP = 860, 130, 62, 44, 46
COLOURS = ("#2563a8", "#c2541b", "#2f7d4f", "#7b4ba0", "#8a6d1f")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.t{font-weight:600}.h{font-size:15px;"
    "font-weight:600}.g{stroke:#e3e3e3}.a{stroke:#999}path{fill:none;stroke-width:1.4}"
)


class Panel(NamedTuple):
    """Lines that share an axis, which begins at 0."""

    title: str
    lines: Mapping[str, Points]


def draw(
    path: Path, title: str, panels: Sequence[Panel], spans: Mapping[str, tuple[float, float]]
) -> None:
    """Write them below each other, over the same seconds; `spans` are shaded and named."""
    end = max(x for panel in panels for line in panel.lines.values() for x, _ in line)
    scale = (WIDTH - LEFT - 16) / max(end, 1e-9)
    height = TOP + len(panels) * (HEIGHT + GAP) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
    ]

    def text(x: float, y: float, words: str, more: str = "") -> None:
        out.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>')

    def across(y: float, kind: str) -> None:
        out.append(
            f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )

    text(LEFT, 20, title, 'class="h"')
    for name, (since, until) in spans.items():
        x, width, below = LEFT + since * scale, (until - since) * scale, height - TOP - GAP - 8
        size = f'width="{width:.1f}" height="{below}" fill="#f7f0e3"'
        out.append(f'<rect x="{x:.1f}" y="{TOP}" {size}/>')
        text(x + 4, TOP + 13, name)
    for number, panel in enumerate(panels):
        top = TOP + number * (HEIGHT + GAP)
        bottom = top + HEIGHT
        highest = max((y for line in panel.lines.values() for _, y in line), default=1.0)
        step = _step(highest / 3)
        ceiling = step * max(1, math.ceil(highest / step))
        for tick in range(round(ceiling / step) + 1):
            across(y := bottom - HEIGHT * tick * step / ceiling, "g")
            text(LEFT - 6, y + 4, _number(tick * step), 'text-anchor="end"')
        seconds = _step(end / 8)
        for tick in range(int(end / seconds) + 1):
            words = f"{_number(tick * seconds)} s"
            text(LEFT + tick * seconds * scale, bottom + 15, words, 'text-anchor="middle"')
        across(bottom, "a")
        text(x := float(LEFT), top - 6, panel.title, 'class="t"')
        x += 7.2 * len(panel.title) + 14
        for (name, line), colour in zip(panel.lines.items(), COLOURS, strict=False):
            dots = (
                f"{LEFT + at * scale:.1f},{bottom - HEIGHT * y / ceiling:.1f}" for at, y in line
            )
            if line:
                out.append(f'<path stroke="{colour}" d="M{" ".join(dots)}"/>')
            if len(panel.lines) > 1:
                text(x, top - 6, name, f'style="fill:{colour}"')
                x += 7.0 * len(name) + 14
    path.write_text("\n".join([*out, "</svg>\n"]), encoding="utf-8")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _step(least: float) -> float:
    """The next of 1, 2, 5, 10, ... that is not smaller."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
