"""The command `reproduce`: a published result, predicted from other measurements.

Arguments in, words and files out.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_output, refuse_card
from aioserve.lab.calibration import write_profile
from aioserve.lab.comparison.document import encode
from aioserve.lab.reproduce.claims.commands import ALL, CLAIMS, run_claims
from aioserve.lab.reproduce.vtc import predict
from aioserve.lab.reproduce.vtc_words import as_document, draw, render, summary, tabulate
from aioserve.lab.terminal import paint, progress, say
from aioserve.support.arguments import Parser, count, positive
from aioserve.support.files import write

#: Where the outcomes of the artifact are in a checkout of this repository.
FOLDER = Path(__file__).parents[3] / "benchmarks" / "published" / "vtc"


VLLM = "vllm"  # measured runs of vLLM, which have a command of their own


def run_reproduce(argv: Sequence[str]) -> int:
    """`python -m aioserve reproduce`; returns the exit code. Raises `ConfigError`."""
    refuse_card(argv, "a published result is of its own machine")
    if argv and argv[0] in (*CLAIMS, ALL):
        return run_claims(argv)
    if argv and argv[0] == VLLM:
        from aioserve.lab.reproduce.vllm.commands import run_vllm

        return run_vllm(argv)
    parser = Parser(
        "reproduce",
        description="Predict a published result from other measurements of the same machine, and "
        "print it beside what was measured, where that is published. vtc: fit a step-time profile "
        "to what S-LoRA on an A10G did first come, first served, and predict (weighted) VTC (Sheng "
        "et al., OSDI'24). The others run a setting again, and have options of their own "
        f"(`reproduce {VLLM} --help`, `reproduce {ALL} --help`).",
    )
    parser.add_argument("result", choices=["vtc", VLLM, *CLAIMS, ALL], help="the published result")
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help="workloads to predict (default: all)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=FOLDER,
        metavar="FOLDER",
        help="folder of outcomes: NAME.fcfs.csv to fit, NAME.vtc.csv or NAME.wvtc.csv to compare "
        "with (default: those of the checkout)",
    )
    parser.add_argument(
        "--runs",
        type=count,
        default=10,
        metavar="N",
        help="simulated runs of each workload with the host of its session; two more have the "
        "hosts of the quickest and the slowest session",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.01,
        metavar="X",
        help="standard deviation of step times as a share of them, so that cycles in which equal "
        "requests lock differ from run to run",
    )
    parser.add_argument(
        "--speed",
        type=positive,
        default=1.0,
        metavar="X",
        help="speed of the host against that of its session: 1.03 is 3%% quicker",
    )
    add_output(parser, "--profile", help="write the fitted profile to this file", metavar="YAML")
    add_output(parser, "--json", help="write all numbers to this JSON file")
    add_output(parser, "--svg", help="draw measured and predicted times to this SVG file")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.jitter < 1:
        raise ConfigError(f"--jitter must be at least 0 and below 1, got {arguments.jitter:g}")
    if not arguments.data.is_dir():
        raise ConfigError(
            f"{arguments.data} is no folder: the outcomes are in benchmarks/published/vtc of the "
            "repository; name a copy with --data"
        )
    say("Fitting step times to the outcomes first come, first served")
    with ExitStack() as stack:
        model, sessions, predictions = predict(
            arguments.data,
            num_runs=arguments.runs,
            jitter=arguments.jitter,
            speed=arguments.speed,
            names=arguments.workloads,
            num_jobs=os.cpu_count() or 1,
            begin=lambda total: stack.enter_context(
                progress(total, title="Simulating the requests of all workloads")
            ),
        )
    tables = [tabulate(prediction) for prediction in predictions]
    speeds = ", ".join(
        f"{file.removesuffix('.fcfs')} {session.host_factor:.3f}"
        for file, session in sessions.items()
    )
    print(f"{model.source}; {model.error}\nhost factor of each session: {speeds}\n")
    for table in tables:
        print(paint(render(table)) + "\n")
    print(summary(tables))
    if arguments.profile is not None:
        write_profile(model, arguments.profile)
    write(
        arguments.json,
        encode({"profile": msgspec.to_builtins(model), "tables": as_document(tables)}),
    )
    if arguments.svg:
        write(arguments.svg, draw(tables).encode())
    return 0
