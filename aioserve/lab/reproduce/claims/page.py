"""Findings as words: a table for a terminal, and the page of the documentation.

Knows claims and findings. Runs nothing.
"""

from collections.abc import Mapping

from aioserve.lab.reproduce.claims.claim import CLOSE, Claim, Finding, verdict_of

HEAD = f"""# Published results, run again

How far a simulation can be trusted shows in results that are known. The authors of each result on
this page measured it on their machines, or computed it by their simulators. Here the engine, KV
cache and clock that `compare` uses run its setting again, in virtual time. The verdict is a rule,
not a judgement: *reproduced* is within {CLOSE:.0%} of the published number or range, in the mean
over the seeds, and a ratio is on the same side of 1; *direction only* has the effect on the same
side in each seed, and another size; *not reproduced* is all else. A ratio is of the new policy to
the baseline.

Two more are on [a page of their own](predicting-vtc.md), as predictions of single requests: VTC and
weighted VTC on an A10G (`python -m aioserve reproduce vtc`), the end of each run within 0.4%, the
mean time to first token of each client within 3%.

```bash
python -m aioserve reproduce watermark   # one of them
python -m aioserve reproduce all --markdown docs/reproductions.md   # this page
```
"""


def number(value: float) -> str:
    """With three digits, and without an exponent."""
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


def render(claim: Claim, findings: list[Finding]) -> str:
    """Return one claim for a terminal."""
    rows = [("", "published", "here", "")]
    rows += [(f.quantity, published(f), ours(f), str(f.verdict)) for f in findings]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows
    ]
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
