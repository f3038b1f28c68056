"""A hook of the site's generator: links that lead out of docs/ fit the site.

On GitHub and in a clone, `[a test](../tests/test_cli.py)` leads to the file. The site holds the
pages alone: there such a link leads to the repository if `repo_url` of mkdocs.yml says where that
is, and else its words stand without a link.
"""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\[\]]*)\]\(\.\./([^)]*)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """The page as the site shows it; the generator calls this for each."""
    if config.repo_url:
        return OUTSIDE.sub(rf"[\1]({config.repo_url.rstrip('/')}/blob/main/\2)", markdown)
    return OUTSIDE.sub(r"\1", markdown)
