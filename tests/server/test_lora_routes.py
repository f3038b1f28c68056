"""Adapters over HTTP: models by name, loaded and unloaded by vLLM's routes."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import aioserve
from aioserve import AsyncEngine, EngineConfig
from aioserve.cli.main import main
from aioserve.config import AdapterConfig, CacheConfig, ModelConfig, RunnerConfig, ServerConfig
from aioserve.server.app import listening
from aioserve.server.sockets import bind
from tests.adapters import make_adapter
from tests.models import make_model

on_uvloop = pytest.mark.asyncio(loop_factories=["uvloop"])

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PROMPT = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model("llama", tmp_path_factory.mktemp("served") / "base", vocab_size=2048)
    for name in TOKENIZER_FILES:
        shutil.copy(Path(aioserve.__file__).parent / "model_source" / "embedded" / name, path)
    return path


@pytest.fixture(scope="module")
def paths(base: Path) -> dict[str, Path]:
    return {name: make_adapter(base, base.parent / name, seed=ord(name)) for name in "ab"}


@asynccontextmanager
async def serving(
    base: Path, lora: dict[str, Path], *, enable_admin: bool = True
) -> AsyncIterator["Client"]:
    config = EngineConfig(
        model=ModelConfig(model=str(base), served_model_name="base", dtype="float32"),
        cache=CacheConfig(num_kv_blocks=128),
        adapters=AdapterConfig(lora=tuple(f"{name}={path}" for name, path in lora.items())),
        runner=RunnerConfig(threads=1),
        server=ServerConfig(enable_admin=enable_admin),
    )
    async with (
        AsyncEngine(config) as engine,
        listening(engine, bind("127.0.0.1", 0)) as url,
        aiohttp.ClientSession(url) as session,
    ):
        yield Client(session)


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._session.post(path, json=body) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(path) as response:
            text = await response.text()
            return response.status, json.loads(text) if path != "/metrics" else text

    async def tokens(self, model: str) -> list[int]:
        status, body = await self.post("/v1/completions", {"model": model, **PROMPT})
        assert status == 200, body
        assert body["model"] == model
        ids: list[int] = body["choices"][0]["token_ids"]
        return ids


@on_uvloop
async def test_every_route_takes_an_adapter_as_its_model(
    base: Path, paths: dict[str, Path]
) -> None:
    messages = [{"role": "user", "content": "Who's there?"}]
    routes: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 5, "temperature": 0},
        "/v1/responses": {"input": "Who's there?", "max_output_tokens": 5, "temperature": 0},
        "/v1/messages": {"messages": messages, "max_tokens": 5, "temperature": 0},
        "/v1/embeddings": {"input": "Who's there?"},
    }
    async with serving(base, paths) as client:
        found = [await client.tokens(model) for model in ("base", "a", "b")]
        assert len({tuple(tokens) for tokens in found}) == 3
        for path, body in routes.items():
            said = {}
            for model in ("base", "a", "b"):
                status, answer = await client.post(path, {"model": model, **body})
                assert status == 200, answer
                assert answer["model"] == model
                parts = ("choices", "output", "content", "data")
                [part] = [answer[name] for name in parts if name in answer]
                for entry in part:
                    entry.pop("id", None)
                said[model] = json.dumps(part)
            assert len(set(said.values())) == 3, path
            status, answer = await client.post(path, {"model": "c", **body})
            assert status == 404
        _, models = await client.get("/v1/models")
        cards = {card["id"]: (card["root"], card["parent"]) for card in models["data"]}
        assert cards == {
            "base": (str(base), None),
            "a": (str(paths["a"]), "base"),
            "b": (str(paths["b"]), "base"),
        }
        assert (await client.get("/v1/models/a"))[1]["parent"] == "base"
        assert (await client.get("/v1/models/c"))[0] == 404


@on_uvloop
async def test_adapters_come_and_go_by_vllms_routes(base: Path, paths: dict[str, Path]) -> None:
    async with serving(base, {"a": paths["a"]}) as client:
        load = {"lora_name": "new", "lora_path": str(paths["b"])}
        assert await client.post("/v1/load_lora_adapter", load) == (
            200,
            "Success: LoRA adapter 'new' added successfully.",
        )
        tokens = await client.tokens("new")
        document = (await client.get("/openapi.json"))[1]
        body = document["components"]["schemas"]["CompletionRequest"]["properties"]
        assert body["model"]["enum"] == ["base", "a", "new", None]
        assert "408" in document["paths"]["/v1/responses"]["post"]["responses"]  # for an adapter
        assert tokens != await client.tokens("a")
        for body, status, code, why in (
            (load, 400, None, "is in use"),
            (load | {"lora_name": "base"}, 400, None, "the model's own"),
            (load | {"lora_name": ""}, 400, None, "needs a name"),
            (load | {"lora_name": "x", "lora_path": "/nowhere"}, 404, "adapter_not_found", "no ad"),
            (load | {"load_inplace": True}, 400, None, "unload_lora_adapter first"),
            (load | {"lora_path": "a\0b"}, 400, None, "NUL"),
            ({"lora_name": "x"}, 400, None, "lora_path"),
        ):
            found, answer = await client.post("/v1/load_lora_adapter", body)
            assert (found, answer["error"]["code"]) == (status, code), answer
            assert why in answer["error"]["message"]
        assert await client.tokens("new") == tokens
        of_new = 'aioserve_requests_by_adapter_total{adapter="new"} 2.0'
        assert of_new in (await client.get("/metrics"))[1]
        assert await client.post("/v1/unload_lora_adapter", {"lora_name": "new"}) == (
            200,
            "Success: LoRA adapter 'new' removed successfully.",
        )
        for path, body in (
            ("/v1/unload_lora_adapter", {"lora_name": "new"}),
            ("/v1/completions", {"model": "new", **PROMPT}),
        ):
            status, answer = await client.post(path, body)
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
        _, metrics = await client.get("/metrics")
        assert 'adapter="new"' not in metrics
        assert "aioserve_adapters_resident 1.0" in metrics
        assert "aioserve_adapter_loads_total 2.0" in metrics


@on_uvloop
async def test_without_admin_routes_nobody_can_load(base: Path, paths: dict[str, Path]) -> None:
    async with serving(base, {}, enable_admin=False) as client:
        body = {"lora_name": "x", "lora_path": str(paths["a"])}
        status, _ = await client.post("/v1/load_lora_adapter", body)
        assert status == 404


def test_a_bad_adapter_is_one_line_at_the_start(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    model = ["--model", str(base), "--port", "0"]
    for lora, why in (
        (["--lora", "nothing"], "adapters.lora must be NAME=PATH, got 'nothing'"),
        (["--lora", f"x={tmp_path}"], "use_dora is set: such adapters are not served"),
        (["--lora", "x=/nowhere"], "no adapter_config.json in adapter /nowhere"),
        (["--lora", f"x={tmp_path}", "--runner", "simulated"], "no model is run"),
    ):
        assert main([*model, *lora]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("aioserve: error: ")
        assert why in error
