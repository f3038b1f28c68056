"""The page on faults names a test for each, and the tests exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reliability.md").read_text()
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| (?!what happens|---)", line)]


def test_each_fault_has_a_test_that_exists() -> None:
    assert len(ROWS) >= 60
    assert f"\n{len(ROWS)} faults: " in PAGE
    for row in ROWS:
        (found,) = re.findall(r"\[(test_\w+)\]\(\.\./(tests/\S+\.py)\) \|$", row)
        name, path = found
        assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), row


def test_each_fault_says_who_sees_what_and_what_others_do() -> None:
    told = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in ROWS]
    assert all(len(cells) == 8 and all(cells) for cells in told)
    assert len({cells[0] for cells in told}) == len(told)


def test_each_link_to_another_engine_leads_somewhere_and_each_address_is_used() -> None:
    used = set(re.findall(r"\[#\d+\]\[(\w+)\]", PAGE))
    led = dict(re.findall(r"^\[([vsl]\d+)\]: (\S+)$", PAGE, re.MULTILINE))
    assert used == led.keys()
    for key, address in led.items():
        assert re.search(rf"/(?:issues|pull)/{key[1:]}$", address), key
