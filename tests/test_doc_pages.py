"""The pages in docs/ about embedding and the HTTP extensions are true."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec

from aioserve.server.protocol import ChatCompletionRequest, CompletionRequest
from aioserve.server.unserved import FOREIGN, HINTS, UNSERVED

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_on_embedding_runs() -> None:
    """In one program, as the page goes on from block to block."""
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks("embedding.md", "python"))],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == ["timeout", "0 requests running"]


def test_every_extension_is_a_field_of_both_bodies() -> None:
    _, _, section = (ROOT / "docs/http-api.md").read_text().partition("\n## Extensions\n")
    cells = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert {"user", "priority", "timeout", "cache_salt"} <= names
    for body in (CompletionRequest, ChatCompletionRequest):
        assert names <= {field.name for field in msgspec.structs.fields(body)}


def test_the_request_that_is_shown_is_accepted() -> None:
    (command,) = blocks("http-api.md", "bash")
    (body,) = re.findall(r"-d '(.*)'", command, re.DOTALL)
    request = msgspec.json.decode(body, type=CompletionRequest)
    assert (request.user, request.priority, request.timeout) == ("ann", -1, 30)


def test_the_policies_read_what_the_page_says() -> None:
    source = {path.stem: path.read_text() for path in (ROOT / "policies").glob("*.py")}
    reads = {
        field: {name for name, text in source.items() if re.search(pattern, text)}
        for field, pattern in {
            "user": r"\.user\b",
            "priority": r"\.priority\b",
            "timeout": r"\.deadline\b",
        }.items()
    }
    assert reads == {"user": {"fair"}, "priority": {"priority"}, "timeout": {"deadline"}}


def test_the_page_of_the_api_lists_every_field_and_what_asks_for_nothing() -> None:
    page = (ROOT / "docs/http-api.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", page, re.MULTILINE)
    listed = {name: rest for cell, rest in rows for name in re.findall(r"`(\w+)`", cell)}
    for name, field in {**UNSERVED, **FOREIGN}.items():
        told = [msgspec.json.decode(value) for value in re.findall(r"`(.*?)`", listed.pop(name))]
        if told or name not in ("store", "service_tier"):
            assert told == list(field.no_ops), name
    served = {
        field.name
        for body in (CompletionRequest, ChatCompletionRequest)
        for field in msgspec.structs.fields(body)
    }
    assert listed.keys() - {"failing", "draining", "dead"} <= served | set(HINTS)
    for name in served:
        assert f"`{name}`" in page, name
