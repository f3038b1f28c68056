"""A browser for every test of this folder, and none of them where there is none."""

from collections.abc import AsyncIterator

import pytest

from tests.page.browser import CHROMIUM, Browser, chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="needs a browser: apt-get install chromium")
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.browser)
            if CHROMIUM is None:
                item.add_marker(missing)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser
