"""The tables of fleets on the page about scaling are what their commands print today."""

import re
from pathlib import Path

import pytest

from aioserve.cli.main import main
from aioserve.lab.simulation.fleet_plan import FleetSpec

PAGE = (Path(__file__).parents[3] / "docs/scaling.md").read_text()


@pytest.mark.slow  # half a minute of CPU each, and a minute
@pytest.mark.parametrize(
    "heading",
    [
        "Twelve routers in one report",
        "Three autoscalers in one report",
        "Routers, autoscalers and policies in one report",
        "Where memory is short",
    ],
)
def test_the_table_of_a_fleet_is_what_its_command_prints(
    heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, section = PAGE.partition(f"### {heading}\n")
    (command,) = re.findall(r"```bash\npython -m aioserve (.*?)\n```", section)[:1]
    (table,) = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)[:1]
    assert main(command.split()) == 0
    assert table in capsys.readouterr().out


@pytest.mark.parametrize("name", ["eight", "rough", "scaled", "sixteen", "tight"])
def test_a_shipped_fleet_is_a_fleet(name: str) -> None:
    assert FleetSpec.load(name).choices
