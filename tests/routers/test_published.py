"""What the routers of papers and of other systems do that the plain ones do not."""

from typing import Any

import pytest

from aioserve.errors import ConfigError
from aioserve.fleet.routing import Dispatcher, ReplicaReport, RoutedRequest, make_dispatcher
from aioserve.kv_cache.block_pool import BlockStored

SIZE = 16


class Fleet:
    """Replicas r0, r1, ... behind a router, on a clock that tests set."""

    def __init__(self, router: str, num_replicas: int, **options: Any) -> None:
        self.now = 0.0
        self.dispatcher: Dispatcher = make_dispatcher(router, options, clock=lambda: self.now)
        for i in range(num_replicas):
            self.dispatcher.join(f"r{i}")

    def report(self, name: str, running: int = 0, waiting: int = 0, **fields: Any) -> None:
        """The replica says that it runs so much."""
        report = ReplicaReport(running, waiting, max_num_seqs=fields.pop("seats", 64), **fields)
        now = self.now
        self.dispatcher.on_report(name, lambda: (report, now))

    def hold(self, name: str, num_blocks: int) -> None:
        """The replica holds the first blocks of the prompt of `asking`."""
        for number in range(num_blocks):
            self.dispatcher.on_kv_event(name, BlockStored(bytes([number]), None, []))

    def choose(self, num_blocks: int = 8, **fields: Any) -> str:
        """The replica of a request whose prompt has a number of blocks."""
        answer = self.dispatcher.choose(asking(num_blocks, **fields))
        assert isinstance(answer, str)
        return answer


def asking(num_blocks: int = 8, **fields: Any) -> RoutedRequest:
    hashes = [bytes([number]) for number in range(num_blocks)]
    return RoutedRequest(
        num_tokens=num_blocks * SIZE, block_hashes=hashes, block_size=SIZE, **fields
    )


@pytest.mark.parametrize("router", ["least_requests", "power_of_two"])
def test_requests_of_other_senders_count_and_so_does_what_is_not_reported_yet(router: str) -> None:
    fleet = Fleet(router, 2)
    fleet.report("r0", running=2, waiting=1)
    assert fleet.choose() == "r1"
    for _ in range(4):  # more than the report of the other says
        fleet.dispatcher.assign(asking(), "r1")
    assert fleet.choose() == "r0"


def test_lmetric_multiplies_what_is_to_be_computed_by_the_batch() -> None:
    fleet = Fleet("lmetric", 2)
    fleet.hold("r0", 6)  # 2 of 8 blocks are missing there, 8 at r1
    fleet.report("r0", running=2)
    fleet.report("r1", running=0)
    assert fleet.choose() == "r0"  # 2 x 3 against 8 x 1
    fleet.report("r0", running=4)
    assert fleet.choose() == "r1"  # 2 x 5 against 8 x 1
    fleet.report("r1", running=1)
    assert fleet.choose() == "r0"  # 2 x 5 against 8 x 2
    fleet.dispatcher.assign(asking(8), "r0")  # 2 blocks more are to be computed there
    assert fleet.choose() == "r1"  # 4 x 5 against 8 x 2


def test_scores_are_weighted_as_the_options_say() -> None:
    wishes = {"prefix": 0.0, "queue": 0.0, "kv_cache": 0.0}
    chosen = {}
    for wish in wishes:
        fleet = Fleet("scorers", 3, **wishes | {wish: 1.0})
        fleet.hold("r0", 4)
        fleet.report("r0", 4, 4, num_kv_tokens=100, num_free_kv_tokens=50)
        fleet.report("r1", 4, 0, num_kv_tokens=100, num_free_kv_tokens=20)
        fleet.report("r2", 4, 2, num_kv_tokens=100, num_free_kv_tokens=90)
        chosen[wish] = fleet.choose()
    assert chosen == {"prefix": "r0", "queue": "r1", "kv_cache": "r2"}


def test_a_session_goes_back_to_its_replica_if_that_has_a_weight() -> None:
    fleet = Fleet("scorers", 2, session=10.0)
    assert fleet.choose(session="s") == "r0"
    fleet.report("r0", running=5, waiting=5)
    assert fleet.choose(session="s") == "r0"
    assert fleet.choose(session="t") == "r1"
    with pytest.raises(ConfigError, match="options of router Scorers"):
        Fleet("scorers", 2, session=-1.0)


def test_scorers_look_for_adapters_short_steps_and_room_beside_cached_prefixes() -> None:
    plain = {"prefix": 0.0, "queue": 0.0, "kv_cache": 0.0}
    fleet = Fleet("scorers", 3, **plain)
    fleet.report("r0", adapters=("a",))
    fleet.report("r1", adapters=("b",))
    fleet.report("r2")  # which does not say
    for name in ("r0", "r1", "r2"):
        fleet.dispatcher.assign(asking(), "r0" if name != "r1" else "r2")
    chosen = [fleet.choose(adapter=name) for name in ("a", "b", "c", "")]
    assert chosen == ["r0", "r1", "r2", "r1"]
    fleet = Fleet("scorers", 2, latency=1.0, **plain)
    fleet.report("r0", 2, step_base_seconds=0.01, step_request_seconds=0.010)
    fleet.report("r1", 4, step_base_seconds=0.01, step_request_seconds=0.001)
    assert fleet.choose() == "r1"
    fleet = Fleet("scorers", 2, eviction=1.0, **plain)
    full = {"num_kv_tokens": 900, "num_free_kv_tokens": 800}
    fleet.report("r0", num_evictable_kv_tokens=790, **full)
    fleet.report("r1", num_evictable_kv_tokens=100, **full)
    assert fleet.choose() == "r1"


