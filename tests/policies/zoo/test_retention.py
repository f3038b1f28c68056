"""Policies that decide what stays in the cache, and one that pauses what it displaces."""

from typing import Any

from aioserve.testing import SchedulerHarness
from tests.policies.zoo.harnesses import first_served, harness_of, plans


def run(harness: SchedulerHarness, name: str, prompt: list[int], **hints: Any) -> int:
    """Serve a request alone; how many tokens of its prompt were cached."""
    harness.add_request(name, prompt, max_tokens=2, hints=hints)
    harness.run_until_idle()
    return harness.requests[name].num_cached_tokens


def test_kvflow_evicts_the_prefix_first_that_its_workflow_needs_last() -> None:
    def cached(policy: str) -> tuple[int, int]:
        harness = harness_of(policy, num_blocks=18, watermark=0)
        soon, late = [1] * 24, [2] * 24
        run(harness, "soon", soon, program="w", steps_to_next_use=3)
        run(harness, "late", late, program="w", steps_to_next_use=9)
        run(harness, "other", [3] * 28)  # needs blocks of one of them
        return run(harness, "again", [*soon, 9]), run(harness, "then", [*late, 9])

    soon, late = cached("kvflow")
    assert soon == 24
    assert late < 24
    soon, late = cached("prefill_first")  # the least recently used goes first
    assert soon < 24


def test_kvcache_wild_keeps_what_its_kind_uses_again_and_not_what_it_never_does() -> None:
    def cached(policy: str) -> int:
        harness = harness_of(policy, num_blocks=18, watermark=0)
        for i in range(5):  # chats go on, calls do not
            chat = [10 + i] * 8
            run(harness, f"c{i}", chat, type="chat", session=f"s{i}")
            harness.wait(60)
            run(harness, f"d{i}", [*chat, *harness.tokens[f"c{i}"]], type="chat", session=f"s{i}")
            run(harness, f"x{i}", [30 + i] * 8, type="call", session=f"x{i}")
        chat = [1] * 24
        run(harness, "chat", chat, type="chat", session="s")
        run(harness, "call", [2] * 24, type="call", session="x")
        run(harness, "other", [3] * 28)
        return run(harness, "again", [*chat, *harness.tokens["chat"]], type="chat", session="s")

    assert cached("kvcache_wild") == 24
    assert cached("prefill_first") < 24


def test_fastserve_takes_a_seat_without_computing_anything_again() -> None:
    harness = harness_of("fastserve", max_num_seqs=1, options={"quantum": 16})
    harness.add_request("long", [1] * 4, max_tokens=20)
    for _ in range(9):
        harness.step()
    harness.add_request("short", [2] * 4, max_tokens=2)
    harness.step()
    assert plans(harness)[-1] == {"short": 4}
    harness.run_until_idle()
    computed = sum(plan.get("long", 0) for plan in plans(harness))
    assert computed == 4 + 19  # each of its tokens once; the last needs no step


def test_fastserve_promotes_what_has_waited_long_so_that_it_gets_a_quantum() -> None:
    harness = harness_of("fastserve", max_num_seqs=1, options={"quantum": 16, "starve_after": 20.0})
    harness.add_request("long", [1] * 40, max_tokens=3)
    harness.step()
    harness.step()
    for i in range(40):  # short requests that never leave the seat free
        harness.add_request(f"s{i}", [i % 50] * 4, max_tokens=2)
        harness.step()
        harness.step()
    assert len(harness.tokens["long"]) == 3
    assert len(first_served(harness)) > 20
