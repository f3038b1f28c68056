"""What /v1/models says that a model can do is what the server then does."""

from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncClient
from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    ServerConfig,
)
from aioserve.server.chat.protocol import ChatCompletionRequest
from tests.server.scripted import HERMES, THINKING, saying
from tests.server.serving import Server, running

TOOL = {"type": "function", "function": {"name": "f"}}


async def card_of(server: Server) -> dict[str, Any]:
    [card] = (await server.get("/v1/models")).json()["data"]
    assert (await server.get(f"/v1/models/{card['id']}")).json() == card
    assert card["context_length"] == card["max_model_len"] == server.engine.max_model_len
    assert set(card["supported_parameters"]) <= set(ChatCompletionRequest.__struct_fields__)
    assert card["supported_parameters"] == sorted(card["supported_parameters"])
    assert isinstance(card, dict)
    return card


async def check(server: Server) -> dict[str, Any]:
    """The card, after the server was asked for all that it names and may leave out."""
    card = await card_of(server)
    for parameter, fields in {
        "tools": {"tools": [TOOL]},
        "structured_outputs": {"structured_outputs": {"choice": ["a", "b"]}},
        "response_format": {"response_format": {"type": "json_object"}},
        "thinking_token_budget": {"thinking_token_budget": 3},
    }.items():
        status = (await server.chat(**fields, max_tokens=4)).status
        assert status == (200 if parameter in card["supported_parameters"] else 400), parameter
    embedding = await server.request("POST", "/v1/embeddings", json={"input": "a"})
    assert (embedding.status == 200) == ("embedding" in card["capabilities"])
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    refusal = (await server.chat(image)).json()["error"]["message"]
    assert card["architecture"]["input_modalities"] == ["text"]
    assert "image" in refusal
    return card


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_models_card_says_what_its_server_does() -> None:
    real = {
        "model": ModelConfig(max_model_len=128),
        "cache": CacheConfig(num_kv_blocks=32),
        "runner": RunnerConfig(threads=1),
    }
    async with running(EngineConfig(**real)) as server:
        card = await check(server)
        assert card["capabilities"] == ["completion", "embedding"]
        assert card["architecture"] == {
            "modality": "text->text",
            "input_modalities": ["text"],
            "output_modalities": ["text"],
        }
        assert "response_format" in card["supported_parameters"]
        async with AsyncClient(server.url) as client:
            [told] = await client.models()
            assert told.capabilities == card["capabilities"]
    parsers = ServerConfig(tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    async with running(EngineConfig(**real, server=parsers)) as server:
        card = await check(server)
        assert card["capabilities"] == ["completion", "embedding", "tools", "thinking"]
        assert "thinking_token_budget" in card["supported_parameters"]


async def test_a_chat_template_shows_tools_and_reasoning(tmp_path: Path) -> None:
    for template, told in ((HERMES, ["tools"]), (THINKING, ["tools", "thinking"])):
        async with saying("Yes.", tmp_path, template) as server:
            card = await card_of(server)
            assert card["capabilities"][2:] == told
            assert ("tools" in card["supported_parameters"]) is True
            assert ("reasoning_effort" in card["supported_parameters"]) == ("thinking" in told)
            # The scripted runner has no logits, so there is nothing to bind.
            assert "structured_outputs" not in card["supported_parameters"]
