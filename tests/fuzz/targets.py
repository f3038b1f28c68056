"""What reads: a target for each kind of thing that others write."""

import asyncio
import json
import os
import resource
import shutil
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from aioserve.client import AsyncClient
from aioserve.config import (
    AccessConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    ServerConfig,
)
from aioserve.engine import AsyncEngine
from aioserve.engine.chat_template import ChatTemplate
from aioserve.engine.prompt import Conversation
from aioserve.engine.template_process import syntax_error
from aioserve.errors import ConfigError, RequestError
from aioserve.features.grammars import GrammarCompiler
from aioserve.features.kv_connector import BlockDirectory
from aioserve.features.lora.peft_directory import read_adapter, stored_parameters
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.logs import write_trace
from aioserve.lab.simulation.fleet_plan import FleetSpec
from aioserve.lab.what_if import make_workload, read_traffic
from aioserve.lab.workloads.synthetic import read_spec
from aioserve.lab.workloads.traces import read_trace
from aioserve.lab.workloads.workload import Reading
from aioserve.model_source.info import ModelInfo, find_model
from aioserve.params import SamplingParams, StructuredOutputs
from aioserve.runner.step_times import load_profile
from aioserve.server.access.keys import read_keys
from aioserve.server.routes import all_routes
from tests.adapters import make_adapter
from tests.fuzz.bounded import BOUNDED
from tests.fuzz.harness import Target
from tests.gguf_models import write_gguf
from tests.lab.traffic import record
from tests.models import make_model
from tests.processes import PATIENCE
from tests.server.bad_bodies import good_numbers
from tests.server.serving import SIMULATED, running

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "lab" / "workloads" / "traces"
EMBEDDED = find_model(ModelConfig()).path


