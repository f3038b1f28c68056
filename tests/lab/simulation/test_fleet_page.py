"""The table of routers on the page about scaling is what its command prints today."""

import re
from pathlib import Path

import pytest

from aioserve.cli import main

PAGE = (Path(__file__).parents[3] / "docs/scaling.md").read_text()


@pytest.mark.slow  # half a minute of CPU
def test_the_table_of_routers_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, _, section = PAGE.partition("### Twelve routers in one report\n")
    (command,) = re.findall(r"```bash\npython -m aioserve (.*?)\n```", section)[:1]
    (table,) = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)[:1]
    assert main(command.split()) == 0
    assert table in capsys.readouterr().out
