"""vLLM of 2023 lets streams wait for prompts; Orca reserves for the longest reply."""

import pytest

from tests.policies.zoo.harnesses import first_served, harness_of, plans, preempted


def test_under_prefill_first_every_stream_waits_while_a_prompt_runs() -> None:
    harness = harness_of("prefill_first")
    harness.add_request("a", [1] * 5, max_tokens=9)
    harness.step()
    harness.step()
    harness.add_request("b", [2] * 30, max_tokens=9)
    harness.add_request("c", [3] * 30, max_tokens=9)
    harness.step()
    harness.step()
    assert plans(harness) == [{"a": 5}, {"a": 1}, {"b": 30, "c": 30}, {"a": 1, "b": 1, "c": 1}]


@pytest.mark.parametrize(("reserve", "together"), [("request", 2), ("model", 1)])
def test_orca_admits_only_what_has_room_to_its_limit_and_never_preempts(
    reserve: str, together: int
) -> None:
    """Of 16 blocks of 4 tokens: 30 tokens each, or the 50 of the model."""
    harness = harness_of(
        "orca", num_blocks=16, max_model_len=50, options={"reserve": reserve}, watermark=0
    )
    for i in range(4):
        harness.add_request(f"r{i}", [i] * 6, max_tokens=24)
    harness.run_until_idle()
    assert max(map(len, plans(harness))) == together
    assert not preempted(harness)
    # What is reserved is not what is used: with blocks on demand three and more run at once.
    eager = harness_of("prefill_first", num_blocks=16, max_model_len=50, watermark=0)
    for i in range(4):
        eager.add_request(f"r{i}", [i] * 6, max_tokens=24)
    eager.run_until_idle()
    assert max(map(len, plans(eager))) == 4
    assert preempted(eager)


def test_orca_has_no_more_requests_in_a_batch_than_it_may() -> None:
    harness = harness_of("orca", options={"max_batch": 2}, max_num_seqs=4)
    for i in range(5):
        harness.add_request(f"r{i}", [i] * 4, max_tokens=3)
    harness.run_until_idle()
    assert max(map(len, plans(harness))) == 2
    assert first_served(harness) == [f"r{i}" for i in range(5)]
