"""Requests that replicas share, on real lines: split behind the prompt, migrated, and orphaned.

Small real models, whose tokens are those of one engine. Needs Ray's names and none of its
processes. For `make test-dist`.
"""

import asyncio
import re
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import MultimodalPrompt
from aioserve.config import EngineConfig
from aioserve.engine import AsyncEngine
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.params import PoolingParams, SamplingParams, StructuredOutputs
from tests.seeing_models import make_seeing_model, picture

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    pytest.importorskip("ray", reason="pip install 'ray[serve]'")
    from aioserve.features.kv_connector import BlockDirectory
    from aioserve.fleet.ray.front import RayFront
    from aioserve.fleet.ray.line import IngressClient
    from aioserve.fleet.ray.settings import ReplicaGroup
    from tests.ray.joined import Joined, Replica, is_idle, joined, whole

pytestmark = pytest.mark.dist

PROMPT = "What news, my lord? " * 12
APART = (ReplicaGroup(role="prefill"), ReplicaGroup(role="decode"))
#: Options of a request that only go right if what was said before counts.
ASKED: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=24, temperature=0, logprobs=2),
    "prompt_logprobs": SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=1, logprobs=0),
    "seed": SamplingParams(max_tokens=24, temperature=0.9, seed=7),
    "penalties": SamplingParams(
        max_tokens=40, temperature=0, presence_penalty=1.5, frequency_penalty=0.8
    ),
    "repetition": SamplingParams(max_tokens=30, temperature=0, repetition_penalty=1.6),
    "min_tokens": SamplingParams(max_tokens=20, min_tokens=12, temperature=1.2, seed=3),
    "stop": SamplingParams(max_tokens=60, temperature=0, stop=("lord",)),
    "final_only": SamplingParams(max_tokens=20, temperature=0, output_kind="final_only"),
    "one_token": SamplingParams(max_tokens=1, temperature=0),
    "grammar": SamplingParams(
        max_tokens=40,
        temperature=0.8,
        seed=5,
        structured_outputs=StructuredOutputs(regex=r"[a-z]{3}-[0-9]{12}-[a-z]{4}"),
    ),
}


def sharing(path: Path) -> EngineConfig:
    """Settings of engines that hand their blocks over in a directory."""
    settings: list[tuple[str, Any]] = [
        *(("model.dtype", "float32"), ("cache.num_kv_blocks", 512), ("cache.block_size", 8)),
        *(("cache.kv_connector", "disk"), ("cache.kv_connector_path", str(path))),
    ]
    return EngineConfig.load(None, settings)


def fetched(replica: Replica) -> int:
    """Tokens that a replica has read from the directory."""
    connector = replica.engine.metrics.kv_connector.connector
    assert connector is not None
    return connector.make_stats().num_fetched_tokens


def told(output: RequestOutput) -> tuple[Any, ...]:
    """All that a reader hears; of logprobs three digits, as sums of other lengths are rounded."""
    every = (output.logprobs, output.prompt_logprobs)
    rounded = [
        [each and (each.rank, each.top_token_ids, round(each.logprob, 3)) for each in of or ()]
        for of in every
    ]
    return (
        *(output.text, output.token_ids, rounded, output.finish_reason, output.stop_reason),
        *(output.num_prompt_tokens, output.num_output_tokens),
    )


async def alone(path: Path, asked: list[tuple[str, SamplingParams]]) -> list[tuple[Any, ...]]:
    """What one engine without a connector says."""
    config = sharing(path)
    cache = msgspec.structs.replace(config.cache, kv_connector="none", kv_connector_path=None)
    found = []
    async with AsyncEngine(msgspec.structs.replace(config, cache=cache)) as engine:
        for prompt, params in asked:
            [output] = await whole(engine, prompt, params)  # type: ignore[arg-type]
            found.append(told(output))
    return found


def work(both: Joined) -> list[float]:
    return [both.dispatcher().work_of(name) for name in both.dispatcher().names]


async def test_a_split_request_is_the_one_of_one_engine_and_computes_its_prompt_once(
    tmp_path: Path,
) -> None:
    asked = [(f"{name}. {PROMPT}", params) for name, params in ASKED.items()]
    expected = await alone(tmp_path, asked)
    async with joined(sharing(tmp_path), router="prefill_decode", groups=APART) as both:
        front, [prefill, decode] = both.fronts[0], both.replicas
        for (prompt, params), right in zip(asked, expected, strict=True):
            before, steps = fetched(decode), prefill.engine.get_stats()
            [output] = await whole(front, prompt, params)
            assert told(output) == right, prompt
            assert output.num_cached_tokens == 0, prompt  # of the replica that computed it
            after = prefill.engine.get_stats()
            assert steps is not None
            assert after is not None
            assert after.num_steps > steps.num_steps
            if params.max_tokens != 1:
                assert fetched(decode) - before >= output.num_prompt_tokens // 8 * 8 - 8, prompt
        metrics = front.router_metrics
        assert metrics.num_moved == len(asked) - 1  # but for the one that is one token
        assert metrics.num_resent == 0
        await is_idle(both)
        assert work(both) == [0, 0]


