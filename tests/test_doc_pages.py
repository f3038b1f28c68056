"""The pages in docs/ are true: code and requests, links, the files that are named."""

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import (
    CompletionCreateParamsStreaming as CompletionParams,
)
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from aioserve.server import completions, embeddings
from aioserve.server.admin import Ready
from aioserve.server.anthropic import routes as messages
from aioserve.server.chat import routes as chat
from aioserve.server.chat.protocol import ChatCompletionRequest
from aioserve.server.protocol import CompletionRequest
from aioserve.server.responses import routes as response
from aioserve.server.unserved import FOREIGN, HINTS, UNSERVED, Unserved
from aioserve.server.validation import BodyDecoder
from aioserve.version import __version__

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_on_embedding_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one program, as the page goes on from block to block; in this process, which has imported
    what a program would import for seconds.
    """
    monkeypatch.chdir(ROOT)
    code = "\n".join(blocks("embedding.md", "python"))
    exec(compile(code, "embedding.md", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert "timeout" in lines
    assert "0 requests running" in lines


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


OTHER_PROTOCOLS = ("Anthropic's messages", "Responses", "Embeddings")


def section_of(heading: str) -> str:
    """Of the page on HTTP."""
    page = (ROOT / "docs/http-api.md").read_text()
    [section] = re.findall(rf"\n## {heading}\n.*?(?=\n## )", page, re.DOTALL)
    return section


def test_the_page_of_the_api_lists_every_field_and_what_asks_for_nothing() -> None:
    page = (ROOT / "docs/http-api.md").read_text()
    for heading in (*OTHER_PROTOCOLS, "Hints"):
        page = page.replace(section_of(heading), "")
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
    states = set(typing.get_args(Ready.__annotations__["status"]))
    assert states - {"ready"} <= listed.keys()
    assert listed.keys() - states <= served | set(HINTS)
    for name in (*served, *HINTS):
        assert f"`{name}`" in page, name


def test_every_field_of_openais_client_is_known() -> None:
    for params, decoder in (
        (ChatParams, chat.decoder),
        (CompletionParams, completions.decoder),
    ):
        known = {*decoder.served.__struct_fields__, *decoder.unserved, *decoder.hints}
        assert set(params.__annotations__) <= known


def fields_of(heading: str) -> dict[str, tuple[str, ...]]:
    """The other cells of each field's row, below that heading."""
    found = re.findall(r"^\| (`.*) \|$", section_of(heading), re.MULTILINE)
    rows = [row.split(" | ") for row in found]
    return {n: tuple(rest) for cell, *rest in rows for n in re.findall(r"`(\w+)`", cell)}


def check_refusals(told: dict[str, str], refused: Mapping[str, Unserved]) -> None:
    for name, words in told.items():
        assert words.startswith("refused") == (name in refused), name
        if name in refused and not refused[name].instead:
            values = [msgspec.json.decode(value) for value in re.findall(r"`(.*?)`", words)]
            assert values == list(refused[name].no_ops), name


@pytest.mark.parametrize(
    ("heading", "decoder", "client"),
    [
        ("Responses", response.decoder, ResponseCreateParamsNonStreaming),
        ("Embeddings", embeddings.decoder, EmbeddingCreateParams),
    ],
    ids=["responses", "embeddings"],
)
def test_the_table_of_a_route_holds_all_fields_that_are_known_and_the_clients(
    heading: str, decoder: BodyDecoder[Any], client: Any
) -> None:
    listed = {name: words for name, (words,) in fields_of(heading).items()}
    assert listed.keys() == {*decoder.served.__struct_fields__, *decoder.unserved, *decoder.hints}
    check_refusals(listed, decoder.unserved)
    assert set(client.__annotations__) <= listed.keys()


def test_the_table_of_anthropics_fields_holds_all_that_are_known_and_the_clients() -> None:
    listed = fields_of(OTHER_PROTOCOLS[0])
    on_both = {name for name, (on, _) in listed.items() if on == "both"}
    headers = {"user_profile_id", "workspace_id"}
    for decoder, params, names in (
        (messages.create_decoder, MessageCreateParamsNonStreaming, listed.keys()),
        (messages.count_decoder, MessageCountTokensParams, on_both),
    ):
        assert names == {*decoder.served.__struct_fields__, *decoder.unserved, *decoder.hints}
        assert set(params.__annotations__) - headers <= names
    check_refusals(
        {name: words for name, (_, words) in listed.items()}, messages.create_decoder.unserved
    )


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)(.*?)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_file_that_the_map_names_exists() -> None:
    for path in re.findall(r"`(\w[\w./-]*/[\w./-]*)`", ARCHITECTURE):
        assert (ROOT / path).exists(), path


def test_the_newest_version_in_the_changelog_is_the_packages() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", changes, re.MULTILINE)
    assert versions[0] in (__version__, "Unreleased")
    assert __version__ in versions
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
    for version in changes.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.*)", version, re.MULTILINE)
        assert "Breaks" not in kinds[1:]  # what breaks comes first
