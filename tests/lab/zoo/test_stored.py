"""Stored results carry what makes them comparable, and say when they are not."""

import math
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from aioserve.errors import ConfigError
from aioserve.lab.comparison.measures import IN_TIME
from aioserve.lab.zoo import standing
from aioserve.lab.zoo.standing import (
    FILE,
    FIRST_SEEDS,
    SEEDS,
    WORKLOADS,
    Entry,
    Results,
    code_digest,
    load_policies,
    policy_names,
    read_results,
    run_standard,
    stale,
    values_of,
    write_results,
)
from tests.lab.zoo.test_standard import file_of


def test_every_policy_that_ships_has_results_of_its_code_of_today() -> None:
    results = read_results()
    names = policy_names()
    missing = stale(results, names)
    assert not missing, f"python -m aioserve zoo {' '.join(missing)} --store"
    assert list(results.policies) == names
    assert {entry.num_seeds for entry in results.policies.values()} == {results.num_seeds}
    assert len(FIRST_SEEDS) <= results.num_seeds <= len(SEEDS)
    assert all(entry.cost for entry in results.policies.values())


def test_the_reference_is_busy_and_neither_idle_nor_lost_on_every_workload() -> None:
    """What the workloads were chosen for: `chunked_prefill` near what the engine can serve."""
    reference = read_results().policies["chunked_prefill"]
    for workload in WORKLOADS:
        of = reference.scores[workload]
        assert fmean(of["busy_share"]) > 0.93, workload
        share = fmean(values_of(reference, workload, IN_TIME))
        assert 0.35 < share < 0.95, workload


def test_a_policy_by_file_reaches_today_what_is_stored_by_its_name() -> None:
    """To the last digit: if a change of the scheduler or of the lab moves numbers, all are stored
    anew (`python -m aioserve zoo --store`).
    """
    [found] = run_standard(load_policies([file_of("zoo.sjf")]), SEEDS[1:2], workloads=["code"])
    kept = read_results().policies["zoo.sjf"].scores["code"]
    for measure, [value] in found["code"].items():
        assert math.isnan(value) or value == kept[measure][1], measure


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    entry = Entry("abc", {"chat": {"in_time": [0.5, math.nan]}, "code": {"in_time": [0.25]}})
    path = tmp_path / "results.json"
    write_results(Results().with_entries({"b": entry, "a": entry}), path)
    again = read_results(path)
    assert list(again.policies) == ["a", "b"]
    assert repr(again.policies["a"]) == repr(entry)
    lines = path.read_text().splitlines()
    assert sum('"chat": {' in line for line in lines) == 2  # a line for each policy and workload
    assert msgspec.json.decode(path.read_bytes())["digest"] == again.digest


def test_results_of_another_standard_or_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(Results(digest="0123456789abcdef"), path)
    with pytest.raises(
        ConfigError, match=r"are those of zoo-1 0123456789abcdef, and the standard is"
    ):
        read_results(path)
    with pytest.raises(
        ConfigError, match=r"no stored results in .*; python -m aioserve zoo --store"
    ):
        read_results(tmp_path / "none.json")
    path.write_text('{"policies": {"a": {"code": 3}}}')
    with pytest.raises(ConfigError, match="no stored results in"):
        read_results(path)


def test_the_digest_of_code_is_of_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (Path(standing.__file__).parents[3] / "policies/zoo/srpt.py").read_text()
    path = tmp_path / "srpt.py"

    class Spec:
        origin = str(path)

    monkeypatch.setattr(standing.importlib.util, "find_spec", lambda name: Spec)  # type: ignore[attr-defined]
    path.write_text(source)
    kept = code_digest("zoo.srpt")
    path.write_text(
        source.replace("Shortest predicted remaining", "Another").replace("  # ", "  # !")
    )
    assert code_digest("zoo.srpt") == kept
    path.write_text(source.replace("= 0.8", "= 0.7"))
    assert code_digest("zoo.srpt") != kept
    assert code_digest("path/to/mine.py:Mine") == ""
    assert FILE.parent == Path(standing.__file__).parent