async def test_many_at_once_are_those_of_one_engine(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=1)
    asked = [(f"{i} of the clock. {PROMPT[: 20 * i]}", params) for i in range(1, 13)]
    expected = await alone(tmp_path, asked)
    groups = (ReplicaGroup(role="prefill", num_replicas=2), ReplicaGroup(role="decode"))
    async with joined(sharing(tmp_path), router="prefill_decode", groups=groups) as both:
        outputs = await asyncio.gather(*(whole(both.fronts[0], *each) for each in asked))
        assert [told(output) for [output] in outputs] == expected
        await is_idle(both)


async def test_what_replicas_cannot_share_is_served_whole(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=7, n=2, ignore_eos=True)
    async with joined(sharing(tmp_path), router="prefill_decode", groups=APART) as both:
        front, [prefill, decode] = both.fronts[0], both.replicas
        outputs = await whole(front, PROMPT, params)
        assert [output.num_output_tokens for output in outputs] == [8, 8]
        counts = [replica.engine.get_stats() for replica in (prefill, decode)]
        assert [stats is not None and stats.num_steps > 0 for stats in counts] == [False, True]
        [vector] = await whole(front, PROMPT, PoolingParams())
        assert vector.embedding is not None
        assert front.router_metrics.num_moved == 0
        await is_idle(both)


async def test_blocks_that_are_missing_or_damaged_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    asked = [(f"{i}. {PROMPT}", params) for i in range(2)]
    expected = await alone(tmp_path, asked)
    async with joined(sharing(tmp_path), router="prefill_decode", groups=APART) as both:
        front, decode = both.fronts[0], both.replicas[1]
        monkeypatch.setattr(BlockDirectory, "_write_one", lambda *_: None)
        [output] = await whole(front, *asked[0])
        assert told(output) == expected[0]
        assert fetched(decode) == 0
        monkeypatch.undo()
        write = BlockDirectory._write_one

        def damage(self: BlockDirectory, *arguments: Any) -> None:
            write(self, *arguments)
            for file in tmp_path.rglob("*"):
                if file.is_file() and file.suffix != ".json":
                    file.write_bytes(file.read_bytes()[:-1])

        monkeypatch.setattr(BlockDirectory, "_write_one", damage)
        [output] = await whole(front, *asked[1])
        assert told(output) == expected[1]
        await is_idle(both)


async def stream_of(front: Any, params: SamplingParams, **fields: Any) -> Any:
    """A stream that has had its first token."""
    stream = await front.add_request(PROMPT, params, **fields)
    return stream, await anext(stream)


async def rest_of(stream: Any, first: RequestOutput) -> RequestOutput:
    async with asyncio.timeout(60), stream:
        async for output in stream:
            first.merge(output)
    return first


LONG = SamplingParams(max_tokens=300, temperature=0.8, seed=11, ignore_eos=True)


@pytest.mark.parametrize("phase", ["prefill", "handover", "decode"])
async def test_a_replica_that_dies_in_any_phase_costs_no_token(tmp_path: Path, phase: str) -> None:
    [right] = await alone(tmp_path, [(PROMPT, LONG)])
    groups = tuple(msgspec.structs.replace(group, num_replicas=2) for group in APART)
    async with joined(sharing(tmp_path), router="prefill_decode", groups=groups) as both:
        front, replicas = both.fronts[0], list(both.replicas)
        if phase == "prefill":
            adding = asyncio.create_task(stream_of(front, LONG))
            victim = await having(both, replicas)
            assert victim in replicas[:2]
            await victim.die()
            stream, first = await adding
        else:
            stream, first = await stream_of(front, LONG)
            if phase == "handover":  # the prefill replica, or the one that has just got it
                victim = await having(both, replicas)
            else:
                async with asyncio.timeout(20):
                    while front.router_metrics.num_moved == 0:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                victim = await having(both, replicas[2:])
            await victim.die()
        output = await rest_of(stream, first)
        assert told(output) == right
        both.replicas.remove(victim)
        await is_idle(both)
        assert not any(work(both))


async def having(both: Joined, replicas: list[Replica]) -> Replica:
    """The replica that has a request, once one has."""
    async with asyncio.timeout(20):
        while True:
            for replica in replicas:
                if replica.door.num_requests:
                    return replica
            await asyncio.sleep(0)


