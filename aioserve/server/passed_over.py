"""What a request asks for and only a vendor's servers do: it is passed over, and logged once.

Knows the tools of vendors by their types. Knows no route and no struct.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from aiohttp import web

logger = logging.getLogger(__name__)

PASSED_OVER = web.RequestKey("PASSED_OVER", list[str])

#: Types of tools, without their dates, that a vendor runs, or that only a vendor's models know.
VENDORS_TOOLS = frozenset(
    (
        *("advisor", "apply_patch", "bash", "browser_toolset", "code_execution"),
        *("code_interpreter", "computer", "computer_toolset", "computer_use"),
        *("computer_use_preview", "file_search", "google_search", "image_generation"),
        *("local_shell", "mcp", "mcp_toolset", "memory", "programmatic_tool_calling", "shell"),
        *("text_editor", "tool_search", "tool_search_tool_bm25", "tool_search_tool_regex"),
        *("web_fetch", "web_search", "web_search_preview"),
    )
)
_DATED = re.compile(r"(.+?)(_\d{8}|_\d{4}_\d\d_\d\d)?", re.ASCII)


def is_vendors(kind: object) -> bool:
    """Whether a tool of this type, with a date behind it or not, is one of a vendor's."""
    found = _DATED.fullmatch(kind) if isinstance(kind, str) else None
    return found is not None and found[1] in VENDORS_TOOLS


def pass_over(request: web.Request, what: Iterable[str]) -> None:
    """Note what is not done, in words, for the log."""
    request.setdefault(PASSED_OVER, []).extend(what)


def pass_over_tools(request: web.Request, tools: Sequence[dict[str, Any]] | None) -> None:
    """Note the tools among `tools` that are a vendor's."""
    kinds = (tool.get("type") for tool in tools or ())
    pass_over(request, (f"the tool {kind}" for kind in kinds if is_vendors(kind)))


def log_passed_over(request: web.Request, request_id: str) -> None:
    """Say in one line what was passed over, if anything was."""
    if what := request.get(PASSED_OVER):
        logger.info(
            "%s: passed over, since only a vendor's servers do it: %s", request_id, ", ".join(what)
        )
