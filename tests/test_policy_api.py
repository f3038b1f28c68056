"""The page of what a policy can read and call is what the source says today."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_made_from_the_source_of_today() -> None:
    spec = importlib.util.spec_from_file_location("page", ROOT / "docs/make_policy_api.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    made = page.render()
    assert made == (ROOT / "docs/policy-api.md").read_text(), (
        "python docs/make_policy_api.py writes it anew"
    )
