"""What `deploy/` says is true of this program: flags, routes, times, ports, users."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from aioserve.cli.serve import build_parser, load_config
from aioserve.config import EngineConfig, ServerConfig
from aioserve.engine.lock_guard import GRACE_SECONDS
from aioserve.server.access.keys import ENVIRONMENT
from aioserve.server.routes import all_routes
from aioserve.support.arguments import EXIT_USAGE
from tests import processes
from tests.processes import serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GET = {route.path for route in all_routes() if route.method == "GET"}
INSTALL = "make test-deploy installs it"


def instructions(stage: str) -> list[tuple[str, str]]:
    """Those of a stage of the Dockerfile, as name and rest, lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    pairs = [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]
    begin = next(i for i, (name, rest) in enumerate(pairs) if rest.endswith(f" AS {stage}"))
    end = next((i for i in range(begin + 1, len(pairs)) if pairs[i][0] == "FROM"), len(pairs))
    return pairs[begin + 1 : end]


def the(name: str, stage: str) -> str:
    (rest,) = [rest for found, rest in instructions(stage) if found == name]
    return rest


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read(DEPLOY / "aioserve.service")
    return parser["Service"]


def manifests() -> dict[str, Any]:
    return {
        one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    }


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return spec


def config_of_pods(tmp_path: Path) -> EngineConfig:
    (tmp_path / "config.yaml").write_text(manifests()["ConfigMap"]["data"]["config.yaml"])
    return EngineConfig.load(tmp_path / "config.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_an_image_serves_on_its_port_and_is_well_while_it_does(stage: str) -> None:
    """The words of its entry point and of its health check, run here."""
    program, *words = json.loads(the("ENTRYPOINT", stage))
    assert program == "aioserve"
    config = load_config(build_parser().parse_args(words[1:]))
    assert (words[0], config.server.host) == ("serve", "0.0.0.0")
    port = the("EXPOSE", stage)
    assert config.server.port == int(port)
    python, flag, code = json.loads(the("HEALTHCHECK", stage).partition("CMD ")[2])
    assert python == "python"
    environ = {**os.environ, "AIOSERVE_API_KEYS": "sk-0123456789abcdef"}
    settings = (*words[1:], "--port", "0", "--runner", "simulated")
    with serving(*settings, env=environ) as (process, url):
        check = code.replace(f":{port}/", f":{url.rpartition(':')[2]}/")
        assert check != code
        assert processes.run(sys.executable, flag, check).returncode == 0
        process.terminate()
        process.communicate(timeout=processes.PATIENCE)
    assert processes.run(sys.executable, flag, check).returncode != 0


def test_images_the_unit_and_pods_start_with_a_key(tmp_path: Path) -> None:
    for stage in ("cpu", "cuda"):
        _, command, *words = json.loads(the("ENTRYPOINT", stage))
        config = load_config(build_parser().parse_args(words))
        assert (command, config.access.without_keys) == ("serve", "refuse")
    _, _, *words = shlex.split(unit()["ExecStart"])
    assert vars(build_parser().parse_args(words))["access.without_keys"] == "refuse"
    assert config_of_pods(tmp_path).access.without_keys == "refuse"
    (container,) = pod()["containers"]
    (variable,) = container["env"]
    assert variable["name"] == ENVIRONMENT
    assert not variable["valueFrom"]["secretKeyRef"].get("optional")


@pytest.mark.parametrize("stage", ["wheel", "cpu", "cuda"])
def test_what_an_image_copies_is_there_and_reaches_the_builder(stage: str) -> None:
    let_in = {
        line.removeprefix("!")
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for name, rest in instructions(stage):
        if name == "COPY":
            *sources, _ = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] in let_in, source


def test_the_wheel_of_an_image_has_what_setup_and_pyproject_name() -> None:
    copied = {
        source
        for name, rest in instructions("wheel")
        if name == "COPY"
        for source in rest.split()[:-1]
    }
    text = (ROOT / "pyproject.toml").read_text() + (ROOT / "setup.py").read_text()
    assert {"pyproject.toml", "setup.py", "README.md", "aioserve"} <= copied
    for folder in re.findall(r'^"aioserve\.\w+" = "(\w+)"', text, re.M):
        assert folder in copied


def test_images_run_as_the_user_that_pods_ask_for() -> None:
    for stage in ("cpu", "cuda"):
        user = the("USER", stage)
        assert int(user) == pod()["securityContext"]["runAsUser"]
        system = the("RUN", f"system-{stage}")
        assert f"useradd --uid {user} " in system


def test_the_unit_starts_the_server_and_gives_it_time_to_drain() -> None:
    service = unit()
    program, command, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("aioserve", "serve")
    arguments = build_parser().parse_args(words)
    assert arguments.config == "/etc/aioserve/config.yaml"
    drain_timeout = float(vars(arguments)["server.drain_timeout"])
    assert float(service["TimeoutStopSec"]) > drain_timeout + 1
    assert service["Type"] == "notify"  # as `test_service_manager.py` shows
    assert int(service["RestartPreventExitStatus"]) == EXIT_USAGE


def test_systemd_ends_a_loop_that_stands_still_only_after_the_server_would_itself() -> None:
    service, server = unit(), ServerConfig()
    assert server.dead_loop_seconds is not None
    assert float(service["WatchdogSec"]) > server.dead_loop_seconds + 2 * GRACE_SECONDS
    assert service["WatchdogSignal"] == "SIGALRM"  # as `test_hangs.py` shows, it writes all stacks
    assert service["Restart"] == "on-failure"
    assert service["MemoryMax"].endswith("%")


def test_a_keys_file_of_mode_600_can_belong_to_the_user_of_the_unit() -> None:
    service = unit()
    assert "DynamicUser" not in service
    text = (DEPLOY / "aioserve.service").read_text()
    docs = (ROOT / "docs" / "deployment.md").read_text()
    for page in (text, docs):
        assert f"useradd --system --home-dir /var/lib/aioserve {service['User']}" in page


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "aioserve.service").read_text()
    program = shlex.split(unit()["ExecStart"])[0]
    (tmp_path / "aioserve.service").write_text(text.replace(program, "/bin/true"))
    result = processes.run("systemd-analyze", "verify", str(tmp_path / "aioserve.service"))
    assert (result.returncode, result.stderr) == (0, "")


