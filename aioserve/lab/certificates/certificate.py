"""A certificate: what one policy file keeps, costs and reaches, with digests of what was judged.

What is in it is exact but for the cost: the contract draws the same traffic in every run, and the
zoo runs on a virtual clock. So a certificate is checked by doing it again (`check`), and needs no
signature. Knows the contract kit and the zoo; knows no command.
"""

import ast
import importlib.util
import inspect
import json
import math
import platform
import subprocess
import tempfile
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.certificates.contract import contract_command
from aioserve.lab.comparison.candidates import (
    Candidate,
    load_candidates,
    options_of,
    with_whole_prompts,
)
from aioserve.lab.comparison.measures import IN_TIME
from aioserve.lab.simulation.run import Progress
from aioserve.lab.zoo.cost import Cost, measure_costs
from aioserve.lab.zoo.standing import (
    DIGEST,
    OVERALL,
    SETTINGS,
    VERSION,
    WORKLOADS,
    Entry,
    Rank,
    Scores,
    bare_code,
    policy_names,
    ranks_of,
    read_results,
    run_standard,
    workload_digest,
)
from aioserve.scheduler import available_policies, load_policy
from aioserve.support import __version__

FORMAT = "aioserve-certificate-1"
TESTING = Path(__file__).parents[2] / "testing"  # the kit of the contract
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


# The contract in a pytest of its own: in a folder without settings, so that those of the user's
# project change nothing.


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
