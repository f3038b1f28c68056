"""Another policy on a stretch of the live traffic: records it, and has `compare` simulate both.

What is recorded lies in a file that no other user can read, until the comparison is made; that runs
in a process of its own, of low priority. Knows no HTTP, and of the lab the command alone.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from aioserve.config import EngineConfig, SchedulerConfig
from aioserve.engine.clock import Clock
from aioserve.engine.core import EngineLoop
from aioserve.engine.operations.command import Report
from aioserve.errors import EngineOverloadedError, RequestError
from aioserve.lab.decision_log.recorder import LOG_SETTINGS, LogWriter, RecordingScheduler
from aioserve.lab.decision_log.records import Closed
from aioserve.scheduler import BaseScheduler, load_policy
from aioserve.scheduler.delegate import innermost, without

logger = logging.getLogger(__name__)

MAX_SECONDS = 300.0  # of a recording: what it holds is simulated, which takes a fraction of that
MAX_REQUESTS = 100_000
ENOUGH_REQUESTS = 200  # for intervals: ten blocks of twenty, as `lab.comparison` draws them
POLL_SECONDS = 0.05  # between two looks at how many requests came
SETTLE_SECONDS = 5.0  # for the last of them to end, so that their whole replies are recorded
SECRETS = ("AIOSERVE_API_KEYS", "AIOSERVE_SSL_KEYFILE_PASSWORD")  # no business of a comparison
COMPARE_SECONDS = 300.0  # until a comparison is given up
NUM_KEPT = 8  # reports; they are asked for soon, or never

# Beside a server that is busy it gets what is left.
RUN = (
    "import os, sys; os.nice(10); from aioserve.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


class PolicyTrials:
    """The trials of policies on one engine, one at a time."""

    def __init__(
        self,
        loop: EngineLoop,
        clock: Clock,
        config: Callable[[], EngineConfig],
        max_model_len: int,
    ) -> None:
        """`config` is asked each time: the policy may have changed."""
        self._loop = loop
        self._clock = clock
        self._config = config
        self._max_model_len = max_model_len
        self._is_busy = False
        self._reports: OrderedDict[str, bytes] = OrderedDict()

    def find(self, report_id: str) -> bytes | None:
        """Return a report, in HTML; None if it was never made, or is forgotten."""
        return self._reports.get(report_id)

    async def try_policy(
        self, settings: SchedulerConfig, seconds: float | None, num_requests: int | None
    ) -> Report:
        """Record, and compare what there is with `settings` on the requests that came meanwhile:
        for the given seconds, or until the given number of them came if sooner; where neither is
        given, until there are enough for intervals, for at most `MAX_SECONDS`.

        Raises `ConfigError` or `PolicyError` for settings that cannot work, `EngineOverloadedError`
        while another trial goes on, and `RequestError` where nothing can be compared.
        """
        if seconds is None:
            seconds = MAX_SECONDS
            num_requests = ENOUGH_REQUESTS if num_requests is None else num_requests
        if num_requests is not None and not 1 <= num_requests <= MAX_REQUESTS:
            raise RequestError(
                f"requests must be from 1 to {MAX_REQUESTS:,}, got {num_requests}", param="requests"
            )
        if not 1 <= seconds <= MAX_SECONDS:
            raise RequestError(
                f"seconds must be from 1 to {MAX_SECONDS:g}, got {seconds:g}", param="seconds"
            )
        policy = load_policy(settings.policy)
        live = innermost(self._loop.scheduler)
        if not (issubclass(policy, BaseScheduler) and isinstance(live, BaseScheduler)):
            raise RequestError("only policies that derive from BaseScheduler can be compared")
        policy.parse_options(settings.options)
        policy.check_limits(settings, self._max_model_len)
        if self._is_busy:
            raise EngineOverloadedError("another trial goes on", retry_after=10)
        self._is_busy = True
        try:
            with tempfile.TemporaryDirectory(prefix="aioserve-trial-") as folder:
                return await self._try(settings, seconds, num_requests, Path(folder))
        finally:
            self._is_busy = False

    async def _try(
        self, settings: SchedulerConfig, seconds: float, enough: int | None, folder: Path
    ) -> Report:
        before = self._config().scheduler
        num_requests = await self._record(folder / "recording", seconds, enough)
        if not num_requests:
            raise RequestError(f"no request came in {seconds:g} s: there is nothing to compare")
        if self._config().scheduler is not before:
            raise RequestError("the policy was switched meanwhile: begin anew")
        names = [before.policy.rpartition(":")[2], settings.policy.rpartition(":")[2]]
        names = [Path(name).stem for name in names]
        if names[0] == names[1]:
            names[1] += " otherwise"
        paths = [folder / f"{name}.yaml" for name in names]
        for path, scheduler in zip(paths, (before, settings), strict=True):
            _write(path, scheduler)
        words = await self._compare(paths, folder)
        page, said, has_intervals = await asyncio.to_thread(_read_report, folder)
        report_id = secrets.token_urlsafe(24)  # knowing it suffices to read the report
        self._reports[report_id] = page
        if len(self._reports) > NUM_KEPT:
            self._reports.popitem(last=False)
        missing = max(ENOUGH_REQUESTS - num_requests, 0)
        return Report(report_id, num_requests, missing, said, has_intervals, words)

    async def _record(self, path: Path, seconds: float, enough: int | None) -> int:
        """Return how many requests came: in `seconds`, or until `enough` came and have ended."""
        sink = LogWriter(path)
        recorder, end = self._begin(sink), self._clock() + seconds
        there = self._request_ids()
        try:
            self._loop.scheduler = recorder
            if enough is None:
                await asyncio.sleep(seconds)
            else:
                await self._wait(seconds, lambda: recorder.num_added >= enough)
                rest = min(SETTLE_SECONDS, max(end - self._clock(), 0))
                last = self._request_ids() - there
                await self._wait(rest, lambda: last.isdisjoint(self._request_ids()))
        finally:
            self._loop.scheduler = without(self._loop.scheduler, recorder)
            sink.write(Closed(self._clock()))
            await asyncio.to_thread(sink.close)
        return recorder.num_added

    def _request_ids(self) -> set[str]:
        """Return the ids of the requests that have not ended."""
        policy = innermost(self._loop.scheduler)
        assert isinstance(policy, BaseScheduler)
        return {request.request_id for request in policy.get_requests()}

    async def _wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until `is_over` is true, for `seconds` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_over():  # noqa: ASYNC110 - a scheduler has nothing to wait for
                    await asyncio.sleep(POLL_SECONDS)

    def _begin(self, sink: LogWriter) -> RecordingScheduler:
        chain = self._loop.scheduler
        live = innermost(chain)
        assert isinstance(live, BaseScheduler)
        return RecordingScheduler(
            lambda *args, **kwargs: chain,
            self._config().scheduler,
            live.kv_cache,
            max_model_len=self._max_model_len,
            clock=self._clock,
            sink=sink,
            there=live.get_requests(),
        )

    async def _compare(self, paths: list[Path], folder: Path) -> str:
        """Have the report written in HTML and JSON. Returns what the command prints."""
        words = ["compare", *map(str, paths), "--replay", str(folder / "recording")]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RUN, *words, "--jobs", "1"),
            *("--html", str(folder / "report.html"), "--json", str(folder / "report.json")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in SECRETS},
        )
        try:
            async with asyncio.timeout(COMPARE_SECONDS):
                out, errors = await process.communicate()
        except TimeoutError:
            raise RequestError(
                f"the comparison was not made in {COMPARE_SECONDS:g} s: record fewer seconds"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise RequestError(f"these cannot be compared: {last.rpartition('error: ')[2]}")
        return out.decode(errors="replace")


def _read_report(folder: Path) -> tuple[bytes, list[str], bool]:
    """Return what `compare` has written to the folder: its HTML page, its sentences about these
    very requests, and whether its differences have intervals.
    """
    document = msgspec.json.decode((folder / "report.json").read_bytes())
    mean = document["results"][1]["against_first"]["differences"]["e2e"]["mean"]
    page = (folder / "report.html").read_bytes()
    return page, document["on_these_requests"], mean["low"] is not None


def _write(path: Path, scheduler: SchedulerConfig) -> None:
    plain = msgspec.to_builtins(scheduler)
    for name in LOG_SETTINGS:
        del plain[name]
    if plain["policy"].partition(":")[0].endswith(".py"):
        plain["policy"] = str(Path(plain["policy"]).absolute())
    path.write_bytes(msgspec.json.encode({"scheduler": plain}))  # which is YAML, too
