"""Blocks as files: bounded, shared, and believed only if they are what they should be."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aioserve.errors import ConfigError
from aioserve.features.kv_connector import BlockDirectory
from tests.processes import PATIENCE

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SIZE = 4096
IDENTITY = {"model": "a"}


class Memory:
    """Slots of host memory."""

    def __init__(self) -> None:
        self.bytes = bytearray(SIZE * 8)

    def __call__(self, slot: int) -> memoryview:
        return memoryview(self.bytes)[slot * SIZE : (slot + 1) * SIZE]

    def fill(self, slot: int, value: int) -> None:
        self(slot)[:] = bytes([value]) * SIZE


@pytest.fixture
def memory() -> Memory:
    return Memory()


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


async def write(store: BlockDirectory, *pairs: tuple[int, int]) -> None:
    done = asyncio.Event()
    store.write([key(i) for i, _ in pairs], [slot for _, slot in pairs], done.set)
    await done.wait()


async def read(store: BlockDirectory, *pairs: tuple[int, int]) -> int:
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    store.read([key(i) for i, _ in pairs], [slot for _, slot in pairs], done.set_result)
    return await done


async def find(store: BlockDirectory, *blocks: int) -> int:
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    store.find([key(i) for i in blocks], done.set_result)
    return await done


def used_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.kv"))


async def test_blocks_are_found_from_the_first_on_without_a_gap(
    tmp_path: Path, memory: Memory
) -> None:
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    for i in (0, 1, 3):
        memory.fill(0, i + 1)
        await write(store, (i, 0))
    assert await find(store, 0, 1, 2, 3) == 2
    assert await find(store, 4) == 0
    assert await read(store, (0, 5), (1, 6), (2, 7)) == 2
    assert memory(5) == bytes([1]) * SIZE
    assert memory(6) == bytes([2]) * SIZE
    await store.close()


async def test_the_directory_keeps_its_limit_and_what_was_wanted_last(
    tmp_path: Path, memory: Memory
) -> None:
    """Also of what another namespace has written; other people's files stay."""
    limit = 64 * (SIZE + 72)
    other = BlockDirectory(tmp_path, {"model": "b"}, SIZE, memory, max_bytes=limit)
    await write(other, *((i, 0) for i in range(8)))
    await other.close()
    for file in other.folder.rglob("*.kv"):
        os.utime(file, (1, 1))  # of long ago
    (tmp_path / "notes.kv").write_bytes(b"not ours")
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=limit)
    for i in range(100):
        await write(store, (i, 0))
        assert used_bytes(tmp_path) <= limit * (1 + 1 / 16) + SIZE
        if i >= 20:
            assert await read(store, (20, 1)) == 1  # wanted again and again: it stays
        for j, file in enumerate(sorted(store.folder.rglob("*.kv"))):
            if file.stat().st_mtime > 1e6 and file.stem != key(20).hex():
                os.utime(file, (1000 + j, 1000 + j))  # clocks of file systems are coarse
    assert not list(other.folder.rglob("*.kv"))
    assert await find(store, 99) == 1
    assert (tmp_path / "notes.kv").exists()
    assert store.num_failures == 0
    await store.close()


async def test_what_a_dead_writer_left_is_swept_away(tmp_path: Path, memory: Memory) -> None:
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await write(store, (0, 0))
    await store.close()
    (folder,) = (path for path in store.folder.iterdir() if path.is_dir())
    old, fresh = folder / ".x.1.1.tmp", folder / ".y.1.1.tmp"
    for file in (old, fresh):
        file.write_bytes(b"half a block")
    os.utime(old, (1, 1))
    again = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await write(again, (1, 0))  # after the sweep: one thread does both
    assert fresh.exists()
    assert not old.exists()
    await again.close()


async def test_a_crash_before_the_rename_leaves_no_block(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: Path, target: Path) -> Path:
        raise OSError("the power went out")

    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    monkeypatch.setattr(Path, "replace", crash)
    await write(store, (0, 0))
    monkeypatch.undo()
    assert await find(store, 0) == 0
    assert store.num_failures == 1
    await store.close()


