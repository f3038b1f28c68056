"""`aioserve bench`: flags to a workload and a target, progress, the table, JSON, the exit code.

Exit code 0: every request was answered to its end; 1: some were not; 130: interrupted.
"""

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from aioserve.arguments import Parser, count, mapping, natural, positive
from aioserve.errors import ConfigError
from aioserve.lab.arguments import (
    add_json,
    add_output,
    add_slo,
    add_time_scale,
    wants_json,
)
from aioserve.lab.bench.exchange import Load, Target
from aioserve.lab.bench.summary import render, summarize
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.terminal import paint, progress
from aioserve.lab.workloads.source import WorkloadSource
from aioserve.lab.workloads.synthetic import generate
from aioserve.lab.workloads.synthetic_spec import (
    ClientClass,
    ClosedLoop,
    Constant,
    Poisson,
    Prefixes,
    WorkloadSpec,
)
from aioserve.lab.workloads.workload import Workload, WorkloadRequest
from aioserve.output_file import write

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # a shell's, for SIGINT
WARMUP_SEED = 1 << 32  # other texts: what is measured must not find them in the prefix cache
DEFAULT_RATE_REQUESTS = 100


def run_bench(words: Sequence[str]) -> int:
    """`aioserve bench URL ...`; returns the exit code. Raises `ConfigError`."""
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
        "--workload)",
    )
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
        return WorkloadSource(
            path=arguments.workload,
            time_scale=arguments.time_scale,
            limit=arguments.num_requests,
        ).load(seed)
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
    """The requests without waiting for a time or for each other."""
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
