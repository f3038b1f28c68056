"""The command `certify`: what a policy file keeps, costs and reaches, and a check of that.

What a certificate states is exact but for the cost: the contract draws the same traffic in every
run, and the zoo runs on a virtual clock. So a certificate is checked by doing it again (`check`),
and needs no signature.
"""

import argparse
import ast
import importlib.util
import inspect
import json
import math
import os
import platform
import subprocess
import tempfile
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_settings, running
from aioserve.lab.check import contract_command
from aioserve.lab.comparison.candidates import (
    Candidate,
    load_candidates,
    options_of,
    with_whole_prompts,
)
from aioserve.lab.comparison.document import encode
from aioserve.lab.comparison.measures import IN_TIME
from aioserve.lab.simulation.run import Progress
from aioserve.lab.terminal import say
from aioserve.lab.zoo.cost import Cost, measure_costs
from aioserve.lab.zoo.standing import (
    DIGEST,
    OVERALL,
    SEEDS,
    SETTINGS,
    VERSION,
    WORKLOADS,
    Entry,
    Rank,
    Scores,
    bare_code,
    load_workload,
    policy_names,
    ranks_of,
    read_results,
    run_standard,
    workload_digest,
)
from aioserve.scheduler import available_policies, load_policy
from aioserve.support import __version__
from aioserve.support.arguments import EXIT_FAILED, Parser, count
from aioserve.support.files import check_writable, write

FORMAT = "aioserve-certificate-1"
TESTING = Path(__file__).parents[1] / "testing"  # the kit of the contract
STORY = 2000  # characters that are kept of the story of a broken rule
LIBRARIES = ("numpy", "msgspec", "hypothesis")  # that the exact numbers depend on


class Rule(msgspec.Struct, frozen=True):
    """One rule of the contract, at both depths of the pipeline."""

    name: str
    version: str  # digest of the rule's own code
    outcome: Literal["kept", "broken", "not run"]
    story: str = ""  # how it was broken


class Contract(msgspec.Struct, frozen=True):
    """All rules, with the version of the kit that holds them."""

    version: str  # digest of the code of the kit: harness, invariants, rules
    examples: int  # random sequences of requests, at each depth of the pipeline
    rules: list[Rule]

    @property
    def num_kept(self) -> int:
        """Number of rules that the policy keeps."""
        return sum(rule.outcome == "kept" for rule in self.rules)

    @property
    def is_kept(self) -> bool:
        """Whether the policy keeps every rule of the contract."""
        return bool(self.rules) and self.num_kept == len(self.rules)


class Zoo(msgspec.Struct, frozen=True):
    """The standing of a policy on the standard workloads, among the policies that ship."""

    standard: str
    digest: str  # of the standard: workloads of all seeds, service levels, step times, settings
    seeds: list[int]
    workloads: dict[str, str]  # SHA-256 of the requests that were run, by workload
    scores: Scores  # by workload and measure, a value for each seed
    overall: Rank  # by the share in time over all workloads


class Certificate(msgspec.Struct, frozen=True):
    """A certificate as it stands in its file."""

    format: str
    policy: str  # the class
    file: str  # its name, without folders
    sha256: str  # of the bytes of the file
    beside: dict[str, str]  # SHA-256 of the files beside it that it imports, by name
    options: dict[str, Any]  # those that were stated and the defaults of the others
    made: str  # the day
    aioserve: str
    python: str
    libraries: dict[str, str]
    contract: Contract
    zoo: Zoo
    cost: Cost | None  # of this machine: the one part that is not exact


def load(policy: str, options: dict[str, Any] | None = None) -> Candidate:
    """Return the policy on the machine of the zoo, with `options` in the place of those that its
    configuration states. Raises `ConfigError`.
    """
    stated = [] if options is None else [("scheduler.options", options)]
    [candidate] = load_candidates([policy], [*SETTINGS, *stated])
    kind = load_policy(candidate.config.scheduler.policy)
    name = _shipped_name(Path(inspect.getfile(kind))) or candidate.name
    return with_whole_prompts(msgspec.structs.replace(candidate, name=name))


def _shipped_name(file: Path) -> str:
    """Return the name of the policy that ships in a file, so that it is not ranked beside itself;
    "" if none does.
    """
    for name in policy_names():
        spec = importlib.util.find_spec(available_policies()[name].module)
        if spec is not None and spec.origin is not None and Path(spec.origin).samefile(file):
            return name
    return ""


