"""Every asynchronous test runs on asyncio's loop and on uvloop, in `make test` on one of them, by
its name; torch starts with one thread.
"""

import asyncio
import atexit
import copy
import gc
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import settings

from tests.slow import (
    is_left_out,
    leave_out,
    leave_out_cases,
    left_out,
    mark_twins_of_depth_one,
    remember,
)
from tests.tokenizing import share_tokenizer, shared_files

# What is asserted beside the tests tells its values as well.
pytest.register_assert_rewrite("tests.policies", "tests.runner", "tests.server")

# Read when torch is loaded, and when threads are counted, here and in processes that tests start.
# Two test workers share the cores: a second thread, where a test does not ask for one, would mostly
# wait for its core, and the first for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# As in the Makefile: where Python may not keep what it has compiled, each of a hundred processes
# would compile all of aioserve anew, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# What servers keep for their next start is kept for this run alone: all workers inherit it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="aioserve-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# A shell that starts this in its background lets it ignore Ctrl-C, and every process that a test
# starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No example is too slow: the machine may be busy.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


#: Files and folders with tests of many seconds. They come first: the run then ends with short
#: tests, so that no worker waits for another.
LONG = (
    *("tests/benchmarks/test_card.py", "tests/faults/", "tests/fuzz/", "tests/matrix/"),
    *("tests/lab/certify/", "tests/lab/evaluate/", "tests/lab/evolve/"),
    *("tests/server/test_hangs.py", "tests/test_"),
)


def pytest_configure(config: pytest.Config) -> None:
    remember(config)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: Any) -> list[pytest.Item] | None:
    return [] if is_left_out(obj, left_out(collector.config)) else None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    leave_out_cases(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    mark_twins_of_depth_one(items)
    leave_out(items, config)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection() -> None:
    """What is imported stays to the end: to look for garbage among it takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: to look at them, even once, takes half a second, and
    runners that give their weights back make a full collection each. So no runner thaws them, and
    no server freezes what a test has made: tests/engine/test_control.py asks another process what
    that does. Young objects are looked at once there are many: most are gone by then.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    gc.freeze = gc.unfreeze = lambda: None


class Kept:
    """Processes that an engine starts and ends, which go on to the next test's engine instead: to
    start one takes longer than most tests.
    """

    MOST = 6

    def __init__(self, module: Any) -> None:
        self.module, self.start, self.end_all = module, module._Process, module._end_all
        self._idle: list[tuple[bytes, Any]] = []  # the last used at the end
        self._most = self.MOST

    def started(self, *setup: Any) -> Any:
        """One that was started with the same setup, if there is any."""
        key = hashlib.sha256(msgspec.msgpack.encode(setup)).digest()
        for place in reversed(range(len(self._idle))):
            if self._idle[place][0] == key:
                _, process = self._idle.pop(place)
                if process._process.poll() is None:
                    return process
                process.end()
        process = self.start(*setup)
        process.kept_as = key
        return process

    def keep(self, processes: list[Any]) -> None:
        while processes:
            process = processes.pop()
            self._idle.append((getattr(process, "kept_as", b""), process))
        while len(self._idle) > self._most:
            self._idle.pop(0)[1].end()

    def end(self) -> None:
        """Also those of engines that end after the last test."""
        self._most = 0
        self.keep([])


@pytest.fixture(scope="session")
def kept_modules() -> Iterator[list[Kept]]:
    """What renders chats, and what tries grammars."""
    from aioserve.engine import template_renderer
    from aioserve.features.grammars import trial

    kept = [Kept(template_renderer), Kept(trial)]
    yield kept
    for each in kept:
        each.end()


@pytest.fixture(scope="session", autouse=True)
def kept_processes(kept_modules: list[Kept]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for kept in kept_modules:
            patch.setattr(kept.module, "_Process", kept.started)
            patch.setattr(kept.module, "_end_all", kept.keep)
        yield


@pytest.fixture
def own_processes(kept_modules: list[Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how these processes start and end: they are started anew, and end."""
    for kept in kept_modules:
        monkeypatch.setattr(kept.module, "_Process", kept.start)
        monkeypatch.setattr(kept.module, "_end_all", kept.end_all)


@pytest.fixture(scope="session", autouse=True)
def shared_tokenizers() -> Iterator[None]:
    """The engines of this process share the tokenizers of the embedded model and of its copies with
    other templates and tokens, and the proof of what their tokens spell: to read and prove one is
    five sixths of the start of an engine without weights. What both do is the subject of
    tests/engine/test_byte_level.py, by other tokenizers.
    """
    from aioserve.engine import detokenizer
    from aioserve.model_source import kept_tokenizer
    from aioserve.model_source.source import ModelSource

    share_tokenizer(Path(kept_tokenizer.__file__).parent / "embedded")
    read, prove = kept_tokenizer.read_tokenizer, detokenizer.prove_token_pieces
    tokenizers: dict[Any, Any] = {}  # by the folder in which they are kept, and their files
    proofs: dict[int, Any] = {}  # by the tokenizer that they are of

    def read_once(source: ModelSource, *, keep: bool) -> Any:
        if (files := shared_files(source.path)) is None:
            return read(source, keep=keep)
        place = os.environ["XDG_CACHE_HOME"], files
        if place not in tokenizers:
            tokenizers[place] = read(source, keep=True)
        return copy.copy(tokenizers[place])  # settings may give it another chat template

    def prove_once(tokenizer: Any) -> Any:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if all(backend is not own.backend_tokenizer for own in tokenizers.values()):
            return prove(tokenizer)
        if id(backend) not in proofs:
            proofs[id(backend)] = prove(tokenizer)
        return proofs[id(backend)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_tokenizer, "read_tokenizer", read_once)
        patch.setattr(detokenizer, "prove_token_pieces", prove_once)
        yield


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    both = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    marker = item.get_closest_marker("asyncio")
    if marker is not None and "loop_factories" in marker.kwargs:  # it is skipped without them
        return both
    if item.get_closest_marker("dist"):  # what they are about runs in other processes
        return {"asyncio": asyncio.new_event_loop}
    if "not slow" not in item.config.option.markexpr:
        return both
    name = sorted(both)[zlib.crc32(item.nodeid.encode()) % 2]
    return {name: both[name]}
