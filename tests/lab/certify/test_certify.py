"""A certificate says what a policy keeps and reaches, and a check of it does that again."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from aioserve.cli.main import main
from aioserve.lab import certify as module
from aioserve.lab.certify import (
    Certificate,
    Contract,
    Rule,
    badge,
    check,
    encode_certificate,
    file_digest,
    files_beside,
    read_certificate,
    render_gallery,
    rule_versions,
    run_contract,
)
from aioserve.lab.zoo import standing
from aioserve.lab.zoo.standing import (
    SEEDS,
    WORKLOADS,
    load_workload,
    run_standard,
    workload_digest,
)

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
FILES = sorted((DOCS / "certificates").glob("*.json"))

DRAWS = """
import random
from aioserve.policies.fcfs import FCFSScheduler


class Draws(FCFSScheduler):
    def schedule(self):
        random.random()
        return super().schedule()
"""
BROKEN = "time_and_chance_are_the_policys_own"


@pytest.fixture
def run_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The contract and the zoo run once, the zoo with `documents`, the shortest workload, for all
    six; later runs of the same file, which would say the same, are noted here. Of each workload
    there are 80 requests, which are made once.
    """
    noted: list[str] = []
    found: dict[str, Any] = {}

    def contract(file: Path, policy: str, options: dict[str, Any], examples: int) -> Contract:
        noted.append("contract")
        key = f"{file_digest(file)} {policy} {options} {examples}"
        if key not in found:
            found[key] = run_contract(file, policy, options, examples)
        return found[key]

    def documents(candidates: Any, seeds: Any, num_jobs: int = 1, progress: Any = None) -> Any:
        noted.append("zoo")
        if "zoo" not in found:
            [scores] = run_standard(candidates, seeds, num_jobs, workloads=["documents"])
            found["zoo"] = dict.fromkeys(WORKLOADS, scores["documents"])
        return [found["zoo"]]

    monkeypatch.setattr(module, "run_contract", contract)
    monkeypatch.setattr(module, "run_standard", documents)
    made_once = cache(lambda *words: load_workload(*words).cut(limit=80))
    for user in (module, standing):
        monkeypatch.setattr(user, "load_workload", made_once)
    return noted


def test_a_certificate_is_of_its_file_and_of_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run_once: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(DRAWS)
    words = ["certify", "mine.py", "--examples", "1", "--no-cost"]
    assert main(words) == 1, "a rule is broken"
    made = read_certificate(Path("mine.certificate.json"))
    assert made.sha256 == file_digest(Path("mine.py"))
    assert (made.policy, made.file, made.cost) == ("Draws", "mine.py", None)
    assert made.zoo.seeds == list(SEEDS[:1])
    assert encode_certificate(made) == Path("mine.certificate.json").read_bytes()
    rules = made.contract.rules
    assert [rule.name for rule in rules] == sorted(rule_versions())
    assert all(re.fullmatch(r"[0-9a-f]{12}", rule.version) for rule in rules)
    broken = [rule for rule in rules if rule.outcome == "broken"]
    assert [rule.name for rule in broken] == [BROKEN]
    assert "Draws" in broken[0].story, broken[0].story
    printed, said = capsys.readouterr()
    assert said.startswith("The contract runs first, then the zoo")
    assert f"{len(rules) - 1} of {len(rules)} rules kept\n  broken: " in printed
    checking = ["certify", "--check", "mine.certificate.json", "mine.py"]
    assert main(checking) == 0
    assert "is a certificate of mine.py, which breaks the contract" in capsys.readouterr().out
    assert run_once == ["contract", "zoo"] * 2, "a check runs both again"
    data = json.loads(Path("mine.certificate.json").read_bytes())
    data["zoo"]["scores"]["agents"]["in_time"] = [0.99]
    data["contract"]["rules"][0]["outcome"] = "broken"
    Path("mine.certificate.json").write_text(json.dumps(data))
    assert main(checking) == 1
    printed = capsys.readouterr().out
    assert re.search(r"scores in the zoo +DIFFERS +agents, in_time: \[0\.99\]", printed)
    assert re.search(r"rules of the contract +DIFFERS +\w+: broken in the certificate", printed)
    Path("mine.py").write_text(Path("mine.py").read_text() + "# another one\n")
    assert main(checking) == 1
    printed = capsys.readouterr().out
    assert re.search(r"file +DIFFERS", printed)
    assert "is no certificate of mine.py" in printed
    assert run_once == ["contract", "zoo"] * 3, "neither runs of a file that is another one"


