"""Whatever goes wrong: every client has an end, nothing is left, the log says it, and the next
request is served; tokens that come are the reference's.

A short part of it, the same one each time. `make test-faults` takes all kinds at every point, and
as many random days as `AIOSERVE_FAULT_DAYS` says.
"""

import asyncio
import functools
import gc
import os
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aioserve.errors import AioserveError
from aioserve.testing.faults import CLIENTS, RUNNER_KINDS, Fault, Faults, JumpingLoop, Point, points
from tests.faults.rig import (
    ASKS,
    EARLY_PARTS,
    LENGTHS,
    MAX_TOKENS,
    OPTIONS,
    PARTS,
    PINS,
    STORE,
    Rig,
    config_of,
    reference_of,
)
from tests.slow import examples, mostly_slow

NUM_DAYS = int(os.environ.get("AIOSERVE_FAULT_DAYS", "0"))
IS_LONG = NUM_DAYS > 0
DEPTHS = (1, 2) if IS_LONG else mostly_slow((1, 2), but=[2])
LINE_KINDS = ("raises", "cancelled", "no memory") if IS_LONG else ("raises",)
PASSES = (0, 2) if IS_LONG else (0,)
PART_KINDS = ("raises", "no memory", "cancelled", "slow")
#: Functions that a beat of the loop monitor calls, every 100 ms of busy time: no crowd is sure to
#: last until one.
AT_BEATS = {"_part"}


