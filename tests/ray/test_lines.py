"""Requests on real lines between front ends and replicas, to any of their ends: all but Ray.

Needs Ray's names and none of its processes. For `make test-dist`.
"""

import asyncio
import time
import warnings
from collections.abc import Set
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aioserve.config import EngineConfig, RunnerConfig
from aioserve.engine.operations import ResetPrefixCache, ShowMetrics
from aioserve.errors import (
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    RequestIdInUseError,
    RunnerDeadError,
)
from aioserve.fleet.routing import RoutedRequest
from aioserve.kv_cache.block_pool import hash_blocks
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import FinishReason, ModelRunnerOutput
from aioserve.params import PoolingParams, SamplingParams, StructuredOutputs
from aioserve.request import Request, RequestSpec
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler import SchedulerOutput
from tests.server.serving import SIMULATED

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    pytest.importorskip("ray", reason="pip install 'ray[serve]'")
    from aioserve.fleet.ray import call as ray_call
    from aioserve.fleet.ray import fleet as ray_fleet
    from aioserve.fleet.ray import front as ray_front
    from aioserve.fleet.ray.front import RayFront
    from aioserve.fleet.ray.kv_feed import Ticket, attach
    from aioserve.fleet.ray.line import IngressClient
    from aioserve.fleet.workers import remote_engine
    from tests.ray.joined import Joined, Replica, is_idle, joined, whole

pytestmark = pytest.mark.dist

MODEL = EngineConfig.load(None, [("model.dtype", "float32"), ("cache.num_kv_blocks", 512)])
SLOW = msgspec.structs.replace(SIMULATED, runner=RunnerConfig(runner="simulated", step_base_ms=20))
ENDLESS = SamplingParams(max_tokens=100_000, ignore_eos=True)
PROMPT = "What news, my lord? " * 12


async def test_texts_of_every_kind_are_those_of_one_engine() -> None:
    asked: list[Any] = [
        SamplingParams(max_tokens=12, temperature=0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=12, temperature=0.9, seed=7, n=2),
        SamplingParams(max_tokens=40, temperature=0, stop=("lord",)),
        SamplingParams(max_tokens=9, temperature=0, output_kind="final_only"),
    ]
    async with joined(MODEL) as both:
        engine, front = both.replicas[0].engine, both.fronts[0]
        for params in asked:
            alone = await whole(engine, PROMPT, params)  # type: ignore[arg-type]
            for _ in both.replicas:
                for one, other in zip(alone, await whole(front, PROMPT, params), strict=True):
                    assert (one.text, one.token_ids) == (other.text, other.token_ids)
                    assert (one.logprobs, one.finish_reason) == (
                        other.logprobs,
                        other.finish_reason,
                    )
        [vector] = await whole(front, PROMPT, PoolingParams())
        [same] = await whole(engine, PROMPT, PoolingParams())  # type: ignore[arg-type]
        assert vector.embedding is not None
        assert same.embedding is not None
        assert vector.embedding.tolist() == same.embedding.tolist()
        await is_idle(both)


async def test_a_prefix_that_a_replica_holds_is_found_there_and_counted() -> None:
    async with joined(MODEL, router="prefix") as both:
        params = SamplingParams(max_tokens=3, temperature=0)
        prompts = [f"{i} of the clock. {PROMPT}" for i in range(8)]
        await asyncio.gather(*(whole(both.fronts[0], prompt, params) for prompt in prompts))
        await asyncio.sleep(0.5)  # what the router knows is as old as a message
        again = [await whole(both.fronts[0], prompt, params) for prompt in prompts]
        assert all(output.num_cached_tokens for [output] in again)


async def test_what_a_replica_refuses_is_raised_as_it_is() -> None:
    config = msgspec.structs.replace(
        SLOW,
        scheduler=msgspec.structs.replace(SLOW.scheduler, max_num_seqs=1, max_waiting_requests=1),
    )
    async with joined(config, num_replicas=1) as both:
        front = both.fronts[0]
        streams = [await front.add_request([1], ENDLESS, request_id="x")]
        await anext(streams[0])
        streams.append(await front.add_request([2], ENDLESS))
        with pytest.raises(EngineOverloadedError, match="are waiting already"):
            await front.add_request([3], ENDLESS)
        with pytest.raises(RequestIdInUseError):
            await front.add_request([1], ENDLESS, request_id="x")
        for stream in streams:
            stream.close()
        await is_idle(both)
    async with joined(MODEL, num_replicas=1) as both:
        schema = StructuredOutputs(json={"type": "no"})
        with pytest.raises(RequestError, match="no"):
            await both.fronts[0].add_request("a", SamplingParams(structured_outputs=schema))
        await is_idle(both)


