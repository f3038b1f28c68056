"""What is made from the source in docs/ says what the source says today."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import load_program

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return load_program("docs/make_pages.py")


ANEW = "python docs/make_pages.py writes it anew"


def test_the_pages_of_the_contract_and_the_harness_have_the_rules_of_today() -> None:
    for name, text in load_program("docs/make_testing.py").pages().items():
        assert text == (DOCS / name).read_text(), "python docs/make_testing.py writes it anew"
        assert text.count("\n| `test_") >= 25 or "`add_request(" in text


def test_what_a_policy_can_read_and_call_is_that_of_today(pages: ModuleType) -> None:
    assert pages.render() == (DOCS / "policy-api.md").read_text(), ANEW


def test_the_catalogue_has_the_policies_and_options_of_today(pages: ModuleType) -> None:
    assert pages.catalogue() == (DOCS / "policies.md").read_text(), ANEW


def test_the_table_of_operators_routes_has_the_commands_of_today(pages: ModuleType) -> None:
    page = (DOCS / "operations.md").read_text()
    assert "| `/admin/pause` | `pause` | " in page
    assert pages.with_operators_routes(page) == page, ANEW


def test_the_table_of_ranges_has_the_numbers_of_today(pages: ModuleType) -> None:
    page = (DOCS / "http-api.md").read_text()
    assert "| `temperature` | between 0 and 2 | 0: greedy |" in page
    assert pages.with_ranges(page) == page, ANEW


def test_the_page_of_fields_has_the_rules_of_today(pages: ModuleType) -> None:
    page = (DOCS / "fields.md").read_text()
    assert "| `temperature` | **served** | **served** | **served** | **served** |" in page
    assert pages.fields_page() == page, ANEW
