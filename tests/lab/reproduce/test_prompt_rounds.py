"""The scheduler of S-LoRA keeps the contract, and admits as its source says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.config import SchedulerConfig
from aioserve.lab.reproduce.vtc import PromptRoundsScheduler
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec
from aioserve.scheduler import PeakMemory
from aioserve.testing import SchedulerHarness
from aioserve.testing.contract import PolicyContract
from tests.slow import examples


@pytest.mark.slow
class TestFcfs(PolicyContract):
    policy = PromptRoundsScheduler
    max_examples = 20


class TestVtc(PolicyContract):
    policy = PromptRoundsScheduler
    options = {"order": "vtc", "sees_late": True, "decode_steps": 2, "client_tokens": 1}  # noqa: RUF012
    max_examples = examples(6, slow=20)
    # S-LoRA's rule goes through all running requests for each that may enter.
    test_schedule_costs_in_proportion_to_the_requests = None


def request(name: str, prompt: int, output: int) -> Request:
    made = Request(RequestSpec(name, [1] * prompt, SamplingParams(max_tokens=output)))
    made.bound_length(1000)
    return made


def peak_by_steps(requests: list[tuple[int, int]]) -> int:
    """Tokens held at the most when each gets one a step until its end."""
    longest = max(output for _, output in requests)
    return max(
        sum(prompt + step for prompt, output in requests if step <= output)
        for step in range(1, longest + 1)
    )


@pytest.mark.parametrize(
    "requests", [[(10, 5)], [(10, 5), (10, 5)], [(100, 2), (3, 90), (50, 20)], [(1, 1), (9, 30)]]
)
def test_the_peak_is_what_counting_step_by_step_finds(requests: list[tuple[int, int]]) -> None:
    made = [request(str(i), *sizes) for i, sizes in enumerate(requests)]
    peak = PeakMemory(made[:-1])
    assert peak.with_request(made[-1]) == peak_by_steps(requests)
    peak.add(made[-1])
    assert peak.peak == peak_by_steps(requests)
    assert len(peak) == len(requests)
    assert PeakMemory().peak == 0


sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(st.lists(sizes, max_size=6), st.lists(sizes, max_size=20), st.integers(0, 500))
def test_as_many_fit_as_when_one_is_added_after_the_other(
    running: list[tuple[int, int]], waiting: list[tuple[int, int]], capacity: int
) -> None:
    in_turn = PeakMemory(request(f"r{i}", *of) for i, of in enumerate(running))
    line = [request(f"w{i}", *of) for i, of in enumerate(waiting)]
    found = PeakMemory(request(f"r{i}", *of) for i, of in enumerate(running))
    expected = 0
    for one in line:
        if in_turn.with_request(one) > capacity:
            break
        in_turn.add(one)
        expected += 1
    assert found.num_fitting(line, capacity) == expected
    assert len(found) == len(running)


def harness(**options: object) -> SchedulerHarness:
    return SchedulerHarness(
        PromptRoundsScheduler,
        num_blocks=64,
        max_num_batched_tokens=None,
        options={"decode_steps": 3, **options},
    )


def test_prompts_run_in_rounds_of_their_own_and_decodes_wait() -> None:
    with_round = harness()
    for i in range(2):
        with_round.add_request(f"a{i}", [i] * 5, max_tokens=9)
    with_round.step()
    with_round.add_request("b", [7] * 5, max_tokens=9)
    for _ in range(4):
        with_round.step()
    planned = [output.num_scheduled_tokens for output in with_round.steps]
    decodes = {"a0": 1, "a1": 1}
    assert planned == [{"a0": 5, "a1": 5}, decodes, decodes, decodes, {"b": 5}]


def test_a_request_enters_only_if_the_peak_of_all_fits() -> None:
    full = harness(pool_tokens=40)
    full.add_request("a", [1] * 10, max_tokens=10)
    full.add_request("b", [2] * 10, max_tokens=10)  # 20 each at once: as much as the pool
    full.add_request("c", [3] * 2, max_tokens=2)
    full.run_until_idle()
    assert [list(output.num_scheduled_tokens) for output in full.steps[:2]] == [["a"], ["a"]]
    assert SchedulerConfig().max_num_seqs > 2  # seats are not what is short


def test_the_client_that_was_served_least_goes_first() -> None:
    fair = harness(order="vtc", pool_tokens=30)
    for name, user in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        fair.add_request(name, [ord(name[0]) % 50] * 9, max_tokens=9, user=user)
    fair.run_until_idle()
    firsts = {}
    for i, output in enumerate(fair.steps):
        for name in output.num_scheduled_tokens:
            firsts.setdefault(name, i)
    assert firsts["a0"] < firsts["b0"] < firsts["a1"]
