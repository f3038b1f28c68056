import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.fleet.ray.settings import RaySettings, check_served, names_of

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs/ray"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "models"),
        ({"models": []}, "models"),
        ({"models": [{"num_replicas": 0}]}, "num_replicas"),
        ({"models": [{"replicas": 2}]}, "replicas"),
        ({"models": [{"router": "best"}]}, "unknown router 'best'"),
        ({"models": [{"autoscaling": {"max_replicas": 1, "min_replicas": 2}}]}, "below"),
        ({"models": [{"autoscaling": {"max_replicas": 2}, "num_replicas": 2}]}, "leave one out"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySettings.of(config)


def test_a_router_that_moves_requests_needs_a_directory_for_their_blocks(tmp_path: Path) -> None:
    for router, answer in (("llumnix", "Llumnix answers Migrate"), ("prefill_decode", "Split")):
        model: dict[str, Any] = {"router": router}
        with pytest.raises(ConfigError, match=f"{answer}: .*cache.kv_connector is to be disk"):
            RaySettings.of({"models": [model]}).models[0].group_configs()
        model["settings"] = {
            "cache.kv_connector": "disk",
            "cache.kv_connector_path": str(tmp_path),
        }
        RaySettings.of({"models": [model]}).models[0].group_configs()
    wrong = {"role": "decode", "settings": {"cache.kv_role": "producer"}}
    model["groups"] = [{"role": "prefill"}, wrong]
    with pytest.raises(ConfigError, match=r"with the role decode is producer: .*both will do"):
        RaySettings.of({"models": [model]}).models[0].group_configs()


def test_groups_are_as_the_model_but_for_what_they_state() -> None:
    groups = [
        {"role": "prefill", "settings": {"scheduler.max_num_seqs": 3}},
        {"role": "decode", "num_replicas": 2},
        {"role": "decode", "autoscaling": {"min_replicas": 1, "max_replicas": 4}},
    ]
    (model,) = RaySettings.of({"models": [{"groups": groups}]}).models
    first, second, _ = model.group_configs()
    assert (first.scheduler.max_num_seqs, second) == (3, model.engine_config())
    assert [group.least for group in model.all_groups] == [1, 2, 1]
    assert names_of(model.all_groups) == ["prefill", "decode-1", "decode-2"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"groups": [{"role": "prefill"}]}, "none would decode"),
        ({"groups": [{"role": "all"}]}, "role"),
        ({"groups": [{}], "num_replicas": 2}, "have no effect beside groups"),
        ({"groups": [{}], "router": "ray.serve:X"}, "groups are for aioserve's routers"),
        (
            {"groups": [{"settings": {"cache.block_size": 32}}, {}]},
            r"cache.block_size differs .*all",
        ),
        (
            {"groups": [{"settings": {"scheduler.request_log": "a"}}, {}]},
            "all replicas would write",
        ),
    ],
)
def test_groups_that_cannot_work_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySettings.of({"models": [model]}).models[0].group_configs()


def test_a_replica_is_set_up_as_a_server_is() -> None:
    settings = RaySettings.of(
        {"models": [{"config": "priority", "settings": {"scheduler.max_num_seqs": 3}}]}
    )
    config = settings.models[0].engine_config()
    assert config.scheduler.policy == "priority"
    assert config.scheduler.max_num_seqs == 3


@pytest.mark.parametrize("many", [{"num_replicas": 2}, {"autoscaling": {"max_replicas": 2}}])
@pytest.mark.parametrize("name", ["decision_log", "request_log"])
def test_replicas_do_not_write_into_one_log(name: str, many: dict[str, Any]) -> None:
    model = {"settings": {f"scheduler.{name}": "a.log"}}
    for number in ({}, {"num_replicas": 1}):
        RaySettings.of({"models": [model | number]}).models[0].engine_config()
    with pytest.raises(ConfigError, match=f"scheduler.{name} is the file of one engine"):
        RaySettings.of({"models": [model | many]}).models[0].engine_config()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_files_that_ship_say_what_can_work(path: Path) -> None:
    (application,) = yaml.safe_load(path.read_text())["applications"]
    for model in RaySettings.of(application["args"]).models:
        model.group_configs()


def test_the_manifest_of_kuberay_says_what_its_cluster_can_hold() -> None:
    manifest = yaml.safe_load((CONFIGS.parents[1] / "deploy/rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    settings = RaySettings.of(application["args"])
    (model,) = settings.models
    model.engine_config()
    (workers,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    has = workers["replicas"] * int(container["resources"]["limits"]["cpu"])
    ingress = settings.ingress_actor_options["num_cpus"] * settings.num_ingress_replicas
    assert model.num_replicas is not None
    assert model.ray_actor_options["num_cpus"] * model.num_replicas + ingress <= has


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_files_that_ship_come_up_on_two_cores(path: Path) -> None:
    (application,) = yaml.safe_load(path.read_text())["applications"]
    settings = RaySettings.of(application["args"])
    needed = settings.num_ingress_replicas * settings.ingress_actor_options["num_cpus"]
    for model in settings.models:
        for group in model.all_groups:
            options = model.ray_actor_options | group.ray_actor_options
            needed += group.least * options["num_cpus"]
    assert needed <= 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("server.port", 9000),
        ("access.api_keys_file", "keys.yaml"),
        ("access.uds", "a.sock"),
        ("access.ssl_certfile", "cert.pem"),
        ("access.allowed_origins", ("*",)),
        ("access.max_connections", 7),
    ],
)
def test_what_rays_proxies_do_is_refused_in_words(name: str, value: Any) -> None:
    check_served(EngineConfig())
    with pytest.raises(ConfigError, match=f"{name} has no effect on Ray Serve, .*: set it there"):
        check_served(EngineConfig.load(None, [(name, value)]))


def test_keys_of_the_environment_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSERVE_API_KEYS", "sk-ann-0123456789")
    with pytest.raises(ConfigError, match="AIOSERVE_API_KEYS has no effect on Ray Serve"):
        check_served(EngineConfig())


def test_the_module_that_ray_sends_by_value_holds_no_state() -> None:
    """Each process would have its own, and a lock cannot be sent at all."""
    module = ast.parse((ROOT / "aioserve/fleet/ray/router.py").read_text())
    assert any(isinstance(part, ast.ClassDef) for part in module.body)
    assert not [
        ast.unparse(part) for part in module.body if isinstance(part, ast.Assign | ast.AnnAssign)
    ]
