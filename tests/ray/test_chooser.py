"""What a router raises when it is told how far a request is stays with the router."""

import logging
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from aioserve.fleet.routing import BaseRouter, Dispatcher, ReplicaView, RoutedRequest

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    pytest.importorskip("ray", reason="pip install 'ray[serve]'")
    from aioserve.fleet.ray.chooser import AccountSeat, OwnChooser, RouterMetrics

pytestmark = pytest.mark.dist


class Grudging(BaseRouter):
    """Names a replica, and does not want to hear what became of the request."""

    def choose(self, request: RoutedRequest, replicas: tuple[ReplicaView, ...]) -> str:
        return replicas[0].name

    def on_first_token(self, request: RoutedRequest, name: str, seconds: float) -> None:
        raise ValueError("no first token, please")

    def on_end(self, request: RoutedRequest, name: str) -> None:
        raise ValueError("no end, please")


async def test_an_error_of_the_router_reaches_no_request_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher = Dispatcher(Grudging, clock=time.monotonic)
    dispatcher.join("a")
    fleet: Any = SimpleNamespace(lines={"a": SimpleNamespace(name="a")})
    spec: Any = None  # what Ray's own router would be asked with
    metrics = RouterMetrics("m", "grudging", lambda: len(fleet.lines))
    chooser = OwnChooser(dispatcher, fleet, 4, metrics)
    with caplog.at_level(logging.ERROR, "aioserve.fleet.ray.chooser"):
        seat = await chooser.choose(RoutedRequest(num_tokens=100), frozenset(), spec)
        assert isinstance(seat, AccountSeat)
        seat.has_started()
        seat.has_ended()
    told = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert ["no first token, please" in each for each in told] == [True, False]
    assert "on_end()" in told[1]
    assert dispatcher.work_of("a") == 0  # the next request finds the replica idle
