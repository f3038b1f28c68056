"""The page on the JSON of `compare` has every key of the document, and no other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioserve.cli.main import main
from aioserve.lab.comparison.measures import ROWS
from tests.lab.traffic import record

PAGE = (Path(__file__).parents[3] / "docs/compare-json.md").read_text()
LISTED = ("MEASURE", "STATISTIC", "TOTAL", "DIFFERENCE")


def names_of(section: str) -> set[str]:
    """Of the table under a heading of the page."""
    _, _, text = PAGE.partition(f"\n## {section}\n")
    cells = re.findall(r"^\| (`.*?) \|", text.partition("\n## ")[0], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def documented() -> list[str]:
    cells = re.findall(r"^\| (`.*?) \|", PAGE.partition("\n## MEASURE\n")[0], re.MULTILINE)
    return [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]


def pattern(key: str) -> re.Pattern[str]:
    """Of the paths that a documented key stands for, each with the ones that lead to it."""
    text = re.escape(key)
    for name in LISTED:
        text = re.sub(rf"\b{name}\b", "(?:" + "|".join(sorted(names_of(name))) + ")", text)
    text = re.sub(r"\bGROUP\b", "(?:client|class)", text)
    text = re.sub(r"\b(?:CLIENT|CLASS|NAME|REASON)\b", "[^/]*?", text)
    return re.compile(text.replace(r"\.\*", "/.+").replace(r"\.", "/"))


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all that is neither an object nor a list, or is empty; parts are divided by /."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from leaves(part, f"{path}/{name}" if path else name)
    elif isinstance(value, list) and value:
        for part in value:
            yield from leaves(part, f"{path}[]")
    else:
        yield path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Of documents of every kind: clients with weights, programs, a fleet with a price, drafts, a
    card, a sweep, and what a server measured.
    """
    folder = tmp_path_factory.mktemp("documents")
    drafts = folder / "drafts.yaml"
    drafts.write_text(
        "arrivals: {kind: poisson, rate: 20}\nnum_requests: 20\nclasses:\n"
        "- {name: chat, draft_acceptance: 0.7, prompt: {kind: constant, value: 50},"
        " output: {kind: constant, value: 20}}\n"
    )
    fleet = folder / "fleet.yaml"
    fleet.write_text(
        "replicas: 2\nprice_per_hour: 2\ntransfer_gb_per_second: 10\nrouters: [least_work]\n"
        "autoscaling: {autoscalers: [{autoscaler: queue_tokens}], startup_seconds: 1}\n"
    )
    log = folder / "decisions.log"
    record(log)
    paths: set[str] = set()
    for command in (
        "compare fcfs fair --workload tiers --limit 30 --seeds 2 --slo ttft=0.5 --reading-speed 8 "
        "--requests",
        "compare fcfs chunked_prefill --workload agents --limit 30 --seeds 2 "
        "--card h100-llama-3.1-8b --price-per-hour 2",
        f"compare fcfs --workload mixed --limit 30 --seeds 1 --fleet {fleet}",
        f"compare fcfs fair --workload {drafts} --seeds 1 --set runner.simulated_draft_tokens=3 "
        "--set model.max_model_len=60 --clip",
        f"compare fcfs --replay {log}",
        "sweep chunked_prefill --workload mixed --limit 30 --seeds 1 "
        "--set scheduler.options.chunk_size=64,256",
    ):
        assert main([*command.split(), "--json", f"{folder}/out.json"]) == 0
        paths |= set(leaves(json.loads((folder / "out.json").read_bytes())))
    return paths


def test_every_key_of_real_documents_is_on_the_page(found: set[str]) -> None:
    patterns = [pattern(key) for key in documented()]
    # An empty list or object, or null, stands for what would be below it.
    parents = {
        pattern(".".join(parts[:end]).removesuffix("[]"))
        for parts in (key.split(".") for key in documented())
        for end in range(1, len(parts) + 1)
    }
    missing = [
        path for path in sorted(found) if not any(p.fullmatch(path) for p in (*patterns, *parents))
    ]
    assert not missing


def test_every_key_of_the_page_is_in_some_real_document(found: set[str]) -> None:
    absent = [key for key in documented() if not any(map(pattern(key).match, found))]
    assert not absent


def test_every_total_and_statistic_of_the_page_is_in_some_real_document(found: set[str]) -> None:
    totals = {path.rpartition("/")[2] for path in found if path.startswith("results[]/totals/")}
    assert totals == names_of("TOTAL")
    assert totals >= {row.statistic for row in ROWS if row.measure == "totals"}
    durations = [path.split("/") for path in found if path.startswith("results[]/durations/")]
    assert {parts[2] for parts in durations} == names_of("MEASURE")
    assert {parts[3] for parts in durations} == names_of("STATISTIC")


def test_the_recipe_of_matplotlib_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    [command] = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    words = command.replace("\\\n", " ").split()[3:]
    assert main([*words, "--limit", "40", "--seeds", "2"]) == 0
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(program, "compare-json.md", "exec"), {"__name__": "__main__"})
    drawn = (tmp_path / "ttft.svg").read_text()
    assert "</svg>" in drawn
