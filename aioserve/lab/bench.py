"""`aioserve bench`: any OpenAI-compatible server under load, over HTTP, in numbers and a table.

Sends a workload, notes what came back and when, and makes latencies, throughput and goodput of it.
Durations are in seconds; what is undefined is NaN, and null in JSON. Knows of the wire what it
must: text or no text, usage, errors; nothing about aioserve's own server. Exit code 0: every
request was answered to its end; 1: some were not; 130: interrupted.
"""

import argparse
import asyncio
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np

from aioserve.errors import UNREADABLE, AioserveError, ConfigError
from aioserve.lab.arguments import (
    add_cut,
    add_json,
    add_output,
    add_reading,
    add_slo,
    add_time_scale,
    read_reading,
    refuse_card,
    wants_json,
)
from aioserve.lab.comparison.measures import STATISTICS, good_totals, statistics_of
from aioserve.lab.comparison.service import Floats
from aioserve.lab.simulation.outcome import RequestOutcome
from aioserve.lab.simulation.run import Clients, Progress
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.terminal import legend, paint, progress
from aioserve.lab.workloads.synthetic import (
    ClientClass,
    ClosedLoop,
    Constant,
    Poisson,
    Prefixes,
    WorkloadSource,
    WorkloadSpec,
    generate,
)
from aioserve.lab.workloads.workload import Reading, Workload, WorkloadRequest, build_prompt
from aioserve.support.arguments import EXIT_INTERRUPTED, Parser, count, mapping, natural, positive
from aioserve.support.files import write

# Common words, a token each for most tokenizers: prompts for servers that take no token ids.
_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this from "
    "or had by but some what there we can out other were all your when up use how said an each "
    "she which do their time if will way about many then them would like so these her long make"
)
WORDS = _TEXT.split()
LARGE_BODY = 1 << 20  # aiohttp warns of bytes longer than this: it writes them at once


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and how it is asked."""

    url: str
    model: str | None = None  # None: the first that the server names
    endpoint: Literal["completions", "chat"] = "completions"
    prompts: Literal["auto", "ids", "text"] = "auto"  # auto: ids if the server takes them
    vocab_size: int = 2000  # ids stay below
    extra_body: dict[str, Any] = {}  # laid over the fields of every request; null removes one
    headers: dict[str, str] = {}
    timeout: float = 600.0  # seconds without a byte


class Exchange(RequestOutcome):
    """One request and its answer. `token_times` are those of chunks with text in them."""

    __slots__ = ("error", "is_sent", "lateness", "num_prompt_tokens")

    def __init__(self) -> None:
        super().__init__()
        self.is_sent = False
        self.lateness = 0.0  # seconds from when it was due to when it was sent
        self.num_prompt_tokens = 0  # as the server counted; 0: it did not say
        self.error: tuple[str, str] | None = None  # its kind, and what was said


class ServerError(Exception):
    """An answer that is no reply: of a kind that can be counted, with what was said."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Attempt:
    """An attempt, which knows whether its request went over a connection that an earlier request
    had left open.
    """

    __slots__ = ("is_reused",)

    def __init__(self) -> None:
        self.is_reused = False


