"""What a model recommends holds for requests that do not state it, and for no others."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncClient, AsyncEngine, SamplingParams
from aioserve.config import EngineConfig, ModelConfig, RunnerConfig, ServerConfig
from aioserve.errors import ConfigError
from aioserve.model_source.downloads import DOWNLOADS
from aioserve.model_source.info import ModelInfo
from aioserve.params import NO_DEFAULTS, SamplingDefaults
from aioserve.server.app import say_chat_limit
from tests.server.serving import running
from tests.tokenizing import share_tokenizer

EMBEDDED = Path(__file__).parents[2] / "aioserve/model_source/embedded"
MESSAGES = [{"role": "user", "content": "Hello"}]


def recommending(path: Path, **fields: Any) -> Path:
    """The embedded model with these fields in its generation_config.json."""
    shutil.copytree(EMBEDDED, path)
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    share_tokenizer(path)
    return path


def config_of(path: Path | str, *, chat_tokens: int | None = 2048, **model: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", **model),
        runner=RunnerConfig(threads=1),
        server=ServerConfig(default_chat_tokens=chat_tokens),
    )


def defaults_of(path: Path | str, **model: Any) -> SamplingDefaults:
    return ModelInfo(config_of(path, **model).model).sampling_defaults


def test_a_generation_config_is_read_and_can_be_switched_off(tmp_path: Path) -> None:
    path = recommending(
        tmp_path / "m",
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        min_p=None,
        repetition_penalty=1.1,
        max_new_tokens=64,
        do_sample=True,
        pad_token_id=0,
    )
    assert defaults_of(path) == SamplingDefaults(
        temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, max_tokens=64
    )
    assert defaults_of(path, generation_config="none") == NO_DEFAULTS
    assert defaults_of(EMBEDDED) == NO_DEFAULTS


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": "high"}, {"top_k": 2.5}])
async def test_a_recommendation_that_makes_no_sense_is_refused_at_the_start(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    path, name = recommending(tmp_path / "m", **fields), next(iter(fields))
    with pytest.raises(ConfigError, match=rf"generation_config\.json recommends .*{name}"):
        await AsyncEngine(config_of(path)).start()


def test_a_model_that_is_fetched_by_name_has_a_recommendation() -> None:
    recommended = SamplingDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.1)
    assert DOWNLOADS["smollm2"].sampling == recommended


async def test_requests_that_state_nothing_are_sampled_as_the_model_recommends(
    tmp_path: Path,
) -> None:
    path = recommending(tmp_path / "m", top_k=1, max_new_tokens=5)  # the likeliest token alone
    async with running(config_of(path)) as server:
        greedy = (await server.complete(temperature=0, max_tokens=5, ignore_eos=True)).json()
        for _ in range(3):
            same = (await server.complete(max_tokens=5, ignore_eos=True)).json()
            assert same["choices"][0]["text"] == greedy["choices"][0]["text"]
        chats = {
            "/v1/chat/completions": {"messages": MESSAGES, "ignore_eos": True},
            "/v1/responses": {"input": "Hello"},
        }
        for route, body in chats.items():
            answer = await server.request("POST", route, json=body)
            usage = answer.json()["usage"]
            assert usage.get("completion_tokens", usage.get("output_tokens")) <= 5
        (card,) = (await server.get("/v1/models")).json()["data"]
        stated = {name: value for name, value in card["sampling"].items() if value is not None}
        assert stated == {"top_k": 1, "max_tokens": 5}


async def test_what_a_request_states_wins(tmp_path: Path) -> None:
    path = recommending(tmp_path / "m", top_k=1, max_new_tokens=5)
    async with running(config_of(path)) as server:
        fields = {"ignore_eos": True, "max_tokens": 12, "top_k": 0}
        texts = {
            (await server.complete(**fields, seed=seed)).json()["choices"][0]["text"]
            for seed in range(4)
        }
        assert len(texts) > 1
        body = {"messages": MESSAGES, "ignore_eos": True, "min_tokens": 9, "max_tokens": 9}
        chat = await server.request("POST", "/v1/chat/completions", json=body)
        assert chat.json()["usage"]["completion_tokens"] == 9
        body = {"messages": MESSAGES, "min_tokens": 9}  # more than is recommended
        chat = await server.request("POST", "/v1/chat/completions", json=body)
        assert chat.json()["usage"]["completion_tokens"] >= 9
        async with AsyncClient(server.url) as client:
            params = SamplingParams(max_tokens=12, ignore_eos=True)  # with every token possible
            texts = set()
            for _ in range(4):
                outputs = [output async for output in client.generate("Hello", params)]
                texts.add("".join(output.text for output in outputs))
            assert len(texts) > 1


async def test_a_chat_without_a_limit_ends(tmp_path: Path) -> None:
    path = recommending(tmp_path / "m")
    async with running(config_of(path, chat_tokens=7)) as server:
        body = {"messages": MESSAGES, "ignore_eos": True}
        chat = (await server.request("POST", "/v1/chat/completions", json=body)).json()
        assert chat["usage"]["completion_tokens"] == 7
        assert chat["choices"][0]["finish_reason"] == "length"


async def test_an_engine_without_parameters_samples_as_the_model_recommends(
    tmp_path: Path,
) -> None:
    path = recommending(tmp_path / "m", max_new_tokens=3, top_k=1)
    async with AsyncEngine(config_of(path)) as engine:
        outputs = [output async for output in engine.generate("Hello")]
        assert outputs[-1].num_output_tokens <= 3
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        outputs = [output async for output in engine.generate("Hello", params)]
        assert outputs[-1].num_output_tokens == 6


@pytest.mark.parametrize(
    ("chat_tokens", "is_said"), [(64, True), (None, False), (1_000_000, False)]
)
async def test_a_limit_that_cuts_replies_is_said_at_the_start(
    chat_tokens: int | None, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with AsyncEngine(config_of(EMBEDDED, chat_tokens=chat_tokens)) as engine:
        say_chat_limit(engine)
    said = "replies of chats that state no limit end after 64 tokens" in caplog.text
    assert said is is_said
