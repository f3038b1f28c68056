"""Files over HTTP: uploaded in pieces, listed, read again, forgotten, and never too much."""

import asyncio
import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from aioserve.apis.batches import runner
from aioserve.apis.batches.disk import Disk, sweep, usage
from aioserve.config import AccessConfig
from tests.processes import PATIENCE
from tests.server.batches.asking import completions, config, create, serving, until
from tests.server.serving import SIMULATED

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

MIB = 2**20


async def test_a_file_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3000 + b"\r\n--end"
    async with serving(tmp_path) as (_, client):
        made = await client.files.create(file=("two words.jsonl", data), purpose="batch")
        assert (made.filename, made.bytes, made.purpose) == ("two words.jsonl", len(data), "batch")
        found = await client.files.retrieve(made.id)
        assert found == made
        assert (await client.files.content(made.id)).content == data
        gone = await client.files.delete(made.id)
        assert (gone.id, gone.deleted) == (made.id, True)
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="no file"):
                await ask(made.id)
    kept = [path for path in (tmp_path / "batches").rglob("*") if path.is_file()]
    assert [path.name for path in kept] == ["owner"]


async def test_a_client_that_reads_nothing_of_a_file_is_dropped_and_the_file_closed(
    tmp_path: Path,
) -> None:
    base = msgspec.structs.replace(SIMULATED, access=AccessConfig(send_timeout=0.2))

    def num_open() -> int:
        paths = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the list itself
                paths.append(os.readlink(f"/proc/self/fd/{name}"))
        return sum(made.id in path for path in paths)

    async with serving(tmp_path, base) as (server, client):
        data = io.BytesIO(bytes(16 * MIB))  # no buffer of the system's holds it
        made = await client.files.create(file=("big.jsonl", data), purpose="batch")
        reader, writer = await asyncio.open_connection(server.host, server.port)
        head = f"GET /v1/files/{made.id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(PATIENCE):
            await reader.readexactly(15)  # it has begun
            assert num_open() == 1
            writer.transport.pause_reading()
            while b"unread_answer" not in (await server.get("/metrics")).body:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            while num_open():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.transport.abort()


async def test_files_are_listed_by_pages_in_either_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, client):
        made = [
            (await client.files.create(file=(f"{i}.jsonl", b"{}"), purpose="batch")).id
            for i in range(5)
        ]
        newest_first = [file.id async for file in client.files.list(limit=2)]
        assert newest_first == made[::-1]
        assert [file.id async for file in client.files.list(order="asc")] == made
        assert [file async for file in client.files.list(purpose="batch_output")] == []
        for query in ("limit=0", "order=up", "after=file-x", "zzz=1"):
            assert (await server.get(f"/v1/files?{query}")).status == 400


async def test_the_parts_of_a_form_come_in_any_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, _):
        form = aiohttp.FormData()
        form.add_field("file", b"{}", filename="a.jsonl")
        form.add_field("expires_after[seconds]", "3600")
        form.add_field("purpose", "batch")
        form.add_field("expires_after[anchor]", "created_at")
        async with server.session.post(server.url + "/v1/files", data=form) as response:
            made = await response.json()
    assert response.status == 200
    assert made["expires_at"] == made["created_at"] + 3600


WRONG_FORMS: list[tuple[list[tuple[str, Any]], str]] = [
    ([("purpose", "batch")], "file"),
    ([("file", b"{}")], "purpose"),
    ([("purpose", "fine-tune"), ("file", b"{}")], "purpose"),
    ([("purpose", "batch"), ("file", b"{}"), ("file", b"{}")], "file"),
    ([("purpose", "batch"), ("purpose", "batch"), ("file", b"{}")], "purpose"),
    ([("purpose", "x" * 5000), ("file", b"{}")], "purpose"),
    ([("purpose", "batch"), ("file", b"{}"), ("zzz", "1")], "zzz"),
    (
        [("purpose", "batch"), ("file", b"{}"), ("expires_after[seconds]", "3600")],
        "expires_after[anchor]",
    ),
    (
        [("purpose", "batch"), ("file", b"{}"), ("expires_after[seconds]", "5")],
        "expires_after[seconds]",
    ),
    ([("purpose", "batch"), ("file", b"x" * (MIB + 1))], "file"),
]


async def test_a_wrong_form_is_refused_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, max_batch_file_mib=1) as (server, _):
        for fields, param in WRONG_FORMS:
            form = aiohttp.FormData(quote_fields=False, default_to_multipart=True)
            for name, value in fields:
                is_file = name == "file"
                value = io.BytesIO(value) if is_file else value
                form.add_field(name, value, filename="a.jsonl" if is_file else None)
            async with server.session.post(server.url + "/v1/files", data=form) as response:
                answer = await response.json()
            assert response.status == 400, answer
            assert answer["error"]["param"] == param
            assert list((tmp_path / "batches/incoming").iterdir()) == []
            assert (await server.get("/v1/files")).json()["data"] == []


