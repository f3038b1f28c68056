"""A server around OpenVINO GenAI's continuous batching, for `peers.py`: completions alone.

    .venv/peers/openvino/bin/python benchmarks/openvino_server.py model.gguf --port 8000
    .venv/peers/openvino/bin/python benchmarks/openvino_server.py model.gguf --threads 1 --costs

Runs in an environment of its own, which has `openvino-genai` and `aiohttp`. Prompts are token ids,
and the text of a token is its number: nothing is detokenized, which is to this server's advantage.
One thread adds requests and computes steps, and tells the event loop of the tokens of each.
`--costs` serves nothing: it prints the least processor time of steps, whatever else runs.
"""

import argparse
import asyncio
import itertools
import json
import queue
import random
import threading
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from aiohttp import web

SEATS, STEP_TOKENS, CACHE_GIB = 64, 2048, 2


class Worker(threading.Thread):
    """Generates on a thread that owns OpenVINO's pipeline."""

    def __init__(self, model: str, threads: int) -> None:
        super().__init__(daemon=True)
        config = openvino_genai.SchedulerConfig()
        config.cache_size, config.max_num_seqs = CACHE_GIB, SEATS
        config.max_num_batched_tokens, config.enable_prefix_caching = STEP_TOKENS, True
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self._asked: queue.SimpleQueue[tuple[list[int], int, Any]] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._handles: list[tuple[Any, Any]] = []  # a handle, and what to tell of its tokens

    def ask(self, prompt: list[int], num_tokens: int, tell: Any) -> None:
        """Compute a request; this thread calls `tell` with new tokens, and at the end with None."""
        self._asked.put((prompt, num_tokens, tell))

    def run(self) -> None:
        while True:
            if not self._handles:
                self._add(*self._asked.get())
            while not self._asked.empty():
                self._add(*self._asked.get())
            self._step()

    def _step(self) -> None:
        self._pipeline.step()
        self._handles = [entry for entry in self._handles if self._read(*entry)]

    def costs(self, streams: int, num_tokens: int) -> list[float]:
        """Return the processor seconds of the steps that serve all of `streams` random prompts."""
        for _ in range(streams):
            self._add([random.randrange(16, 49000) for _ in range(num_tokens)], 16, lambda _: None)
        found = []
        while self._handles:
            began, count = time.process_time(), len(self._handles)
            self._step()
            if count == streams:
                found.append(time.process_time() - began)
        return found

    def _add(self, prompt: list[int], num_tokens: int, tell: Any) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handle = self._pipeline.add_request(next(self._ids), ids, config)
        self._handles.append((handle, tell))

    def _read(self, handle: Any, tell: Any) -> bool:
        """Tell of what is new; whether more will come."""
        while handle.can_read():
            for output in handle.read().values():
                tell(list(output.generated_ids))
        is_running = handle.get_status() == openvino_genai.GenerationStatus.RUNNING
        if not is_running:
            tell(None)
        return bool(is_running)


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions with a stream of server-sent events."""
    body = await request.json()
    tokens: asyncio.Queue[list[int] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(new: list[int] | None) -> None:
        loop.call_soon_threadsafe(tokens.put_nowait, new)

    worker: Worker = request.app["worker"]
    worker.ask(body["prompt"], body["max_tokens"], tell)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    count = 0
    while (new := await tokens.get()) is not None:
        count += len(new)
        text = "".join(f" {token}" for token in new)
        await _send(response, {"choices": [{"index": 0, "text": text}]})
    end = {"index": 0, "text": "", "finish_reason": "length"}
    await _send(response, {"choices": [end]})
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    await _send(response, {"choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")
    return response


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


async def models(request: web.Request) -> web.Response:
    """Answer GET /v1/models with the one model that is served."""
    return web.json_response({"data": [{"id": request.app["name"]}]})


async def health(request: web.Request) -> web.Response:
    """GET /health: it listens once the model is loaded."""
    del request
    return web.Response()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--costs", action="store_true")
    args = parser.parse_args()
    if args.costs:
        worker = Worker(args.model, args.threads)
        prompts = [worker.costs(1, 2048)[0] for _ in range(3)]
        print(f"prompt of 2,048: {min(prompts):.2f} s")
        print(f"16 decodes at 512: {1e3 * min(worker.costs(16, 512)):.1f} ms")
        return
    app = web.Application()
    app["name"], app["worker"] = args.model, Worker(args.model, args.threads)
    app["worker"].start()
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    app.add_routes([web.get("/health", health)])
    web.run_app(app, host="127.0.0.1", port=args.port, print=lambda *_: None)


if __name__ == "__main__":
    main()