def test_pods_have_settings_that_load_and_flags_that_exist(tmp_path: Path) -> None:
    (container,) = pod()["containers"]
    arguments = build_parser().parse_args(container["args"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert len(set(mounts.values())) == len(mounts)  # no folder is in two places
    assert mounts[str(Path(arguments.config).parent)] == "config"
    assert Path(arguments.config).name in manifests()["ConfigMap"]["data"]
    assert config_of_pods(tmp_path).model.model == "embedded"
    assert set(mounts.values()) == {volume["name"] for volume in pod()["volumes"]}


def test_pods_are_asked_on_routes_that_there_are() -> None:
    (container,) = pod()["containers"]
    (port,) = container["ports"]
    for stage in ("cpu", "cuda"):
        assert port["containerPort"] == int(the("EXPOSE", stage))
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness")}
    probes["liveness"] = container["livenessProbe"]["httpGet"]
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/livez",
    }
    assert all(probe["port"] == port["name"] and probe["path"] in GET for probe in probes.values())
    annotations = manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in GET
    assert int(annotations["prometheus.io/port"]) == port["containerPort"]
    (entry,) = manifests()["Service"]["spec"]["ports"]
    assert entry["targetPort"] == port["name"]


def test_pods_keep_their_models_on_a_claim_that_one_node_can_hand_on() -> None:
    (models,) = [volume for volume in pod()["volumes"] if volume["name"] == "models"]
    claim = manifests()["PersistentVolumeClaim"]
    assert models["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    rolling = manifests()["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    is_shared = claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert is_shared or (rolling["maxUnavailable"], rolling["maxSurge"]) == (1, 0)


def test_pods_run_an_image_that_is_built_here() -> None:
    """A tag other than `latest`, of which a node may have a copy that it did not pull."""
    (container,) = pod()["containers"]
    name, _, tag = container["image"].partition(":")
    assert (name, bool(tag), tag == "latest") == ("aioserve", True, False)
    assert container["imagePullPolicy"] == "IfNotPresent"
    docs = (ROOT / "docs" / "deployment.md").read_text()
    assert f"--target cpu -t {container['image']} ." in docs
    assert f"kind load docker-image {container['image']}" in docs


def test_a_disruption_budget_and_a_network_policy_are_of_the_pods() -> None:
    labels = manifests()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    budget, policy = manifests()["PodDisruptionBudget"], manifests()["NetworkPolicy"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    (container,) = pod()["containers"]
    (rule,) = policy["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [it["name"] for it in container["ports"]]
    # With one replica, a budget that lets none go would hold up every node that is drained.
    assert budget["spec"]["maxUnavailable"] >= 1


def test_pods_have_time_to_drain(tmp_path: Path) -> None:
    (container,) = pod()["containers"]
    name, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert name == "sleep"
    needed = float(seconds) + config_of_pods(tmp_path).server.drain_timeout + 1
    assert pod()["terminationGracePeriodSeconds"] > needed


def test_the_service_finds_the_pods() -> None:
    template = manifests()["Deployment"]["spec"]["template"]
    selector = manifests()["Service"]["spec"]["selector"]
    assert selector == manifests()["Deployment"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= template["metadata"]["labels"].items()


def test_kubernetes_takes_every_manifest() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason=INSTALL)
    for manifest in manifests().values():
        validator.validate(manifest, "1.30", strict=True)


def test_a_linter_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip(f"no hadolint: {INSTALL}")
    result = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")
