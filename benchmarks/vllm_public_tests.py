"""vLLM's public tests of its scheduler, run on aioserve's: how many apply, pass and fail, and why.

    pip download --no-deps --no-binary :all: vllm==0.32.0      # its sdist has them; unpack it
    python benchmarks/vllm_public_tests.py vllm-0.32.0         # the folder in which `tests` is

First each test runs with vLLM's own scheduler, to see whether it can run on this machine at all
(many want a model of the hub); what passes there runs again with `aioserve.vllm.Scheduler` in its
place, under vLLM's order of service. Most tests read vLLM's own lists of requests, which no
interface declares: they are shown those of aioserve's scheduler, in vLLM's words, to be read.

A test that fails does so for one of these reasons, which the table counts: it wants a feature that
aioserve refuses at the start, by name; it reads or writes what only vLLM's class has inside; it
brings back a plan that `schedule()` has not made; or it expects another decision, which is listed.
Needs vLLM and pytest. The last line is JSON.
"""

import collections
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import pytest
from harness import Args, Opt, Program
from vllm.v1.request import Request, RequestStatus

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError, InvariantError
from aioserve.model_source.info import find_model
from aioserve.vllm import Scheduler

program = Program(__doc__)

FOLDER = "tests/v1/core"
FILES = (
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_priority_scheduler_random.py",
    "test_priority_preemption_bug.py",
    "test_repetition_detection.py",
    "test_deferred_block_free.py",
    "test_worker_slot_overflow.py",
    "test_swa_inflight_window_free.py",
    "test_prefix_replay.py",
)
#: The model that nearly all tests name. Of it they need the configuration alone.
MODEL = "facebook/opt-125m"

REFUSED = "wants what is refused at the start"
INSIDE = "reads or writes what only vLLM's class has"
OTHER_PLAN = "brings back a plan that schedule() has not made"
DIFFERS = "expects another decision"


# aioserve's scheduler as tests of vLLM's class know it.


class Shown(Scheduler):
    """aioserve's scheduler with vLLM's own lists of requests, to be read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's own order: whole steps, first come first served, unless it says otherwise."""
        config = kwargs["vllm_config"]
        if config.scheduler_config.policy != "priority":
            most = config.scheduler_config.max_num_batched_tokens
            stated = {"policy": "chunked_prefill", "options": {"chunk_size": most}}
            config.additional_config = {"aioserve": stated}
        super().__init__(*args, **kwargs)
        self.vllm_config = config
        self.max_num_running_reqs = config.scheduler_config.max_num_seqs
        self.max_model_len = self.settings.max_model_len

    @property
    def requests(self) -> Mapping[str, Request]:
        """The requests that have not ended, by id."""
        return types.MappingProxyType(self._theirs | self._compiling)

    @property
    def running(self) -> list[Request]:
        """The requests that run, in order of admission."""
        return [self._theirs[request.request_id] for request in self.policy.running]

    @property
    def waiting(self) -> list[Request]:
        """The requests that wait, in the order of the policy."""
        waiting = [self._theirs[request.request_id] for request in self.policy.waiting]
        return waiting + list(self._compiling.values())

    @property
    def finished_req_ids(self) -> set[str]:
        """The requests that have ended, of which the runner has not been told."""
        return set(self.policy.book.finished_req_ids)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Plan a step; vLLM's requests then say what was planned of them."""
        with self._told():
            return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a result; vLLM's requests then have the tokens."""
        with self._told():
            return super().update_from_output(scheduler_output, model_runner_output)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forget cached prefixes; vLLM's requests then say which were preempted."""
        with self._told():
            return super().reset_prefix_cache(*args, **kwargs)

    @property
    def use_v2_model_runner(self) -> bool:
        """Whether the runner gets a request that comes back as a new one."""
        return self._resumes_as_new

    @use_v2_model_runner.setter
    def use_v2_model_runner(self, is_so: bool) -> None:
        self._resumes_as_new = is_so

    @property
    def _told(self) -> Callable[[], Any]:
        return lambda: _Telling(dict(self._tracked))


class _Telling:
    """Writes into vLLM's requests what their counterparts say at the end of a call."""

    def __init__(self, tracked: dict[str, Any]) -> None:
        self._tracked = tracked

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        for row in self._tracked.values():
            theirs, ours = row.theirs, row.ours
            theirs.num_computed_tokens = ours.num_computed_tokens
            if missing := ours.token_ids[theirs.num_tokens :]:
                theirs.append_output_token_ids(list(missing))
            if not theirs.is_finished() and not ours.status.is_finished:
                theirs.status = RequestStatus[ours.status.name]


# The tests, run.