async def test_what_a_dying_replica_had_not_told_is_whole_from_another_and_streams_say_so() -> None:
    async with joined(SLOW, router="round_robin") as both:
        front, [victim, _] = both.fronts[0], both.replicas
        streams = [await front.add_request([i], ENDLESS) for i in range(4)]
        for stream in streams:
            await anext(stream)
        params = SamplingParams(
            max_tokens=20, ignore_eos=True, output_kind="final_only", stop=("never said",)
        )
        asked = [asyncio.create_task(whole(front, [i], params)) for i in range(6)]
        while len(front.fleet.lines[victim.name].calls) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)  # some tokens of them
        await victim.die()
        for [output] in await asyncio.gather(*asked):
            assert output.num_output_tokens == 20
        ends = await asyncio.gather(*map(_read_some, streams), return_exceptions=True)
        broken = [end for end in ends if end is not None]
        assert len(broken) == 2
        for error in broken:
            assert isinstance(error, EngineDeadError)
            assert "the replica that served this request has died" in str(error)
        for stream in streams:
            stream.close()
        both.replicas.remove(victim)
        await is_idle(both)
        assert both.dispatcher().names == [both.replicas[0].name]


async def _read_some(stream: Any) -> None:
    for _ in range(5):
        await anext(stream)


async def test_a_request_that_three_replicas_did_not_survive_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with joined(SLOW, num_replicas=4) as both:
        taken: list[str] = []

        def die(client: IngressClient, *_: Any) -> None:
            taken.append(client.name)
            client.refuse()

        monkeypatch.setattr(IngressClient, "_add", die)
        with pytest.raises(EngineDeadError, match="the replica that served this request has died"):
            await both.fronts[0].add_request([1], ENDLESS)
        assert len(taken) == 3
        monkeypatch.undo()
        assert len(await whole(both.fronts[0], [1], SamplingParams(max_tokens=2))) == 1


async def test_a_line_that_breaks_is_made_anew_while_the_replica_lives() -> None:
    async with joined(SLOW, num_replicas=1) as both:
        stream = await both.fronts[0].add_request([1], ENDLESS)
        await anext(stream)
        for client in list(both.replicas[0].door._clients):
            client.refuse()
        with pytest.raises(EngineDeadError):
            await _read_some(stream)
        stream.close()
        [output] = await whole(both.fronts[0], [1], SamplingParams(max_tokens=3, ignore_eos=True))
        assert output.num_output_tokens == 3
        await is_idle(both)


class DyingRunner(SimulatedRunner):
    """Its device is gone as soon as that is said."""

    is_dead = False

    def _compute(self, scheduler_output: SchedulerOutput) -> tuple[float, ModelRunnerOutput]:
        if self.is_dead:
            raise RunnerDeadError("the device is gone")
        return super()._compute(scheduler_output)


async def test_a_dead_engine_in_a_replica_that_lives_gets_nothing_more() -> None:
    runner = DyingRunner(SLOW, ModelInfo(SLOW.model))
    async with joined(SLOW, runner=runner) as both:
        [_, other] = both.replicas
        params = SamplingParams(max_tokens=20, ignore_eos=True, output_kind="final_only")
        asked = [asyncio.create_task(whole(both.fronts[0], [i], params)) for i in range(4)]
        await asyncio.sleep(0.2)
        runner.is_dead = True
        for [output] in await asyncio.gather(*asked):
            assert output.num_output_tokens == 20
        await both.expect_lines(1)
        assert both.dispatcher().names == [other.name]


async def test_a_replica_that_goes_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with joined(SLOW) as both:
        front, [going, stays] = both.fronts[0], both.replicas
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        streams = [await front.add_request([i], params) for i in range(4)]
        both.tell(stays)
        leaving = asyncio.create_task(going.door.leave())
        await asyncio.sleep(0.1)
        assert both.dispatcher().names == [stays.name]
        with pytest.raises(EngineDeadError, match="about to go"):
            await attach(going.feed.ticket)
        streams += [await front.add_request([i], params) for i in range(4)]
        for stream in streams:
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert outputs[-1].num_output_tokens == 30
        async with asyncio.timeout(4):  # sooner than without an answer of the ingress
            await leaving
        await is_idle(both)