class NobodyThereError(AioserveError):
    """No connection could be made: thousands of requests would say the same."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content)))


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_models = msgspec.json.Decoder(_Models).decode
_encode = msgspec.json.Encoder().encode


class Load(Clients):
    """A workload on its way to a server; `exchanges` and totals can be read at any time."""

    def __init__(
        self, target: Target, workload: Workload, progress: Progress = lambda count: None
    ) -> None:
        super().__init__(workload, time.perf_counter, progress)
        workload.refuse_images("bench sends text alone")
        self.target = target
        self.exchanges = [Exchange() for _ in workload.requests]
        self.model = target.model
        self.sends_ids = target.endpoint == "completions" and target.prompts != "text"
        self.seconds = 0.0  # from the first request to the last answer
        self.cpu_seconds = 0.0  # of this process meanwhile
        self.is_cut = False

    async def run(
        self, *, warmup: tuple[WorkloadRequest, ...] = (), max_seconds: float | None = None
    ) -> None:
        """Send the load, and return after the last answer, or when `max_seconds` are over; errors
        are noted, not raised.

        `warmup` is sent before, all at once, and not noted. Raises `NobodyThereError`.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.target.timeout, sock_connect=30)
        async with aiohttp.ClientSession(
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
            headers=self.target.headers,
            auto_decompress=False,
            trace_configs=[_tracing_reuse()],
        ) as session:
            self._session = session
            await self._meet(warmup)
            self.start, cpu = self.clock(), time.process_time()
            try:
                async with asyncio.timeout(max_seconds):
                    await self.come()
            except TimeoutError:
                self.is_cut = True
            finally:  # also when interrupted
                self.seconds = self.clock() - self.start
                self.cpu_seconds = time.process_time() - cpu

    async def _meet(self, warmup: tuple[WorkloadRequest, ...]) -> None:
        """Learn whether a server is there, the model's name, and whether ids are taken; warm up."""
        try:
            async with self._session.get(f"{self.target.url}/v1/models") as response:
                body = await response.read()
                self.model = self.model or _decode_models(body).data[0].id
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NobodyThereError(f"{self.target.url}: {_kind(error)}") from error
        except (aiohttp.ClientError, TimeoutError, IndexError, *UNREADABLE):
            pass  # it may serve all the same; if not, each request says why
        if self.sends_ids and self.target.prompts == "auto" and self.workload.requests:
            first = msgspec.structs.replace(self.workload.requests[0], pieces=(), output_tokens=1)
            try:
                await self._send(first, [16, 17, 18, 19], Exchange())
            except ServerError as error:
                self.sends_ids = error.kind not in ("HTTP 400", "HTTP 422")
            except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
                pass
        prompts = [build_prompt(request, self.target.vocab_size, {}) for request in warmup]
        await asyncio.gather(
            *(self._send(r, p, Exchange()) for r, p in zip(warmup, prompts, strict=True)),
            return_exceptions=True,
        )

    async def ask(self, i: int, due: float) -> list[int]:
        request, exchange = self.workload.requests[i], self.exchanges[i]
        prompt = build_prompt(request, self.target.vocab_size, self.replies)
        exchange.is_sent = True
        exchange.arrival = self.clock() - self.start
        exchange.lateness = exchange.arrival + self.start - due
        reply: list[int] = []
        try:
            reply = await self._send(request, prompt, exchange, i in self.is_replied_to)
        except ServerError as error:
            exchange.error = error.kind, str(error)
        except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as error:
            exchange.error = _kind(error), str(error) or type(error).__name__
        exchange.end = self.clock() - self.start
        return reply

    async def _send(
        self,
        request: WorkloadRequest,
        prompt: list[int],
        exchange: Exchange,
        wants_ids: bool = False,
    ) -> list[int]:
        """Return the ids of the reply, if they were asked for and the server tells them."""
        path = "chat/completions" if self.target.endpoint == "chat" else "completions"
        body = _encode(self._body(request, prompt, wants_ids))
        while True:
            attempt = _Attempt()
            try:
                response = await self._session.post(
                    f"{self.target.url}/v1/{path}",
                    data=body if len(body) < LARGE_BODY else io.BytesIO(body),
                    headers={"Content-Type": "application/json"},
                    trace_request_ctx=attempt,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if attempt.is_reused:  # the server had closed an idle connection: RFC 9112, 9.3.1
                    continue
                raise
            async with response:
                if response.status != 200:
                    text = (await response.read())[:500].decode("utf-8", "replace")
                    raise ServerError(f"HTTP {response.status}", text)
                return await self._read(response.content, exchange)

    def _body(self, request: WorkloadRequest, prompt: list[int], wants_ids: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "priority": request.priority or None,
            "user": request.user or None,
            "hints": request.hints or None,
            "timeout": request.timeout,
            "return_token_ids": wants_ids or None,
        }
        if self.sends_ids:
            body["prompt"] = prompt
        else:
            text = " ".join(WORDS[token % len(WORDS)] for token in prompt)
            if self.target.endpoint == "chat":
                body["messages"] = [{"role": "user", "content": text}]
            else:
                body["prompt"] = text
        body |= self.target.extra_body
        return {name: value for name, value in body.items() if value is not None}

    async def _read(self, content: aiohttp.StreamReader, exchange: Exchange) -> list[int]:
        """Read events to the end. Raises `ServerError` for what is no reply."""
        token_ids: list[int] = []
        rest = b""
        async for received in content.iter_any():
            now = self.clock() - self.start
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:") or line.startswith((b"data: [D", b"data:[D")):
                    continue  # between events, a comment, or [DONE]
                chunk = _decode_chunk(line[5:])
                for choice in chunk.choices:
                    if choice.has_text():
                        exchange.token_times.append(now)
                    token_ids += choice.token_ids or ()
                    exchange.finish_reason = choice.finish_reason or exchange.finish_reason
                if chunk.usage is not None:
                    exchange.num_prompt_tokens = chunk.usage.prompt_tokens
                    exchange.num_output_tokens = chunk.usage.completion_tokens
                    details = chunk.usage.prompt_tokens_details
                    exchange.num_cached_tokens = (details and details.cached_tokens) or 0
                if chunk.error and bytes(chunk.error) != b"null":
                    raise ServerError("error event", bytes(chunk.error).decode("utf-8", "replace"))
        if not exchange.finish_reason:
            raise ServerError("cut off", "the stream ended without a finish reason")
        if not exchange.is_finished:
            reason = exchange.finish_reason
            raise ServerError(f"finish reason {reason}", "ended before its last token")
        return token_ids


def _tracing_reuse() -> aiohttp.TraceConfig:
    async def note(_: aiohttp.ClientSession, context: Any, __: object) -> None:
        if isinstance(context.trace_request_ctx, _Attempt):
            context.trace_request_ctx.is_reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(note)
    return config


def _kind(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return "connection refused" if refused else "cannot connect"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "not JSON" if isinstance(error, UNREADABLE) else "disconnected"


# From what a server answered to latencies, throughput, goodput and a table.


Document = dict[str, Any]

BUSY_SHARE = 0.5  # of a core: from here on the client may be what is measured. A guess.
LABELS = {"ttft": "TTFT", "tpot": "TPOT", "gap": "gap", "e2e": "end to end"}


def summarize(load: Load, slo: ServiceLevels | None = None) -> Document:
    """Return all numbers of a load that ended, or was interrupted: whatever has come is counted."""
    sent = [exchange for exchange in load.exchanges if exchange.is_sent]
    finished = [exchange for exchange in sent if exchange.error is None and exchange.is_finished]
    durations = {
        "ttft": np.array([e.ttft for e in finished]),
        "tpot": np.array([_per_token(e) for e in finished]),
        "e2e": np.array([e.end - e.arrival for e in finished]),
    }
    gaps = [np.diff(np.frombuffer(e.token_times)) for e in finished if e.token_times]
    seconds = max(load.seconds, 1e-9)
    tokens = _count_tokens(load, finished)
    tokens["output"] = sum(map(_num_output, sent))  # also of requests that did not finish
    totals = {
        "seconds": load.seconds,
        "output_tokens_per_second": tokens["output"] / seconds,
        "total_tokens_per_second": (tokens["output"] + tokens["prompt"]) / seconds,
        "requests_per_second": len(finished) / seconds,
    }
    by_class: dict[str, dict[str, float]] = {}
    if slo is not None:
        kinds, good = _judge(load, slo)
        totals |= good_totals(good, kinds, seconds)
        of = np.array(kinds)
        for kind in sorted(set(kinds)):
            own = good_totals(good[of == kind], [kind] * kinds.count(kind), seconds)
            by_class[kind] = {"requests": float(kinds.count(kind)), **own}
    document: Document = {
        "target": {
            "url": load.target.url,
            "model": load.model,
            "endpoint": load.target.endpoint,
            "prompts": "ids" if load.sends_ids else "text",
        },
        "workload": {
            "name": load.workload.name,
            "seed": load.workload.seed,
            "requests": len(load.workload.requests),
        },
        "slo": None if slo is None else msgspec.to_builtins(slo) | {"words": str(slo)},
        "by_class": by_class,
        "requests": {
            "sent": len(sent),
            "finished": len(finished),
            "failed": sum(e.error is not None for e in sent),
            "unfinished": sum(e.error is None and not e.end for e in sent),
        },
        "durations": {
            **{name: statistics_of(values) for name, values in durations.items()},
            "gap": statistics_of(np.concatenate(gaps) if gaps else np.empty(0)),
        },
        "totals": totals,
        "tokens": tokens,
        "errors": _count_errors(sent),
        "client": {
            "cpu_us_per_token": 1e6 * load.cpu_seconds / max(tokens["output"], 1),
            "busy_share": load.cpu_seconds / seconds,
            "max_lateness": max((e.lateness for e in sent), default=0.0),
        },
    }
    document["notes"] = _notes(document, load)
    return document


def _judge(load: Load, slo: ServiceLevels) -> tuple[list[str], Floats]:
    """Return the class of each request that was sent, and whether it finished within its limits."""
    sent = [
        (request, exchange)
        for request, exchange in zip(load.workload.requests, load.exchanges, strict=True)
        if exchange.is_sent
    ]
    e2e = np.array([e.end - e.arrival for _, e in sent])
    timeouts = np.array([r.timeout or np.nan for r, _ in sent])
    durations = {
        "ttft": np.array([e.ttft for _, e in sent]),
        "tpot": np.array([_per_token(e) for _, e in sent]),
        "gap": np.array([max(np.diff(e.token_times), default=np.nan) for _, e in sent]),
        "e2e": e2e,
        "overtime": e2e - timeouts,
    }
    kinds = [request.kind for request, _ in sent]
    good = slo.judge(kinds, durations)
    is_whole = np.array([e.error is None and e.is_finished for _, e in sent], dtype=bool)
    good[~is_whole & ~np.isnan(good)] = 0.0
    return kinds, good


def _per_token(exchange: Exchange) -> float:
    """Return seconds per token after the first: tokens by usage, times by chunks."""
    times, num_tokens = exchange.token_times, _num_output(exchange)
    return (times[-1] - times[0]) / (num_tokens - 1) if times and num_tokens > 1 else math.nan


def _num_output(exchange: Exchange) -> int:
    return exchange.num_output_tokens or len(exchange.token_times)


def _count_tokens(load: Load, finished: list[Exchange]) -> dict[str, int]:
    """Return tokens of the finished requests: what was asked for, what came, and in how many
    chunks.
    """
    asked = [
        request
        for request, exchange in zip(load.workload.requests, load.exchanges, strict=True)
        if exchange.is_sent and exchange.error is None and exchange.is_finished
    ]
    return {
        "prompt_asked": sum(request.num_prompt_tokens for request in asked),
        "prompt": sum(exchange.num_prompt_tokens for exchange in finished),
        "cached": sum(exchange.num_cached_tokens for exchange in finished),
        "output_asked": sum(request.output_tokens for request in asked),
        "output_of_finished": sum(map(_num_output, finished)),
        "chunks": sum(len(exchange.token_times) for exchange in finished),
        "without_usage": sum(not exchange.num_output_tokens for exchange in finished),
    }


def _count_errors(sent: list[Exchange]) -> list[dict[str, Any]]:
    """Errors by kind, the most frequent first, each with what was said the first time."""
    errors = [exchange.error for exchange in sent if exchange.error is not None]
    said = dict(reversed(errors))
    counts = Counter(kind for kind, _ in errors).most_common()
    return [{"kind": kind, "count": count, "example": said[kind]} for kind, count in counts]


def _notes(document: Document, load: Load) -> list[str]:
    """Sentences that a reader of the numbers should know."""
    tokens, requests, client = document["tokens"], document["requests"], document["client"]
    notes = []
    if requests["unfinished"] or requests["sent"] < len(load.exchanges):
        notes.append(
            f"Cut short: {requests['unfinished']} requests had no end yet, "
            f"{len(load.exchanges) - requests['sent']} were never sent."
        )
    if tokens["without_usage"]:
        notes.append(
            f"{tokens['without_usage']} replies came without usage: chunks count as tokens."
        )
    if tokens["output_of_finished"] < tokens["output_asked"]:
        notes.append(
            f"{tokens['output_asked']} output tokens were asked for, "
            f"{tokens['output_of_finished']} came (does the server know ignore_eos?)."
        )
    if tokens["chunks"] != tokens["output_of_finished"]:
        notes.append(
            f"{tokens['output_of_finished']} tokens came in {tokens['chunks']} chunks with text: "
            "gaps are between chunks."
        )
    if tokens["prompt"] and abs(tokens["prompt"] / tokens["prompt_asked"] - 1) > 0.02:
        notes.append(
            f"{tokens['prompt_asked']} prompt tokens were meant, the server counted "
            f"{tokens['prompt']}."
        )
    if tokens["cached"]:
        share = tokens["cached"] / max(tokens["prompt"], 1)
        notes.append(f"The server had {100 * share:.0f}% of the prompt tokens in its cache.")
    if tokens["output"] and client["busy_share"] > BUSY_SHARE:
        notes.append(
            f"This client used {100 * client['busy_share']:.0f}% of a core: it may be what was "
            "measured."
        )
    notes.append(
        "Each request stated the length of its reply (max_tokens with ignore_eos): a policy of "
        "the server that reads max_tokens knew what no client tells in life."
    )
    return notes


def render(document: Document) -> str:
    """Return the table for a terminal."""
    target, requests, totals = document["target"], document["requests"], document["totals"]
    lines = [
        f"{target['url']} ({target['model'] or 'no model named'}): {requests['finished']} of "
        f"{requests['sent']} requests in {totals['seconds']:.1f} s, prompts as {target['prompts']}",
        "",
        f"{'ms':12}" + "".join(f"{statistic:>10}" for statistic in STATISTICS),
    ]
    for name, label in LABELS.items():
        values = document["durations"][name]
        lines.append(f"{label:12}" + "".join(_ms(values[s]) for s in STATISTICS))
    lines += [
        "",
        f"output tokens/s   {totals['output_tokens_per_second']:10.1f}",
        f"all tokens/s      {totals['total_tokens_per_second']:10.1f}",
        f"requests/s        {totals['requests_per_second']:10.2f}",
    ]
    if "good_share" in totals:
        lines.append(
            f"goodput, requests/s {totals['goodput_per_second']:8.2f}  "
            f"({100 * totals['good_share']:.1f}% of the requests)"
        )
    if "worst_class_share" in totals:
        shares = {n: c["good_share"] for n, c in document["by_class"].items() if "good_share" in c}
        said = (
            f"{name} {100 * shares[name]:.1f}%" for name in sorted(shares, key=shares.__getitem__)
        )
        lines.append(f"within the SLO by class, the worst first: {', '.join(said)}")
    lines.append(f"client, us/token  {document['client']['cpu_us_per_token']:10.1f}")
    lines += ["", legend(list(LABELS.values()))]
    for error in document["errors"]:
        example = " ".join(error["example"].split())[:200]
        lines.append(f"{error['count']} x {error['kind']}: {example}")
    return "\n".join([*lines, *document["notes"]])


def _ms(seconds: float) -> str:
    return f"{'-':>10}" if math.isnan(seconds) else f"{1e3 * seconds:10.2f}"


# The command: flags to a workload and a target, progress, the table, JSON, the exit code.


EXIT_FAILED = 1
WARMUP_SEED = 1 << 32  # other texts: what is measured must not find them in the prefix cache
DEFAULT_RATE_REQUESTS = 100


def run_bench(words: Sequence[str]) -> int:
    """`aioserve bench URL ...`; returns the exit code. Raises `ConfigError`."""
    refuse_card(words, "bench measures a server that runs; `compare --card` simulates one")
    arguments = _parser().parse_args(words)
    target = _target(arguments)
    workload = _workload(arguments, arguments.seed)
    levels = ServiceLevels.of(arguments.slo, workload.all_classes)
    if any(slo.program is not None for _, slo in arguments.slo):
        raise ConfigError("--slo program=...: bench measures requests and no programs")
    warmup = _alone(_workload(arguments, arguments.seed + WARMUP_SEED).requests[: arguments.warmup])
    is_interrupted = False
    with progress(len(workload.requests)) as report:
        load = Load(target, workload, report)
        try:
            _run(load.run(warmup=warmup, max_seconds=arguments.max_seconds))
        except KeyboardInterrupt:
            is_interrupted = True
    document = summarize(load, levels)
    print(paint(render(document)))
    # JSON has no NaN: msgspec writes null.
    encoded = msgspec.json.encode(document)
    if arguments.output is not None:
        write(arguments.output, encoded)
    if arguments.json or (arguments.output is None and wants_json(arguments)):
        print(encoded.decode())
    if is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if document["requests"]["failed"] else 0


def _parser() -> Parser:
    parser = Parser(
        "bench",
        description="Measure an OpenAI-compatible server over HTTP.",
        epilog="Where stdout is no terminal, the last line is JSON, unless -o names a file for it.",
    )
    parser.add_argument(
        "url", metavar="URL", help="URL of the server, such as http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--model", help="model name on that server (default: the first of /v1/models)"
    )
    parser.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="OpenAI endpoint to send requests to",
    )
    parser.add_argument(
        "--prompts",
        choices=("auto", "ids", "text"),
        default="auto",
        help="prompts as token ids or as common words; auto: ids if the server accepts them",
    )
    parser.add_argument(
        "--vocab-size",
        type=count,
        default=2000,
        metavar="N",
        help="random prompt token ids are below N",
    )
    parser.add_argument(
        "--extra-body",
        type=mapping,
        default={},
        metavar="JSON",
        help='request fields to add; null removes one: {"min_tokens": 9, "ignore_eos": null}',
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="HTTP header to send; repeatable",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="S",
        help="seconds without a byte after which a request fails",
    )
    load = parser.add_argument_group("load")
    arrivals = load.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--concurrency",
        type=count,
        metavar="N",
        help="closed loop: number of clients, each with one request at a time (default: 1)",
    )
    arrivals.add_argument(
        "--rate", type=positive, metavar="R", help="open loop: Poisson arrivals per second"
    )
    arrivals.add_argument(
        "--workload",
        metavar="FILE",
        help="description or trace of requests, as for compare",
    )
    load.add_argument(
        "--input-tokens", type=count, default=128, metavar="N", help="tokens per prompt"
    )
    load.add_argument(
        "--output-tokens", type=count, default=128, metavar="N", help="tokens per reply"
    )
    load.add_argument(
        "--prefix-tokens",
        type=count,
        metavar="N",
        help="tokens of a shared prefix before each prompt",
    )
    load.add_argument(
        "--num-requests",
        type=count,
        metavar="N",
        help="requests to measure (default: 4 per client, at least 10; 100 with --rate; all with "
        "--workload, where --limit means the same)",
    )
    add_reading(load)
    add_cut(load, " of --workload")
    add_time_scale(load)
    load.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of prompts and arrivals"
    )
    load.add_argument(
        "--warmup",
        type=natural,
        default=1,
        metavar="N",
        help="requests sent first and not measured",
    )
    load.add_argument(
        "--max-seconds", type=positive, metavar="S", help="stop the run after this many seconds"
    )
    add_slo(parser)
    add_json(parser)
    add_output(parser, "-o", "--output", help="file to write the JSON to")
    return parser


def _target(arguments: argparse.Namespace) -> Target:
    url = arguments.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"expected a URL such as http://127.0.0.1:8000, got {arguments.url!r}")
    headers = [header.partition(":") for header in arguments.header]
    if bad := [name for name, colon, _ in headers if not colon]:
        raise ConfigError(f"--header looks like NAME:VALUE, got {bad[0]!r}")
    return Target(
        url=url,
        model=arguments.model,
        endpoint=arguments.endpoint,
        prompts=arguments.prompts,
        vocab_size=arguments.vocab_size,
        extra_body=arguments.extra_body,
        headers={name: value.strip() for name, _, value in headers},
        timeout=arguments.timeout,
    )


