"""Keys before several workers: their limits are of all together, and a reload reaches all."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from aioserve.engine.operations import AbortElsewhere, ShowMetrics
from aioserve.errors import KeyLimitError
from aioserve.fleet.workers.messages import EndLease
from aioserve.fleet.workers.remote_engine import RemoteResponses
from aioserve.params import SamplingParams
from aioserve.server.app import listening
from aioserve.server.running import RunningResponses
from aioserve.server.sockets import bind
from tests.server.serving import SIMULATED
from tests.workers.joined import joined, read

BEN = "sk-ben-0123456789"


def write(path, entry):
    path.write_text(f"keys: [{entry}]")
    path.chmod(0o600)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, f"{{name: ben, key: {BEN}, max_requests: 2, tokens_per_minute: 99}}")
    return replace(SIMULATED, access=replace(SIMULATED.access, api_keys_file=str(path)))


async def test_what_a_key_may_have_is_counted_for_all_workers_together(config):
    async with joined(config, num_workers=2) as (_, host, remotes, clients):
        here, there = (remote.access.entrance for remote in remotes)
        accounts = host.access.accounts
        async with here.entered("ben"):
            async with there.entered("ben"):
                with pytest.raises(KeyLimitError, match="2 requests running") as caught:
                    async with here.entered("ben"):
                        pass
                assert caught.value.retry_after >= 1
                assert accounts.num_running("ben") == 2
            async with there.entered("ben"):
                assert accounts.num_running("ben") == 2
        lost = there.entered("ben")
        await lost.__aenter__()
        host.close(clients[1])  # its process has died
        async with here.entered("ben"), asyncio.timeout(60):
            while accounts.num_running("ben") != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("completions", {"prompt": "Hello", "stream": True}),
        ("completions", {"prompt": ["Hello", "you"], "n": 2, "stream": True}),
        ("completions", {"prompt": "Hello"}),
        ("completions", {"prompt": "Hello", "logit_bias": {"999999": 1}}),
        ("embeddings", {"input": "Hello"}),
        ("responses", {"input": "Hello", "stream": True}),
    ],
    ids=["a stream", "streams", "whole", "refused", "embeddings", "a response"],
)
async def test_who_has_heard_the_end_may_ask_another_worker_at_once(config, route, fields):
    prompts = fields.get("prompt")
    num_sequences = (len(prompts) if isinstance(prompts, list) else 1) * fields.get("n", 1)
    rights = f"max_requests: {num_sequences}"
    write(Path(config.access.api_keys_file), f"{{name: ben, key: {BEN}, {rights}}}")
    headers = {"Authorization": f"Bearer {BEN}"}
    async with joined(config, num_workers=2) as (_, host, remotes, _), AsyncExitStack() as stack:
        answer = host.answer

        async def answer_late(question, asking):
            if isinstance(question, EndLease):  # as if this worker's messages were slow
                await asyncio.sleep(0.05)
            return await answer(question, asking)

        host.answer = answer_late
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
        urls = []
        for remote in remotes:
            sockets = bind("127.0.0.1", 0)
            serving = listening(
                remote, sockets, RemoteResponses(remote), RunningResponses(remote), remote.access
            )
            urls.append(await stack.enter_async_context(serving))
        num_prompts = len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1
        for url in urls * 2:
            async with session.post(f"{url}/v1/{route}", json=fields) as response:
                assert response.status == (400 if "logit_bias" in fields else 200)
                num_ends = 0
                async for line in response.content:
                    num_ends += line.count(b'"finish_reason":"')
                    if num_ends == fields.get("n", 1) * num_prompts:
                        break  # some do not wait for what comes behind it


async def test_tokens_that_a_worker_asked_for_are_charged_to_its_key(config):
    async with joined(config, num_workers=2) as (_, host, remotes, _):
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        for remote in remotes:
            await read(remote, "Hello", params, key_name="ben")
        assert host.access.accounts.num_tokens["ben"] > 120
        async with remotes[0].access.entrance.entered("ben"):
            pass  # its first: before, there was nothing to limit
        host.access.accounts.charge("ben", 120)
        with pytest.raises(KeyLimitError, match="99 tokens a minute"):
            async with remotes[1].access.entrance.entered("ben"):
                pass


async def test_a_reload_reaches_every_worker_and_their_refusals_are_one_metric(config):
    path = Path(config.access.api_keys_file)
    async with joined(config, num_workers=2) as (_, host, remotes, clients):
        assert all(remote.access.keyring.find(BEN) is not None for remote in remotes)
        write(path, "{name: ann, key: sk-ann-0123456789}")
        host.access.reload()
        async with asyncio.timeout(60):
            for remote in remotes:
                while remote.access.keyring.find(BEN) is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                assert remote.access.keyring.find("sk-ann-0123456789").name == "ann"
        for remote in remotes:
            remote.access.refusals["invalid_api_key", ""] += 2
        line = b'aioserve_requests_refused_total{key="",reason="invalid_api_key"} 4.0'
        assert line in await remotes[0].ask(ShowMetrics())
        host.close(clients[1])  # what it refused has happened
        assert line in await remotes[0].ask(ShowMetrics())


async def test_only_its_owner_ends_a_response_of_another_worker(config):
    async with joined(config, num_workers=2) as (_, _, [here, there], _):
        running = RunningResponses(there)
        there.abort_here = running.abort
        with running.enter("mine", ["mine"], "ben") as response:
            assert not await here.ask(AbortElsewhere("mine", "ann"))
            assert not response.is_aborted
            assert await here.ask(AbortElsewhere("mine", "ben"))
            assert response.is_aborted
            assert await here.ask(AbortElsewhere("mine"))