def certify(
    candidate: Candidate,
    seeds: Sequence[int],
    *,
    examples: int,
    num_jobs: int = 1,
    has_cost: bool = True,
    progress: Progress = lambda count: None,
) -> Certificate:
    """Run the contract, the standard workloads with these seeds, and the measurement of the cost.
    Raises `ConfigError` where the contract cannot run, `PolicyError` where the policy fails in the
    zoo.
    """
    kind = load_policy(candidate.config.scheduler.policy)
    file, options = Path(inspect.getfile(kind)), options_of(candidate.config)
    contract = run_contract(file, kind.__name__, options, examples)
    zoo = measure_zoo(candidate, seeds, num_jobs, progress)
    [cost] = measure_costs([candidate.config]) if has_cost else [None]
    return Certificate(
        FORMAT,
        kind.__name__,
        file.name,
        file_digest(file),
        files_beside(file),
        options,
        f"{datetime.now(UTC):%Y-%m-%d}",
        __version__,
        platform.python_version(),
        {name: version(name) for name in LIBRARIES},
        contract,
        zoo,
        cost,
    )


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    return sha256(file.read_bytes()).hexdigest()


def files_beside(file: Path) -> dict[str, str]:
    """Return the digests of the files in the folder of a policy that it imports, directly or by
    others of them, by name.
    """
    found: dict[str, str] = {}
    left = [file]
    while left:
        for path in _imported(left.pop()):
            if path.parent == file.parent and path != file and path.name not in found:
                found[path.name] = file_digest(path)
                left.append(path)
    return dict(sorted(found.items()))