def _workload(arguments: argparse.Namespace, seed: int) -> Workload:
    if arguments.workload is not None:
        if arguments.limit is not None and arguments.num_requests is not None:
            raise ConfigError("--limit and --num-requests mean the same with --workload: give one")
        return WorkloadSource(
            path=arguments.workload,
            time_scale=arguments.time_scale,
            start=arguments.start,
            duration=arguments.duration,
            limit=arguments.limit or arguments.num_requests,
            reading=read_reading(arguments),
        ).load(seed)
    for name in ("start", "duration", "limit"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} cuts a workload: give --workload as well")
    if read_reading(arguments) != Reading():
        raise ConfigError("--columns, --tokenizer and --think read a file: give --workload as well")
    clients = arguments.concurrency or 1
    closed_requests = max(4 * clients, 10)
    prefixes = arguments.prefix_tokens and Prefixes(
        count=1, length=Constant(value=arguments.prefix_tokens)
    )
    spec = WorkloadSpec(
        classes=[
            ClientClass(
                name="bench",
                prompt=Constant(value=arguments.input_tokens),
                output=Constant(value=arguments.output_tokens),
                prefixes=prefixes,
            )
        ],
        arrivals=Poisson(rate=arguments.rate) if arguments.rate else ClosedLoop(clients=clients),
        num_requests=arguments.num_requests
        or (DEFAULT_RATE_REQUESTS if arguments.rate else closed_requests),
    )
    return generate(spec, seed, f"{arguments.rate}/s" if arguments.rate else f"{clients} clients")


def _alone(requests: tuple[WorkloadRequest, ...]) -> tuple[WorkloadRequest, ...]:
    """Return the requests without waiting for a time or for each other."""
    return tuple(msgspec.structs.replace(r, arrival=0.0, follows=-1, after=()) for r in requests)


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        from uvloop import new_event_loop

        loop_factory = new_event_loop
    except ImportError:  # no wheel for this platform: asyncio's own loop
        pass
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(coroutine)