async def test_a_replica_that_ray_left_out_for_a_while_gets_requests_again() -> None:
    async with joined(SIMULATED) as both:
        both.tell(both.replicas[0])
        await both.expect_lines(1)
        both.tell(*both.replicas)
        await both.expect_lines(2)
        for _ in range(2):  # round robin: one each
            await whole(both.fronts[0], PROMPT, SamplingParams(max_tokens=2))
        counts = [replica.engine.get_stats() for replica in both.replicas]
        assert all(stats is not None and stats.num_steps for stats in counts), counts


async def test_an_abort_brings_what_there_is_and_ends_what_no_replica_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_call, "ABORT_SECONDS", 0.05)
    params = msgspec.structs.replace(ENDLESS, output_kind="final_only")
    async with joined(SLOW) as both:
        front = both.fronts[0]
        for is_deaf in (False, True):
            asked = asyncio.create_task(whole(front, [1], params, request_id="x"))
            await asyncio.sleep(0.3)
            if is_deaf:
                monkeypatch.setattr(IngressClient, "_abort", lambda *_: None)
            assert front.abort_now("x")
            assert not front.abort_now("x")  # its end is on the way
            [output] = await asked
            assert output.finish_reason is FinishReason.ABORT
            assert output.num_output_tokens == len(output.token_ids)
            assert is_deaf or output.token_ids
        await is_idle(both)


async def test_what_no_replica_has_accepted_can_be_aborted_left_or_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with joined(SLOW) as both:
        front = both.fronts[0]
        add = IngressClient._add
        monkeypatch.setattr(IngressClient, "_add", lambda *_: None)
        adding = asyncio.create_task(whole(front, [1], ENDLESS, request_id="x"))
        await asyncio.sleep(0.1)
        assert front.abort_now("x")
        [output] = await adding
        assert output.finish_reason is FinishReason.ABORT
        [output] = await whole(front, [1], ENDLESS, timeout=0.05)
        assert output.finish_reason is FinishReason.TIMEOUT
        adding = asyncio.create_task(whole(front, [1], ENDLESS, request_id="x"))
        await asyncio.sleep(0.1)
        adding.cancel()
        await asyncio.wait([adding])
        monkeypatch.setattr(IngressClient, "_add", add)
        [output] = await whole(front, [1], SamplingParams(max_tokens=2), request_id="x")
        assert output.finish_reason is not None
        await is_idle(both)
        assert not any(both.dispatcher().work_of(name) for name in both.dispatcher().names)


async def test_a_timeout_counts_from_the_ingress_on_by_the_clock_of_the_replica() -> None:
    async with joined(SLOW) as both:
        since = time.monotonic()
        [output] = await whole(both.fronts[0], [1], ENDLESS, timeout=0.5)
        assert output.finish_reason is FinishReason.TIMEOUT
        assert output.num_output_tokens
        assert time.monotonic() - since >= 0.5
        await is_idle(both)


async def test_a_reader_that_leaves_frees_its_replica() -> None:
    async with joined(SLOW) as both:
        async with await both.fronts[0].add_request([1], ENDLESS) as stream:
            await anext(stream)
        await is_idle(both)
        assert not any(both.dispatcher().work_of(name) for name in both.dispatcher().names)


