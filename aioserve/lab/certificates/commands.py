"""The command `certify`: a policy file in; a certificate and a badge out, or a certificate checked.

Arguments in, words and files out; then what is shown of certificates: a badge for one, as SVG, and
a page of many, as Markdown.
"""

import argparse
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_settings
from aioserve.lab.certificates.certificate import (
    Certificate,
    certify,
    check,
    load,
    read_certificate,
)
from aioserve.lab.comparison.arguments import running
from aioserve.lab.comparison.candidates import load_candidates, options_of
from aioserve.lab.comparison.document import encode
from aioserve.lab.terminal import say
from aioserve.lab.zoo.standing import SEEDS, VERSION, WORKLOADS, load_workload, read_results
from aioserve.support.arguments import EXIT_FAILED, Parser, count
from aioserve.support.files import check_writable, write

OPTIONS = "scheduler.options."
EXAMPLES = 100  # random sequences of requests, at each depth of the pipeline
COLUMNS = 26
WORK = "The contract runs first, then the zoo: together a minute or more."


def run_certify(words: Sequence[str]) -> int:
    """`aioserve certify`; returns the exit code: 1 for a broken rule, or a certificate that is not
    of this file. Raises `AioserveError`.
    """
    arguments = _parser().parse_args(words)
    if mode := ("--check" if arguments.check else "--gallery" if arguments.gallery else ""):
        _refuse_beside(mode, arguments)
    if arguments.gallery is not None:
        return _write_gallery(arguments)
    if len(arguments.files) > 1:
        raise ConfigError("certify takes one policy; several files are certificates of --gallery")
    if arguments.check is not None:
        return _check(arguments)
    return _certify(arguments)