def test_preble_exploits_what_is_mostly_cached_and_explores_for_the_rest() -> None:
    fleet = Fleet("preble", 2, window=10.0)
    fleet.hold("r0", 5)
    fleet.dispatcher.assign(RoutedRequest(num_tokens=100), "r0")
    assert fleet.choose(8) == "r0"  # 5 of 8 are cached, though r1 has nothing to do
    assert fleet.choose(12) == "r1"  # 5 of 12 are not most
    fleet = Fleet("preble", 2, window=10.0)
    for _ in range(3):
        fleet.dispatcher.assign(RoutedRequest(num_tokens=400), "r0")
    fleet.hold("r0", 5)
    assert fleet.choose(8) == "r1"  # the holder has several times the load


def test_preble_remembers_what_it_has_sent_for_its_window() -> None:
    fleet = Fleet("preble", 2, window=10.0)
    unlike = RoutedRequest(num_tokens=100)
    first, second = (fleet.dispatcher.choose(unlike) for _ in range(2))
    assert [first, second] == ["r0", "r1"]  # nothing runs, and the first has computed
    fleet.dispatcher.choose(RoutedRequest(num_tokens=500))
    assert fleet.dispatcher.choose(unlike) == "r1"
    fleet.now = 60.0
    assert fleet.dispatcher.choose(unlike) == "r0"


def reporting_polyserve() -> Fleet:
    """Replicas whose steps take 10 ms and 1 ms more for each request, and have said so."""
    fleet = Fleet("polyserve", 3)
    line = {"step_base_seconds": 0.010, "step_request_seconds": 0.001}
    for name, batch in (("r0", 11), ("r1", 3), ("r2", 1)):
        fleet.report(name, running=batch, step_seconds=0.010 + 0.001 * batch, **line)
    return fleet


def test_polyserve_knows_the_step_times_of_each_replica() -> None:
    fleet = Fleet("polyserve", 2)
    slow = {"step_base_seconds": 0.010, "step_request_seconds": 0.010}
    quick = {"step_base_seconds": 0.010, "step_request_seconds": 0.001}
    fleet.report("r0", running=5, step_seconds=0.060, **slow)
    fleet.report("r1", running=3, step_seconds=0.013, **quick)
    assert fleet.choose(hints={"slo_tpot": 0.05}) == "r1"
    assert fleet.choose(hints={"slo_tpot": 0.08}) == "r0"


def test_polyserve_fills_the_fullest_replica_that_keeps_the_time_per_token() -> None:
    fleet = reporting_polyserve()
    assert fleet.choose(hints={"slo_tpot": 0.05}) == "r0"
    assert fleet.choose(hints={"slo_tpot": 0.020}) == "r1"  # 12 requests would take 22 ms
    assert fleet.choose(hints={"slo_tpot": 0.0125}) == "r2"
    assert fleet.choose(hints={"slo_tpot": 0.001}) == "r2"  # none keeps that: the fewest


def test_polyserve_lets_no_request_with_time_slow_one_down_that_has_none() -> None:
    fleet = reporting_polyserve()
    sent = fleet.dispatcher.assign(asking(hints={"slo_tpot": 0.0135}), "r1")
    sent.has_started(fleet.now)
    loose = {"slo_tpot": 0.05}
    fleet.report("r0", running=64, step_seconds=0.074)  # no seat is free
    assert fleet.choose(hints=loose) == "r2"
    sent.has_ended()
    assert fleet.choose(hints=loose) == "r1"


def test_a_slow_replica_is_predicted_to_be_slow_from_its_first_tokens() -> None:
    fleet = Fleet("predicted_latency", 2)
    for name, seconds in (("r0", 4.0), ("r1", 0.1)) * 3:
        other = {"r0": "r1", "r1": "r0"}[name]
        request = asking(request_id=f"{name} {fleet.now}")
        assert fleet.dispatcher.choose(request, {other}) == name
        sent = fleet.dispatcher.assign(request, name)
        fleet.now += seconds
        sent.has_started(fleet.now)
        sent.has_ended()
    assert fleet.choose() == "r1"
    for _ in range(30):  # 31 prompts at r1 are still sooner computed than one at r0
        fleet.dispatcher.assign(asking(), "r1")
    assert fleet.choose() == "r1"
    for _ in range(10):
        fleet.dispatcher.assign(asking(), "r1")
    assert fleet.choose() == "r0"


def test_a_level_is_met_with_the_least_headroom() -> None:
    fleet = Fleet("predicted_latency", 2)
    request = asking(request_id="first")
    sent = fleet.dispatcher.assign(request, str(fleet.dispatcher.choose(request)))
    sent.has_started(0.128)  # a millisecond a token
    fleet.dispatcher.assign(asking(), "r0")
    assert fleet.choose(hints={"slo_ttft": 2.0}) == "r0"  # 256 ms there, 128 at r1
    assert fleet.choose(hints={"slo_ttft": 0.4}) == "r1"  # of which half may be taken up
    assert fleet.choose() == "r1"
    fleet.report("r0", step_seconds=0.3)
    assert fleet.choose(hints={"slo_ttft": 1.0, "slo_tpot": 0.1}) == "r1"
