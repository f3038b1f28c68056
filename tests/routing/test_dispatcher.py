"""What a sender keeps of its replicas, what routers see of it, and which answers count."""

import importlib
import inspect
import math
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from aioserve.errors import ConfigError
from aioserve.fleet import routers
from aioserve.fleet.routing import (
    REPORTED,
    BaseRouter,
    Dispatcher,
    Refuse,
    ReplicaReport,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterError,
    Wait,
    available_routers,
    load_router,
    make_dispatcher,
    short_name,
)
from aioserve.kv_cache.block_pool import BlockStored


class Clock:
    """A time that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watching(BaseRouter):
    """Chooses the first, and remembers all that it is told."""

    uses_reports = True
    uses_prefixes = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: list[Any] = []
        self.seen: Replicas = ()

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        self.seen = replicas
        return replicas[0]

    def on_join(self, name: str) -> None:
        self.told.append(("join", name))

    def on_leave(self, name: str) -> None:
        self.told.append(("leave", name))

    def on_first_token(self, request: RoutedRequest, name: str, seconds: float) -> None:
        self.told.append(("first", name, seconds))

    def on_end(self, request: RoutedRequest, name: str) -> None:
        self.told.append(("end", name))


class Blind(Watching):
    """Asks for nothing of replicas."""

    uses_reports = False
    uses_prefixes = False


ASKED = RoutedRequest(num_tokens=100)


def watching(kind: type[Watching] = Watching, *names: str) -> tuple[Dispatcher, Watching, Clock]:
    made: list[Watching] = []

    class Made(kind):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    clock = Clock()
    dispatcher = Dispatcher(Made, clock=clock)
    for name in names:
        dispatcher.join(name)
    return dispatcher, made[0], clock


def test_work_is_what_was_sent_and_has_not_ended() -> None:
    dispatcher, router, clock = watching(Watching, "a")
    dispatcher.on_kv_event("a", BlockStored(b"1", None, []))
    cached = RoutedRequest(num_tokens=100, block_hashes=[b"1"], block_size=40)
    first = dispatcher.assign(cached, "a")
    second = dispatcher.assign(RoutedRequest(num_tokens=10), "a")
    dispatcher.choose(ASKED)
    (view,) = router.seen
    assert (view.work, view.num_sent, view.num_unstarted_tokens) == (60 + 50 + 10 + 5, 2, 70)
    clock.now = 3.0
    first.has_started(3.0)
    first.has_started(4.0)
    dispatcher.choose(ASKED)
    (view,) = router.seen
    assert (view.work, view.num_sent, view.num_unstarted_tokens) == (50 + 15, 2, 10)
    second.has_ended()
    first.has_ended()
    first.has_ended()
    first.has_started(5.0)
    dispatcher.choose(ASKED)
    (view,) = router.seen
    assert (view.work, view.num_sent, view.num_unstarted_tokens) == (0, 0, 0)
    assert router.told == [("join", "a"), ("first", "a", 3.0), ("end", "a"), ("end", "a")]


def test_replicas_are_seen_in_order_and_a_view_stays_the_same_until_something_changes() -> None:
    dispatcher, router, _ = watching(Watching, "a", "c")
    dispatcher.join("b", 1)
    dispatcher.choose(ASKED)
    before = router.seen
    assert [view.name for view in before] == ["a", "b", "c"]
    dispatcher.assign(ASKED, "c")
    dispatcher.choose(ASKED)
    assert [new is old for new, old in zip(router.seen, before, strict=True)] == [True, True, False]


def test_what_ends_after_its_replica_has_gone_changes_no_other() -> None:
    dispatcher, router, _ = watching(Watching, "a", "b")
    sent = dispatcher.assign(ASKED, "a")
    dispatcher.leave("a")
    dispatcher.choose(ASKED)
    sent.has_started(1.0)
    sent.has_ended()
    dispatcher.choose(ASKED)
    assert router.seen == (ReplicaView("b"),)
    dispatcher.join("a")
    dispatcher.choose(ASKED)
    assert {view.name: view.work for view in router.seen} == {"a": 0, "b": 0}


def test_a_report_is_made_when_the_router_is_asked_and_only_the_newest() -> None:
    dispatcher, router, _ = watching(Watching, "a", "b")
    made = []

    def report(number: int) -> tuple[ReplicaReport, float]:
        made.append(number)
        return ReplicaReport(num_running=number, step_seconds=0.5), float(number)

    dispatcher.on_report("a", lambda: report(1))
    dispatcher.on_report("a", lambda: report(2))
    dispatcher.on_report("gone", lambda: report(3))
    for _ in range(2):
        dispatcher.choose(ASKED)
    a, b = router.seen
    assert (a.num_running, a.known_at, a.step_seconds) == (2, 2.0, 0.5)
    assert (b.num_running, b.known_at) == (0, -math.inf)
    assert made == [2]


def test_a_router_that_asks_for_nothing_of_replicas_is_told_nothing() -> None:
    dispatcher, router, _ = watching(Blind, "a")
    dispatcher.on_kv_event("a", BlockStored(b"1", None, []))
    dispatcher.on_report("a", lambda: pytest.fail("no report is wanted"))
    asked = RoutedRequest(num_tokens=40, block_hashes=[b"1"], block_size=40)
    dispatcher.choose(asked)
    assert router.seen == (ReplicaView("a"),)
    assert router.prefixes.by_name(asked) == {}


def test_every_field_of_a_report_is_a_field_of_the_view() -> None:
    assert REPORTED - {"known_at"} == set(ReplicaReport.__struct_fields__)
    assert set(ReplicaView.__struct_fields__) >= REPORTED


def test_prefixes_are_told_by_replica_in_tokens() -> None:
    dispatcher, router, _ = watching(Watching, "a", "b", "c", "d")
    for name, count in (("a", 3), ("b", 1), ("c", 3)):
        for number in range(count):
            dispatcher.on_kv_event(name, BlockStored(bytes([number]), None, []))
    dispatcher.on_kv_event("d", BlockStored(bytes([1]), None, []))  # not the first
    hashes = [bytes([number]) for number in range(4)]
    asked = RoutedRequest(num_tokens=70, block_hashes=hashes, block_size=16)
    assert router.prefixes.by_name(asked) == {"a": 48, "b": 16, "c": 48}
    assert router.prefixes.longest(asked) == (48, ["a", "c"])
    assert router.prefixes.cached_tokens(asked, "b") == 16
    whole = RoutedRequest(num_tokens=48, block_hashes=hashes[:3], block_size=16)
    assert router.prefixes.by_name(whole) == {"a": 48, "b": 16, "c": 48}
    assert router.prefixes.by_name(ASKED) == {}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", "got None"),
        ("'a'", "got 'a'"),
        ("0", "got 0"),
        ("ReplicaView('else')", r"got ReplicaView\(name='else'"),
        ("1 / 0", r"ZeroDivisionError.* in choose\(\) \(mine.py:4\)"),
        ("Refuse('')", "Refuse needs a reason"),
        ("Refuse('full', -1)", "retry_after is a finite number of at least 0"),
        ("Wait(0)", "Wait takes seconds above 0 and up to 60, got 0"),
        ("Wait(float('nan'))", "Wait takes seconds"),
    ],
)
def test_what_is_no_answer_is_an_error_that_names_the_router(
    answer: str, said: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from aioserve.fleet.routing import BaseRouter, Refuse, ReplicaView, Wait\n"
        "class Mine(BaseRouter):\n"
        "    def choose(self, request, replicas):\n"
        f"        return {answer}\n"
    )
    dispatcher = make_dispatcher(str(mine), clock=Clock())
    dispatcher.join("a")
    with pytest.raises(RouterError, match=said) as raised:
        dispatcher.choose(ASKED)
    assert "Mine" in str(raised.value)


def test_refusals_and_waits_come_back_and_an_empty_fleet_asks_no_router(tmp_path: Path) -> None:
    class Picky(BaseRouter):
        def choose(self, request: RoutedRequest, replicas: Replicas) -> Refuse | Wait:
            return Refuse("no", 2.0) if request.user else Wait(0.5)

    dispatcher = Dispatcher(Picky, clock=Clock())
    assert dispatcher.choose(ASKED) is None
    dispatcher.join("a")
    assert dispatcher.choose(ASKED) == Wait(0.5)
    assert dispatcher.choose(RoutedRequest(num_tokens=1, user="u")) == Refuse("no", 2.0)
    assert dispatcher.choose(ASKED, {"a"}) is None


def test_an_unknown_router_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'prefx' \(did you mean 'prefix'\?\).*round_robin"):
        load_router("prefx")


def test_a_router_that_is_none_and_options_that_it_has_not_are_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("class Mine: pass\n")
    with pytest.raises(ConfigError, match="is not a BaseRouter; derive from BaseRouter"):
        load_router(f"{mine}:Mine")
    with pytest.raises(ConfigError, match=r"options of router LeastWork: .*unknown field `weight`"):
        make_dispatcher("least_work", {"weight": 2}, clock=Clock())


def test_every_router_of_the_package_has_a_name() -> None:
    known = available_routers()
    assert {"round_robin", "least_work", "two_choices", "prefix", "session"} <= set(known)
    named = {load_router(name) for name in known}
    for found in pkgutil.iter_modules(routers.__path__):
        module = importlib.import_module(f"{routers.__name__}.{found.name}")
        own = {cls for cls in vars(module).values() if inspect.isclass(cls)}
        own = {cls for cls in own if cls.__module__ == module.__name__}
        own = {cls for cls in own if not inspect.isabstract(cls)}  # a base of several
        assert {cls for cls in own if issubclass(cls, BaseRouter)} <= named


@pytest.mark.parametrize(
    ("spec", "shown"),
    [("prefix", "prefix"), ("a/mine.py:Mine", "Mine"), ("a/mine.py", "mine"), ("x.y:Z", "Z")],
)
def test_tables_have_a_router_by_a_short_name(spec: str, shown: str) -> None:
    assert short_name(spec) == shown


def test_hints_that_are_no_numbers_are_as_good_as_none() -> None:
    asked = RoutedRequest(
        num_tokens=1, hints={"slo_ttft": "soon", "slo_tpot": 0.2, "slo_class": 3, "x": True}
    )
    assert (asked.slo_ttft, asked.slo_tpot, asked.slo_class) == (None, 0.2, "")
    assert asked.predicted_tokens is None
    assert RoutedRequest(num_tokens=1, hints={"predicted_output_tokens": 7}).predicted_tokens == 7