def test_a_policy_that_keeps_every_rule_is_certified_with_exit_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the contract and the zoo of a committed certificate."""
    monkeypatch.chdir(tmp_path)
    kept = read_certificate(DOCS / "certificates/sjf.json")
    monkeypatch.setattr(module, "run_contract", lambda *_: kept.contract)
    monkeypatch.setattr(module, "measure_zoo", lambda *_: kept.zoo)
    assert main(["certify", "zoo.sjf", "--no-cost"]) == 0
    number = len(kept.contract.rules)
    assert f"{number} of {number} rules kept" in capsys.readouterr().out
    made = read_certificate(Path("zoo.certificate.json"))
    assert (made.contract, made.zoo) == (kept.contract, kept.zoo)


def test_files_that_a_policy_imports_from_its_folder_are_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json\nimport lengths\n")
    (tmp_path / "lengths.py").write_text("from tables import ONE\n")
    (tmp_path / "tables.py").write_text("ONE = 1\n")
    found = files_beside(tmp_path / "mine.py")
    assert list(found) == ["lengths.py", "tables.py"]
    assert found["tables.py"] == file_digest(tmp_path / "tables.py")


def test_a_workload_of_other_seeds_has_another_digest() -> None:
    assert workload_digest("agents", [1]) == workload_digest("agents", [1])
    assert workload_digest("agents", [1]) != workload_digest("agents", [2])


def test_the_badge_is_red_where_a_rule_is_broken_and_says_how_many_are_kept() -> None:
    kept = read_certificate(FILES[0])
    broken = msgspec.structs.replace(
        kept, contract=Contract("v", 1, [Rule("a", "", "kept"), Rule("b", "", "broken")])
    )
    for found, words, colour in (
        (kept, f"{len(kept.contract.rules)} of {len(kept.contract.rules)} rules", "#2b7a4b"),
        (broken, "1 of 2 rules", "#b3372b"),
    ):
        drawn = badge(found)
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
        assert words in drawn
        assert colour in drawn


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fcfs", "mlfq"], "certify takes one policy"),
        (["fcfs", "--set", "cache.block_size=4"], "certify takes the policy's options alone"),
        (["--check", "nowhere.json", "fcfs"], "cannot read certificate nowhere.json"),
        (["fcfs", "--output", "/nowhere/x"], "cannot write certificate /nowhere/x.json"),
        (["--gallery", "x.md", f"{ROOT}/mkdocs.yml"], "is no certificate"),
        (["--check", "x.json", "fcfs", "--no-cost"], "certify --check takes no --no-cost"),
        (["--check", "x.json", "fcfs", "--set", "a.b=1"], "certify --check takes no --set"),
        (["--gallery", "x.md", "x.json", "--jobs", "2"], "certify --gallery takes no --jobs"),
    ],
)
def test_what_cannot_be_certified_is_refused_before_the_work(
    words: list[str], message: str, refused: Callable[[list[str], str], None]
) -> None:
    refused(["certify", *words], message)


def test_a_certificate_of_another_format_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(FILES[0].read_bytes()) | {"format": "aioserve-certificate-9"}
    (tmp_path / "other.json").write_text(json.dumps(data))
    assert main(["certify", "--check", str(tmp_path / "other.json"), "fcfs"]) == 2
    assert "has the format 'aioserve-certificate-9'" in capsys.readouterr().err


# The committed certificates and their gallery.


def policy_file(made: Certificate) -> Path:
    """The file of a policy that ships."""
    folder = ROOT / "policies"
    return folder / made.file if (folder / made.file).exists() else folder / "zoo" / made.file


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_certificate_is_of_the_policy_of_today(file: Path) -> None:
    made = read_certificate(file)
    assert made.sha256 == file_digest(policy_file(made)), (
        f"python -m aioserve certify {policy_file(made)} --output docs/certificates/{file.stem}"
    )
    assert made.contract.is_kept
    assert file.with_suffix(".svg").read_text() == badge(made)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_certificate_passes_its_check(file: Path) -> None:
    made = read_certificate(file)
    found = check(made, str(policy_file(made)))
    assert all(finding.is_same for finding in found), found


def test_the_gallery_is_made_of_the_committed_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    page = (DOCS / "gallery.md").read_text()
    again = "python -m aioserve certify --gallery docs/gallery.md docs/certificates/*.json"
    assert page == render_gallery(DOCS / "gallery.md", FILES), again
    assert len(FILES) == 3


def test_the_page_on_certificates_lists_every_key() -> None:
    page = (DOCS / "certify.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`([\w.\[\]]+)`", cell)}
    data = json.loads(FILES[0].read_bytes())
    keys = {key for key in data if key not in ("contract", "zoo")}
    keys |= {f"contract.{key}" for key in data["contract"] if key != "rules"}
    keys |= {f"zoo.{key}" for key in data["zoo"]} | {"contract.rules[]"}
    assert listed == keys


def test_the_page_on_certificates_states_what_a_committed_one_says() -> None:
    page = (DOCS / "certify.md").read_text()
    made = read_certificate(DOCS / "certificates" / "chunked_prefill.json")
    num_rules, cost = len(made.contract.rules), made.cost
    assert cost is not None
    [zoo] = re.findall(r"^zoo-.*$", page, re.MULTILINE)
    overall, standard = made.zoo.overall, f"{made.zoo.standard} ({made.zoo.digest}), 1 seed"
    assert zoo == (
        f"{standard}: rank {overall.rank} of {overall.of}, {overall.value:.1%} in time over all "
        "workloads"
    )
    for words in (
        f"{made.policy} of {made.file}, SHA-256 {made.sha256}\n",
        f"contract {made.contract.version}: {made.contract.num_kept} of {num_rules} rules kept\n",
        f"{cost.us:,.0f} microseconds per schedule(), {cost.us / cost.reference_us:.1f} times what",
        f"({cost.machine})\n",
        f"keeps all {num_rules} rules of its contract (kit {made.contract.version})\n",
        f"serves {overall.value:.1%} of requests in time on {made.zoo.standard} (digest ",
        f"(digest {made.zoo.digest}, seed {made.zoo.seeds[0]})",
        f"(SHA-256 {made.sha256[:12]}…)",
        f"aioserve {made.aioserve}:",
    ):
        assert words in page
