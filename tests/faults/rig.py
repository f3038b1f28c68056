"""A real server with faults around its parts, clients, and what must be true when all is over."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve import AsyncEngine, EngineConfig, EngineSnapshot
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig, ServerConfig
from aioserve.engine.input_processor import InputProcessor, SamplingValidator
from aioserve.engine.output_processor import OutputProcessor
from aioserve.engine.request_log import RequestLog
from aioserve.errors import EngineDeadError
from aioserve.features.kv_connector.simulated import SimulatedDirectory
from aioserve.server.app import listening
from aioserve.server.sockets import bind
from aioserve.testing.faults import (
    READERS,
    Client,
    Fault,
    Faults,
    FaultyLines,
    FaultyRunner,
    Point,
    Told,
    faulty,
    few_descriptors,
    open_descriptors,
)
from tests.kit import runner_of
from tests.processes import PATIENCE

#: What clients ask for: prompts that share a beginning, one of several chunks, one of its own.
PROMPTS = ("Once upon a time", "Once upon a time there was a king", "x" * 150, "Who's there?")
ASKS: tuple[dict[str, Any], ...] = (
    *({"prompt": prompt, "ignore_eos": True} for prompt in PROMPTS),
    *(
        {"messages": [{"role": "user", "content": text}], "ignore_eos": True}
        for text in PROMPTS[:2]
    ),
    {"prompt": "Several", "ignore_eos": True, "n": 3},
)
LENGTHS = (1, 4, 12)
OPTIONS = {"chunk_size": 32}
MAX_TOKENS = max(LENGTHS)


class Observer:
    """Hears of the KV cache, and does nothing."""

    def __call__(self, event: object) -> None:
        pass


#: Parts around which faults are put, besides lines: the class, or how to find the object, and what
#: is asked there.
PARTS: "Parts" = {
    "tokenizer": (InputProcessor, "_encode"),
    "lengths": (InputProcessor, "least_tokens"),
    "sampling": (SamplingValidator, "complete"),
    "schedule": (ChunkedPrefillScheduler, "schedule"),
    "update": (ChunkedPrefillScheduler, "update_from_output"),
    "arrival": (ChunkedPrefillScheduler, "add_request"),
    "reader": (OutputProcessor, "add_request"),
    "request log": (RequestLog, "write"),
}

#: Likewise, of those that are there before the engine starts.
EARLY_PARTS: "Parts" = {
    "metrics": (lambda engine: engine.metrics, "on_finished"),
    "first metrics": (lambda engine: engine.metrics, "on_prompt_computed"),
    "observer": (Observer, "__call__"),
}

#: Of the store behind the prefix cache, where there is one: what a request asks of it.
STORE: "Parts" = {f"store {name}": (SimulatedDirectory, name) for name in ("find", "read", "write")}

#: Whose faults nobody must notice but who reads the log. A forward pass is computed again.
HARMLESS_PARTS = (
    "metrics",
    "first metrics",
    "request log",
    "observer",
    "forward",
    "sampler",
    *STORE,
)

Reference = dict[str, dict[int, str]]  # texts by choice
Parts = dict[str, tuple[type | Callable[[AsyncEngine], Any], str]]

#: Pins and unpins at random, and plans as `chunked_prefill`.
PINS = "tests.testing.pinning:PinsForMoments"


def config_of(
    pipeline_depth: int, request_log: str = os.devnull, policy: str = "chunked_prefill"
) -> EngineConfig:
    """Of the simulated runner, whose tokens depend on the prompt alone."""
    return EngineConfig(
        cache=CacheConfig(num_kv_blocks=64, block_size=8),
        scheduler=SchedulerConfig(
            policy=policy,
            options=OPTIONS,
            max_num_seqs=6,
            pipeline_depth=pipeline_depth,
            request_log=request_log,
        ),
        runner=RunnerConfig(
            runner="simulated", step_base_ms=0.2, step_prefill_token_us=1, step_decode_us=1
        ),
        server=ServerConfig(exit_on_dead_engine=False),
    )


def is_harmless(fault: Fault) -> bool:
    """Whether everybody must be served all the same."""
    is_error = fault.kind != "cancelled"  # which would mean the task that calls
    return fault.kind == "slow" or (fault.part in HARMLESS_PARTS and is_error)


def is_of_one(fault: Fault) -> bool:
    """Whether it may end one request at most."""
    at_doors = ("server/", "engine/front", "engine/input", "engine/stream", "engine/arrivals")
    parts = ("tokenizer", "lengths", "sampling", "arrival", "reader", "grammar", "logits")
    return fault.part in parts or fault.part.startswith(at_doors) or fault.kind == "nan"


class Wrong(AssertionError):
    """Something is not as it must be; says after which faults."""


class _Lines(logging.Handler):
    """What the log says, causes and all."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"