# A line at which something is raised may have been about to await what was made before it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.usefixtures("own_processes"),
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Coroutines that were never awaited are dropped here, and not in the midst of another test."""
    yield
    gc.collect()


@functools.cache
def reference() -> dict[str, str]:
    return asyncio.run(reference_of(config_of(1)))


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    """Before any loop runs."""
    reference()
    passed_points()


def crowd(rig: Rig) -> None:
    """Clients who read, with every body."""
    for ask in range(len(ASKS)):
        rig.come(("streams", "whole")[ask % 2], ask, MAX_TOKENS)


async def meet(
    coming: list[Fault],
    depth: int,
    injected: Counter[str],
    lines: list[Point],
    policy: str = "chunked_prefill",
) -> None:
    """One fault after another, each among a crowd; one server meets as many as it can."""
    expected = reference()
    at_beats = {point.part for point in points() if point.function in AT_BEATS}
    assert len(at_beats) == len(AT_BEATS)
    while coming:
        faults = Faults()
        async with Rig(config_of(depth, policy=policy), faults, expected, lines) as rig:
            while coming and not rig.is_worn:
                fault = coming.pop(0)
                for _ in range(10 if fault.part in at_beats else 1):
                    rig.begin_again()
                    faults.arm(fault)  # `settle` disarms it
                    crowd(rig)
                    await rig.settle()
                    if faults.came or fault.after:
                        break
                assert faults.came or fault.after, fault
        injected.update(faults.injected)


@functools.cache
def passed_points() -> list[Point]:
    """Those that each of three crowds passes, without a fault: a timer may pass some by chance."""

    expected = reference()

    async def pass_all() -> set[Point]:
        async with Rig(config_of(1), Faults(), expected, list(points())) as rig:
            crowd(rig)
            await rig.settle()
            return rig.passed

    passed = set.intersection(*(asyncio.run(pass_all()) for _ in range(3)))
    return [point for point in points() if point in passed]


def all_faults() -> Iterator[Fault]:
    """But for those of lines."""
    for after in (0, 3) if IS_LONG else (0,):
        for kind in RUNNER_KINDS:
            yield Fault("runner", kind, after)
        # The number of parts is odd: every second fault is of every kind, and of every part.
        for kind in PART_KINDS:
            for part in (*PARTS, *EARLY_PARTS):
                yield Fault(part, kind, after)


@pytest.mark.parametrize("policy", mostly_slow(["chunked_prefill", PINS], but=["chunked_prefill"]))
@pytest.mark.parametrize("depth", DEPTHS if IS_LONG else (2,))
def test_what_is_raised_at_any_point_of_a_requests_way_leaves_nothing(
    depth: int, policy: str, injected: Counter[str]
) -> None:
    assert len(passed_points()) > 40  # of a list that is made from the code
    coming = [
        Fault(point.part, kind, after)
        for point in passed_points()
        for kind in LINE_KINDS
        for after in PASSES
    ]
    asyncio.run(meet(coming, depth, injected, passed_points(), policy))


@pytest.mark.parametrize("policy", mostly_slow(["chunked_prefill", PINS], but=["chunked_prefill"]))
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_part_that_fails_leaves_nothing(depth: int, policy: str, injected: Counter[str]) -> None:
    coming = list(all_faults())
    met = coming if IS_LONG else coming[depth - 1 :: 2]
    assert {fault.kind for fault in met} >= set(PART_KINDS)
    assert {fault.part for fault in met} >= {*PARTS, *EARLY_PARTS}
    asyncio.run(meet(met, depth, injected, [], policy))


class Day(RuleBasedStateMachine):
    """Clients of every kind, and up to `depth` faults that come upon one another."""

    depth: int
    policy = "chunked_prefill"
    injected: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.num_armed = 0

    @initialize()
    def begin(self) -> None:
        self.faults = Faults()
        config = config_of(self.depth, policy=self.policy)
        self.rig = Rig(config, self.faults, reference(), passed_points())
        self.loop.run(self.rig.__aenter__())

    @precondition(lambda self: self.num_armed < self.depth)
    @rule(
        fault=st.one_of(
            st.sampled_from(list(all_faults())),
            st.builds(
                lambda number, kind, after: (number, kind, after),
                st.integers(0, 10**6),
                st.sampled_from(("raises", "cancelled", "no memory")),
                st.integers(0, 3),
            ),
        )
    )
    def a_fault_is_near(self, fault: Fault | tuple[int, str, int]) -> None:
        if not isinstance(fault, Fault):
            number, kind, after = fault
            fault = Fault(passed_points()[number % len(passed_points())].part, kind, after)
        self.num_armed += 1
        self.faults.arm(fault)

    @rule(
        kinds=st.lists(st.sampled_from((*CLIENTS, "streams", "whole")), min_size=1, max_size=4),
        ask=st.integers(0, len(ASKS) - 1),
        length=st.sampled_from(LENGTHS),
    )
    def clients_come(self, kinds: list[str], ask: int, length: int) -> None:
        for number, kind in enumerate(kinds):
            self.rig.come(kind, (ask + number) % len(ASKS), length)

    @rule(count=st.integers(1, 60))
    def the_loop_turns(self, count: int) -> None:
        self.loop.run(self.rig.turn(count))

    @precondition(lambda self: self.num_armed < self.depth)
    @rule(luck=st.integers(0, 7))
    def descriptors_are_gone(self, luck: int) -> None:
        if luck == 7:
            self.num_armed += 1
            self.loop.run(self.rig.lack_descriptors())

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        crowd(self.rig)  # so that what is armed comes
        try:
            self.loop.run(self.rig.settle())
        finally:
            self.injected.update(self.faults.injected)
            self.loop.run(self.rig.__aexit__())
            self.loop.close()


class DayOfLeases(Day):
    """A policy that pins a lot, and operators who change what leases hold."""

    policy = PINS

    @precondition(lambda self: not self.rig.is_dead)
    @rule(what=st.sampled_from(("to itself", "to another", "back", "reset", "sleep", "pause")))
    def an_operator_acts(self, what: str) -> None:
        self.loop.run(self.act(what))

    async def act(self, what: str) -> None:
        """What may fail for a fault that is near fails; nothing is left all the same."""
        engine = self.rig.engine
        try:
            if what == "reset":
                engine.reset_prefix_cache()
            elif what == "sleep":
                await engine.sleep()
                await engine.wake()
            elif what == "pause":
                await engine.pause()
                await engine.resume()
            else:
                policy = "chunked_prefill" if what == "to another" else PINS
                engine.switch_policy(policy, OPTIONS)
        except AioserveError:
            self.rig.is_strange = True


@pytest.mark.parametrize("kind", [Day, DayOfLeases])
@pytest.mark.parametrize("depth", DEPTHS)
def test_on_a_bad_day_every_client_has_an_end_and_nothing_is_left(
    depth: int, kind: type[Day], injected: Counter[str]
) -> None:
    run_state_machine_as_test(
        type("DayOfDepth", (kind,), {"depth": depth, "injected": injected}),
        settings=settings(
            max_examples=NUM_DAYS or examples(6, slow=12),
            stateful_step_count=8,
            deadline=None,
            database=None,
            verbosity=Verbosity.quiet,
            derandomize=not IS_LONG,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        ),
    )


@pytest.mark.parametrize("seconds", [7.0, 7200.0])
def test_a_clock_that_jumps_ahead_leaves_nothing(seconds: float, injected: Counter[str]) -> None:
    async def jump() -> None:
        async with Rig(config_of(2), Faults(), reference(), []) as rig:
            crowd(rig)
            await rig.turn(30)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, JumpingLoop)
            loop.jump(seconds)
            injected["clock: jumps"] += 1
            rig.faults.came.append(Fault("clock", "jumps"))
            await rig.settle()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(jump())


@pytest.mark.parametrize("log", ["request_log", "decision_log"])
def test_a_disk_that_is_full_harms_no_client(log: str, injected: Counter[str]) -> None:
    """The device that is always full, and what is said of it."""

    async def fill() -> None:
        config = config_of(2)
        scheduler = msgspec.structs.replace(config.scheduler, **{log: "/dev/full"})
        full = msgspec.structs.replace(config, scheduler=scheduler)
        async with Rig(full, Faults(), reference(), []) as rig:
            rig.is_strange = True
            for _ in range(3):
                crowd(rig)
            await rig.settle()
            injected["disk: full"] += 1
            assert all(task.result().is_served for _, _, task in rig.clients)
        assert "No space left on device" in rig.log.text

    asyncio.run(fill())


def test_a_step_that_never_comes_back_is_an_end_for_every_client(injected: Counter[str]) -> None:
    async def hang() -> None:
        config = config_of(2)
        bounds = {"hung_step_seconds": 0.2, "dead_step_seconds": 0.4}
        server = msgspec.structs.replace(config.server, **bounds)
        faults = Faults()
        hung = msgspec.structs.replace(config, server=server)
        async with Rig(hung, faults, reference(), []) as rig:
            faults.arm(Fault("runner", "hangs", 2))
            crowd(rig)
            await rig.settle()
            assert rig.is_dead
            assert "a step has not come back from the runner" in rig.log.text
        injected.update(faults.injected)

    asyncio.run(hang())


@pytest.mark.parametrize("part", mostly_slow(STORE, but=[] if IS_LONG else ["store read"]))
def test_a_store_of_blocks_that_fails_harms_no_client(part: str, injected: Counter[str]) -> None:
    async def fail() -> None:
        config = config_of(2)
        cache = msgspec.structs.replace(config.cache, kv_connector="disk")
        runner = msgspec.structs.replace(config.runner, step_kv_read_token_us=0)  # worth it
        stored = msgspec.structs.replace(config, cache=cache, runner=runner)
        for kind in ("raises", "slow", "disk full"):
            for after in (0, 1):
                faults = Faults()
                async with Rig(stored, faults, reference(), [], parts=STORE) as rig:
                    crowd(rig)
                    await rig.ends()
                    assert rig.engine.reset_prefix_cache()  # the store alone has blocks
                    faults.arm(Fault(part, kind, after))
                    crowd(rig)
                    await rig.settle()
                    assert faults.came or after, part
                injected.update(faults.injected)

    asyncio.run(fail())