async def test_without_a_decode_replica_the_request_goes_on_where_it_was(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    [right] = await alone(tmp_path, [(PROMPT, params)])
    async with joined(sharing(tmp_path), router="prefill_decode", groups=APART) as both:
        decode = both.replicas[1]

        def refuse(client: IngressClient, *_: Any) -> None:
            client.refuse()

        for client in decode.door._clients:
            client._add = refuse.__get__(client)  # type: ignore[method-assign]
        [output] = await whole(both.fronts[0], PROMPT, params)
        assert told(output) == right
        assert both.fronts[0].router_metrics.num_moved == 0
        await is_idle(both)


async def test_a_decode_replica_that_refuses_leaves_the_request_where_it_was(
    tmp_path: Path,
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    [right] = await alone(tmp_path, [(PROMPT, params)])
    async with joined(sharing(tmp_path), router="prefill_decode", groups=APART) as both:
        await both.replicas[1].engine.pause(arrivals="refuse")
        [output] = await whole(both.fronts[0], PROMPT, params)
        assert told(output) == right
        metrics = both.fronts[0].router_metrics
        assert (metrics.num_moved, metrics.num_resent) == (0, 0)
        assert not any(work(both))


async def test_a_request_with_an_image_is_split(tmp_path: Path) -> None:
    path = make_seeing_model("idefics3", tmp_path / "seeing")
    config = sharing(tmp_path / "kv")
    model = msgspec.structs.replace(config.model, model=str(path))
    config = msgspec.structs.replace(config, model=model)
    said = {"type": "text", "text": "What is it?"}
    shown = MultimodalPrompt(
        [{"role": "user", "content": [said, {"type": "image"}]}], [picture(0, 60, 40)]
    )
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    options = {"most_local": 0}  # the prompt is short
    fields: dict[str, Any] = {"router": "prefill_decode", "router_options": options}
    async with joined(config, groups=APART, **fields) as both:
        front, [prefill, decode] = both.fronts[0], both.replicas
        [output] = await whole(front, shown, params)
        assert front.router_metrics.num_moved == 1
        assert fetched(decode) > 0
        [right] = await whole(prefill.engine, shown, params)  # type: ignore[arg-type]
        assert output.token_ids == right.token_ids
        await is_idle(both)


FILLS_ONE = """
from aioserve.fleet.routers.llumnix import Llumnix

class Mine(Llumnix):
    rebalance_seconds = 0.1

    def choose(self, request, replicas):
        return replicas[0]
"""


async def test_llumnix_moves_running_requests_off_a_full_replica(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=400, temperature=0.8, seed=1, ignore_eos=True)
    asked = [(f"{i} of the clock.", params) for i in range(6)]
    expected = await alone(tmp_path, asked)
    router = tmp_path / "mine.py"
    router.write_text(FILLS_ONE)
    options = {"out_below": 1e6, "in_above": 1.0}
    fields: dict[str, Any] = {"router": f"{router}:Mine", "router_options": options}
    async with joined(sharing(tmp_path / "kv"), **fields) as both:
        front = both.fronts[0]
        outputs = await asyncio.gather(*(reading(front, *each) for each in asked))
        assert [told(output) for output in outputs] == expected
        assert front.router_metrics.num_moved > 0
        await is_idle(both)
        assert work(both) == [0, 0]


async def reading(front: RayFront, prompt: str, params: SamplingParams) -> RequestOutput:
    """All of a stream that is read as it comes."""
    stream = await front.add_request(prompt, params)
    return await rest_of(stream, await anext(stream))


@pytest.mark.parametrize("way", ["abort", "leave", "timeout"])
@pytest.mark.parametrize("phase", ["prefill", "handover", "decode"])
async def test_a_request_that_is_ended_in_any_phase_leaves_nothing(
    tmp_path: Path, phase: str, way: str
) -> None:
    async with joined(sharing(tmp_path), router="prefill_decode", groups=APART) as both:
        front, replicas = both.fronts[0], both.replicas
        params = msgspec.structs.replace(LONG, max_tokens=3000)
        fields: dict[str, Any] = {"request_id": "x"}
        if way == "timeout":
            fields["timeout"] = {"prefill": 0.001, "handover": 0.1, "decode": 0.5}[phase]
        asked = asyncio.create_task(whole(front, PROMPT, params, **fields))
        if way != "timeout":
            if phase == "prefill":
                await having(both, replicas[:1])
            async with asyncio.timeout(20):
                while phase == "handover" and not front.router_metrics.outcomes["sent"]:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                while phase == "handover" and replicas[0].door.num_requests:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                while phase == "decode" and not front.router_metrics.num_moved:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        if way == "leave":
            asked.cancel()
            await asyncio.wait([asked])
        else:
            if way == "abort":
                assert front.abort_now("x")
            [output] = await asked
            reason = FinishReason.ABORT if way == "abort" else FinishReason.TIMEOUT
            assert output.finish_reason is reason
            assert output.num_output_tokens == len(output.token_ids)
        await is_idle(both)
        assert work(both) == [0, 0]
        [output] = await whole(front, PROMPT, SamplingParams(max_tokens=2), request_id="x")
        assert output.num_output_tokens <= 2


MIGRATES = """
from aioserve.fleet.routing import BaseRouter, Migrate

class Mine(BaseRouter):
    rebalance_seconds = {seconds}
    at = None

    def choose(self, request, replicas):
        return replicas[0]

    def on_first_token(self, request, name, seconds):
        self.at = (request.request_id, name)

    def on_move(self, request, source, target):
        self.at = (request.request_id, target)

    def on_end(self, request, name):
        self.at = None

    def rebalance(self, replicas):
        if self.at is None:
            return ()
        request_id, name = self.at
        return [Migrate(request_id, next(r for r in replicas if r.name != name))]
"""


async def test_a_request_that_is_migrated_to_and_fro_is_the_one_of_one_engine(
    tmp_path: Path,
) -> None:
    router = tmp_path / "mine.py"
    router.write_text(MIGRATES.format(seconds=0.03))
    long = {"max_tokens": 300, "ignore_eos": True}
    kinds = {
        name: msgspec.structs.replace(params, **long)
        for name, params in ASKED.items()
        if name in ("greedy", "seed", "penalties", "repetition")
    }
    kinds["stop"] = SamplingParams(max_tokens=600, temperature=1.0, seed=2, stop=("never said",))
    kinds["grammar"] = SamplingParams(
        max_tokens=300,
        temperature=0.8,
        seed=5,
        structured_outputs=StructuredOutputs(regex=r"[a-z]{3}-[0-9]{200}-[a-z]{4}"),
    )
    asked = [(f"{name}. {PROMPT}", params) for name, params in kinds.items()]
    expected = await alone(tmp_path, asked)
    async with joined(sharing(tmp_path / "kv"), router=f"{router}:Mine") as both:
        front = both.fronts[0]
        for (prompt, params), right in zip(asked, expected, strict=True):
            before = front.router_metrics.num_moved
            stream = await front.add_request(prompt, params)
            output = await rest_of(stream, await anext(stream))
            assert told(output) == right, prompt
            assert front.router_metrics.num_moved - before >= 2, prompt
        await is_idle(both)
        assert work(both) == [0, 0]
        assert sum(map(fetched, both.replicas)) > 100


async def test_the_metrics_tell_how_many_have_moved(tmp_path: Path) -> None:
    from aioserve.engine.operations import ShowMetrics

    async with joined(sharing(tmp_path), router="prefill_decode", groups=APART) as both:
        front = both.fronts[0]
        await whole(front, PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
        text = (await front.ask(ShowMetrics())).decode()
        [moved] = re.findall(r"aioserve_router_moved_requests_total{.*} (.*)", text)
        assert float(moved) == 1


RESTLESS = """
from aioserve.fleet.routing import BaseRouter, Migrate

class Mine(BaseRouter):
    rebalance_seconds = 0.02
    running = ()

    def choose(self, request, replicas):
        return self.rng.choice(replicas)

    def on_first_token(self, request, name, seconds):
        self.running += (request.request_id,)

    def on_end(self, request, name):
        self.running = tuple(each for each in self.running if each != request.request_id)

    def rebalance(self, replicas):
        count = min(4, len(self.running))
        return [Migrate(i, self.rng.choice(replicas)) for i in self.rng.sample(self.running, count)]
"""


async def test_no_stream_is_lost_while_requests_move_and_replicas_die(tmp_path: Path) -> None:
    router = tmp_path / "mine.py"
    router.write_text(RESTLESS)
    asked = [
        (
            f"{i} of the clock. {PROMPT[: 9 * i]}",
            msgspec.structs.replace(LONG, seed=i, max_tokens=120),
        )
        for i in range(1, 17)
    ]
    expected = await alone(tmp_path, asked)
    config = sharing(tmp_path / "kv")
    async with joined(config, 3, router=f"{router}:Mine") as both:
        front, [victim, *_] = both.fronts[0], both.replicas

        running = [asyncio.create_task(reading(front, *each)) for each in asked]
        leaving = [asyncio.create_task(whole(front, PROMPT, LONG)) for _ in range(4)]
        async with asyncio.timeout(60):
            while front.router_metrics.num_moved < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        for task in leaving:
            task.cancel()
        await victim.die()
        both.replicas.remove(victim)
        outputs = await asyncio.gather(*running)
        assert [told(output) for output in outputs] == expected
        await is_idle(both)
        assert work(both) == [0, 0]
