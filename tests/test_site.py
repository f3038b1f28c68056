"""The site of docs/: every page stands behind one door, and the generator finds no broken link."""

import re
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.programs import load_program

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOORS = ["Tutorials", "How-to guides", "Reference", "Explanations"]
GENERATOR = ROOT / ".venv/docs/bin/mkdocs"


class Loader(yaml.SafeLoader):
    """Reads the generator's settings, whose tags name functions of packages that are not here."""


Loader.add_multi_constructor("!", lambda *_: None)
Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    return loaded


def pages_of(entry: Any) -> list[str]:
    """All pages below an entry of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages_of(part)]


def doors_of_the_site() -> dict[str, list[str]]:
    _, *doors = settings()["nav"]
    return {name: pages_of(pages) for door in doors for name, pages in door.items()}


def test_every_page_stands_behind_exactly_one_of_four_doors() -> None:
    doors = doors_of_the_site()
    assert list(doors) == DOORS
    listed = sorted(["README.md", *(page for pages in doors.values() for page in pages)])
    assert listed == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_first_page_lists_all_pages_as_the_site_does() -> None:
    """It is what GitHub shows of docs/."""
    _, *sections = (DOCS / "README.md").read_text().split("\n## ")
    listed = {
        section.partition("\n")[0]: re.findall(r"^- \[.*?\]\((.*?)\)", section, re.MULTILINE)
        for section in sections
    }
    assert listed == doors_of_the_site()


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    (path,) = settings()["hooks"]
    return load_program(path)


def test_links_that_lead_out_of_the_pages_lead_to_the_repository_or_are_words(
    hook: ModuleType,
) -> None:
    page = "[`it`](../tests/test_cli.py), [a page](gpu.md)"
    nowhere = SimpleNamespace(repo_url=None)
    somewhere = SimpleNamespace(repo_url="https://x.org/a/")
    assert hook.on_page_markdown(page, config=nowhere) == "`it`, [a page](gpu.md)"
    assert hook.on_page_markdown(page, config=somewhere) == (
        "[`it`](https://x.org/a/blob/main/tests/test_cli.py), [a page](gpu.md)"
    )


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    if not GENERATOR.exists():
        pytest.skip("needs make docs, which installs the generator of the site")
    done = subprocess.run(
        [GENERATOR, "build", "--strict", "-d", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = list(tmp_path.rglob("*.html"))
    assert len(built) > len(list(DOCS.glob("*.md")))
    loaded = r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(https?:)?//|<link[^>]*stylesheet[^>]*//"
    for page in built:
        assert not re.search(loaded, page.read_text()), page.name
