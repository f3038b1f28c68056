"""Policies that go by cached prefixes: how far locality bends the order, and where it stops."""

from tests.policies.zoo.harnesses import first_served, harness_of


def test_dlpm_follows_the_cache_until_the_quantum_of_the_client_is_spent() -> None:
    def order(quantum: float) -> str:
        harness = harness_of("dlpm", max_num_seqs=1, options={"quantum": quantum})
        warm = list(range(24))
        harness.add_request("warm", warm, max_tokens=2, user="a")
        harness.run_until_idle()
        harness.add_request("seat", [40] * 4, max_tokens=2, user="c")
        harness.step()
        for i in range(4):
            harness.add_request(f"a{i}", [*warm, 30 + i], max_tokens=4, user="a")
            harness.add_request(f"b{i}", [50 + i] * 12, max_tokens=4, user="b")
        harness.run_until_idle()
        return "".join(name[0] for name in first_served(harness)[2:])

    assert order(10_000) == "aaaabbbb"
    assert order(10) != "aaaabbbb"
    assert order(10)[:3].count("b") >= 1


def test_preble_takes_most_from_the_group_that_shares_most_and_some_from_each() -> None:
    harness = harness_of("preble", max_num_seqs=1, options={"num_groups": 2})
    warm = list(range(24))
    harness.add_request("warm", warm, max_tokens=2)
    harness.run_until_idle()
    harness.add_request("seat", [40] * 4, max_tokens=3)
    harness.step()
    for i in range(3):
        harness.add_request(f"cold{i}", [50 + i] * 12, max_tokens=2)
    for i in range(4):
        harness.add_request(f"hot{i}", [*warm, 30 + i], max_tokens=2)
    harness.run_until_idle()
    served = first_served(harness)[2:]
    assert served[:2] == ["hot0", "hot1"]  # two turns of a round for the upper of two groups
    assert [name for name in served if name.startswith("cold")] == ["cold0", "cold1", "cold2"]
    assert served.index("cold0") < served.index("hot3")
