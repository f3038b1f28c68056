"""A real local Ray with replicas on this machine. For `make test-dist`."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from aioserve import AsyncEngine, EngineConfig, MultimodalPrompt, SamplingParams
from aioserve.errors import ConfigError
from aioserve.fleet.ray import build_app
from tests.multimodal.pictures import data_url, encoded
from tests.processes import COMPUTING_SECONDS, JSON
from tests.seeing_models import make_seeing_model, picture

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="pip install 'ray[serve]'")
    from ray import serve

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

PROMPT = "What news, my lord? " * 12  # several KV blocks
REAL = {"model.dtype": "float32", "cache.num_kv_blocks": 512}
SLOW = {  # a stream takes some seconds: something can happen meanwhile
    "runner.runner": "simulated",
    "runner.step_base_ms": 50.0,
    "runner.simulated_output_tokens": 60,
}
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A Ray of our own, and where its proxy listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest_asyncio.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        url,
        timeout=aiohttp.ClientTimeout(COMPUTING_SECONDS),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        yield session


def deploy(*models: dict[str, Any]) -> None:
    """Run these, each on a tenth of a CPU, in the place of what ran before."""
    cpu = {"num_cpus": 0.1}
    models = tuple({"ray_actor_options": cpu} | model for model in models)
    app = build_app({"models": models, "ingress_actor_options": cpu})
    serve.run(app, name="aioserve", route_prefix="/")


def replicas() -> list[psutil.Process]:
    """The processes of the engines, of this Ray alone: another may run beside it."""
    return processes("engine")


def processes(deployment: str) -> list[psutil.Process]:
    """Those of all deployments whose names begin so."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if name_of(process).startswith(f"ray::ServeReplica:aioserve:{deployment}")
    ]


