"""Everything mixed against one server for twenty minutes: is what was taken given back?

    python benchmarks/soak.py [--seconds 1200] [--plot docs/soak.svg] [-- MORE FLAGS OF IT]
    python benchmarks/soak.py -- --speculative-method ngram --api-workers 2     # drafts, workers

The embedded model in float32 with few KV blocks and two adapters, so that requests are preempted
and refused. Clients stream, leave, ask for schemas, tools, choices, vectors, adapters, send batches
and cancel some, send what is no body, close half of their connection or reset it; an operator
switches policies, pauses, puts the server to sleep and empties its cache. Each answer is checked,
and greedy ones must have the tokens that they had when the server was idle. After each round all is
quiet, and the server is looked at: resident memory, what tracemalloc counts, tasks of the event
loop, KV blocks in use; descriptors and threads, with those of the processes that it has started,
such as API workers. The first quarter is warm-up. The last line is JSON.
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
from harness import Args, Opt, Panel, Program, draw, process, told_of
from make_model import EMBEDDED, make_adapter

PATIENCE = 60.0  # seconds after which a request counts as unanswered
POLICIES = [
    *("fcfs", "priority", "chunked_prefill", "hrrn", "fair"),
    *("deadline", "latency_budget", "mlfq", "prefix_aged"),
    "aioserve.apis.batches.policy:OfflineScheduler",
]
TEXT = "what news my lord of the king and his brother who is there in this cold night"
WORDS = TEXT.split()
CACHED_GRAMMARS = 260  # the server keeps fewer: what is kept is there from the beginning
# What counts as flat from the end of the warm-up to the end of the run. Pools of threads, one in
# each process, grow to a few threads, with the most calls that ever came at once.
MOST_RESIDENT_MIB, MOST_TRACED_KIB, MOST_THREADS = 16.0, 512.0, 8
ENDS = ("completed", "failed", "expired", "cancelled")  # of a batch
BATCH_DAYS = 0.005  # after which a batch and its files are deleted: seven minutes
IDLE = re.compile(r"^aioserve_(?:num_requests_\w+|kv_cache_used_blocks) (\S+)$", re.MULTILINE)


# The server, in a process of its own, which tells what it holds when it is asked.


def serve(words: list[str]) -> int:
    """The command line of aioserve; a line on stdin is answered by one of JSON on stdout."""
    import aioserve.runner.cpu.load  # noqa: F401  # torch with it: traced, it would take a minute
    from aioserve.cli.main import main

    tracemalloc.start()
    threading.Thread(target=answer_looks, daemon=True).start()
    return main(words)


def answer_looks() -> None:
    """Answer each line with what memory holds, until stdin ends."""
    before: dict[str, int] = {}
    for line in sys.stdin:
        gc.collect()
        told: dict[str, Any] = {
            "traced_kib": tracemalloc.get_traced_memory()[0] / 1024,
            "tasks": sum(isinstance(it, asyncio.Task) and not it.done() for it in gc.get_objects()),
        }
        if line.strip() == "remember":
            before = traced_by_line()
        elif line.strip() == "compare" and before:
            now = traced_by_line()
            grown = sorted(now, key=lambda where: before.get(where, 0) - now[where])[:12]
            told["grown"] = [
                f"{where}: {(now[where] - before.get(where, 0)) / 1024:+,.0f} KiB of "
                f"{now[where] / 1024:,.0f}"
                for where in grown
            ]
        print(json.dumps(told), flush=True)


def traced_by_line() -> dict[str, int]:
    """Bytes that lines of Python hold, if above 1024; from a process forked to find out. A snapshot
    takes 200 MiB where there are a million allocations, and malloc keeps most of them: they would
    count as the server's.
    """
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            lines = tracemalloc.take_snapshot().statistics("lineno")
            with open(write, "w") as told:
                json.dump({str(it.traceback): it.size for it in lines if it.size > 1024}, told)
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as told:
        found: dict[str, int] = json.loads(told.read() or "{}")
    os.waitpid(child, 0)
    return found


class Look(NamedTuple):
    """What the server holds while there is no request: its own process, if nothing else is said."""

    at: float
    resident_mib: float
    others_mib: float  # resident memory of the processes that it has started
    traced_kib: float
    descriptors: int  # with those of the processes that it has started
    tasks: int
    blocks: float
    threads: int  # with those of the processes that it has started


class Server:
    """One that runs, and what has been asked of it."""

    def __init__(self, url: str, started: "subprocess.Popen[str]", adapters: Path) -> None:
        self.url = url
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self.started = started
        self.adapters = adapters
        self.asked: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.errors: list[str] = []  # lines of its log
        self.replies: dict[str, str] = {}  # greedy ones, by prompt
        self.responses: list[str] = []  # ids of stored ones

    async def tell(self, word: str) -> dict[str, Any]:
        """What the process says of itself."""
        stdin, stdout = self.started.stdin, self.started.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(word + "\n")
        stdin.flush()
        told: dict[str, Any] = json.loads(await asyncio.to_thread(stdout.readline))
        return told

    async def look(self, since: float, last: Look | None = None) -> Look:
        """When all is quiet, and no more is held than at `last`, the look before; or after our
        patience.
        """
        give_up = time.monotonic() + PATIENCE
        seen = psutil.Process(self.started.pid)
        while True:
            async with aiohttp.request("GET", self.url + "/metrics") as answer:
                counts = [float(count) for count in IDLE.findall(await answer.text())]
            await asyncio.sleep(0.5)  # connections that were closed are noticed
            is_over = time.monotonic() > give_up
            if any(counts) and not is_over:
                continue
            told, processes = await self.tell("look"), [seen, *seen.children(recursive=True)]
            descriptors = sum(process.num_fds() for process in processes)
            is_more = last and (descriptors > last.descriptors or told["tasks"] > last.tasks)
            if is_over or not is_more:
                break
        self.check(not any(counts), f"still held after {PATIENCE:.0f} s of quiet: {counts}")
        own, *others = (process.memory_info().rss / 2**20 for process in processes)
        return Look(
            at=time.perf_counter() - since,
            resident_mib=own,
            others_mib=sum(others),
            descriptors=descriptors,
            blocks=counts[-1],
            threads=sum(process.num_threads() for process in processes),
            **told,
        )

    def check(self, is_right: bool, what: str) -> None:
        """Notes what is wrong, and goes on."""
        if not is_right:
            self.wrong.append(what)
            print(f"WRONG  {what}", flush=True)


# The clients.


class Client:
    """One of several: it does one thing after the other, at random."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.session: aiohttp.ClientSession

    def prompt(self) -> str:
        """From few to many words; some of them often."""
        if self.random.random() < 0.3:
            return " ".join(WORDS[: self.random.randrange(4, len(WORDS))])
        return " ".join(self.random.choices(WORDS, k=self.random.choice((3, 20, 120))))

    def body(self, **fields: Any) -> dict[str, Any]:
        """The body of a completion request."""
        body = {"prompt": self.prompt(), "max_tokens": self.random.randrange(1, 60), **fields}
        body["temperature"] = self.random.choice((0, 0.7, 1.5))
        for name, value in {
            "user": f"user-{self.random.randrange(10**6)}",
            "cache_salt": f"salt-{self.random.randrange(10**6)}",
            "priority": self.random.randrange(-3, 4),
            "timeout": self.random.choice((0.01, 0.3, 30)),
            "logprobs": self.random.randrange(5),
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "logit_bias": {"70": -100, "71": 5},
            "stop": [" lord", "king"],
            "bad_words": ["night"],
            "model": self.random.choice(("one", "two")),  # adapters
        }.items():
            if self.random.random() < 0.2:
                body.setdefault(name, value)
        return body

    async def post(self, path: str, body: Any, *allowed: int) -> tuple[int, bytes]:
        """The whole answer. 200 and 429 are right, and what is `allowed` instead of 200."""
        async with self.session.post(self.server.url + path, json=body) as answer:
            said = await answer.read()
        # An adapter that is not in memory in time is a 408.
        allowed = (*(allowed or (200,)), 429, *((408,) if "timeout" in body else ()))
        is_right = answer.status in allowed
        self.server.statuses[answer.status] += 1
        self.server.check(is_right, f"{path} {json.dumps(body)[:300]}: {answer.status} {said!r}")
        return answer.status, said

    async def whole(self) -> None:
        await self.post("/v1/completions", self.body(n=self.random.randrange(1, 4)))

    async def stream(self) -> None:
        """Read to its end, or left after some events."""
        body = self.body(stream=True, n=self.random.choice((1, 1, 3)))
        leaves = self.random.random() < 0.4
        async with self.session.post(self.server.url + "/v1/completions", json=body) as answer:
            self.server.statuses[answer.status] += 1
            told = b""
            async for piece in answer.content.iter_any():
                told += piece
                if leaves and len(told) > 800:
                    answer.close()
                    return
        is_right = answer.status in (408, 429) or told.endswith(b"data: [DONE]\n\n")
        self.server.check(is_right, f"a stream ends with {told[-200:]!r}")

    async def chat(self) -> None:
        messages = [{"role": "user", "content": self.prompt()}]
        if self.random.random() < 0.3:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        await self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 20})

    async def greedy(self) -> None:
        """One of a few prompts, whose tokens were noted when nothing else ran."""
        prompt, said = self.random.choice(sorted(self.server.replies.items()))
        await self.check_greedy(prompt, said)

    async def check_greedy(self, prompt: str, said: str | None) -> None:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
        status, answer = await self.post("/v1/completions", body)
        if status == 200:
            text = json.loads(answer)["choices"][0]["text"]
            self.server.replies.setdefault(prompt, text)
            self.server.check(text == (said or text), f"{prompt!r}: {text!r}, not {said!r}")

    async def structured(self) -> None:
        """Schemas of which half are new, patterns, choices, a grammar."""
        number = self.random.choice((self.random.randrange(8), self.random.randrange(10**6)))
        schema = {
            "type": "object",
            "properties": {f"k{number}": {"enum": ["yes", "no"]}},
            "required": [f"k{number}"],
            "additionalProperties": False,
        }
        kind, value = self.random.choice(
            (
                ("json", schema),
                ("regex", f"[ab]{{{number % 20 + 1}}}"),
                ("choice", ["yes", "no", f"maybe {number}"]),
                ("grammar", f'start: "x{number}" ("y" | "z")'),
            )
        )
        body = self.body(structured_outputs={kind: value}, max_tokens=48)
        for name in ("stop", "bad_words", "logit_bias", "timeout"):
            body.pop(name, None)
        status, answer = await self.post("/v1/completions", body)
        if status != 200:
            return
        choice = json.loads(answer)["choices"][0]
        if choice["finish_reason"] == "stop" and kind == "json":
            is_right = set(json.loads(choice["text"])) == {f"k{number}"}
            self.server.check(is_right, f"{choice['text']!r} is not of {schema}")

    async def tools(self) -> None:
        function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
        fields = {"tools": [{"type": "function", "function": function}], "max_tokens": 40}
        choice = self.random.choice(("auto", "required"))
        messages = [{"role": "user", "content": self.prompt()}]
        await self.post(
            "/v1/chat/completions", {"messages": messages, "tool_choice": choice, **fields}
        )

    async def responses(self) -> None:
        """Some are remembered, gone on with and forgotten."""
        body: dict[str, Any] = {"input": self.prompt(), "max_output_tokens": 16}
        known = self.server.responses
        if known and self.random.random() < 0.5:
            body["previous_response_id"] = known[-1]
        status, answer = await self.post("/v1/responses", body, 200, 400)
        if status == 200:
            known.append(json.loads(answer)["id"])
        while len(known) > 20:
            url = f"{self.server.url}/v1/responses/{known.pop(0)}"
            async with self.session.delete(url) as deleted:
                await deleted.read()

    async def messages(self) -> None:
        messages = [{"role": "user", "content": self.prompt()}]
        body = {"messages": messages, "max_tokens": 12}
        await self.post("/v1/messages", body, 200, 529)

    async def vectors(self) -> None:
        inputs = [self.prompt() for _ in range(self.random.randrange(1, 5))]
        await self.post("/v1/embeddings", {"input": inputs})
        await self.post("/tokenize", {"prompt": inputs[0]})

    async def batch(self) -> None:
        """A file of lines, run to its end or cancelled: every line is answered once."""
        path = self.random.choice(("/v1/completions", "/v1/chat/completions", "/v1/embeddings"))
        bodies = [self.line(path) for _ in range(self.random.randrange(1, 12))]
        lines = [
            {"custom_id": str(number), "method": "POST", "url": path, "body": body}
            for number, body in enumerate(bodies)
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)), filename="lines.jsonl")
        file = await self.ask("POST", "/v1/files", data=form)
        wanted = {"input_file_id": file["id"], "endpoint": path, "completion_window": "1h"}
        batch = await self.ask("POST", "/v1/batches", json=wanted)
        url = f"/v1/batches/{batch['id']}"
        if is_cancelled := self.random.random() < 0.3:
            await asyncio.sleep(self.random.random())
            await self.post(f"{url}/cancel", {}, 200, 400)
        give_up = time.monotonic() + PATIENCE
        while batch["status"] not in ENDS and time.monotonic() < give_up:
            await asyncio.sleep(0.2)
            batch = await self.ask("GET", url)
        is_right = batch["status"] == "completed" or (is_cancelled and batch["status"] in ENDS)
        self.server.check(is_right, f"{url}: {batch}")
        made = [batch[name] for name in ("output_file_id", "error_file_id") if batch.get(name)]
        told = []
        for file_id in made:
            async with self.session.get(f"{self.server.url}/v1/files/{file_id}/content") as answer:
                told += [json.loads(line) for line in (await answer.text()).splitlines()]
        ids = sorted(int(line["custom_id"]) for line in told)
        self.server.check(ids == list(range(len(bodies))), f"{url}: lines {ids} of {len(bodies)}")
        for line in told:
            self.check_line(url, bodies[int(line["custom_id"])], line, is_cancelled)
        if self.random.random() < 0.5:  # else the server deletes them
            for file_id in (file["id"], *made):
                await self.ask("DELETE", f"/v1/files/{file_id}")

    def line(self, path: str) -> dict[str, Any]:
        """The body of a line of a batch on that route; some are wrong."""
        if path == "/v1/embeddings":
            return {"input": self.prompt()}
        if path == "/v1/chat/completions":
            messages = [{"role": "user", "content": self.prompt()}]
            return {"messages": messages, "max_tokens": self.random.randrange(1, 20)}
        prompt = self.random.choice(sorted(self.server.replies))
        return self.random.choice(
            (
                {"prompt": prompt, "max_tokens": 24, "temperature": 0},
                {**self.body(n=2), "timeout": 30},
                {"prompt": "a", "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}},
                {"prompt": "a", "top_p": -1},
                {"prompt": "a", "stream": True},
            )
        )

    def check_line(
        self, url: str, body: dict[str, Any], line: dict[str, Any], is_cancelled: bool
    ) -> None:
        """A right line has a reply, a greedy one the known tokens; a wrong one has its error."""
        if line["response"] is None:
            is_right = is_cancelled and line["error"]["code"] == "batch_cancelled"
        elif body.get("stream") or body.get("top_p") == -1:
            is_right = line["response"]["status_code"] == 400
        else:
            # An adapter that is not in memory in time is a 408.
            is_right = line["response"]["status_code"] in (200, 408 if "timeout" in body else 200)
            if is_right and body.get("temperature") == 0 and body["prompt"] in self.server.replies:
                text = line["response"]["body"]["choices"][0]["text"]
                is_plain = body.keys() == {"prompt", "max_tokens", "temperature"}
                is_right = not is_plain or text == self.server.replies[body["prompt"]]
        self.server.check(is_right, f"{url}: {json.dumps(body)[:300]} is answered by {line}")

    async def ask(self, method: str, path: str, **body: Any) -> Any:
        """The JSON of an answer that has to be 200."""
        async with self.session.request(method, self.server.url + path, **body) as answer:
            said = await answer.read()
        self.server.statuses[answer.status] += 1
        self.server.check(answer.status == 200, f"{method} {path}: {answer.status} {said!r}")
        return json.loads(said)

    async def aborted(self) -> None:
        """Ended by its id while it runs."""
        body = self.body(request_id=f"mine-{self.random.randrange(10**9)}", max_tokens=400)
        body.pop("timeout", None)
        asking = asyncio.create_task(self.post("/v1/completions", body))
        await asyncio.sleep(self.random.random() * 0.2)
        await self.post("/v1/abort", {"request_id": body["request_id"]}, 200, 404)
        await asking

    async def bad_body(self) -> None:
        """Each is a 400, and says so."""
        path, body = self.random.choice(
            (
                ("/v1/completions", {"prompt": [[]]}),
                ("/v1/completions", {"prompt": "a", "temperature": 1e39}),
                ("/v1/completions", {"prompt": "a", "top_p": -1}),
                ("/v1/completions", {"prompt": "a", "unheard_of": 1}),
                ("/v1/completions", {"prompt": "a " * 9000}),
                ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}),
                ("/v1/completions", {"prompt": "a", "logit_bias": {"9999999": 1}}),
                ("/v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}),
                ("/v1/chat/completions", {"messages": "a"}),
                ("/v1/completions", [1, 2]),
                ("/v1/embeddings", {"input": ""}),
            )
        )
        await self.post(path, body, 400)

    async def rude(self) -> None:
        """Bytes of a kind, and an end of a kind."""
        body = json.dumps(self.body(stream=True, max_tokens=200)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        sent = self.random.choice(
            (head + body, head + body[:20], head[:30], b"\x16\x03\x01\x02\x00", b"\xff" * 3000)
        )
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port)
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            end = self.random.choice(("half", "reset", "close"))
            if end == "half":
                writer.write_eof()
            await asyncio.wait(
                [asyncio.ensure_future(reader.read(2000))], timeout=self.random.random()
            )
            if end == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def onlooker(self) -> None:
        """The page's stream, for a moment."""
        async with self.session.get(self.server.url + "/watch/steps") as answer:
            self.server.check(answer.status == 200, f"/watch/steps: {answer.status}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.random.random()):
                    await answer.content.read()

    async def operator(self) -> None:
        """Another policy; at times more than that."""
        dice = self.random.random()
        if dice < 0.7:
            policy = self.random.choice(POLICIES)
            await self.post("/admin/policy", {"policy": policy})
        elif dice < 0.8:
            await self.post("/admin/pause", {})
            await asyncio.sleep(0.1)
            await self.post("/admin/resume", {})
        elif dice < 0.9:
            await self.post("/admin/sleep", {}, 200, 400, 409)
            await self.post("/admin/wake", {}, 200, 400, 409)
        else:
            await self.post("/admin/reset_prefix_cache", {})
        name = f"late-{self.random.randrange(3)}"
        path = str(self.server.adapters / "one")
        body = {"lora_name": name, "lora_path": path}
        await self.post("/v1/load_lora_adapter", body, 200, 400)
        await self.post("/v1/unload_lora_adapter", {"lora_name": name}, 200, 400, 404)

    def choices(self) -> dict[Callable[[], Awaitable[None]], int]:
        """What is done, and how often."""
        return {
            **{self.stream: 6, self.whole: 4, self.greedy: 3, self.structured: 3, self.chat: 2},
            **{self.bad_body: 2, self.rude: 3, self.aborted: 2, self.responses: 2, self.tools: 1},
            **{self.messages: 1, self.vectors: 1, self.onlooker: 1, self.batch: 1},
        }

    async def run(self, until: float) -> None:
        """One thing after the other until then, each within our patience."""
        choices = self.choices()
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        async with aiohttp.ClientSession(timeout=timeout) as self.session:
            while time.perf_counter() < until:
                (act,) = self.random.choices(list(choices), list(choices.values()))
                await self.do(act)

    async def run_operator(self, until: float) -> None:
        """Do one thing per second."""
        async with aiohttp.ClientSession() as self.session:
            while time.perf_counter() < until:
                await self.do(self.operator)
                await asyncio.sleep(1.0)

    async def do(self, act: Callable[[], Awaitable[None]]) -> None:
        """Run an action and note what it raises."""
        name = getattr(act, "__name__", "")
        self.server.asked[name] += 1
        try:
            await act()
        except (OSError, TimeoutError, aiohttp.ClientError, ValueError, KeyError) as error:
            self.server.check(False, f"{name}: {type(error).__name__}: {error}")


# The run.


async def run(server: Server, given: Args) -> tuple[list[Look], list[str]]:
    """Rounds with a look after each, and which lines hold more memory than after the warm-up."""
    clients = [Client(server, seed) for seed in range(given.clients)]
    async with aiohttp.ClientSession() as clients[0].session:
        for number in range(4):
            await clients[0].check_greedy(" ".join(WORDS[number:]), None)
        for number in range(CACHED_GRAMMARS):
            wanted = {"choice": [f"no {number}"]}
            body = {"prompt": "what", "max_tokens": 1, "structured_outputs": wanted}
            await clients[0].post("/v1/completions", body)
    since = time.perf_counter()
    looks = [await server.look(since)]
    is_warm = False
    while looks[-1].at < given.seconds or len(looks) < 4:  # three rounds at least
        until = time.perf_counter() + given.round
        await asyncio.gather(
            *(client.run(until) for client in clients),
            Client(server, len(looks)).run_operator(until),
        )
        looks.append(await server.look(since, looks[-1] if looks[1:] else None))
        print("  ".join(f"{n} {v:,.1f}" for n, v in looks[-1]._asdict().items()), flush=True)
        if given.where and not is_warm and looks[-1].at >= given.seconds / 4:
            is_warm = True
            await server.tell("remember")
    return looks, (await server.tell("compare")).get("grown", [])


def judge(looks: list[Look], server: Server, seconds: float) -> dict[str, tuple[bool, str]]:
    """Each limit: whether it was held, and what was seen."""
    warm = [look for look in looks[1:] if look.at >= seconds / 4]
    third = max(1, len(warm) // 3)

    def grown(name: str) -> float:
        """From the first third to the last one, medians."""
        values = [getattr(look, name) for look in warm]
        begin, end = sorted(values[:third]), sorted(values[-third:])
        return float(end[len(end) // 2] - begin[len(begin) // 2])

    def spread(name: str) -> str:
        values = {getattr(look, name) for look in warm}
        return f"{min(values):g} to {max(values):g}"

    resident, others, traced = grown("resident_mib"), grown("others_mib"), grown("traced_kib")
    descriptors, tasks = grown("descriptors"), grown("tasks")
    blocks = max(look.blocks for look in looks)
    requests = sum(server.asked.values())
    return {
        "every answer is right": (
            not server.wrong,
            f"{len(server.wrong)} of {requests:,} were wrong",
        ),
        "its log has no error": (
            not server.errors,
            " ".join([f"{len(server.errors)}", *server.errors[:1]]),
        ),
        f"resident memory: less than {MOST_RESIDENT_MIB:g} MiB more": (
            resident < MOST_RESIDENT_MIB,
            f"{resident:+.1f} MiB of {warm[0].resident_mib:.0f}",
        ),
        f"resident memory of processes beside it: less than {MOST_RESIDENT_MIB:g} MiB more": (
            others < MOST_RESIDENT_MIB,
            f"{others:+.1f} MiB of {warm[0].others_mib:.0f}",
        ),
        f"tracemalloc: less than {MOST_TRACED_KIB:g} KiB more": (
            traced < MOST_TRACED_KIB,
            f"{traced:+.0f} KiB of {warm[0].traced_kib:,.0f}",
        ),
        "no descriptor more": (descriptors <= 0, f"{descriptors:+.0f}, {spread('descriptors')}"),
        f"threads: at most {MOST_THREADS} more": (
            grown("threads") <= MOST_THREADS,
            f"{grown('threads'):+.0f}, {spread('threads')}",
        ),
        "no task more": (tasks <= 0, f"{tasks:+.0f}, {spread('tasks')}"),
        "no KV block is held": (blocks == 0, f"{blocks:g} at most"),
    }


def plot(path: Path, looks: list[Look], seconds: float) -> None:
    """One panel for each of what is looked at."""
    titles = {
        "resident_mib": "resident memory, MiB",
        "others_mib": "resident memory of processes beside it, MiB",
        "traced_kib": "tracemalloc, KiB",
        "descriptors": "descriptors",
        "tasks": "tasks of the event loop",
        "blocks": "KV blocks in use",
    }
    panels = [
        Panel(title, {"": [(look.at, getattr(look, name)) for look in looks]})
        for name, title in titles.items()
    ]
    title = "Soak: what the server holds while it is quiet, after each round"
    draw(path, title, panels, {"warm-up": (0.0, seconds / 4)})


def url_in(log: Path, started: "subprocess.Popen[str]") -> str:
    """Where the server listens, once it does and the model is loaded."""
    while started.poll() is None:
        time.sleep(0.2)
        if address := re.search(r"listening on (http://[\d.]+:\d+)", log.read_text()):
            return address[1]
    raise RuntimeError(f"the server does not start: {log.read_text()}")


program = Program(__doc__)


@program.command(
    words={"flags": Opt([], "more flags of the server, after --")},
    seconds=1200.0,
    round=Opt(15.0, "seconds between two looks"),
    clients=12,
    plot=Opt(Path, "an SVG file to write"),
    where=Opt(False, "say which lines hold more after the warm-up"),
)
async def main(given: Args) -> tuple[dict[str, Any], int]:
    """Start the server, run, print. The exit code is 1 if a limit was missed."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("one", "two")
        for number, name in enumerate(names):
            make_adapter(EMBEDDED, Path(folder) / name, 8, number, ("o_proj",))
        words = ["--port", "0", "--dtype", "float32", "--enable-admin", "--threads", "1"]
        words += ["--num-kv-blocks", "240", "--max-num-seqs", "12", "--max-waiting-requests", "8"]
        words += ["--tool-call-parser", "hermes", "--max-loras", "4", "--max-cpu-loras", "8"]
        words += [it for name in names for it in ("--lora", f"{name}={Path(folder) / name}")]
        words += ["--batch-dir", str(Path(folder) / "batches")]
        words += ["--batch-file-days", str(BATCH_DAYS)]
        words += ["--request-log", str(Path(folder) / "requests.jsonl"), *given.flags]
        log = Path(folder) / "log"
        with log.open("w") as written:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": written}
            with process(__file__, "--serve", "--", *words, **pipes) as started:
                server = Server(url_in(log, started), started, Path(folder))
                looks, grown = await run(server, given)
        lines = log.read_text().splitlines()
        server.errors = [line for line in lines if " ERROR " in line or "Traceback" in line]
    return report(looks, grown, server, given)


def report(
    looks: list[Look], grown: list[str], server: Server, given: Args
) -> tuple[dict[str, Any], int]:
    """Print the whole report."""
    print("asked:", ", ".join(f"{name} {n:,}" for name, n in server.asked.most_common()))
    print("answered:", ", ".join(f"{n:,} times {s}" for s, n in server.statuses.most_common()))
    for line in grown:
        print("more than after the warm-up:", line)
    limits, code = told_of(judge(looks, server, given.seconds))
    if given.plot:
        plot(given.plot, looks, given.seconds)
    return {"limits": limits, "looks": looks, "asked": server.asked}, code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:  # the server's own process
        sys.exit(serve(sys.argv[3:]))
    program.main()
