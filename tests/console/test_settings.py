"""The command `settings`: a file, a page and a schema of all settings; all errors of a file."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from aioserve.cli.main import main
from aioserve.cli.settings import all_settings, as_json_schema, as_markdown, as_yaml
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


def test_the_file_of_all_settings_changes_none(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text(as_yaml())
    assert EngineConfig.load(path) == EngineConfig()
    sections = yaml.safe_load(as_yaml())
    stated = {(section, name) for section, values in sections.items() for name in values}
    assert stated == {(setting.section, setting.name) for setting in all_settings()}


def test_the_page_of_settings_is_current():
    assert (ROOT / "docs" / "settings.md").read_text() == as_markdown()


def test_every_setting_says_what_it_does():
    assert [f"{s.section}.{s.name}" for s in all_settings() if not s.description] == []


def test_the_schema_takes_what_is_shipped_and_refuses_what_cannot_be():
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(as_json_schema())
    configs = [path for path in SHIPPED if "workloads" not in path.parts]
    assert len(configs) > 20
    for path in configs:
        tree = yaml.safe_load(path.read_text()) or {}
        try:
            EngineConfig.load(path)
        except ConfigError:
            continue  # of another kind: a zoo's workload
        assert not [*check.iter_errors(tree)], path
    for wrong in ({"server": {"port": "high"}}, {"serfer": {}}, {"model": {"dtype": "int3"}}):
        assert [*check.iter_errors(wrong)], wrong


def test_the_command_prints_a_schema():
    words = [sys.executable, "-m", "aioserve", "settings", "--format", "json-schema"]
    printed = subprocess.run(words, check=True, capture_output=True, cwd=ROOT).stdout
    assert json.loads(printed) == json.loads(msgspec.json.encode(as_json_schema()))


def test_all_errors_of_a_file_are_told_at_once(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        "model: {dtype: int3}\nserver: {port: high, hosst: a}\nscheduler: {max_num_seqs: 0}\n"
        "serfer: {}\n"
    )
    with pytest.raises(ConfigError) as raised:
        EngineConfig.load(path)
    first, *rest = str(raised.value).splitlines()
    assert first == "5 errors:"
    assert all(line.startswith(f"  {path}: ") for line in rest)
    told = "\n".join(rest)
    for name in ("model.dtype", "server.port", "hosst", "scheduler.max_num_seqs", "serfer"):
        assert told.count(name) == 1, told


def test_a_servers_start_also_tells_what_is_wrong_with_the_policy_of_the_file(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    for policy, words in (
        ("policy: fcsf", "unknown policy 'fcsf' (did you mean 'fcfs'?)"),
        ("policy: fair, options: {x: 1}", "options of policy FairScheduler"),
        ("policy: mine.py", f"no file mine.py to take a policy from: looked in {tmp_path}"),
    ):
        path.write_text(f"server: {{port: high}}\nscheduler: {{{policy}}}\n")
        assert main(["--config", str(path)]) != 0
        told = capsys.readouterr().err
        assert f"2 errors:\n  {path}: server.port: expected a whole number" in told
        assert f"\n  {path}: {words}" in told


def test_one_error_of_a_file_is_told_in_one_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("server: {port: high}\n")
    with pytest.raises(ConfigError) as raised:
        EngineConfig.load(path)
    assert str(raised.value) == f"{path}: server.port: expected a whole number, got 'high'"