async def test_what_is_no_form_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, _):
        answer = await server.request("POST", "/v1/files", json={"file": "x"})
        assert answer.status == 415
        for kind in ("multipart/form-data", "multipart/form-data; boundary=x"):
            headers = {"Content-Type": kind}
            url = server.url + "/v1/files"
            async with server.session.post(url, data=b"nothing", headers=headers) as response:
                assert response.status == 400, await response.text()


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--b--\r\n'
)
NESTED = b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c--\r\n--b--\r\n"


@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")  # a log line of aiohttp
async def test_a_form_that_is_damaged_anywhere_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    encoded = FORM.replace(b'"a"\r\n', b'"a"\r\nContent-Transfer-Encoding: base64\r\n')
    whole = len(FORM) - len(b"--\r\n")  # the rest of the last mark says nothing more
    damaged = [*(FORM[:end] for end in range(0, whole, 5)), NESTED, encoded]
    damaged += [FORM.replace(b'name="file"; ', b"")]
    damaged += [FORM.replace(b"\r\n", b"\n"), b"\0" * 2000, FORM.replace(b"purpose", b"\xff")]
    url, headers = "/v1/files", {"Content-Type": "multipart/form-data; boundary=b"}
    async with serving(tmp_path) as (server, client):
        for data in damaged:
            async with server.session.post(server.url + url, data=data, headers=headers) as answer:
                assert answer.status == 400, (data, await answer.text())
                assert (await answer.json())["error"]["message"]
        async with server.session.post(server.url + url, data=FORM, headers=headers) as answer:
            assert answer.status == 200
        assert len([file async for file in client.files.list()]) == 1
    assert list((tmp_path / "batches/incoming").iterdir()) == []


async def test_no_page_of_the_web_leaves_a_file_through_a_browser(tmp_path: Path) -> None:
    """A browser sends forms to other origins unasked."""
    async with serving(tmp_path) as (server, client):
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", b"{}", filename="a.jsonl")
        url, headers = server.url + "/v1/files", {"Origin": "http://evil.example"}
        async with server.session.post(url, data=form, headers=headers) as response:
            assert response.status == 403
        assert [file async for file in client.files.list()] == []


async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, client):
        _, writer = await asyncio.open_connection(server.host, server.port)
        head = (
            "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n"
            "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
            '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        )
        writer.write(head.encode() + b"x" * 300_000)
        await writer.drain()
        incoming = tmp_path / "batches/incoming"
        while not any(path.stat().st_size for path in incoming.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.close()
        while any(incoming.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert [file async for file in client.files.list()] == []


async def test_no_more_is_kept_than_there_may_be(tmp_path: Path) -> None:
    """The least that a file counts is a MiB."""
    async with serving(tmp_path, max_batch_gib=3.5 / 1024) as (_, client):
        files = [
            (await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")).id
            for _ in range(3)
        ]
        with pytest.raises(openai.BadRequestError, match="no room"):
            await client.files.create(file=("a.jsonl", b"x" * MIB), purpose="batch")
        await client.files.delete(files[0])
        await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")


async def test_a_file_that_has_expired_is_gone_and_then_deleted(tmp_path: Path) -> None:
    day = 1 / 86_400
    async with serving(tmp_path, batch_file_days=day) as (server, client):
        made = await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        while time.time() < made.expires_at:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert (await server.get(f"/v1/files/{made.id}")).status == 404
        assert [file async for file in client.files.list()] == []
    settings = config(tmp_path, batch_file_days=day).batches
    disk = Disk(settings)
    sweep(disk, time.time())
    assert list(disk.files.iterdir()) == []
    disk.close()


async def test_an_input_counts_although_its_client_deletes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.5)  # three million empty lines are not read
    slow = msgspec.structs.replace(SIMULATED.runner, step_base_ms=50)
    base = msgspec.structs.replace(SIMULATED, runner=slow)
    async with serving(tmp_path, base) as (_, client):
        data = completions(200) + b"\n" * 3 * MIB
        batch = await create(client, data)
        disk = Disk(config(tmp_path).batches)
        before = usage(disk)[""]
        await client.files.delete(batch.input_file_id)
        assert before - 2 * MIB < usage(disk)[""] <= before
        disk.close()
        await client.batches.cancel(batch.id)


async def test_what_a_crash_has_left_among_files_is_deleted_in_time(tmp_path: Path) -> None:
    disk = Disk(config(tmp_path).batches)
    (disk.files / "file-x.json.abcd.new").touch()
    (disk.files / "file-y").touch()
    sweep(disk, time.time())  # they may be on their way
    assert len(list(disk.files.iterdir())) == 2
    sweep(disk, time.time() + 2 * 86_400)
    assert list(disk.files.iterdir()) == []
    disk.close()


async def test_a_batch_that_has_ended_long_ago_is_forgotten(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        batch = await create(client, completions(1))
        await until(client, batch.id, "completed")
    for days, is_there in ((30.0, True), (1e-9, False)):
        disk = Disk(config(tmp_path, batch_file_days=days).batches)
        sweep(disk, time.time())
        assert (disk.find_batch(batch.id) is not None) == is_there
        disk.close()