async def test_a_router_of_a_file_refuses_lets_wait_and_may_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_call, "MAX_WAIT_SECONDS", 0.3)
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from aioserve.fleet.routing import BaseRouter, Refuse, Wait\n"
        "class Mine(BaseRouter):\n"
        "    def choose(self, request, replicas):\n"
        "        if request.user == 'refused':\n"
        "            return Refuse('not today', 7.0)\n"
        "        if request.user == 'waits':\n"
        "            return Wait(0.02)\n"
        "        return None if request.user == 'broken' else replicas[0]\n"
        "    def on_first_token(self, request, name, seconds):\n"
        "        raise KeyError(name)\n"
    )
    async with joined(SLOW, router=f"{mine}:Mine") as both:
        front, params = both.fronts[0], SamplingParams(max_tokens=2)
        with pytest.raises(EngineOverloadedError, match="not today") as raised:
            await front.add_request([1], params, user="refused")
        assert raised.value.retry_after == 7.0
        with pytest.raises(EngineOverloadedError, match=r"no replica was chosen within 0\.3 s"):
            await front.add_request([1], params, user="waits")
        [late] = await whole(front, [1], params, user="waits", timeout=0.1)
        assert late.finish_reason is FinishReason.TIMEOUT
        for _ in range(2):
            [output] = await whole(front, [1], params, user="broken")
            assert output.num_output_tokens == 2
        assert caplog.text.count("the replica with the least work gets the request") == 1
        await is_idle(both)