class Loop:
    """An event loop in a thread, which answers as long as nothing holds it up."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.start(work).result(PATIENCE)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()


def http(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "x",
        "parameters": {"type": "object", "properties": {"hue": {"enum": ["red", "blue"]}}},
        "strict": True,
    },
}
SAMPLING = {
    **good_numbers(),
    **{"stop": ["x"], "stop_token_ids": [3], "logit_bias": {"5": 1}},
    **{"bad_words": ["no"], "allowed_token_ids": [1, 2, 3], "ignore_eos": True},
    **{"priority": 1, "user": "u", "cache_salt": "s", "timeout": 5},
}
#: The example of each route, and bodies with more inside.
BODIES: list[tuple[str, dict[str, Any]]] = [
    *((route.path, dict(route.example)) for route in all_routes() if route.example),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 3, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, **SAMPLING}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stream": True, "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, **SAMPLING, "tools": [TOOL]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "paint"}}]},
                {"role": "tool", "content": "red", "tool_call_id": "c"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            ],
            **{"max_tokens": 2, "tool_choice": "auto", "response_format": {"type": "json_object"}},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 2, "stream": True, "store": True}),
    (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
            **{"instructions": "x", "max_output_tokens": 2, "reasoning": {"effort": "low"}},
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}},
        },
    ),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2, "stream": True, "system": "x"}),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            **{"max_tokens": 2, "stop_sequences": ["x"], "metadata": {"user_id": "u"}},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            **{"tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}},
        },
    ),
    ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
    ("/v1/embeddings", {"input": ["a", [5]], "dimensions": 2, "encoding_format": "base64"}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 9}),
    ("/v1/score", {"query": [5], "items": [[6], [7]], "label_token_ids": [5, 6]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
]


class Bodies(Target):
    """What clients send to a server: heads and bodies, by hand."""

    name = "http"
    words = (
        b"chunked",
        b"Content-Length: 5",
        b"Transfer-Encoding",
        b"X-Request-Timeout: 1",
        b"$ref",
    )
    words += (b"Authorization: Bearer x", b"Connection: close", b"X-Request-Id: \xff", b"Expect")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        _ = ModelInfo(ModelConfig()).hf_config  # imports what takes a busy machine long, unbounded
        self._loop = Loop()
        self._port: Future[int] = Future()
        self._end = asyncio.Event()
        self._served = self._loop.start(self._serve())
        self._address = ("127.0.0.1", self._port.result(PATIENCE))

    async def _serve(self) -> None:
        config = msgspec.structs.replace(
            SIMULATED,
            model=ModelConfig(max_model_len=64),
            server=ServerConfig(port=0),
            access=AccessConfig(),
        )
        async with running(config) as server:
            self._port.set_result(server.port)
            await self._end.wait()
            answer = await server.get("/health")
            assert answer.status == 200, "the server is not well"
            for _ in range(1000):
                gauges = await server.gauges()
                if not any(gauges.values()):
                    break
                await asyncio.sleep(PATIENCE / 1000)
            assert not any(gauges.values()), f"the server has kept {gauges}"

    def seeds(self) -> list[bytes]:
        posts = [http("POST", path, body) for path, body in BODIES]
        # Without streams that end when their reader leaves, and without ids, but for one.
        paths = [r.path for r in all_routes() if r.method == "GET" and not r.events]
        whole = [path for path in paths if "{" not in path]
        gets = [http("GET", path) for path in (*whole, "/v1/responses/x")]
        chunked = (
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        chunked += b'Transfer-Encoding: chunked\r\n\r\nF\r\n{"prompt": "hi"\r\n1\r\n}\r\n0\r\n\r\n'
        return [b"server\n" + data for data in (*posts, *gets, chunked)]

    def read(self, kind: str, data: bytes) -> None:
        with socket.create_connection(self._address, PATIENCE) as client:
            received = bytearray()
            with suppress(ConnectionError):
                client.sendall(data)
                client.settimeout(0.2)
                is_whole = False
                while not is_whole:
                    try:
                        piece = client.recv(2**16)
                    except TimeoutError:  # it waits for more, which does not come
                        client.settimeout(PATIENCE)
                        client.shutdown(socket.SHUT_WR)
                        continue
                    received += piece
                    is_whole = not piece or _is_whole(received)
        for status in _statuses(received):
            if status >= 500 and status not in (501, 503):
                raise AssertionError(f"is answered with {status}: {bytes(received[:300])!r}")

    def close(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._end.set)
        try:
            self._served.result(PATIENCE)
        finally:
            self._loop.close()


def _is_whole(received: bytearray) -> bool:
    """Whether this is one answer, in one of the ways in which the server frames them."""
    head, blank, body = bytes(received).partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    if length.isdigit():
        return bool(blank) and len(body) >= int(length)
    return body.endswith(b"0\r\n\r\n")


def _statuses(received: bytearray) -> list[int]:
    return [
        int(line[9:12])
        for line in bytes(received).split(b"\r\n")
        if line.startswith(b"HTTP/1.") and line[9:12].isdigit()
    ]


CHUNK = {
    **{"id": "r", "created": 1, "model": "m", "object": "text_completion"},
    "choices": [
        {
            **{"index": 0, "text": "x", "token_ids": [5], "finish_reason": None},
            "logprobs": {
                **{"tokens": ["x"], "token_logprobs": [-1.0], "text_offset": [0]},
                "top_logprobs": [{"x": -1.0}],
            },
            "prompt_logprobs": [None, {"5": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}],
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
LAST = {
    **CHUNK,
    "choices": [{"index": 0, "text": "y", "token_ids": [6], "finish_reason": "length"}],
}
CHAT = {
    **{"id": "r", "created": 1, "model": "m", "object": "chat.completion.chunk"},
    "choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [5], "finish_reason": None}],
}
MODELS = {
    "object": "list",
    "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x", "max_model_len": 5}],
}
CHANGE = {"before": {"policy": "fcfs", "options": {}}, "after": {"policy": "fair", "options": {}}}


def _events(*events: Any) -> bytes:
    lines = [b"data: " + json.dumps(event).encode() for event in events]
    return b"\n\n".join([*lines, b"data: [DONE]", b""])


class Client(Target):
    """What a server, or something in its place, answers to our client."""

    name = "client"
    words = (b"data: ", b"\n\n", b"data: [DONE]", b"event: x\n", b": ping\n\n", b'{"error"')

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._runner = asyncio.Runner()
        self._answer = b""
        self._port = self._runner.run(self._listen())
        self._clients: dict[str, AsyncClient] = {}

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            await reader.readexactly(int(length or 0))
            writer.write(self._answer)
            await writer.drain()
        writer.close()

    def seeds(self) -> list[bytes]:
        def answer(body: bytes, kind: str = "application/json", status: int = 200) -> bytes:
            head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n"
            return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

        stream = "text/event-stream"
        error = {"error": {"message": "m", "type": "invalid_request_error", "param": "x"}}
        endless = f"HTTP/1.1 200 OK\r\nContent-Type: {stream}\r\n\r\n".encode()
        done = {**CHUNK, "choices": CHUNK["choices"] + LAST["choices"]}  # type: ignore[operator]
        return [
            b"generate\n" + answer(_events(CHUNK, LAST), stream),
            b"generate\n" + endless + _events(CHUNK, LAST),
            b"generate\n" + answer(_events(error), stream),
            b"chat\n" + answer(_events(CHAT, CHAT), stream),
            b"whole\n" + answer(json.dumps(done).encode()),
            b"models\n" + answer(json.dumps(MODELS).encode()),
            b"health\n" + answer(json.dumps({"status": "ready"}).encode()),
            b"policy\n" + answer(json.dumps(CHANGE).encode()),
            b"models\n" + answer(json.dumps(error).encode(), status=400),
            b"health\n" + answer(json.dumps(error).encode(), status=503),
            b"generate\nHTTP/1.1 429 X\r\nRetry-After: 5\r\nContent-Length: 2\r\n\r\n{}",
        ]

    def read(self, kind: str, data: bytes) -> None:
        self._answer = data
        self._runner.run(self._ask(kind))

    async def _ask(self, kind: str) -> None:
        url = f"http://127.0.0.1:{self._port}"
        params = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1)
        async with AsyncClient(url, timeout=PATIENCE) as client:
            if kind == "generate":
                [_ async for _ in client.generate("x", params)]
            elif kind == "chat":
                [_ async for _ in client.chat(MESSAGES, params)]
            elif kind == "whole":
                whole = msgspec.structs.replace(params, output_kind="final_only")
                [_ async for _ in client.generate("x", whole)]
            elif kind == "models":
                await client.models()
            elif kind == "health":
                await client.health()
            else:
                await client.switch_policy("fair")

    def close(self) -> None:
        self._server.close()
        self._runner.close()


class Settings(Target):
    """Files of settings, in YAML, and of keys."""

    name = "configs"
    words = (b"&a ", b"*a", b"<<: ", b"!!python/object/apply:os.system [id]", b"? ", b"- ", b": ")
    words += (b"2001-99-99", b"1_000", b"0o9", b".inf", b"x.py:Y", b"!!timestamp x", b"!!binary x")

    def seeds(self) -> list[bytes]:
        found = [
            (kind, path.read_bytes())
            for kind, pattern in (
                ("engine", "configs/*.yaml"),
                ("workload", "configs/workloads/*.yaml"),
                ("fleet", "configs/fleets/*.yaml"),
                ("profile", "aioserve/runner/profiles/*.yaml"),
            )
            for path in sorted(ROOT.glob(pattern))
        ]
        keys = {"keys": [{"name": "a", "key": "x" * 20, "admin": True, "max_requests": 2}]}
        found.append(("keys", json.dumps(keys).encode()))
        found.append(("lines", b"# ours\nsk-0123456789abcdef\n\nsk-fedcba9876543210\n"))
        return [kind.encode() + b"\n" + data for kind, data in found]

    def read(self, kind: str, data: bytes) -> None:
        path = self.folder / ("file.txt" if kind == "lines" else "file.yaml")
        path.write_bytes(data)
        path.chmod(0o600)
        if kind == "engine":
            EngineConfig.load(path).check_effects()
        elif kind == "workload":
            read_spec(path)
        elif kind == "fleet":
            FleetSpec.load(str(path))
        elif kind == "profile":
            load_profile(str(path))
        else:
            read_keys(str(path), {})


class Model(Target):
    """The small files of a model directory, the headers of its weights and their index."""

    name = "models"
    words = (b'"auto_map"', b"quantization_config", b'"text_config": ', b"trust_remote_code")
    words += (b"<|end|>", b'"rope_scaling"', b'"model_type"', b'"__metadata__"', b'"BF16"')
    focus = 6000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}
        self._tiny = make_model("llama", folder / "tiny", vocab_size=32, **small)
        self._case = folder / "case"

    def seeds(self) -> list[bytes]:
        names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
        found = [(name, (EMBEDDED / name).read_bytes()) for name in names]
        config = json.loads(found[0][1])
        code = {"auto_map": {"AutoConfig": "code.X", "AutoModelForCausalLM": "code.X"}}
        found.append(("config.json", json.dumps({**config, **code, "model_type": "own"}).encode()))
        mine = json.loads(found[2][1]) | {"auto_map": {"AutoTokenizer": ["code.X", None]}}
        found.append(("tokenizer_config.json", json.dumps(mine).encode()))
        for method, more in (
            ("gptq", {"bits": 4, "group_size": 32, "checkpoint_format": "gptq"}),
            ("awq", {"bits": 4, "version": "gemm"}),
            ("fp8", {"weight_block_size": [32, 32]}),
            ("compressed-tensors", {"config_groups": {"g": {"weights": {"group_size": 8}}}}),
        ):
            stated = {"quantization_config": {"quant_method": method, **more}}
            found.append(("config.json", json.dumps({**config, **stated}).encode()))
        pooling = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 5}
        found.append(("1_Pooling/config.json", json.dumps(pooling).encode()))
        weights = (self._tiny / "model.safetensors").read_bytes()
        found.append(("model.safetensors", weights))
        length = 8 + struct.unpack("<Q", weights[:8])[0]
        names = json.loads(weights[8:length]).keys() - {"__metadata__"}
        index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(names), "model.safetensors")}
        found.append(("model.safetensors.index.json", json.dumps(index).encode()))
        return [name.encode() + b"\n" + data for name, data in found]

    def read(self, kind: str, data: bytes) -> None:
        shutil.rmtree(self._case, ignore_errors=True)
        self._case.mkdir()
        is_weights = "safetensors" in kind
        for file in (self._tiny if is_weights else EMBEDDED).iterdir():
            (self._case / file.name).symlink_to(file)
        (self._case / "code.py").write_text("class X: pass\n")
        path = self._case / kind
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        info = ModelInfo(ModelConfig(model=str(self._case)))
        if is_weights:
            import torch

            info.source.num_bytes(4)
            info.source.load_module(torch.float32, torch.device("cpu"), "eager")
        elif kind == "tokenizer.json" or kind == "tokenizer_config.json":
            backend = info.tokenizer.backend_tokenizer
            backend.encode_batch_fast(["Hello, ä!"], add_special_tokens=True)
        else:
            with suppress(ConfigError):
                _ = info.sampling_defaults
            with suppress(ConfigError):
                _ = info.stated_pooling, info.matryoshka_dimensions
            with suppress(ConfigError):
                info.source.num_bytes(4)
            _ = info.eos_token_ids, info.max_model_len, info.vocab_size, info.hidden_size
            info.check_positions()


class Starts(Target):
    """The configuration of a model that is loaded and asked for tokens, which it may well give."""

    name = "starts"
    words = (b'"layer_types"', b'"sliding_window"', b'"rope_parameters"', b"qwen2", b"gemma2")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
        for kind in ("llama", "gemma2", "gpt_oss", "mixtral", "qwen3"):
            own = small if kind in ("llama", "qwen3") else {}
            make_model(kind, folder / kind, vocab_size=64, **own)
        self._case = folder / "case"
        self._case.mkdir()
        self._weights = self._case / "model.safetensors"

    def seeds(self) -> list[bytes]:
        found = self.folder.glob("*/config.json")
        return [path.parent.name.encode() + b"\n" + path.read_bytes() for path in sorted(found)]

    def read(self, kind: str, data: bytes) -> None:
        self._weights.unlink(missing_ok=True)
        self._weights.symlink_to(self.folder / kind / "model.safetensors")
        (self._case / "config.json").write_bytes(data)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**33, hard))  # some ask for terabytes
        try:
            asyncio.run(self._serve())
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    async def _serve(self) -> None:
        config = EngineConfig(
            model=ModelConfig(model=str(self._case), skip_tokenizer_init=True, max_model_len=32),
            runner=RunnerConfig(threads=1),
            cache=CacheConfig(num_kv_blocks=16),
        )
        params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
        async with AsyncEngine(config) as engine:
            [_ async for _ in engine.generate([1, 2, 3], params)]


class Gguf(Target):
    """A model in one file."""

    name = "gguf"
    words = (b"llama", b"tokenizer.ggml.tokens", b"general.alignment", b"\xff" * 8, b"\x09\0\0\0")
    focus = 4000

    def seeds(self) -> list[bytes]:
        small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
        model = make_model("llama", self.folder / "made", vocab_size=300, **small)
        whole = write_gguf(model, self.folder / "made.gguf").read_bytes()
        return [b"file\n" + whole, b"facts\n" + whole]

    def read(self, kind: str, data: bytes) -> None:
        path = self.folder / "case.gguf"
        path.write_bytes(data)
        info = ModelInfo(ModelConfig(model=str(path)))
        _ = info.source.stated_sampling, info.source.stated_pooling
        info.source.num_bytes(4)
        if kind == "file":
            _ = info.eos_token_ids, info.vocab_size, info.max_model_len, info.whole_config
            info.tokenizer.encode("Hello")


class Adapter(Target):
    """A PEFT directory."""

    name = "adapters"
    words = (b"lora_A", b"lora_B", b"LORA", b"rank_pattern", b"(((((a+)+)+)+)+$", b"base_layer")
    focus = 2500

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}
        model = make_model("llama", folder / "model", vocab_size=32, **small)
        pattern = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 4}}
        self._good = make_adapter(model, folder / "good", rank=2, **pattern)

    def seeds(self) -> list[bytes]:
        files = ("adapter_config.json", "adapter_model.safetensors")
        return [name.encode() + b"\n" + (self._good / name).read_bytes() for name in files]

    def read(self, kind: str, data: bytes) -> None:
        case = Path(shutil.copytree(self._good, self.folder / "case", dirs_exist_ok=True))
        (case / kind).write_bytes(data)
        stored_parameters(case)
        read_adapter(case)


class Grammars(Target):
    """What texts are bound to."""

    name = "grammars"
    words = (b'"$ref": "#"', b'"pattern": "(a|b)*"', b"{1000}", b"(?=x)", b"[\\s\\S]*", b"\\p{L}")
    words += (b"start: ", b"root ::= ", b"%json {}", b"<[5]>", b'"minItems": 99999', b"$defs", b"|")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._runner = asyncio.Runner()
        self._begin()

    def _begin(self) -> None:
        self._compiler = GrammarCompiler(ModelInfo(ModelConfig()))
        self._runner.run(self._compiler.prepare())

    def seeds(self) -> list[bytes]:
        schema = {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 1, "maximum": 99, "multipleOf": 3},
                "b": {"type": "string", "pattern": "^[a-z]{1,9}$", "maxLength": 5},
                "c": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1},
                "d": {"anyOf": [{"const": 5}, {"enum": ["x", None]}, {"format": "date-time"}]},
            },
            **{"required": ["a"], "additionalProperties": False},
            "$defs": {"x": {"allOf": [{"type": "number"}, {"exclusiveMinimum": 0.5}]}},
        }
        tag = {
            "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
            "triggers": ["<f"],
        }
        found = [
            ("json", json.dumps(schema)),
            ("regex", r"(\d{3}-)?[a-z]+(foo|bar)*\s?\p{Lu}{2,5}"),
            (
                "grammar",
                'start: a | "x" b\na: /[0-9]+/ "," a?\nb: "y" | <[5]> | %json {"type":"null"}',
            ),
            ("grammar", 'root ::= "a" b* | [^x-z]+\nb ::= ("c" | "d")? "e"{1,3} # x\n'),
            ("choice", '["red", "blue"]'),
            ("structural_tag", json.dumps(tag)),
        ]
        return [f"{kind}\n{text}".encode() for kind, text in found]

    def read(self, kind: str, data: bytes) -> None:
        text: Any = data.decode(errors="replace")
        if kind in ("choice", "structural_tag"):
            wanted = msgspec.json.encode({kind: _json(text)})
            try:
                outputs = msgspec.json.decode(wanted, type=StructuredOutputs)
            except msgspec.ValidationError as error:
                raise RequestError(str(error)) from error
        else:
            outputs = StructuredOutputs(**{kind: text})
        try:
            self._runner.run(self._compiler.check(outputs))
        except RequestError as error:
            if " to compile" in str(error):  # it still does
                self._compiler.close()
                self._begin()
            raise
        matcher = self._compiler.matcher(outputs)
        for token in (5, 300, 17):
            matcher.compute_bitmask()
            matcher.try_consume_tokens([token])
        assert not matcher.is_error(), f"breaks while it is read: {matcher.get_error()[:200]}"

    def close(self) -> None:
        self._compiler.close()
        self._runner.close()


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"no JSON: {error}") from error


class _Tokenizer:
    """Of whose like a template is all that is asked."""

    special_tokens_map = {"eos_token": "</s>", "bos_token": "<s>"}  # noqa: RUF012

    def __init__(self) -> None:
        self.chat_template = ""

    def get_chat_template(self, tools: Any = None) -> str:
        return self.chat_template


class Templates(Target):
    """The program that comes with a model, and what clients give it."""

    name = "templates"
    words = (
        b"{% for m in messages %}",
        b"{% endfor %}",
        b"{{ ",
        b" }}",
        b" | tojson",
        b"**",
        b"%}",
    )
    words += (b".__class__", b"|attr('x')", b"range(10**9)", b"'x' * 10**9", b"|batch(10**8)")
    words += (
        b"namespace(",
        b"{% set ",
        b"loop.",
        b"cycler.__init__.__globals__",
        b"{% macro f() %}",
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._tokenizer = _Tokenizer()
        self._template = ChatTemplate(self._tokenizer, seconds=0.3)

    def seeds(self) -> list[bytes]:
        from tests.engine.test_chat_template import QWEN

        good = (EMBEDDED / "chat_template.jinja").read_bytes()
        given = {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "content": "x", "reasoning_content": "y"},
            ],
            **{"tools": [TOOL], "template_kwargs": {"enable_thinking": True}},
            **{"add_generation_prompt": False, "reasoning_effort": "low"},
        }
        return [
            b"source\n" + good,
            b"source\n" + QWEN.encode(),
            b"given\n" + json.dumps(given).encode(),
        ]

    def read(self, kind: str, data: bytes) -> None:
        text = data.decode(errors="replace")
        if kind == "source":
            what = syntax_error(text)
            assert what is None or what.splitlines() == [what]
            self._tokenizer.chat_template = text
            conversation = Conversation(MESSAGES, [TOOL])
        else:
            self._tokenizer.chat_template = "{{ messages }}{{ tools }}{{ enable_thinking }}"
            try:
                conversation = msgspec.convert(_json(text), Conversation)
            except msgspec.ValidationError as error:
                raise RequestError(str(error)) from error
            for message in conversation.messages:  # the door has looked
                if not isinstance(message.get("content", 5), str | None) or "tool_calls" in message:
                    return
        with suppress(RequestError):
            self._template.render(conversation)
        self._template.render(Conversation(MESSAGES))

    def close(self) -> None:
        self._template.close()


class Logs(Target):
    """What servers, and others, have written of requests and decisions."""

    name = "logs"
    words = (b'"input_length"', b"\x82\xa4", b"\xdd\xff\xff\xff\xff", b"\xc1", b"2023-11-16 18:15")

    def seeds(self) -> list[bytes]:
        path = self.folder / "made"
        record(path, policy="fcfs")
        whole = path.read_bytes()
        log = DecisionLog(path)
        first = b"".join(frame for _, frame in log._frames())[:6000]
        line = {"arrival": 0.5, "prompt_tokens": 5, "output_tokens": 3, "user": "u", "priority": 1}
        cool = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
        rows = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,4808,10\n"
        found = [
            ("decisions", whole[:4000]),
            ("records", first),
            ("frames", zlib.compress(first)),
            ("requests.jsonl", json.dumps(line).encode() + b"\n" + json.dumps(line).encode()),
            ("mooncake.jsonl", json.dumps(cool).encode()),
            ("azure.csv", rows),
            *((path.name, path.read_bytes()) for path in sorted(TRACES.iterdir())),
        ]
        return [name.encode() + b"\n" + data for name, data in found]

    def read(self, kind: str, data: bytes) -> None:
        if kind not in ("decisions", "records", "frames"):
            path = self.folder / kind
            path.write_bytes(data)
            with suppress(ConfigError):
                _ = read_trace(path, 0, 2.0, Reading(tokenizer="4", think=1.0)).duration
            with suppress(ConfigError):
                columns = (("arrival", "time"), ("prompt", "in"), ("output", "usage.out"))
                _ = read_trace(path, 0, None, Reading(columns=columns)).duration
            _ = read_trace(path).duration
            return
        path = self.folder / "decisions"
        if kind != "decisions":  # frames whose checksums fit whatever is in them
            packed = zlib.compress(data) if kind == "records" else data
            head = struct.pack("<II", len(packed), zlib.crc32(packed))
            data = (self.folder / "made").read_bytes().partition(b"\n")[0] + b"\n" + head + packed
        path.write_bytes(data)
        log = DecisionLog(path)
        write_trace(log, BytesIO())
        make_workload(read_traffic(log), str(path))


SIZE = 64
BLOCK = bytes(range(SIZE))
KEY = bytes(16)


class Blocks(Target):
    """A directory of KV blocks that others may have written."""

    name = "blocks"
    words = (b"aioserve kv 1\n", KEY, BLOCK)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._runner = asyncio.Runner()
        self._memory = bytearray(SIZE * 2)

    def seeds(self) -> list[bytes]:
        self._runner.run(self._write())
        found = [path for path in (self.folder / "kv").rglob("*") if path.is_file()]
        seeds = [
            f"{path.relative_to(self.folder / 'kv')}\n".encode() + path.read_bytes()
            for path in found
        ]
        shutil.rmtree(self.folder / "kv")
        return seeds

    def _open(self) -> BlockDirectory:
        return BlockDirectory(
            self.folder / "kv",
            {"model": "a"},
            SIZE,
            lambda slot: memoryview(self._memory)[slot * SIZE : (slot + 1) * SIZE],
            max_bytes=1 << 20,
        )

    async def _done(self, begin: Callable[[Callable[..., None]], None]) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        begin(lambda *found: done.set_result(found))
        return await done

    async def _write(self) -> None:
        store = self._open()
        self._memory[:SIZE] = BLOCK
        await self._done(lambda then: store.write([KEY], [0], then))
        await store.close()

    def read(self, kind: str, data: bytes) -> None:
        self._runner.run(self._read(kind, data))

    async def _read(self, kind: str, data: bytes) -> None:
        path = self.folder / "kv" / kind
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.folder / "kv", 0o700)
        path.write_bytes(data)
        store = self._open()
        try:
            self._memory[:] = bytes(SIZE * 2)
            (num_read,) = await self._done(lambda then: store.read([KEY], [1], then))
            assert not num_read or self._memory[SIZE:] == BLOCK, "believes what is no block"
            self._memory[:SIZE] = BLOCK
            await self._done(lambda then: store.write([KEY], [0], then))
            (num_read,) = await self._done(lambda then: store.read([KEY], [1], then))
            assert num_read == 1, "has no good block after it was written"
            assert self._memory[SIZE:] == BLOCK
        finally:
            await store.close()
            shutil.rmtree(self.folder / "kv", ignore_errors=True)

    def close(self) -> None:
        self._runner.close()


TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        *(
            Bodies,
            Client,
            Settings,
            Model,
            Starts,
            Gguf,
            Adapter,
            Grammars,
            Templates,
            Logs,
            Blocks,
            *BOUNDED,
        ),
    )
}
