"""The pages in docs/ are true: code and requests, links, the files that are named."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from aioserve.apis import anthropic
from aioserve.apis import responses as response
from aioserve.server import completions, embeddings
from aioserve.server.body import BodyDecoder
from aioserve.server.chat import routes as chat
from aioserve.server.chat.protocol import ChatCompletionRequest
from aioserve.server.protocol import CompletionRequest, SamplingRequest
from aioserve.support import __version__

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
    code = "\n".join(b for b in blocks("embedding.md", "python") if "AsyncClient(" not in b)
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


def test_the_yaml_of_litellms_proxy_is_the_one_that_is_tested() -> None:
    [text] = blocks("agents.md", "yaml")
    source = (ROOT / "tests/clients/libraries/test_proxy.py").read_text()
    tested = source.partition('CONFIG = """')[2].partition('"""')[0].format(url="http://x")
    shown, tried = yaml.safe_load(text), yaml.safe_load(tested)
    assert shown["general_settings"] == tried["general_settings"]
    [one], [other] = shown["model_list"], tried["model_list"]
    assert one["litellm_params"].keys() == other["litellm_params"].keys()
    assert one["litellm_params"]["api_base"].endswith("/v1")
    assert one["litellm_params"]["api_key"] == other["litellm_params"]["api_key"]


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


def section_of(heading: str) -> str:
    """Of the page on HTTP."""
    page = (ROOT / "docs/http-api.md").read_text()
    [section] = re.findall(rf"\n## {heading}\n.*?(?=\n## )", page, re.DOTALL)
    return section


#: Those that one page has in a table of its own.
SHARED = set(SamplingRequest.__struct_fields__)


@pytest.mark.parametrize(
    ("heading", "decoder"),
    [
        ("Responses", response.decoder),
        ("Embeddings", embeddings.decoder),
        ("Anthropic's messages", anthropic.create_decoder),
        ("Anthropic's messages", anthropic.count_decoder),
        (None, completions.decoder),
        (None, chat.decoder),
    ],
)
def test_the_page_of_the_api_lists_every_field_that_is_served(
    heading: str | None, decoder: BodyDecoder[Any]
) -> None:
    page = (ROOT / "docs/http-api.md").read_text()
    if heading is not None:
        page = section_of(heading)
    rows = re.findall(r"^\| (`.*?|\\\* `.*?) \|", page, re.MULTILINE)
    listed = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}
    own = set(decoder.served.__struct_fields__)
    if heading in ("Responses", "Anthropic's messages"):
        own -= SHARED
        assert "[extensions](#extensions)" in page
    assert own <= listed
    assert "[all fields](fields.md)" in page or heading in (None, "Embeddings")


def test_every_field_of_a_vendors_client_is_known() -> None:
    from anthropic.types import MessageCountTokensParams
    from anthropic.types.beta.message_create_params import (
        MessageCreateParamsNonStreaming as BetaMessageParams,
    )
    from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
    from openai.types.chat.completion_create_params import (
        CompletionCreateParamsStreaming as ChatParams,
    )
    from openai.types.completion_create_params import (
        CompletionCreateParamsStreaming as CompletionParams,
    )
    from openai.types.embedding_create_params import EmbeddingCreateParams
    from openai.types.responses.input_token_count_params import InputTokenCountParams
    from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

    headers = {"user_profile_id", "workspace_id", "betas"}
    for params, decoder in (
        (ChatParams, chat.decoder),
        (CompletionParams, completions.decoder),
        (ResponseCreateParamsNonStreaming, response.decoder),
        (InputTokenCountParams, response.decoder),
        (EmbeddingCreateParams, embeddings.decoder),
        (MessageCreateParamsNonStreaming, anthropic.create_decoder),
        (MessageCountTokensParams, anthropic.count_decoder),
        (BetaMessageParams, anthropic.create_decoder),
    ):
        rules = {*decoder.unserved, *decoder.hints, *decoder.skipped}
        known = rules | set(decoder.served.__struct_fields__)
        assert set(params.__annotations__) - headers <= known, params


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


def test_the_changelog_names_the_packages_version_and_has_sixty_lines_a_release() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", changes, re.MULTILINE)
    assert versions[0] in (__version__, "Unreleased")
    assert __version__ in versions
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
    for version in changes.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.*)", version, re.MULTILINE)
        assert "Breaks" not in kinds[1:]  # what breaks comes first
        lines = version.strip().splitlines()
        assert len(lines) <= 60, f"{lines[0]}: details belong to the pages"
        assert max(map(len, lines)) <= 110