async def test_a_replica_gets_no_more_than_max_ongoing_requests_of_all_ingresses() -> None:
    async with joined(SLOW, num_fronts=2, router="least_requests", max_ongoing_requests=1) as both:
        one, other = both.fronts
        streams = [await one.add_request([1], ENDLESS) for _ in both.replicas]
        async with asyncio.timeout(20):
            while not all(both.dispatcher(1).work_of(r.name) for r in both.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        third = asyncio.create_task(other.add_request([1], ENDLESS))
        await asyncio.sleep(0.3)
        assert not third.done()
        streams.pop().close()
        async with asyncio.timeout(20):
            streams.append(await third)
        for stream in streams:
            stream.close()
        await is_idle(both)


async def test_routers_of_several_ingresses_know_what_the_others_have_sent() -> None:
    async with joined(SLOW, num_fronts=3, router="least_work") as both:
        streams = [await front.add_request([1] * 99, ENDLESS) for front in both.fronts[:2]]
        async with asyncio.timeout(20):
            while (  # noqa: ASYNC110
                sum(both.dispatcher(2).num_requests_of(r.name) for r in both.replicas) < 2
            ):
                await asyncio.sleep(0.005)

        def differences() -> list[float]:
            """By replica, between what the third router was told and what the others have there."""
            return [
                both.dispatcher(2).work_of(replica.name)
                - sum(both.dispatcher(number).own_load(replica.name).work for number in (0, 1))
                for replica in both.replicas
            ]

        async with asyncio.timeout(20):  # it changes when a request starts, and is told then
            while differences() != pytest.approx([0.0, 0.0]):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        for stream in streams:
            stream.close()
        async with asyncio.timeout(20):
            while any(both.dispatcher(2).work_of(r.name) for r in both.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_what_an_ingress_had_sent_is_forgotten_with_it() -> None:
    async with joined(SLOW, num_fronts=2, router="least_work") as both:
        stream = await both.fronts[0].add_request([1] * 99, ENDLESS)
        async with asyncio.timeout(20):
            while not any(both.dispatcher(1).work_of(r.name) for r in both.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await both.fronts[0].close()
        async with asyncio.timeout(20):
            while any(both.dispatcher(1).work_of(r.name) for r in both.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        stream.close()
        both.fronts.pop(0)
        await is_idle(both)


async def test_a_router_of_rays_chooses_and_a_call_holds_the_place() -> None:
    router = "ray.serve.request_router:RequestRouter"
    async with joined(SLOW, router=router) as both:
        front = both.fronts[0]
        for count in range(1, 4):
            async with await front.add_request([1], ENDLESS) as stream:
                await anext(stream)
                assert [held.is_cancelled for held in both.handle.held] == [True] * (count - 1) + [
                    False
                ]
            assert both.handle.held[-1].is_cancelled
        await is_idle(both)


async def test_a_replica_that_comes_later_gets_requests() -> None:
    async with joined(SLOW, num_replicas=1) as both:
        late = Replica(SLOW)
        await late.start()
        both.replicas.append(late)
        both.tell(*both.replicas)
        await both.expect_lines(2)
        streams = [await both.fronts[0].add_request([1], ENDLESS) for _ in range(2)]
        assert all(replica.door.num_requests == 1 for replica in both.replicas)
        for stream in streams:
            stream.close()
        await is_idle(both)
        await late.die()


async def test_an_ingress_of_another_version_gets_no_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with joined(SLOW, num_replicas=1) as both:
        monkeypatch.setattr(remote_engine, "__version__", "0.0.1")
        for client in list(both.replicas[0].door._clients):
            client.refuse()
        async with asyncio.timeout(20):
            while "it is version 0.0.1" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_ticket_with_a_wrong_token_leads_to_no_line() -> None:
    async with joined(SLOW, num_replicas=1) as both:
        own = both.replicas[0].feed.ticket
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await attach(Ticket(own.address, own.server_key, b"x" * 32))


async def test_an_ingress_waits_for_a_replica_of_its_own_version_and_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_front, "PATIENCE_SECONDS", 0.1)
    async with joined(SLOW, num_replicas=1) as both:
        own = await both.handles[0].describe.remote()
        answers = [
            msgspec.structs.replace(own, version="0.0.1"),
            msgspec.structs.replace(own, config=MODEL, max_model_len=7),
            own,
        ]
        both.handles[0].describe.remote = lambda: asyncio.sleep(0, answers.pop(0))
        front = RayFront(SLOW, both.handles, both.model, seed=1)  # type: ignore[arg-type]
        await front.start()
        assert front.max_model_len == own.max_model_len
        assert not answers
        assert "with the settings of this ingress" in caplog.text
        await front.close()


async def test_a_replica_with_another_model_gets_nothing_while_an_application_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_call, "MAX_WAIT_SECONDS", 0.3)
    async with joined(SLOW, num_replicas=1) as both:
        other = Replica(SLOW)
        await other.start()
        ticket = msgspec.structs.replace(other.feed.ticket, model="another")
        other.feed.ticket = ticket
        both.replicas.append(other)
        both.tell(*both.replicas)
        for _ in range(4):
            await whole(both.fronts[0], [1], SamplingParams(max_tokens=2))
        await both.expect_lines(1)
        assert not other.door.num_requests
        both.tell(other)
        await both.expect_lines(0)
        with pytest.raises(EngineOverloadedError, match=r"no replica was chosen within 0\.3 s"):
            await both.fronts[0].add_request([1], SamplingParams(max_tokens=2))
        await other.die()


async def test_an_ingress_does_not_wait_for_the_greeting_of_a_replica_that_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_fleet, "ATTACH_SECONDS", 1000)
    greeted: list[str] = []

    def greet(client: IngressClient, hello: Any) -> None:
        greeted.append(client.name)
        monkeypatch.undo()
        client.refuse()

    async with joined(SLOW, num_replicas=1) as both:
        late = Replica(SLOW)
        await late.start()
        both.replicas.append(late)
        monkeypatch.setattr(IngressClient, "_greet", greet)
        both.tell(*both.replicas)
        await both.expect_lines(2)  # by another line
        assert greeted == ["ingress-1"]
        await late.die()


async def test_a_request_that_fails_to_hear_that_its_replica_is_gone_keeps_no_other_from_it() -> (
    None
):
    class Deaf:
        def lost(self, error: EngineDeadError) -> None:
            raise KeyError("deaf")

    async with joined(SLOW) as both:
        front, [victim, _] = both.fronts[0], both.replicas
        front.fleet.lines[victim.name].calls["deaf"] = Deaf()
        params = SamplingParams(max_tokens=20, ignore_eos=True, output_kind="final_only")
        asked = [asyncio.create_task(whole(front, [i], params)) for i in range(4)]
        while len(front.fleet.lines[victim.name].calls) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await victim.die()
        for [output] in await asyncio.gather(*asked):
            assert output.num_output_tokens == 20


async def test_prefixes_of_a_replica_that_ray_left_out_for_a_while_are_found_again() -> None:
    async with joined(MODEL, router="prefix") as both:
        params = SamplingParams(max_tokens=3, temperature=0)
        prompts = [f"{i} of the clock. {PROMPT}" for i in range(8)]
        await asyncio.gather(*(whole(both.fronts[0], prompt, params) for prompt in prompts))
        both.tell(both.replicas[1])
        await both.expect_lines(1)
        both.tell(*both.replicas)
        await both.expect_lines(2)
        await asyncio.sleep(0.5)  # what the router knows is as old as a message
        again = [await whole(both.fronts[0], prompt, params) for prompt in prompts]
        assert all(output.num_cached_tokens for [output] in again)


class _Recorded:
    """What a router was asked."""

    def __init__(self, both: Joined) -> None:
        self.requests: list[RoutedRequest] = []
        self._choose = both.dispatcher().choose_both
        both.dispatcher().choose_both = self  # type: ignore[method-assign, assignment]

    def __call__(self, request: RoutedRequest, avoid: Set[str] = frozenset()) -> Any:
        self.requests.append(request)
        return self._choose(request, avoid)


async def test_blocks_of_a_long_prompt_are_hashed_in_pieces() -> None:
    config = EngineConfig.load(
        None,
        [
            *(("runner.runner", "simulated"), ("cache.block_size", 16)),
            *(("model.max_model_len", 200_000), ("cache.num_kv_blocks", 20_000)),
        ],
    )
    async with joined(config, num_replicas=1, router="prefix") as both:
        recorded, turns = _Recorded(both), 0
        token_ids = list(range(2000)) * 50
        adding = asyncio.create_task(both.fronts[0].add_request(token_ids, ENDLESS))
        while not recorded.requests:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 100_000 / 16 / ray_front.BLOCKS_AT_ONCE
        request = Request(RequestSpec("", token_ids, ENDLESS))
        hash_blocks(request, 100_000 // 16, 16)
        assert recorded.requests[0].block_hashes == tuple(request.block_hashes)
        (await adding).close()


async def test_a_router_that_wants_no_hashes_gets_none() -> None:
    async with joined(SLOW, num_replicas=1) as both:
        recorded = _Recorded(both)
        await whole(both.fronts[0], [1] * 64, SamplingParams(max_tokens=1), user="ann")
        [request] = recorded.requests
        assert (request.block_hashes, request.session) == ((), "ann")


async def test_what_an_operator_asks_is_refused_in_words() -> None:
    async with joined(SLOW, num_replicas=1) as both:
        with pytest.raises(RequestError, match=r"ResetPrefixCache is not served .* docs/ray.md"):
            await both.fronts[0].ask(ResetPrefixCache())


async def test_decisions_are_counted_by_outcome_with_reasons_times_and_ages(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from aioserve.fleet.routing import BaseRouter, Refuse, Wait\n"
        "class Mine(BaseRouter):\n"
        "    uses_reports = True\n"
        "    def choose(self, request, replicas):\n"
        "        if request.user.startswith('refused'):\n"
        "            return Refuse(request.user)\n"
        "        if request.user == 'waits' and not request.num_attempts:\n"
        "            return Wait(0.02)\n"
        "        return None if request.user == 'broken' else replicas[0]\n"
    )
    async with joined(SLOW, router=f"{mine}:Mine") as both:
        front = both.fronts[0]
        await asyncio.sleep(0.5)  # the first report
        params = SamplingParams(max_tokens=2, output_kind="final_only")
        await whole(front, [1], params)
        await whole(front, [1], params, user="broken")
        await whole(front, [1], params, user="waits", timeout=0.05)
        for i in range(25):
            with pytest.raises(EngineOverloadedError):
                await front.add_request([1], params, user=f"refused {i}")
        long = SamplingParams(max_tokens=30, ignore_eos=True, output_kind="final_only")
        asked = asyncio.create_task(whole(front, [1], long))
        while not any(front.fleet.lines[one.name].calls for one in both.replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for one in both.replicas:
            if front.fleet.lines[one.name].calls:
                await one.die()
                break
        await asked
        text = (await front.ask(ShowMetrics())).decode()
        values = {
            (sample.name.removeprefix("aioserve_router_"), sample.labels.get(label, "")): sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            for label in ("outcome", "reason", "le")
            if label in sample.labels or len(sample.labels) == 2
        }

        def value(name: str, label: str = "") -> float:
            assert values[name, label].labels["router"] == "Mine"
            return values[name, label].value

        assert value("decisions_total", "sent") == 4  # that of a broken router is one
        assert value("decisions_total", "failed") == 1
        assert value("decisions_total", "waits") >= 1
        assert value("decisions_total", "refused") == 25
        assert value("refusals_total", "refused 3") == 1
        assert value("refusals_total", "other") == 5
        assert value("resent_requests_total") == 1
        assert value("replicas") == 1
        assert value("decision_seconds_count") >= 30
        assert value("knowledge_age_seconds_count") == 4
        assert 0 < value("knowledge_age_seconds_sum") < 60