class Watcher:
    """Notes how each test ended; `kind` takes the place of vLLM's schedulers, unless it is None."""

    def __init__(self, kind: type[Scheduler] | None, only: set[str] | None) -> None:
        self.kind, self.only = kind, only
        self.found: dict[str, str | BaseException] = {}  # "passed", "skipped", or what it raised

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Exchange the classes where the tests have imported them."""
        if self.only is not None:
            items[:] = [item for item in items if item.nodeid in self.only]
        for module in list(sys.modules.values()):
            if module.__name__.startswith("tests.v1.core") and hasattr(module, "create_scheduler"):
                for name in ("Scheduler", "AsyncScheduler"):
                    self._exchange(module, name)

    def _exchange(self, module: types.ModuleType, name: str) -> None:
        kept = f"_own_{name}"
        if hasattr(module, name):
            if not hasattr(module, kept):
                setattr(module, kept, getattr(module, name))
            setattr(module, name, self.kind or getattr(module, kept))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Keep what a test raised."""
        outcome: Any = yield
        report = outcome.get_result()
        if report.skipped:
            self.found[item.nodeid] = "skipped"
        elif call.excinfo is not None:
            self.found.setdefault(item.nodeid, call.excinfo.value)
        elif call.when == "call":
            self.found[item.nodeid] = "passed"


def run(root: Path, kind: type[Scheduler] | None, only: set[str] | None) -> Any:
    """Return how each test ended, by its name."""
    watcher = Watcher(kind, only)
    paths = [str(root / FOLDER / name) for name in FILES]
    options = ["--noconftest", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider"]
    options += ["-p", "no:warnings", f"--rootdir={root}", "--import-mode=prepend", "-o", "addopts="]
    pytest.main([*options, *paths], plugins=[watcher])
    return watcher.found


def reason_of(error: BaseException) -> tuple[str, str]:
    """Return why a test failed, and what it is about."""
    text = str(error)
    if isinstance(error, ConfigError):
        features = re.search(r"cannot serve with (.*?)\. Leave", text, re.DOTALL)
        return REFUSED, features.group(1) if features else text
    if isinstance(error, InvariantError | IndexError) and (
        "a plan that is not" in text or "empty deque" in text
    ):
        return OTHER_PLAN, ""
    if named := re.search(
        r"(?:Shown|mappingproxy|list).* object.* (?:has no|does not|no setter)(.*)", text
    ):
        return INSIDE, named.group(1).strip(" '") or text
    if "expected call not found" in text.lower() or "to have been called" in text:
        return INSIDE, "a mock in the place of a part"
    return DIFFERS, f"{type(error).__name__}: {text.strip().splitlines()[0][:150] if text else ''}"


def make_model(folder: Path) -> None:
    """The configuration that the tests name, and a tokenizer, in the working directory."""
    from transformers import OPTConfig

    place = folder / MODEL
    place.mkdir(parents=True)
    OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(place)
    for file in find_model(ModelConfig()).path.glob("tokenizer*"):
        (place / file.name).write_bytes(file.read_bytes())


@program.command(words={"root": Opt(Path, "the folder in which vLLM's `tests` is")})
def main(args: Args) -> dict[str, Any]:
    """Run the tests on both schedulers, and count the reasons for which they fail."""
    root = args.root.resolve()
    sys.path.insert(0, str(root))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        make_model(Path(folder))
        own = run(root, None, None)
        able = {name for name, how in own.items() if how == "passed"}
        ours = run(root, Shown, able)
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name in own:
        file = Path(name.partition("::")[0]).name
        how = ours[name] if name in able else "cannot run here"
        rows[file][how if isinstance(how, str) else reason_of(how)[0]] += 1
    heads = ("passed", REFUSED, INSIDE, OTHER_PLAN, DIFFERS, "cannot run here")
    for file, counts in rows.items():
        print(f"\n{file}: {sum(counts.values())} tests")
        for head in heads:
            print(f"{counts[head]:6}  {head}")
    reasons = {name: reason_of(how) for name, how in ours.items() if not isinstance(how, str)}
    for head in heads[1:5]:
        print(f"\n{head}:")
        about = collections.defaultdict(list)
        for name, (kind, what) in reasons.items():
            if kind == head:
                about[what].append(name.partition("::")[2])
        for what, names in sorted(about.items(), key=lambda pair: -len(pair[1])):
            print(f"  {len(names)} x {what or '...'}: {', '.join(names)}")
    print("\ncannot run here:")
    raised = (str(how).strip() or how for how in own.values() if how not in ("passed", "skipped"))
    for what, count in collections.Counter(str(each).splitlines()[0] for each in raised).items():
        print(f"  {count} x {what[:150]}")
    return {file: dict(counts) for file, counts in rows.items()}


if __name__ == "__main__":
    program.main()
