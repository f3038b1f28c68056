"""The command `reproduce`: a published result, run again or predicted from other measurements.

Arguments in; words, a page and files out. Runs of vLLM have a command of their own.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_output, refuse_card
from aioserve.lab.calibration import write_profile
from aioserve.lab.comparison.document import encode
from aioserve.lab.reproduce.claims import optimum, routing, scheduling
from aioserve.lab.reproduce.claims.claim import CLOSE, WIDE, Claim, Finding, verdict_of
from aioserve.lab.reproduce.vtc import as_document, draw, predict, render, summary, tabulate
from aioserve.lab.terminal import in_columns, paint, progress, say
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


# Claims: a setting is run again, and what comes out is judged.


#: All claims by name, in the order of the page.
CLAIMS: Mapping[str, Claim] = {
    claim.name: claim
    for claim in (
        scheduling.SARATHI,
        optimum.MC_SF,
        scheduling.HRRN,
        scheduling.SHORTEST_PREFILL,
        scheduling.WATERMARK,
        scheduling.VICTIMS,
        scheduling.QOSERVE,
        scheduling.CONTINUUM,
        scheduling.EVICTION,
        routing.LMETRIC,
        routing.PREBLE,
    )
}
ALL = "all"


def run_claims(argv: Sequence[str]) -> int:
    """`python -m aioserve reproduce sarathi`; returns the exit code. Raises `ConfigError`."""
    parser = Parser(
        "reproduce",
        description="Run the setting of a published result again, in virtual time, and print what "
        "comes out beside what was published, with a verdict for each number. "
        + " ".join(f"{claim.name}: {claim.title} ({claim.source})." for claim in CLAIMS.values()),
    )
    parser.add_argument("result", choices=[*CLAIMS, ALL], help="the published result, or all")
    parser.add_argument(
        "--seeds", type=count, default=3, metavar="N", help="runs with other random requests"
    )
    parser.add_argument(
        "--machine",
        default="",
        metavar="TEXT",
        help="what the page says of the machine; virtual time does not depend on it",
    )
    add_output(parser, "--json", help="write all numbers to this JSON file")
    add_output(parser, "--markdown", help="write a page of the results to this Markdown file")
    arguments = parser.parse_args(argv)
    names = list(CLAIMS) if arguments.result == ALL else [arguments.result]
    results: dict[str, list[Finding]] = {}
    for name in names:
        with progress(None) as report:
            results[name] = CLAIMS[name].run(range(arguments.seeds), report)
        print(paint(render_claim(CLAIMS[name], results[name])), flush=True)
    write(arguments.json, encode({name: _plain(found) for name, found in results.items()}))
    if arguments.markdown:
        found: dict[Claim, list[Finding]] = {CLAIMS[name]: results[name] for name in names}
        page = make_page(found, arguments.machine, time.strftime("%Y-%m-%d"), arguments.seeds)
        write(arguments.markdown, page.encode())
    return 0


def _plain(findings: list[Finding]) -> dict[str, object]:
    """Return the findings with their means and verdicts, which are derived, as plain data."""
    rows = [
        {**msgspec.to_builtins(finding), "ours": finding.ours, "verdict": finding.verdict}
        for finding in findings
    ]
    return {"verdict": verdict_of(findings), "findings": rows}


# Findings as words: a table for a terminal, and the page of the documentation.


HEAD = f"""# Published results, run again

This page compares the simulator with eleven published results. Their authors measured each result
on real machines or computed it with a simulator of their own. Here the engine, KV cache and
clock that `compare` uses run the published setting again, in virtual time. A rule gives the
verdict:

- *reproduced*: our mean over the seeds is within {CLOSE:.0%} of the published number or range,
  and a ratio is on the same side of 1;
- *within the published range, which is wide*: the same, but the ends of the range are more than
  a factor of {WIDE:g} apart, or it has only one end;
- *direction only*: every seed shows the effect in the published direction, but with another
  size;
- *not reproduced*: anything else.

A ratio is the value under the new policy divided by the value under the baseline.

[Predictions of single requests](predicting-vtc.md) has two more results: VTC and weighted VTC on
an A10G card (`python -m aioserve reproduce vtc`). Of four workloads they predict the end within
0.4%, and each client's mean time to first token within 2.1%. Of workloads that were compared later,
the direction of VTC's effect was right for all 21 clients, and errors went up to 3% and 24%.

```bash
python -m aioserve reproduce watermark   # one of them
python -m aioserve reproduce all --markdown docs/reproductions.md   # this page
```
"""


def number(value: float) -> str:
    """Return the number with three digits, and without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def published(finding: Finding) -> str:
    """Return the published number, or its range."""
    low, high = finding.published
    if low == high:
        return number(low)
    if low == 0:
        return f"at most {number(high)}"
    return f"{number(low)} to {number(high)}"


def ours(finding: Finding) -> str:
    """Return the mean over the seeds, and their range."""
    if len(finding.runs) == 1:
        return number(finding.ours)
    return f"{number(finding.ours)} ({number(min(finding.runs))} to {number(max(finding.runs))})"


def render_claim(claim: Claim, findings: list[Finding]) -> str:
    """Return one claim for a terminal."""
    rows = [("", "published", "here", "")]
    rows += [(f.quantity, published(f), ours(f), str(f.verdict)) for f in findings]
    lines = in_columns(rows, left=(0, 3))
    return "\n".join(
        [f"{claim.title}", f"({claim.source}): {verdict_of(findings)}", "", *lines, ""]
    )


def make_page(results: Mapping[Claim, list[Finding]], machine: str, date: str, seeds: int) -> str:
    """Return the page of the documentation."""
    parts = [HEAD, f"Computed on {date} ({machine}), {seeds} seeds each.\n"]
    parts.append("| result | source | verdict |\n|---|---|---|")
    for claim, findings in results.items():
        parts.append(
            f"| [{claim.title}](#{claim.name}) | {claim.source} | {verdict_of(findings)} |"
        )
    for claim, findings in results.items():
        parts.append(f"\n## {claim.name}\n\n{claim.title}: {claim.source}.\n")
        parts.append(f"**As published.** {claim.setting}\n\n**Here.** {claim.here}\n")
        parts.append("| quantity | published | here | verdict |\n|---|---|---|---|")
        parts += [f"| {f.quantity} | {published(f)} | {ours(f)} | {f.verdict} |" for f in findings]
    return "\n".join(parts) + "\n"
