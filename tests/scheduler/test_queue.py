"""RequestQueue: order holds whatever happens to the queue while it is read."""

from aioserve.request import Request
from aioserve.sampling_params import SamplingParams
from aioserve.scheduler import RequestQueue


def make_queue(*keys: int) -> tuple[RequestQueue, list[Request]]:
    queue, requests = RequestQueue(), []
    for number, key in enumerate(keys):
        request = Request(str(number), [1], SamplingParams(), max_total_tokens=9)
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
    early, late = (Request(i, [1], SamplingParams(), max_total_tokens=9) for i in ("early", "late"))
    early.order_key, late.order_key = (0, 10), (9, 11)
    seen = []
    for request in queue:
        seen.append(request.request_id)
        if request.request_id == "1":
            queue.add(early)
            queue.add(late)
    assert seen == ["0", "1", "2", "late"]
