"""What is shown of certificates: a badge for one, as SVG, and a page of many, as Markdown.

Knows certificates; runs nothing.
"""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from aioserve.lab.certificates.certificate import Certificate, read_certificate
from aioserve.lab.zoo.standing import WORKLOADS

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