def _imported(file: Path) -> list[Path]:
    """Return the files of the modules that a file imports, as far as they can be found."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    found = []
    for name in names:
        beside = file.parent / f"{name}.py"
        if beside.is_file():
            found.append(beside)
            continue
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin is not None:
            found.append(Path(spec.origin))
    return found


# The contract, in a pytest of its own.


def run_contract(file: Path, policy: str, options: dict[str, Any], examples: int) -> Contract:
    """Run every rule of the contract on a class of a file, and go on after a broken one. Raises
    `ConfigError` where pytest or hypothesis is missing, or pytest does not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*contract_command(folder), "--maxfail=999", f"--junitxml={report}"]
        command += ["--aioserve-policy", f"{file.absolute()}:{policy}"]
        command += ["--aioserve-policy-options", json.dumps(options)]
        command += ["--aioserve-examples", str(examples)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or not report.exists():
            said = (done.stdout + done.stderr).strip().splitlines()
            raise ConfigError(f"the contract did not run: {said[-1] if said else 'no output'}")
        return Contract(kit_version(), examples, _rules(report.read_text(encoding="utf-8")))


def _rules(report: str) -> list[Rule]:
    """Return the rules of a report of pytest in JUnit's XML, by name."""
    versions, found = rule_versions(), dict[str, Rule]()
    for case in ElementTree.fromstring(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        name = case.get("name", "").partition("[")[0].removeprefix("test_")
        broken = [*case.findall("failure"), *case.findall("error")]
        told = broken[0] if broken else None
        outcome: Literal["kept", "broken", "not run"] = "kept" if told is None else "broken"
        if case.find("skipped") is not None:
            outcome = "not run"
        text = "" if told is None else told.text or told.get("message") or ""
        story = text.strip()[:STORY]
        known = found.get(name)
        if known is None or (known.outcome == "kept" and outcome != "kept"):
            found[name] = Rule(name, versions.get(name, ""), outcome, story)
    return sorted(found.values(), key=lambda rule: rule.name)


def rule_versions() -> dict[str, str]:
    """Return a short digest of the code of each rule, by its name."""
    from aioserve.testing.contract import PolicyContract

    return {
        name.removeprefix("test_"): _short([textwrap.dedent(inspect.getsource(rule))])
        for name, rule in inspect.getmembers(PolicyContract, inspect.isfunction)
        if name.startswith("test_")
    }


def kit_version() -> str:
    """Return a short digest of the code of the whole kit, without its words."""
    files = sorted(TESTING.glob("*.py"))
    return _short([file.read_text(encoding="utf-8") for file in files])


def _short(sources: Sequence[str]) -> str:
    return sha256("\n".join(map(bare_code, sources)).encode()).hexdigest()[:12]


def measure_zoo(
    candidate: Candidate, seeds: Sequence[int], num_jobs: int, progress: Progress
) -> Zoo:
    """Run a candidate on the standard workloads, and rank it among the policies that ship. Raises
    as `run_standard`.
    """
    [scores] = run_standard([candidate], seeds, num_jobs, progress)
    return Zoo(
        VERSION,
        DIGEST,
        list(seeds),
        {name: workload_digest(name, seeds) for name in WORKLOADS},
        scores,
        rank_among_shipped(candidate.name, scores, len(seeds)),
    )


def rank_among_shipped(name: str, scores: Scores, num_seeds: int) -> Rank:
    """Return the rank by the share in time over all workloads, as the stored results are today."""
    results = read_results().only(num_seeds).with_entries({name: Entry("", scores)})
    return ranks_of(results, OVERALL, IN_TIME)[name]


# Files of certificates, and checking one: what is exact is done again, and has to be the same.


def read_certificate(path: Path) -> Certificate:
    """Return the certificate of a file. Raises `ConfigError` if it is none."""
    try:
        data = msgspec.json.decode(path.read_bytes())
        if isinstance(data, dict) and isinstance(data.get("zoo"), dict):
            data["zoo"]["scores"] = _with_nan(data["zoo"].get("scores"))
        found = msgspec.convert(data, Certificate)
    except OSError as error:
        raise ConfigError(f"cannot read certificate {path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path} is no certificate: {error}") from error
    if found.format != FORMAT:
        raise ConfigError(
            f"{path} has the format {found.format!r}, and this aioserve reads {FORMAT}"
        )
    return found


def _with_nan(data: Any) -> Any:
    """Return the data with NaN in lists where the file has null."""
    if isinstance(data, dict):
        return {name: _with_nan(value) for name, value in data.items()}
    return [math.nan if v is None else v for v in data] if isinstance(data, list) else data


class Finding(msgspec.Struct, frozen=True):
    """One part of a certificate that was checked."""

    part: str
    is_same: bool
    words: str


def check(
    certificate: Certificate,
    policy: str,
    num_jobs: int = 1,
    progress: Progress = lambda count: None,
) -> list[Finding]:
    """Do again what is exact of a certificate with the policy that it is said to be of, and return
    what is the same and what is not. The contract and the zoo run only where the file is the same.
    Raises as `certify`.
    """
    named = f"{policy}:{certificate.policy}" if policy.endswith(".py") else policy
    candidate = load(named, certificate.options)
    kind = load_policy(candidate.config.scheduler.policy)
    file = Path(inspect.getfile(kind))
    found = [_compare("file", certificate.sha256, file_digest(file))]
    found.append(_compare("files beside it", certificate.beside, files_beside(file)))
    if not all(finding.is_same for finding in found):
        return found
    seeds = certificate.zoo.seeds
    digests = {name: workload_digest(name, seeds) for name in WORKLOADS}
    found.append(_compare("workloads", certificate.zoo.workloads, digests))
    contract = run_contract(file, kind.__name__, certificate.options, certificate.contract.examples)
    stated, now = (
        {rule.name: rule.outcome for rule in of.rules} for of in (certificate.contract, contract)
    )
    found.append(_compare("rules of the contract", stated, now))
    if contract.version != certificate.contract.version:
        said = f"version {certificate.contract.version} then, {contract.version} now"
        found.append(Finding("contract kit", True, f"another one ({said}); its rules ran again"))
    [scores] = run_standard([candidate], seeds, num_jobs, progress)
    is_same = repr(scores) == repr(certificate.zoo.scores)
    apart = _first_apart(certificate.zoo.scores, scores)
    found.append(Finding("scores in the zoo", is_same, apart or "the same, to the last digit"))
    rank = rank_among_shipped(candidate.name, scores, len(seeds))
    if is_same and rank != certificate.zoo.overall:
        said = f"{certificate.zoo.overall} of {certificate.zoo.overall.of} then"
        found.append(Finding("rank", True, f"{rank} of {rank.of} now, {said}: others have changed"))
    return found


def _compare(part: str, stated: Any, now: Any) -> Finding:
    if stated == now:
        return Finding(part, True, "the same")
    if isinstance(stated, dict) and isinstance(now, dict):
        names = [n for n in stated.keys() | now.keys() if stated.get(n) != now.get(n)]
        listed = ", ".join(
            f"{name}: {stated.get(name, 'none')} in the certificate, {now.get(name, 'none')} now"
            for name in sorted(names)
        )
        return Finding(part, False, listed)
    return Finding(part, False, f"{stated} in the certificate, {now} now")


def _first_apart(stated: Scores, now: Scores) -> str:
    """Return the first score that differs, in words; "" if none does."""
    for workload in now:
        for measure, values in now[workload].items():
            old = stated.get(workload, {}).get(measure)
            if repr(old) != repr(values):
                return f"{workload}, {measure}: {old} in the certificate, {values} now"
    return ""


# The command: arguments in, words and files out; a badge for one certificate, a page for many.


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
    return encode(msgspec.to_builtins(certificate)) + b"\n"


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
