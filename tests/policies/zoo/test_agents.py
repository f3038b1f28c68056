"""Policies that know programs and conversations: which agent goes first, and what stays for it."""

from tests.policies.zoo.harnesses import first_served, harness_of, preempted


def test_autellix_serves_a_new_program_before_the_next_call_of_one_that_had_much() -> None:
    harness = harness_of("autellix", max_num_seqs=1, options={"quantum": 16})
    harness.add_request("a1", [1] * 20, max_tokens=9, hints={"program": "a"})
    harness.run_until_idle()
    harness.add_request("x", [2] * 4, max_tokens=9)  # keeps the seat for a while
    harness.step()
    harness.add_request("a2", [3] * 4, max_tokens=2, hints={"program": "a"})
    harness.step()
    harness.add_request("b1", [4] * 4, max_tokens=2, hints={"program": "b"})
    harness.run_until_idle()
    assert first_served(harness) == ["a1", "x", "b1", "a2"]


def test_autellix_counts_the_longest_chain_of_a_program_and_not_the_sum_of_its_calls() -> None:
    harness = harness_of("autellix", max_num_seqs=4, options={"quantum": 60, "starve_after": 99})
    for i in range(3):  # side by side: each 4 + 8 * 5 tokens of service
        harness.add_request(f"wide{i}", [i] * 4, max_tokens=5, hints={"program": "wide"})
    harness.run_until_idle()
    for i in range(3):  # one after the other
        harness.add_request(f"deep{i}", [i] * 4, max_tokens=5, hints={"program": "deep"})
        harness.run_until_idle()
    for i in range(4):  # all seats
        harness.add_request(f"x{i}", [9] * 4, max_tokens=9)
    harness.step()
    harness.add_request("deep", [5] * 4, max_tokens=2, hints={"program": "deep"})
    harness.step()
    harness.add_request("wide", [6] * 4, max_tokens=2, hints={"program": "wide"})
    harness.run_until_idle()
    assert first_served(harness)[-2:] == ["wide", "deep"]


def test_autellix_gives_the_place_of_a_served_program_to_a_new_one_once() -> None:
    harness = harness_of("autellix", max_num_seqs=1, options={"quantum": 16})
    harness.add_request("long", [1] * 4, max_tokens=40)
    for _ in range(20):
        harness.step()
    harness.add_request("new", [2] * 4, max_tokens=2)
    harness.step()
    harness.add_request("newer", [3] * 4, max_tokens=2)
    harness.run_until_idle()
    assert preempted(harness) == ["long"]
    assert first_served(harness)[1] == "new"


def test_justitia_serves_the_agent_first_that_fair_sharing_would_complete_first() -> None:
    harness = harness_of("justitia", max_num_seqs=1)
    harness.add_request("seat", [0] * 4, max_tokens=4)
    harness.step()
    for i in range(3):
        hints = {"program": "big", "predicted_output_tokens": 400}
        harness.add_request(f"big{i}", [i] * 9, max_tokens=3, hints=hints)
        hints = {"program": "small", "predicted_output_tokens": 3}
        harness.add_request(f"small{i}", [i] * 9, max_tokens=3, hints=hints)
    harness.run_until_idle()
    served = first_served(harness)[1:]
    assert served == ["small0", "small1", "small2", "big0", "big1", "big2"]


def test_justitia_lets_an_agent_have_its_turn_while_small_ones_keep_coming() -> None:
    harness = harness_of("justitia", max_num_seqs=1)
    big = {"program": "big", "predicted_output_tokens": 60}
    harness.add_request("big", [1] * 9, max_tokens=3, hints=big)
    for i in range(100):
        hints = {"program": f"p{i}", "predicted_output_tokens": 3}
        harness.add_request(f"s{i}", [i % 50] * 9, max_tokens=3, hints=hints)
        for _ in range(3 * (i > 0)):  # one more waits at any time
            harness.step()
    served = first_served(harness)
    assert 9 < served.index("big") < 99


def test_continuum_keeps_the_prefix_of_a_conversation_through_a_call_of_a_tool() -> None:
    def cached(name: str, **options: float) -> int:
        harness = harness_of(name, num_blocks=24, max_num_seqs=2, watermark=0, options=options)
        turn = list(range(40))
        harness.add_request("a1", turn, max_tokens=2, hints={"session": "a", "tool": "search"})
        harness.run_until_idle()
        for i in range(2):  # others that need most of the memory
            harness.add_request(f"x{i}", [50 + i] * 30, max_tokens=20)
        harness.step()
        harness.step()
        said = turn + harness.tokens["a1"]
        harness.add_request("a2", [*said, 7], max_tokens=2, hints={"session": "a"})
        harness.run_until_idle()
        return harness.requests["a2"].num_cached_tokens

    assert cached("continuum", first_ttl=30) >= 36
    assert cached("prefill_first") < 36


def test_continuum_serves_programs_in_the_order_in_which_they_began() -> None:
    harness = harness_of("continuum", max_num_seqs=1)
    harness.add_request("a1", [1] * 4, max_tokens=2, hints={"program": "a"})
    harness.run_until_idle()
    harness.add_request("seat", [9] * 4, max_tokens=6)
    harness.step()
    harness.add_request("b1", [2] * 4, max_tokens=2, hints={"program": "b"})
    harness.step()
    harness.add_request("a2", [3] * 4, max_tokens=2, hints={"program": "a"})
    harness.run_until_idle()
    assert first_served(harness) == ["a1", "seat", "a2", "b1"]
