"""Settings from files: where the files of policies are looked for, and what is said of misspelt
names.
"""

from pathlib import Path

import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a YAML file in `experiments/`; it is not the working directory's."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/mine.yaml").write_text(
        "scheduler: {policy: 'mine.py:Mine'}\nshadow: {shadow_policy: mine.py}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(*overrides: tuple[str, str]) -> tuple[str, str | None]:
    config = EngineConfig.load("experiments/mine.yaml", overrides)
    return config.scheduler.policy, config.shadow.shadow_policy


def test_a_policys_file_is_looked_for_beside_the_settings_then_here(folder: Path) -> None:
    (folder / "mine.py").touch()
    assert load() == ("mine.py:Mine", "mine.py")
    (folder / "experiments/mine.py").touch()
    assert load() == ("experiments/mine.py:Mine", "experiments/mine.py")


def test_the_message_says_where_it_was_looked_for(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"experiments/mine\.yaml: no file mine\.py") as caught:
        load()
    assert f"looked in {folder / 'experiments'} and in {folder}" in str(caught.value)


def test_a_policy_that_is_not_asked_for_need_not_be_there(folder: Path) -> None:
    overrides = [("scheduler.policy", "fcfs"), ("shadow.shadow_policy", "hrrn")]
    assert load(*overrides) == ("fcfs", "hrrn")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scheduler.policyy", "fcfs", "`policyy` - at `$.scheduler` (did you mean 'policy'?)"),
        ("schedular.policy", "fcfs", "`schedular` (did you mean 'scheduler'?)"),
        ("scheduler.victim", "newst", "expected one of policy, newest, lowest_priority"),
    ],
)
def test_the_name_that_was_probably_meant_is_said(
    name: str, value: str, message: str, tmp_path: Path
) -> None:
    section, _, field = name.partition(".")
    path = tmp_path / "x.yaml"
    path.write_text(f"{section}: {{{field}: {value}}}")
    for arguments in ((path,), (None, [(name, value)])):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.load(*arguments)  # type: ignore[arg-type]
        assert message in str(caught.value)
