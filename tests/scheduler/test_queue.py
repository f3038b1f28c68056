"""RequestQueue: order holds whatever happens to the queue while it is read."""

import pytest

from aioserve.errors import InvariantError
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec
from aioserve.scheduler import RequestQueue


def make_queue(*keys: object) -> tuple[RequestQueue, list[Request]]:
    queue, requests = RequestQueue(), []
    for number, key in enumerate(keys):
        request = Request(RequestSpec(str(number), [1], SamplingParams()))
        request.order_key = (key, number)
        queue.add(request)
        requests.append(request)
    return queue, requests


def test_iteration_follows_the_key_and_equals_keep_their_order_of_arrival() -> None:
    queue, requests = make_queue(2, 1, 2, 0)
    assert [r.request_id for r in queue] == ["3", "1", "0", "2"]
    assert len(queue) == 4
    assert requests[0] in queue


def test_taking_out_each_request_that_is_visited_visits_all() -> None:
    queue, _ = make_queue(*range(10))
    seen = []
    for request in queue:
        seen.append(request.request_id)
        queue.remove(request)
    assert seen == [str(i) for i in range(10)]
    assert len(queue) == 0


def test_what_comes_in_before_the_place_of_reading_is_not_visited() -> None:
    queue, _ = make_queue(5, 6, 7)
    early, late = (Request(RequestSpec(i, [1], SamplingParams())) for i in ("early", "late"))
    early.order_key, late.order_key = (0, 10), (9, 11)
    seen = []
    for request in queue:
        seen.append(request.request_id)
        if request.request_id == "1":
            queue.add(early)
            queue.add(late)
    assert seen == ["0", "1", "2", "late"]


def test_a_request_that_does_not_wait_cannot_be_taken_out_nor_put_in_twice() -> None:
    queue, (request,) = make_queue(1)
    with pytest.raises(InvariantError, match="waits already"):
        queue.add(request)
    queue.remove(request)
    with pytest.raises(InvariantError, match="does not wait"):
        queue.remove(request)
    assert (len(queue), queue.num_tokens, queue.heads()) == (0, 0, [])


def test_a_key_that_compares_with_nothing_is_refused_and_nothing_has_changed() -> None:
    queue, requests = make_queue(1, 2)
    other = Request(RequestSpec("other", [1], SamplingParams(), user="ann"))
    other.order_key = ("late", 3)
    with pytest.raises(TypeError):
        queue.add(other)
    assert list(queue) == requests
    assert other not in queue
    assert queue.num_tokens == 2


def test_nobody_is_lost_among_keys_that_are_no_numbers() -> None:
    nan = float("nan")
    queue, requests = make_queue(3.0, nan, 1.0, nan, 2.0, nan)
    for request in requests:
        assert request in queue
        queue.remove(request)
        assert request not in queue
    assert (len(queue), queue.num_tokens, queue.heads()) == (0, 0, [])


def test_whose_first_request_changed_is_told_once() -> None:
    queue, requests = RequestQueue(), []
    for user, key in (("a", 2), ("a", 1), ("b", 3)):
        request = Request(RequestSpec(f"{key}", [1], SamplingParams(), user=user))
        request.order_key = (key, 0)
        requests.append(request)
    first, second, other = requests
    queue.add(first)
    assert queue.take_changed() == ["a"]  # at first, all
    assert queue.take_changed() == []
    queue.add(second)
    queue.add(other)
    assert queue.take_changed() == ["a", "b"]
    assert queue.head("a") is second
    queue.remove(first)
    assert queue.take_changed() == []
    queue.remove(second)
    assert queue.take_changed() == ["a"]
    assert queue.head("a") is None
