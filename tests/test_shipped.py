"""The configs that come with the package are found by name, from anywhere."""

from pathlib import Path

import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.workloads.synthetic import read_spec
from aioserve.support.files import find_config, find_workload

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_found_by_its_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert EngineConfig.load(path.stem) == EngineConfig.load(path)
    assert find_config(path.stem).samefile(path)


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("workloads/*.yaml")), ids=lambda path: path.stem
)
def test_every_workload_is_found_by_its_name(path: Path) -> None:
    assert read_spec(find_workload(path.stem)) == read_spec(path)


@pytest.mark.parametrize("path", ["mine.yaml", "./fcfs", "configs/fcfs", "trace.csv"])
def test_whatever_has_a_suffix_or_a_folder_is_a_path(path: str) -> None:
    assert find_config(path) == Path(path)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown config 'fcsf' .*'fcfs'.*; available: batches, "
    ):
        EngineConfig.load("fcsf")
    with pytest.raises(
        ConfigError, match=r"unknown workload 'fcfs'; available: agent_sessions, agents, breakdown"
    ):
        find_workload("fcfs")
