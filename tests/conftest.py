"""Every asynchronous test runs on asyncio's loop and on uvloop, in `make test` on one of them, by
its name; torch starts with one thread.
"""

import asyncio
import atexit
import gc
import os
import shutil
import signal
import tempfile
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from hypothesis import settings

from tests.slow import is_left_out, leave_out, left_out, mark_twins_of_depth_one

# What is asserted beside the tests tells its values as well.
pytest.register_assert_rewrite("tests.policies", "tests.runner", "tests.server")

# Read when torch is loaded, and when threads are counted, here and in processes that tests start.
# Two test workers share the cores: a second thread, where a test does not ask for one, would mostly
# wait for its core, and the first for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: Any) -> list[pytest.Item] | None:
    return [] if is_left_out(obj, left_out(collector.config)) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    mark_twins_of_depth_one(items)
    leave_out(items, config)


def pytest_collection() -> None:
    """What is imported stays to the end: to look for garbage among it takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: to look at them again takes a full collection half a
    second, and runners that give their models back make one each.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


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
