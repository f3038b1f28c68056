"""The command `reproduce` for a claim: arguments in, words and files out."""

import time
from collections.abc import Sequence

import msgspec

from aioserve.lab.arguments import add_output
from aioserve.lab.comparison.document import encode
from aioserve.lab.reproduce.claims.claim import Claim, Finding, verdict_of
from aioserve.lab.reproduce.claims.page import make_page, render
from aioserve.lab.reproduce.claims.registry import CLAIMS
from aioserve.lab.terminal import paint, progress
from aioserve.support.arguments import Parser, count
from aioserve.support.files import write

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
        print(paint(render(CLAIMS[name], results[name])), flush=True)
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