async def test_what_a_writer_of_the_same_pid_left_is_in_nobodys_way(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers, most have one: the next one after a crash, and two on one volume."""

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    stores = [BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20) for _ in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        patch.setattr(Path, "unlink", crash)
        with pytest.raises(KeyboardInterrupt):
            stores[0]._write_one(stores[0]._path(key(0)), key(0), memory(0))
    await write(stores[1], (0, 0))
    assert await find(stores[1], 0) == 1
    assert stores[1].num_failures == 0
    for store in stores:
        await store.close()


async def test_blocks_of_a_directory_that_may_only_be_read_are_believed(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("the file is another user's")

    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    memory.fill(0, 7)
    await write(store, (0, 0))
    monkeypatch.setattr(os, "utime", refuse)
    assert await read(store, (0, 1)) == 1
    assert memory(1) == memory(0)
    assert store.num_failures == 0
    await store.close()


async def test_a_namespace_file_that_was_cut_off_is_written_again(
    tmp_path: Path, memory: Memory
) -> None:
    for content in (b"", b'{"mod'):
        store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
        await store.close()
        note = store.folder / "namespace.json"
        assert b'"model": "a"' in note.read_bytes()
        note.write_bytes(content)


async def test_one_file_that_is_gone_hides_no_other_from_the_limit(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await write(store, *((i, 0) for i in range(8)))  # in one folder
    await store.close()
    gone = store.folder / key(0).hex()[:2] / "gone.kv"
    gone.symlink_to(tmp_path / "nothing")
    scandir = os.scandir

    @contextmanager
    def gone_first(path: str) -> Iterator[list[os.DirEntry[str]]]:
        with scandir(path) as found:
            yield sorted(found, key=lambda item: item.name != gone.name)

    monkeypatch.setattr(os, "scandir", gone_first)
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=4 * SIZE)
    await store.close()
    gone.unlink()
    assert used_bytes(tmp_path) <= 4 * SIZE


async def test_others_give_way_for_a_file_that_cannot_be_removed(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await write(store, *((i, 0) for i in range(8)))
    await store.close()
    kept, unlink = {store._path(key(i)) for i in range(2)}, os.unlink
    for path in kept:
        os.utime(path, (1, 1))

    def refuse(path: str) -> None:
        if Path(path) in kept:
            raise PermissionError("the file is another user's")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=5 * SIZE)
    await store.close()
    assert kept < set(store.folder.rglob("*.kv"))
    assert used_bytes(tmp_path) <= 5 * SIZE


async def test_a_folder_of_another_engine_is_refused_in_one_line(
    tmp_path: Path, memory: Memory
) -> None:
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await store.close()
    (store.folder / "namespace.json").write_text('{"model": "another"}')
    with pytest.raises(ConfigError, match=r"namespace.json is not of this model .*: remove "):
        BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
async def test_what_is_made_is_its_users_alone_whatever_the_umask(
    tmp_path: Path, memory: Memory
) -> None:
    root = tmp_path / "kv"
    store = BlockDirectory(root, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await write(store, (0, 0))
    shutil.rmtree(store.folder)  # as the docs say one may
    await write(store, (1, 0))
    await store.close()
    made = [root, *root.rglob("*")]
    assert len(made) == 4
    assert {oct(path.stat().st_mode & 0o077) for path in made} == {"0o0"}
    assert (root.stat().st_mode & 0o700, (await find_again(root, memory, 1))) == (0o700, 1)


async def find_again(root: Path, memory: Memory, block: int) -> int:
    store = BlockDirectory(root, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    found = await find(store, block)
    note = store.folder / "namespace.json"
    assert note.stat().st_mode & 0o777 == 0o600
    await store.close()
    return found


async def test_a_folder_that_an_earlier_version_left_open_is_closed(
    tmp_path: Path, memory: Memory
) -> None:
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await store.close()
    store.folder.chmod(0o775)
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await store.close()
    assert store.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
async def test_a_folder_of_another_user_is_refused_in_one_line(
    tmp_path: Path, memory: Memory
) -> None:
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await store.close()
    os.chown(store.folder, 12345, 12345)
    with pytest.raises(ConfigError, match="is not a folder of this user's"):
        BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)


async def test_a_link_that_another_user_may_have_put_there_is_refused(
    tmp_path: Path, memory: Memory
) -> None:
    store = BlockDirectory(tmp_path / "a", IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await store.close()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / store.folder.name).symlink_to(store.folder)
    with pytest.raises(ConfigError, match="is not a folder of this user's"):
        BlockDirectory(tmp_path / "b", IDENTITY, SIZE, memory, max_bytes=1 << 20)


async def test_a_directory_that_others_may_write_to_is_told(
    tmp_path: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    for mode, is_told in ((0o770, True), (0o777, True), (0o1777, False), (0o755, False)):
        caplog.clear()
        os.chmod(tmp_path, mode)
        store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
        await store.close()
        assert ("other users may put their own folder" in caplog.text) == is_told


async def test_the_loop_runs_on_while_a_close_waits_for_writes(
    tmp_path: Path, memory: Memory
) -> None:
    may_write, written = threading.Event(), []

    def slow(slot: int) -> memoryview:
        assert may_write.wait(PATIENCE)
        return memory(slot)

    store = BlockDirectory(tmp_path, IDENTITY, SIZE, slow, max_bytes=1 << 20)
    store.write([key(0)], [0], lambda: written.append(0))
    closing = asyncio.create_task(store.close())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not closing.done()
    may_write.set()  # by the loop: had it been held up, nobody would
    await closing
    assert written == [0]
    assert used_bytes(tmp_path) == SIZE + 72


async def test_a_fifo_is_no_block_and_no_note(tmp_path: Path, memory: Memory) -> None:
    store = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    memory.fill(0, 5)
    await write(store, (1, 0))
    block = store._path(key(1))
    for path in (block, store.folder / "namespace.json"):
        path.unlink()
        os.mkfifo(path)
    assert await read(store, (1, 3)) == 0
    assert not block.exists()
    await store.close()
    again = BlockDirectory(tmp_path, IDENTITY, SIZE, memory, max_bytes=1 << 20)
    await write(again, (1, 0))
    assert await read(again, (1, 3)) == 1
    await again.close()
