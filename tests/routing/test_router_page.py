"""The page on routers is true: its files run and load, and no field is missing."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from aioserve.cli.main import main
from aioserve.fleet.ray.settings import RaySettings
from aioserve.fleet.routing import (
    FleetView,
    ReplicaView,
    RoutedRequest,
    available_autoscalers,
    available_routers,
    load_autoscaler,
    load_router,
)
from aioserve.lab.simulation.fleet_plan import FleetSpec
from tests import processes

PAGE = (Path(__file__).parents[2] / "docs/writing-a-router.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of the page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch_aside.py").write_text(blocks("python")[0])
    (tmp_path / "fleet.yaml").write_text(blocks("yaml")[1])
    (tmp_path / "groups.yaml").write_text(blocks("yaml")[0])
    (tmp_path / "per_request.py").write_text(blocks("python")[2])
    (tmp_path / "scaled.yaml").write_text(blocks("yaml")[2])
    return tmp_path


def test_the_router_of_the_page_is_compared_as_the_page_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--limit", "40", "--seeds", "1", "--jobs", "1"]
    command = blocks("bash")[1].replace("\\\n", " ").split()
    assert command[:3] == ["python", "-m", "aioserve"]
    assert main([*command[3:], *words]) == 0
    printed = capsys.readouterr().out
    for name in ("fcfs prefix", "fcfs BatchAside", "chunked_prefill BatchAside"):
        assert f"fcfs least_work  {name}" in printed


def test_the_fleet_file_and_the_ray_settings_of_the_page_are_taken(folder: Path) -> None:
    spec = FleetSpec.load("fleet.yaml")
    assert [choice.shown for choice in spec.choices] == ["least_work", "eight"]
    groups = FleetSpec.load("groups.yaml")
    assert [group.role for group in groups.groups] == ["prefill", "decode", "decode"]
    assert len(groups.incidents.deploys) == 1
    scaled = FleetSpec.load("scaled.yaml")
    assert [scaler.shown for scaler in scaled.scalers if scaler] == ["target_utilization", "eight"]
    settings = yaml.safe_load(blocks("yaml")[3].replace("/srv/", ""))
    (model,) = RaySettings.of(settings).models
    assert model.router_class is not None
    assert model.router_class.__name__ == "BatchAside"


def test_the_page_names_every_field_that_a_router_sees_and_every_router() -> None:
    words = set(re.findall(r"`(\w+)`", PAGE))
    assert set(RoutedRequest.__struct_fields__) <= words
    assert set(ReplicaView.__struct_fields__) <= words
    assert set(FleetView.__struct_fields__) <= words
    assert set(available_routers()) | set(available_autoscalers()) <= words


def test_the_router_of_the_page_keeps_batch_requests_aside(folder: Path) -> None:
    router = load_router("batch_aside.py")({"most_running": 1})
    idle, busy = ReplicaView("a", work=9.0), ReplicaView("b", num_running=2)
    batch = RoutedRequest(num_tokens=1, hints={"slo_class": "batch"})
    assert router.choose(RoutedRequest(num_tokens=1), (idle, busy)) is busy
    assert router.choose(batch, (idle, busy)) is idle
    assert type(router.choose(batch, (busy,))).__name__ == "Wait"


@pytest.mark.slow
def test_the_router_of_the_page_keeps_the_contract(folder: Path) -> None:
    command = blocks("bash")[2].splitlines()[0].split()
    result = processes.run(sys.executable, "-m", *command, "-p", "no:cacheprovider", cwd=folder)
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout


def test_the_autoscaler_of_the_page_scales_by_requests(folder: Path) -> None:
    scaler = load_autoscaler("per_request.py")({"requests": 4})
    fleet = FleetView(
        replicas=(ReplicaView("a", num_sent=7), ReplicaView("b", num_running=3)),
        num_starting=0,
        min_replicas=1,
        max_replicas=9,
        startup_seconds=1.0,
        interval=1.0,
        num_arrived=0,
        num_arrived_tokens=0,
    )
    assert scaler.decide(fleet) == 3
