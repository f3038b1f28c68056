"""`docs/writing-a-format.md` shows the example as it is, and the example keeps the contract."""

import re
from pathlib import Path

from aioserve.features.formats import choose, load_format
from aioserve.testing.format_contract import FormatContract

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/bracket_format.py"
PAGE = (ROOT / "docs/writing-a-format.md").read_text()


class TestExample(FormatContract):
    format = load_format(f"{EXAMPLE}:BracketFormat")
    max_examples = 20


def test_the_page_shows_the_file() -> None:
    shown = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert shown[0] == EXAMPLE.read_text()
    compile(shown[1], "page", "exec")


def test_the_flag_of_the_page_names_the_format() -> None:
    [spec] = re.findall(r"--tool-call-parser (\S+:\w+)", PAGE)
    assert spec in re.findall(r"--aioserve-format (\S+)", PAGE)
    assert choose(str(ROOT / spec), "auto", "").format.__name__ == "BracketFormat"