class Rig:
    """One server in its own loop: `async with`."""

    def __init__(
        self,
        config: EngineConfig,
        faults: Faults,
        reference: Reference,
        lines: list[Point],
        asks: Sequence[dict[str, Any]] = ASKS,
        parts: Parts | None = None,
    ) -> None:
        """`asks` are the bodies that clients send, `parts` others than those of any server."""
        self.config, self.faults, self._reference = config, faults, reference
        self._asks, self._more_parts = asks, parts or {}
        self._stack = AsyncExitStack()
        self.log = _Lines()
        self.is_strange = False  # something has happened besides faults
        self.clients: list[tuple[Client, int, asyncio.Task[Told]]] = []
        self._lines = lines

    async def __aenter__(self) -> "Rig":
        """With all its parts wrapped."""
        try:
            await self._begin()
        except BaseException:
            await self._stack.aclose()  # classes are to be as they were
            raise
        return self

    async def _begin(self) -> None:
        logging.getLogger().addHandler(self.log)
        self._stack.callback(logging.getLogger().removeHandler, self.log)
        self._loop = asyncio.get_running_loop()
        sockets = bind("127.0.0.1", 0)
        self.engine = AsyncEngine(self.config, on_kv_event=Observer())
        self._wrap(EARLY_PARTS)
        await self._stack.enter_async_context(self.engine)
        FaultyRunner(runner_of(self.engine), self.faults)
        self._wrap(PARTS | self._more_parts)
        url = await self._stack.enter_async_context(listening(self.engine, sockets))
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)
        for ask in range(len(self._asks)):  # what is opened on first use is, then
            told = await self.ask("whole", ask, 1)
            self._want(told.is_served, f"before any fault a client is told {told}")
        self._tasks_before = self._tasks()
        await self._until_no_connection()
        self._descriptors_before = self._descriptors()
        self.lines = FaultyLines(self.faults, self._lines)
        if self._lines:
            self._stack.enter_context(self.lines)

    def _wrap(self, parts: Parts) -> None:
        for part, (place, name) in parts.items():
            owner = place
            if isinstance(place, type):  # its objects are all of this engine
                self._stack.callback(_restore, place, name, vars(place).get(name))
            else:
                owner = place(self.engine)
            faulty(self.faults, part, owner, name, spoilt_logits)

    async def __aexit__(self, *error: Any) -> None:
        self.faults.disarm()
        tasks = [task for _, _, task in self.clients]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(PATIENCE):
                await self._stack.aclose()
        except EngineDeadError:
            pass  # its clients know

    @property
    def is_dead(self) -> bool:
        return self.engine.errored is not None

    @property
    def is_worn(self) -> bool:
        """Whether its parts are not those any more that faults were put around."""
        return self.is_dead or self._look().is_fallback

    def begin_again(self) -> None:
        """After all was well: what comes from here on is told by itself, and finds no prefix."""
        self.engine.reset_prefix_cache()
        self.clients.clear()
        self.faults.came.clear()
        self.faults.touched.clear()
        self.log.text = ""

    def _client(self, kind: str, ask: int, max_tokens: int, **more: Any) -> Client:
        body = {"max_tokens": max_tokens, "temperature": 0} | self._asks[ask] | more
        return Client(self.host, self.port, kind, body)

    async def ask(self, kind: str, ask: int, max_tokens: int) -> Told:
        """One client to its end, within a bound."""
        async with asyncio.timeout(PATIENCE):
            return await self._client(kind, ask, max_tokens).run()

    def come(self, kind: str, ask: int, max_tokens: int) -> None:
        """A client comes, and is not waited for."""
        client = self._client(kind, ask, max_tokens, request_id=f"r{len(self.clients)}")
        self.clients.append((client, ask, self._loop.create_task(client.run(), name="client")))

    async def turn(self, count: int) -> None:
        """Let turns of the loop go by."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def lack_descriptors(self) -> None:
        """For some turns of the loop nothing more can be opened, nor accepted."""
        self.faults.injected["descriptors: gone"] += 1
        self.is_strange = True
        with few_descriptors():
            await self.turn(20)

    async def settle(self) -> None:
        """Everybody has an end, a new request is served, nothing is left. Raises `Wrong`."""
        told = await self.ends()
        self.passed = set(self.lines.passed)
        self.faults.disarm()
        for client, ask, found in told:
            self._check_told(client, ask, found)
        self._check_reach([found for client, _, found in told if client.kind in READERS])
        self._check_log()
        if self.is_dead:
            self._check_death()
            return
        served = await self.ask("streams", 1, MAX_TOKENS)
        self._want(
            served.is_served and served.texts == self._expected(1, MAX_TOKENS),
            f"a new request is told {served}",
        )
        async with _bounded(lambda: f"something is left: {self._left()}", self):
            while self._left():  # noqa: ASYNC110 - a server has no event for it
                await asyncio.sleep(0.002)

    async def ends(self) -> list[tuple[Client, int, Told]]:
        """Of all clients so far: what each was told. Raises `Wrong` if one waits for ever."""
        tasks = [task for _, _, task in self.clients]
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=PATIENCE)
            waiting = [client.body for client, _, task in self.clients if task in pending]
            self._want(not waiting, f"{len(waiting)} clients wait for ever: {waiting}")
        return [(client, ask, task.result()) for client, ask, task in self.clients]

    def _check_told(self, client: Client, ask: int, told: Told) -> None:
        """Tokens are the reference's, as far as they came; whoever was not touched has them all."""
        if client.kind not in READERS:
            return
        expected = self._expected(ask, client.body["max_tokens"])
        name = client.body["request_id"]
        lies = {"many", "foreign", "stranger", "short"} & {fault.kind for fault in self.faults.came}
        if not (lies and name in self.faults.touched):
            right = (expected[index].startswith(text) for index, text in told.texts.items())
            self._want(all(right), f"{name} has the tokens {told}")
        if told.is_served and not lies:
            self._want(told.texts == expected, f"{name} was ended as if it were whole: {told}")
        if not self.faults.came:
            self._want(told.is_served, f"no fault came, and {name} was told {told}")

    def _check_reach(self, told: list[Told]) -> None:
        """What harms nobody, or one request, harms no other."""
        came = self.faults.came
        if all(is_harmless(fault) or is_of_one(fault) for fault in came):
            most = sum(not is_harmless(fault) for fault in came)
            harmed = [found for found in told if not found.is_served]
            self._want(len(harmed) <= most, f"{len(harmed)} clients were harmed: {harmed}")
            self._want(not self.is_dead, "the engine has died")

    def _check_log(self) -> None:
        """Each fault that raises has a line; without one, nothing is an error."""
        if not self.faults.came and not self.is_strange:
            self._want("ERROR" not in self.log.text, "no fault came, and there is an error")
        for fault in self.faults.came:
            if fault.kind in (
                "raises",
                "no memory",
                "disk full",
                "no descriptors",
                "raises unread",
            ):
                self._want(
                    f"planted in {fault.part}" in self.log.text,
                    f"no line of the log tells of {fault}",
                )

    def _check_death(self) -> None:
        self._want("has died" in self.log.text, "it has died without a word")

    def _left(self) -> dict[str, Any]:
        """What should not be there when nobody asks anything."""
        seen = self._look()
        found: dict[str, Any] = {
            "running": seen.num_running,
            "waiting": seen.num_waiting,
            "requests": seen.requests,
            "blocks": seen.cache.num_used_blocks,
            "readers": seen.reader_ids,
            "ids": seen.ids_in_use,
            "arriving": seen.num_arriving,
            "arriving tokens": seen.num_arriving_tokens,
            "rows": sorted(rows_of(self.engine)),
            "tasks": +(self._tasks() - self._tasks_before),
            "descriptors": +(self._descriptors() - self._descriptors_before),
        }
        return {name: left for name, left in found.items() if left}

    def _look(self) -> EngineSnapshot:
        seen = self.engine.inspect()
        assert seen is not None
        return seen

    def _tasks(self) -> Counter[str]:
        """Of the engine and the server, by what they run."""
        return Counter(
            task.get_coro().__qualname__
            for task in asyncio.all_tasks()
            if task is not asyncio.current_task() and task.get_name() != "client"
        )

    def _descriptors(self) -> Counter[str]:
        """By what they are."""
        return Counter(what.partition(":")[0] for what in open_descriptors().values())

    async def _until_no_connection(self) -> None:
        await self.turn(20)

    def _expected(self, ask: int, max_tokens: int) -> dict[int, str]:
        return self._reference[f"{ask} {max_tokens}"]

    def _want(self, is_true: bool, what: str) -> None:
        if not is_true:
            came = ", ".join(map(str, self.faults.came)) or "none"
            raise Wrong(f"{what}\nfaults: {came}\nlog:\n{self.log.text[-3000:]}")


class _bounded:  # as an `asyncio.timeout` that says what was waited for
    def __init__(self, what: Callable[[], str], rig: Rig) -> None:
        self._what, self._rig = what, rig
        self._timeout = asyncio.timeout(PATIENCE)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            self._rig._want(False, self._what())


def _restore(owner: type, name: str, own: Any) -> None:
    """As the class was: with a method of its own, or with that of its base."""
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


def spoilt_logits(result: Any) -> Any:
    """Those of the first row are no numbers."""
    result = result.clone()
    result[0] = float("nan")
    return result


async def reference_of(config: EngineConfig, asks: Sequence[dict[str, Any]] = ASKS) -> Reference:
    """What each of them is answered alone, by a server whose parts all work."""
    found: Reference = {}
    async with Rig(config, Faults(), found, [], asks) as rig:
        for ask in range(len(asks)):
            for count in LENGTHS:
                told = await rig.ask("whole", ask, count)
                assert told.is_served, told
                found[f"{ask} {count}"] = told.texts
    return found


def rows_of(engine: AsyncEngine) -> list[str]:
    """The requests that its runner remembers."""
    runner = runner_of(engine)
    return list(runner._rows if hasattr(runner, "_rows") else runner._executor._batch._rows)
