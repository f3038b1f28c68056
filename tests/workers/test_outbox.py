"""What waits for a worker that does not read: nothing of it is lost, and nobody gets another's."""

from aioserve.errors import RequestFailedError
from aioserve.fleet.workers.host import Outbox
from aioserve.fleet.workers.messages import Failed, Failure
from aioserve.outputs import EngineCoreOutput, FinishReason, TokenLogprobs

FAILURE = Failure.of(RequestFailedError("its step"))


def logprobs(*values: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(value, 1, [], []) for value in values]


def test_outputs_that_wait_become_one_with_all_that_they_have() -> None:
    outbox = Outbox()
    outbox.outputs = [
        EngineCoreOutput("x", [1], None, None, logprobs(-1.0), logprobs(-9.0)),
        EngineCoreOutput("y", [7]),
        EngineCoreOutput("x", [2, 3], FinishReason.STOP, 3, logprobs(-2.0, -3.0)),
    ]
    outbox.merge()
    merged = EngineCoreOutput(
        "x", [1, 2, 3], FinishReason.STOP, 3, logprobs(-1.0, -2.0, -3.0), logprobs(-9.0)
    )
    assert outbox.outputs == [merged, EngineCoreOutput("y", [7])]


def test_of_who_is_forgotten_nothing_waits_and_of_others_all_does() -> None:
    outbox = Outbox()
    outbox.outputs = [EngineCoreOutput("x", [1]), EngineCoreOutput("y", [7])]
    outbox.num_cached_tokens = {"x": 16, "y": 32}
    outbox.since_first_token = {"x": 0.1, "y": 0.2}
    outbox.vectors = {"x": b"1", "y": b"2"}
    outbox.failed = [Failed(["x", "y"], FAILURE)]
    outbox.forget(["x"])
    assert outbox.outputs == [EngineCoreOutput("y", [7])]
    assert outbox.num_cached_tokens == {"y": 32}
    assert outbox.since_first_token == {"y": 0.2}
    assert outbox.vectors == {"y": b"2"}
    assert outbox.failed == [Failed(["y"], FAILURE)]
