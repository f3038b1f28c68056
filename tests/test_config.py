"""Settings: where the files of policies are looked for, what is said of misspelt names, and what is
refused however settings are made.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig
from aioserve.cli.main import main
from aioserve.config import (
    CacheConfig,
    ImageConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    Section,
    deciding_settings,
)
from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo
from aioserve.runner.simulated import SimulatedRunner


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


def test_a_file_that_is_like_another_engine_may_state_something_else(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: vllm\nscheduler: {max_num_seqs: 8}\n")
    config = EngineConfig.load(str(path))
    assert (config.cache.watermark, config.scheduler.victim) == (0.0, "last_admitted")
    assert config.scheduler.max_num_seqs == 8
    path.write_text("cache: {watermark: 0.25}\nlike: vllm\n")
    config = EngineConfig.load(str(path), [("scheduler.victim", "policy")])
    assert (config.cache.watermark, config.scheduler.victim) == (0.25, "policy")


@pytest.mark.parametrize("name", ["vlm", "[vllm]", "1"])
def test_a_file_can_be_like_no_engine_that_is_not_known(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"like: {name}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: like must be one of vllm, got"):
        EngineConfig.load(str(path))


def test_a_policy_that_is_not_asked_for_need_not_be_there(folder: Path) -> None:
    overrides = [("scheduler.policy", "fcfs"), ("shadow.shadow_policy", "hrrn")]
    assert load(*overrides) == ("fcfs", "hrrn")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scheduler.policyy", "fcfs", "`policyy` - at `$.scheduler` (did you mean 'policy'?)"),
        ("schedular.policy", "fcfs", "`schedular` (did you mean 'scheduler'?)"),
        ("server.request_log", "x", "at `$.server` (it is scheduler.request_log)"),
        (
            "scheduler.victim",
            "newst",
            "expected one of policy, newest, last_admitted, lowest_priority",
        ),
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


def test_a_mapping_will_do_for_a_section() -> None:
    config = EngineConfig(scheduler={"policy": "fcfs", "options": {}})  # type: ignore[arg-type]
    assert config.scheduler == SchedulerConfig(policy="fcfs")
    assert EngineConfig(runner={"runner": "simulated"}) == EngineConfig(  # type: ignore[arg-type]
        runner=RunnerConfig(runner="simulated")
    )


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        (EngineConfig, {"scheduler": {"polcy": "fcfs"}}, r"scheduler: .*unknown field `polcy`"),
        (EngineConfig, {"scheduler": {"max_num_seqs": 0}}, r"scheduler: .*>= 1.*max_num_seqs"),
        (EngineConfig, {"scheduler": "fcfs"}, r"EngineConfig.scheduler: Expected `object`"),
        (EngineConfig, {"cache": RunnerConfig()}, r"EngineConfig.cache: .*got `RunnerConfig`"),
        (SchedulerConfig, {"max_num_seqs": "many"}, r"max_num_seqs: Expected `int`.*got 'many'"),
        (SchedulerConfig, {"max_num_seqs": 0}, r"max_num_seqs: Expected `int` >= 1, got 0"),
        (SchedulerConfig, {"max_num_seqs": True}, r"max_num_seqs: Expected `int`, got `bool`"),
        (RunnerConfig, {"runner": "simulatd"}, r"runner: Invalid enum value 'simulatd'"),
        (CacheConfig, {"watermark": 1.0}, r"watermark: Expected `float` < 1.0"),
        (ImageConfig, {"image_domain": ("https://a.example",)}, r"image_domain: .*matching regex"),
        (ImageConfig, {"image_domain": ("",)}, r"image_domain: .*matching regex"),
        (ModelConfig, {"model": Path("x")}, r"model: Expected `str`, got `PosixPath`"),
    ],
)
def test_a_value_that_cannot_be_is_refused_where_it_is_given(
    section: type[Section], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**fields)


def test_a_replaced_value_is_checked_and_a_whole_number_is_a_float() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        msgspec.structs.replace(CacheConfig(), block_size=0)
    assert isinstance(RunnerConfig(step_base_ms=4).step_base_ms, float)


WITHOUT_EFFECT = [
    ({"runner": "simulated", "threads": 2}, "runner.threads is 2, .*simulated"),
    ({"runner": "simulated", "device": "cpu"}, "runner.device is 'cpu', .*simulated"),
    ({"runner": "simulated", "gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
    ({"runner": "simulated", "enforce_eager": True}, "enforce_eager"),
    ({"runner": "simulated", "dtype": "float32"}, "model.dtype is 'float32', .*simulated"),
    ({"runner": "simulated", "fused": False}, "model.fused is False"),
    ({"runner": "simulated", "quantization": "int8"}, "model.quantization is 'int8', .*simulated"),
    ({"quantization_group_size": 64}, "model.quantization_group_size is 64, .*no model.quantiz"),
    ({"runner": "simulated", "kv_cache_gib": 1.0}, "cache.kv_cache_gib is 1.0, .*simulated"),
    ({"runner": "simulated", "kv_cache_dtype": "fp8"}, "cache.kv_cache_dtype"),
    ({"profile": "embedded-cpu"}, "runner.profile is 'embedded-cpu', .*runner.runner is model"),
    ({"step_base_ms": 4.0}, "runner.step_base_ms is 4.0, .*runner.runner is model"),
    ({"simulated_output_tokens": 9}, "runner.simulated_output_tokens"),
    ({"num_kv_blocks": 9, "kv_cache_gib": 1.0}, "cache.kv_cache_gib is 1.0, .*num_kv_blocks"),
    ({"shadow_max_share": 0.5}, "shadow.shadow_max_share is 0.5, .*no shadow.shadow_policy"),
    ({"image_domain": ("a.example",)}, "images.image_domain is .*image_urls is off"),
    ({"image_timeout": 3.0}, "images.image_timeout is 3.0, .*image_urls is off"),
]


def make_config(fields: dict[str, Any]) -> EngineConfig:
    """From bare names of settings: no name is in two sections."""
    tree: dict[str, dict[str, Any]] = {}
    for section, kind in EngineConfig.__annotations__.items():
        for name in kind.__struct_fields__:
            if name in fields:
                tree.setdefault(section, {})[name] = fields[name]
    return EngineConfig(**tree)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fields", "message"), WITHOUT_EFFECT)
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_setting_without_effect_is_refused_before_anything_is_loaded(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await AsyncEngine(make_config(fields)).start()


@pytest.mark.parametrize(
    "fields",
    [
        {"runner": "simulated", "threads": None, "dtype": "auto"},  # said, but it is the default
        {"runner": "simulated", "profile": "example", "step_base_ms": 1.0, "num_kv_blocks": 9},
        {"runner": "simulated", "simulated_draft_tokens": 2},
        {"shadow_policy": "fcfs", "shadow_max_share": 0.5},
        {"threads": 1, "dtype": "float32", "fused": False, "kv_cache_gib": 1.0},
        {"quantization": "int4", "quantization_group_size": 128},
        {"image_urls": True, "image_domain": ("a.example",), "image_timeout": 3.0},
    ],
)
def test_a_setting_with_an_effect_is_taken(fields: dict[str, Any]) -> None:
    make_config(fields).check_effects()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_runner_of_the_callers_own_is_not_held_against_the_settings() -> None:
    config = EngineConfig(runner=RunnerConfig(profile="embedded-cpu"))  # as a comparison reads it
    async with AsyncEngine(config, runner=SimulatedRunner(config, ModelInfo(config.model))):
        pass


@pytest.mark.parametrize("is_local", [False, True])
def test_a_revision_of_a_model_that_is_here_is_refused(is_local: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = str(tmp_path) if is_local else "embedded"
    where = "a local directory" if is_local else "shipped with aioserve"
    with pytest.raises(ConfigError, match=f"model.revision is 'main', .*{where}"):
        ModelInfo(ModelConfig(model=model, revision="main"))


def test_the_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runner", "simulated", "--threads", "2", "--port", "0"]) == 2
    assert "aioserve: error: runner.threads is 2, which has no effect" in capsys.readouterr().err


def test_the_policy_that_takes_over_decides_alone_within_the_same_limits() -> None:
    assert {"policy", "options", "victim"} <= {*deciding_settings()}
    config = SchedulerConfig(policy="fair", options={"a": 1}, victim="newest", max_num_seqs=7)
    assert config.under("fcfs") == SchedulerConfig(policy="fcfs", max_num_seqs=7)


def test_a_step_has_room_for_one_whole_request_unless_it_is_set() -> None:
    assert [SchedulerConfig().step_budget(length) for length in (100, 4096)] == [2048, 4096]
    assert SchedulerConfig(max_num_batched_tokens=7).step_budget(4096) == 7