def name_of(process: psutil.Process) -> str:
    """What a process calls itself; empty for one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "".join(process.cmdline()[:1])
    return ""


async def complete(http: aiohttp.ClientSession, **body: Any) -> dict[str, Any]:
    """The answer to a whole completion."""
    async with http.post("/v1/completions", json={"model": "embedded", **body}) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


class Streamed:
    """A streamed completion, read to its end."""

    def __init__(self, http: aiohttp.ClientSession, prompt: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.is_done = False
        self.has_begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(http, prompt))

    @property
    def error(self) -> dict[str, Any] | None:
        """What the stream ended with, if with an error."""
        error: dict[str, Any] | None = self.events[-1].get("error")
        return error

    @property
    def num_tokens(self) -> int:
        """That came."""
        return sum(len(e["choices"][0]["token_ids"]) for e in self.events if "choices" in e)

    async def _read(self, http: aiohttp.ClientSession, prompt: str) -> None:
        body = {
            "model": "embedded",
            "prompt": prompt,
            "stream": True,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line == b"data: [DONE]\n":
                    self.is_done = True
                elif line.startswith(b"data: "):
                    self.events.append(json.loads(line[6:]))
                    self.has_begun.set()


def test_replicas_that_fit_nowhere_are_told_in_a_line(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    build_app({"models": [{"ray_actor_options": {"num_cpus": 1000, "resources": {"card": 1}}}]})
    with pytest.raises(ConfigError, match=r"the deployment of 'embedded' cannot be: .*num_cpu\b"):
        build_app({"models": [{"ray_actor_options": {"num_cpu": 1}}]})
    lines = [record.message for record in caplog.records if record.name == "aioserve.fleet.ray.app"]
    assert lines[0].startswith(
        "a replica of 'embedded' needs CPU 1000, card 1, and no node of this"
    )
    told = (
        "the ingress and the replicas need CPU 1001, card 1 together, and this cluster has CPU 8:"
    )
    assert lines[1].startswith(told)
    build_app({"models": [{"num_replicas": 7}]})
    assert len(caplog.records) == 2
    with pytest.raises(
        ConfigError, match=r"no model directory or GGUF file at /nope\. It is looked"
    ):
        build_app({"models": [{"settings": {"model.model": "/nope"}}]})


async def test_an_ingress_logs_the_ends_of_requests_into_the_files_of_serve(
    http: aiohttp.ClientSession,
) -> None:
    deploy({"settings": {"runner.runner": "simulated"}})
    await complete(http, prompt=PROMPT, max_tokens=2)
    (ingress,) = processes("Ingress")

    def said() -> str:
        paths = [Path(file.path) for file in ingress.open_files() if "/serve/" in file.path]
        return "".join(path.read_text() for path in paths)

    async with asyncio.timeout(COMPUTING_SECONDS):
        while " finish=length" not in said():  # a thread writes it  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert "prompt=" in said().partition(" finish=length")[0].splitlines()[-1]


async def test_texts_and_refusals_are_those_of_one_engine(http: aiohttp.ClientSession) -> None:
    deploy({"num_replicas": 2, "settings": REAL})
    asked = [
        SamplingParams(max_tokens=12, temperature=0, logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.9, seed=7, n=2),
        SamplingParams(max_tokens=40, temperature=0, stop=("lord",)),
    ]
    async with AsyncEngine(EngineConfig.load(None, list(REAL.items()))) as engine:
        for params in asked:
            texts = {i: "" for i in range(params.n)}
            async for output in engine.generate(PROMPT, params):
                texts[output.index] += output.text
            body: dict[str, Any] = {
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "n": params.n,
            }
            if params.seed is not None:
                body["seed"] = params.seed
            if params.stop:
                body["stop"] = list(params.stop)
            for _ in range(3):  # whichever replica it is, and whether or not it knows the prompt
                answer = await complete(http, prompt=PROMPT, **body)
                assert [c["text"] for c in answer["choices"]] == list(texts.values())

    async with http.post("/v1/completions", json={"prompt": PROMPT, "top_p": 7}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "top_p"
    async with http.post("/v1/completions", json={"prompt": PROMPT, "model": "no"}) as response:
        assert response.status == 404
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": schema}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400, await response.text()  # it was the replica that refused
    vector = {"input": "What news?", "model": "embedded"}
    async with http.post("/v1/embeddings", json=vector) as response:
        assert len((await response.json())["data"][0]["embedding"]) > 0

    handle = serve.get_deployment_handle("engine-embedded", "aioserve").options(stream=True)
    outputs = handle.generate.remote(PROMPT, SamplingParams(max_tokens=5, temperature=0))
    tokens = [token async for output in outputs for token in output.token_ids]
    assert len(tokens) == 5


async def test_a_replica_is_shown_the_images_that_the_ingress_has_prepared(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    path = make_seeing_model("idefics3", tmp_path / "seeing")
    settings = REAL | {"model.model": str(path), "model.served_model_name": "seer"}
    deploy({"num_replicas": 2, "settings": settings})
    image, said = picture(0, 60, 40), {"type": "text", "text": "What is it?"}
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    shown = MultimodalPrompt([{"role": "user", "content": [said, {"type": "image"}]}], [image])
    async with AsyncEngine(EngineConfig.load(None, list(settings.items()))) as engine:
        text = "".join([output.text async for output in engine.generate(shown, params)])
    url = {"url": data_url(encoded(image))}
    body = {
        "messages": [{"role": "user", "content": [said, {"type": "image_url", "image_url": url}]}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    for _ in range(3):
        async with http.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert answer["choices"][0]["message"]["content"] == text
    url["url"] = data_url(b"none")
    async with http.post("/v1/chat/completions", json=body) as response:
        error = (await response.json())["error"]
    assert error["param"] == "messages[0].content[1].image_url.url"


async def test_a_conversation_goes_on_where_its_prefix_is(http: aiohttp.ClientSession) -> None:
    deploy({"num_replicas": 2, "settings": REAL | {"cache.num_kv_blocks": 2048}})
    prompts = [f"{i} of the clock. {PROMPT}" for i in range(24)]
    first = await asyncio.gather(*[complete(http, prompt=p, max_tokens=4) for p in prompts])
    assert not any(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in first)
    await asyncio.sleep(2)  # what the router knows is as old as a message
    again = [await complete(http, prompt=p + " And then?", max_tokens=4) for p in prompts]
    hits = sum(a["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for a in again)
    assert hits >= 20  # by chance: once in a thousand times


async def test_a_router_of_a_file_refuses_lets_wait_and_hears_what_replicas_report(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from aioserve.fleet.routing import BaseRouter, Refuse, RouterOptions, Wait\n"
        "class Mine(BaseRouter):\n"
        "    uses_reports = True\n"
        "    class Options(RouterOptions):\n"
        "        seconds: float\n"
        "    def choose(self, request, replicas):\n"
        "        if request.user == 'refused' or not request.num_tokens:\n"
        "            return Refuse('not today', 7.0)\n"  # also what asks how a replica is
        "        if request.user == 'late':\n"
        "            return Wait(self.options.seconds)\n"
        "        if request.user == 'broken':\n"
        "            return None\n"
        "        busy = [replica for replica in replicas if replica.num_running]\n"
        "        if request.user == 'follows':\n"
        "            return busy[0] if busy else Wait(0.05)\n"
        "        return replicas[0]\n"
    )
    options = {"seconds": 0.2}
    deploy(
        {"num_replicas": 2, "settings": SLOW, "router": f"{mine}:Mine", "router_options": options}
    )
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": 3}
    async with http.post("/v1/completions", json=body | {"user": "refused"}) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "7"
        assert "not today" in (await response.json())["error"]["message"]
    late = await complete(http, **body | {"user": "late", "timeout": 1.5})
    assert late["choices"][0]["finish_reason"] == "timeout"
    assert (await complete(http, **body | {"user": "broken"}))["usage"]["completion_tokens"] == 3
    await asyncio.sleep(0.5)  # what the router knows is as old as a message
    follows = asyncio.create_task(complete(http, **body | {"user": "follows"}))
    await asyncio.sleep(1.0)
    assert not follows.done()  # no replica has said that it runs anything
    stream = Streamed(http, PROMPT)
    assert (await follows)["usage"]["completion_tokens"] == 3
    await stream.task
    assert stream.is_done


async def test_what_a_dying_replica_had_not_streamed_is_sent_elsewhere(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """By the router of the tutorial, in the file that its contract and comparisons take."""
    router = tmp_path / "batch_aside.py"
    page = (Path(__file__).parents[2] / "docs/writing-a-router.md").read_text()
    router.write_text(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0])
    deploy({"num_replicas": 2, "settings": SLOW, "router": f"{router}:BatchAside"})
    streams = [Streamed(http, f"{i} {PROMPT}") for i in range(12)]
    for stream in streams:
        await stream.has_begun.wait()
    whole = [
        asyncio.create_task(
            complete(http, prompt=f"{i} {PROMPT}", max_tokens=NUM_TOKENS, ignore_eos=True)
        )
        for i in range(12)
    ]
    await asyncio.sleep(0.5)
    victim = replicas()[0]
    os.kill(victim.pid, signal.SIGKILL)
    for answer in await asyncio.gather(*whole):  # nothing of them was told yet: all are whole
        assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    await asyncio.gather(*[stream.task for stream in streams])
    broken = [stream for stream in streams if stream.error is not None]
    assert 0 < len(broken) < len(streams)
    assert all("replica" in stream.error["message"] for stream in broken if stream.error)
    for stream in streams:
        assert stream.error is not None or (stream.is_done and stream.num_tokens == NUM_TOKENS)
    async with http.get("/metrics") as response:
        text = await response.text()
    [resent] = re.findall(r"aioserve_router_resent_requests_total{.*BatchAside.*} (.*)", text)
    assert float(resent) >= 1
    async with asyncio.timeout(COMPUTING_SECONDS):  # Ray starts another one
        while len([p for p in replicas() if p.pid != victim.pid]) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (await complete(http, prompt=PROMPT, max_tokens=3))["usage"]["completion_tokens"] == 3


async def test_nothing_is_lost_while_replicas_come_and_go(http: aiohttp.ClientSession) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_queued_prompt_tokens": 100.0,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 1.0,
        "look_back_period_s": 10.5,
    }
    settings = SLOW | {"scheduler.max_num_seqs": 4}
    deploy({"autoscaling": scaling, "settings": settings})
    streams: list[Streamed] = []

    async def load_until(num_replicas: int, num_streams: int) -> None:
        async with asyncio.timeout(COMPUTING_SECONDS):
            while len(replicas()) != num_replicas:
                open_streams = [stream for stream in streams if not stream.task.done()]
                for _ in range(num_streams - len(open_streams)):
                    streams.append(Streamed(http, f"{len(streams)} {PROMPT}"))
                await asyncio.sleep(0.2)

    await load_until(1, num_streams=0)  # what ran before has ended
    await load_until(2, num_streams=16)  # four run, the others queue
    await load_until(1, num_streams=1)
    await asyncio.gather(*[stream.task for stream in streams])
    for stream in streams:
        assert stream.error is None
        assert stream.is_done
        assert stream.num_tokens == NUM_TOKENS


async def test_models_have_names_and_a_client_that_leaves_frees_its_replica(
    url: str, http: aiohttp.ClientSession
) -> None:
    other = {"settings": SLOW | {"model.served_model_name": "other"}}
    deploy({"settings": SLOW}, other)
    async with http.get("/v1/models") as response:
        assert [c["id"] for c in (await response.json())["data"]] == ["embedded", "other"]
    assert (await complete(http, model="other", prompt="a", max_tokens=3))["model"] == "other"
    async with http.post("/v1/completions", json={"model": "third", "prompt": "a"}) as response:
        assert response.status == 404

    # What names no model is known to whoever has it.
    async with http.get("/v1/models/other") as response:
        assert (await response.json())["id"] == "other"
    async with http.post("/v1/responses", json={"model": "other", "input": "a"}) as response:
        stored = (await response.json())["id"]
    async with http.get(f"/v1/responses/{stored}") as response:
        assert (await response.json())["id"] == stored
    fields = {"prompt": "a", "max_tokens": NUM_TOKENS, "ignore_eos": True, "request_id": "x"}
    aborted = asyncio.create_task(complete(http, model="other", **fields))
    await asyncio.sleep(0.5)
    async with http.post("/v1/abort", json={"request_id": "x"}) as response:
        assert response.status == 200
    answer = await aborted
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert 0 < answer["usage"]["completion_tokens"] < NUM_TOKENS
    assert answer["choices"][0]["text"]

    handle = serve.get_deployment_handle("engine-embedded", "aioserve")
    await handle.reconfigure.remote({"policy": "priority"})
    with pytest.raises(ConfigError, match=r"user_config: .*polcy"):
        await handle.reconfigure.remote({"polcy": "priority"})

    for path in ("/livez", "/health", "/ready"):
        async with http.get(path) as response:
            assert response.status == 200
    async with http.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    for name in ("embedded", "other"):
        assert f'aioserve_router_replicas{{model="{name}",router="prefix"}} 1.0' in text
    async with http.post("/v1/completions", data=b"x" * 2**25, headers=JSON) as response:
        assert response.status == 413
    body = {"model": "other", "prompt": "a", "max_tokens": 1}
    for origin, status in ((url, 200), ("https://evil.example", 403)):
        async with http.post("/v1/completions", json=body, headers={"Origin": origin}) as response:
            assert response.status == status

    stream = Streamed(http, PROMPT)
    await stream.has_begun.wait()
    assert (await handle.record_autoscaling_stats.remote())["num_requests"] == 1
    stream.task.cancel()
    async with asyncio.timeout(COMPUTING_SECONDS):
        while (await handle.record_autoscaling_stats.remote())["num_requests"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
