"""Under LARS a prompt is due by its length, and goes chunk by chunk where it is most urgent."""

from tests.policies.zoo.harnesses import first_served, harness_of, plans

# A step of a harness takes a second, so that these are seconds.
OPTIONS = {"ttft": 4.0, "stretch": 1.0, "tpot": 0.001, "min_prefill_tokens": 8}


def test_a_request_with_less_time_goes_before_one_that_came_first() -> None:
    harness = harness_of("lars", options=OPTIONS, max_num_seqs=1)
    harness.add_request("calm", [1] * 8, max_tokens=2, hints={"slo_ttft": 50})
    harness.add_request("urgent", [2] * 8, max_tokens=2, hints={"slo_ttft": 3})
    harness.run_until_idle()
    assert first_served(harness) == ["urgent", "calm"]


def test_a_long_prompt_that_has_begun_yields_to_one_that_is_more_urgent() -> None:
    harness = harness_of("lars", options=OPTIONS)
    harness.add_request("stream", [3] * 4, max_tokens=30)
    harness.step()
    harness.add_request("long", [1] * 60, max_tokens=2, hints={"slo_ttft": 50})
    harness.step()
    harness.add_request("short", [2] * 6, max_tokens=2, hints={"slo_ttft": 3})
    harness.wait(1.0)
    harness.step()
    assert plans(harness) == [
        {"stream": 4},
        {"stream": 1, "long": 8},  # beside a stream, `min_prefill_tokens`
        {"stream": 1, "short": 6, "long": 2},
    ]
