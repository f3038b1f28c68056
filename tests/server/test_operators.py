"""Operators' commands: by `AsyncClient`, and what a new one gets of its declaration alone."""

import inspect
from typing import Any

import msgspec
import pytest

from aioserve import AsyncClient
from aioserve.engine.operations import OPERATOR_COMMANDS, EngineState, OperatorCommand, Pause
from aioserve.engine.operations.command import FilePath, Http
from aioserve.errors import EngineDeadError, EnginePausedError, RequestError
from aioserve.server.operators import route_of

ADMIN = {"enable_admin": True}


async def test_every_command_is_a_method_of_the_client_with_the_same_words():
    for command in OPERATOR_COMMANDS:
        method = getattr(AsyncClient, command.operation())
        words = list(inspect.signature(method).parameters)
        assert words[0] == "self"
        assert sorted(words[1:]) == sorted(command.__struct_fields__), command


async def test_a_client_pauses_and_wakes_a_server(start_server):
    async with start_server(server=ADMIN) as server, AsyncClient(server.url) as client:
        await client.pause(arrivals="refuse", running="abort")
        assert not await client.health()
        with pytest.raises(EnginePausedError):
            await client.generate_one("Hello")
        await client.resume()
        assert (await client.generate_one("Hello")).finished
        await client.sleep(weights=True)
        with pytest.raises(RequestError, match="wake"):
            await client.resume()
        await client.wake()
        assert await client.health()
        with pytest.raises(RequestError, match="reload is not served") as refused:
            await client.reload("/no/such/model")
        assert refused.value.param == "path"
        assert await client.ask(Pause()) == EngineState("paused")


async def test_a_client_changes_policies_and_forgets_prefixes(start_server):
    async with start_server(server=ADMIN) as server, AsyncClient(server.url) as client:
        before = await client.switch_policy("priority")
        assert before == ("chunked_prefill", {"chunk_size": 64})
        assert server.engine.config.scheduler.policy == "priority"
        await client.switch_shadow("fcfs")
        assert server.engine.config.shadow.shadow_policy == "fcfs"
        await client.switch_shadow(None)
        with pytest.raises(RequestError, match="unknown policy"):
            await client.try_policy("fcsf", seconds=1)
        with pytest.raises(RequestError, match="requests must be from 1") as refused:
            await client.try_policy("fcfs", num_requests=0)
        assert refused.value.param == "requests"
        await client.generate_one([7] * 100)
        assert await client.reset_prefix_cache()
        await client.set_log_level("info")


async def test_a_client_hears_why_an_adapter_cannot_be_loaded(start_server, tmp_path):
    async with start_server(server=ADMIN) as server, AsyncClient(server.url) as client:
        with pytest.raises(RequestError):
            await client.load_adapter("a", str(tmp_path / "a\0b"))
        with pytest.raises(RequestError):
            await client.load_adapter("a", str(tmp_path))
        with pytest.raises(RequestError, match="does not exist"):
            await client.unload_adapter("a")


async def test_without_admin_routes_a_client_hears_that_there_is_none(server):
    async with AsyncClient(server.url) as client:
        with pytest.raises(RequestError):
            await client.pause()


def test_a_route_follows_from_what_a_command_declares():
    class CountFiles(OperatorCommand[int, str], frozen=True):
        folder: FilePath
        suffixes: list[str] = msgspec.field(default_factory=lambda: [".py"])
        deep: bool = msgspec.field(default=False, name="recursive")

        http = Http("/admin/count_files", "Count files.", raises=(EngineDeadError, TimeoutError))

    route = route_of(CountFiles)
    assert (route.method, route.path, route.answer) == ("POST", "/admin/count_files", str)
    assert (route.handler.__name__, route.needs) == ("count_files", "admin_key")
    assert not route.may_lack_body
    assert route.raises == (EngineDeadError, TimeoutError)
    assert route.body is not None
    assert route.body.served.__name__ == "CountFilesRequest"
    body: Any = route.body.decode(b'{"folder": "x", "recursive": true}')
    assert (body.folder, body.suffixes, body.recursive) == ("x", [".py"], True)
    with pytest.raises(RequestError, match="did you mean 'folder'"):
        route.body.decode(b'{"folders": "x"}')


def test_a_command_without_fields_has_a_route_that_looks_at_no_body():
    class Rest(OperatorCommand[bool, bool], frozen=True):
        http = Http("/admin/rest", "Rest.")

    assert route_of(Rest).body is None
    assert Rest.answer_type is bool
    assert Rest().tell(answer=True)