def _refuse_beside(mode: str, arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` for an argument that would have no effect: a certificate states by which
    arguments it was made.
    """
    usual = _parser().parse_args(arguments.files)
    names = ("zoo", "examples", "no_cost", "output", "set", *(["jobs"] * (mode == "--gallery")))
    for name in names:
        if getattr(arguments, name) != getattr(usual, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"certify {mode} takes no {flag}: it is for making a certificate")


def _certify(arguments: argparse.Namespace) -> int:
    [policy] = arguments.files
    candidate = load(policy)
    if arguments.set:
        if others := [name for name, _ in arguments.set if not name.startswith(OPTIONS)]:
            raise ConfigError(f"certify takes the policy's options alone, not --set {others[0]}")
        [stated] = load_candidates([policy], arguments.set)
        candidate = load(policy, options_of(stated.config))
    stem = arguments.output or f"{Path(policy.partition(':')[0]).stem}.certificate"
    files = [f"{stem}.json", f"{stem}.svg"]
    for file in files:
        check_writable(file, "certificate")
    seeds = SEEDS[: read_results().num_seeds if arguments.zoo == "whole" else 1]
    say(WORK)
    with running(_num_requests(seeds)) as report:
        made = certify(
            candidate,
            seeds,
            examples=arguments.examples,
            num_jobs=arguments.jobs,
            has_cost=not arguments.no_cost,
            progress=report,
        )
    write(files[0], encode_certificate(made))
    write(files[1], badge(made).encode())
    print("\n".join([*in_words(made), f"written: {', '.join(files)}"]))
    return 0 if made.contract.is_kept else EXIT_FAILED


def encode_certificate(certificate: Certificate) -> bytes:
    """Return a certificate as its file holds it."""
    from msgspec import to_builtins

    return encode(to_builtins(certificate)) + b"\n"


def in_words(certificate: Certificate) -> list[str]:
    """Return lines that say what is in a certificate."""
    contract, zoo, cost = certificate.contract, certificate.zoo, certificate.cost
    lines = [
        f"{certificate.policy} of {certificate.file}, SHA-256 {certificate.sha256}",
        f"contract {contract.version}: {contract.num_kept} of {len(contract.rules)} rules kept",
    ]
    for rule in contract.rules:
        if rule.outcome != "kept":
            lines += [f"  {rule.outcome}: {rule.name.replace('_', ' ')}"]
            lines += [f"    {line}" for line in rule.story.splitlines()[:3]]
    seeds = f"{len(zoo.seeds)} seeds" if len(zoo.seeds) > 1 else "1 seed"
    lines.append(
        f"{zoo.standard} ({zoo.digest}), {seeds}: rank {zoo.overall} of {zoo.overall.of}, "
        f"{100 * zoo.overall.value:.1f}% in time over all workloads"
    )
    if cost is not None:
        lines.append(
            f"{cost.us:,.0f} microseconds per schedule(), {cost.ratio:.1f} times what "
            f"chunked_prefill takes ({cost.machine})"
        )
    return lines


def _check(arguments: argparse.Namespace) -> int:
    certificate = read_certificate(Path(arguments.check))
    say(WORK)
    with running(_num_requests(certificate.zoo.seeds)) as report:
        found = check(certificate, arguments.files[0], arguments.jobs, report)
    for finding in found:
        mark = "same" if finding.is_same else "DIFFERS"
        print(f"{finding.part:{COLUMNS}}{mark:9}{finding.words}")
    is_valid = all(finding.is_same for finding in found)
    print(
        f"{arguments.check} is {'a' if is_valid else 'no'} certificate of {arguments.files[0]}"
        + ("" if certificate.contract.is_kept else ", which breaks the contract") * is_valid
    )
    return 0 if is_valid else EXIT_FAILED


def _write_gallery(arguments: argparse.Namespace) -> int:
    check_writable(arguments.gallery, "gallery")
    page = render_gallery(Path(arguments.gallery), [Path(file) for file in arguments.files])
    write(arguments.gallery, page.encode())
    return 0


def _num_requests(seeds: Sequence[int]) -> int:
    return sum(len(load_workload(name, seed).requests) for name in WORKLOADS for seed in seeds)


def _parser() -> Parser:
    parser = Parser(
        "certify",
        description="Run the contract, the standard workloads of the zoo and the measurement of "
        "the cost on a policy, and write a certificate (JSON) and a badge (SVG). Anyone can check "
        "a certificate: what is exact in it is run again.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="POLICY",
        help="policy, file.py or file.py:Class; with --gallery, files of certificates",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--check",
        metavar="CERTIFICATE",
        help="say whether this certificate is of this policy, by running again what is exact",
    )
    modes.add_argument(
        "--gallery", metavar="PAGE", help="write a page of certificates, in Markdown"
    )
    parser.add_argument(
        "--zoo",
        choices=("quick", "whole"),
        default="quick",
        help=f"workloads of {VERSION} with one seed, or with as many as are stored of the "
        "policies that ship",
    )
    parser.add_argument(
        "--examples",
        type=count,
        default=EXAMPLES,
        metavar="N",
        help="random sequences of requests of the contract, at each depth of the pipeline",
    )
    parser.add_argument(
        "--no-cost", action="store_true", help="leave the cost out, which is not exact"
    )
    parser.add_argument(
        "--output",
        metavar="STEM",
        help="write STEM.json and STEM.svg (default: the policy's name and .certificate, here)",
    )
    parser.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="processes for simulated runs"
    )
    add_settings(parser, "set an option of the policy, scheduler.options.NAME; repeatable")
    return parser


# What is shown of certificates.


GREEN, RED, GREY = "#2b7a4b", "#b3372b", "#4a5560"
CHARACTER, MARGIN, HEIGHT = 6.6, 8, 20  # pixels, at 11 px

HEAD = """\
# Gallery of certified policies

A [certificate](certify.md) says of one policy file that it keeps every rule of the
[contract](policy-contract.md), what share of requests it serves in time on the [zoo](zoo.md)'s
standard workloads, and what a step of it costs. Anyone can check one:

```bash
python -m aioserve certify --check CERTIFICATE FILE
```

This command writes the page from certificates, and a test keeps it current:

```bash
python -m aioserve certify --gallery {page}{files}
```

The columns of workloads and **overall** are the share in time in percent, the mean over the seeds
of the certificate. **rank** is by the overall share, among the policies that came with aioserve
when the certificate was made. **cost** is that of one `schedule()` with 1,000 requests running and
10,000 waiting, over that of `chunked_prefill` on the same machine.
"""


def badge(certificate: Certificate) -> str:
    """Return a badge in SVG: the rules that are kept, and the rank in the zoo."""
    contract, rank = certificate.contract, certificate.zoo.overall
    left = "aioserve"
    right = (
        f"{contract.num_kept} of {len(contract.rules)} rules, {certificate.zoo.standard} rank "
        f"{rank.rank} of {rank.of}"
    )
    widths = [round(len(text) * CHARACTER + 2 * MARGIN) for text in (left, right)]
    width, colour = sum(widths), GREEN if contract.is_kept else RED
    words = escape(f"{left}: {right}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" role="img" '
        f'aria-label="{words}"><title>{words}</title>'
        "<style>text{font:11px Verdana,DejaVu Sans,sans-serif;fill:#fff;text-anchor:middle}</style>"
        f'<rect rx="3" width="{width}" height="{HEIGHT}" fill="{GREY}"/>'
        f'<path d="M{widths[0]} 0h{widths[1] - 3}a3 3 0 0 1 3 3v{HEIGHT - 6}a3 3 0 0 1-3 3'
        f'H{widths[0]}z" fill="{colour}"/>'
        f'<text x="{widths[0] / 2}" y="14">{left}</text>'
        f'<text x="{widths[0] + widths[1] / 2}" y="14">{escape(right)}</text></svg>\n'
    )


def render_gallery(page: Path, files: Sequence[Path]) -> str:
    """Return the page of certificates, to be written at `page`: the best rank first. Raises
    `ConfigError` for a file that is no certificate.
    """
    read = [(file, read_certificate(file)) for file in files]
    read.sort(key=lambda pair: (-pair[1].zoo.overall.value, pair[1].file))
    shown = " \\\n    ".join(["", *sorted(_relative(file, Path.cwd()) for file in files)])
    heads = ["policy", "file, SHA-256", "contract", *WORKLOADS, "overall", "rank", "cost", ""]
    lines = [HEAD.format(page=_relative(page, Path.cwd()), files=shown)]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join(_cells(page, file, found))} |" for file, found in read]
    return "\n".join(lines) + "\n"


def _cells(page: Path, file: Path, certificate: Certificate) -> list[str]:
    contract, zoo, cost = certificate.contract, certificate.zoo, certificate.cost
    link = _relative(file, page.parent)
    drawn = file.with_suffix(".svg")
    image = f"![badge]({_relative(drawn, page.parent)})" if drawn.exists() else ""
    shares = [zoo.scores[workload]["in_time"] for workload in WORKLOADS]
    return [
        f"[{certificate.policy}]({link})",
        f"`{certificate.file}`, `{certificate.sha256[:12]}`",
        f"{contract.num_kept} of {len(contract.rules)} rules",
        *(f"{100 * sum(of_seeds) / len(of_seeds):.0f}" for of_seeds in shares),
        f"{100 * zoo.overall.value:.1f}",
        f"{zoo.overall} of {zoo.overall.of}, {len(zoo.seeds)} seed{'s' * (len(zoo.seeds) > 1)}",
        "" if cost is None else f"{cost.ratio:.1f}",
        image,
    ]


def _relative(file: Path, folder: Path) -> str:
    return Path(os.path.relpath(file.absolute(), folder.absolute())).as_posix()
