"""A candidate that cheats is refused by what it says, or caught by what it does."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import psutil
import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve.errors import AioserveError
from aioserve.lab.evaluate import trials
from aioserve.lab.evaluate.enclosure import Enclosure, Failed, Guest, Task, Verdict, look
from aioserve.lab.evaluate.evaluator import read_policy
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Workload
from aioserve.lab.zoo.standing import load_policies, load_workload, measure_run, prepared
from aioserve.scheduler import Request, available_policies
from tests.lab.evaluate import cheats
from tests.slow import mostly_slow

RUN = {"workload": "documents", "seed": 7, "requests": 120}


@pytest.fixture(scope="module")
def enclosure() -> Iterator[Enclosure]:
    with Enclosure() as made:
        yield made


def tried(
    enclosure: Enclosure, source: str, trial: str = "run", seconds: float = 120, **more: int
) -> Verdict:
    """What comes of a candidate at which nobody has looked."""
    arguments = RUN if trial in ("run", "foresight") else {}
    return enclosure.run(Task(source, "mine.py", trial, arguments, seconds, **more))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (cheats.READS_LENGTHS, "imports sys"),
        (cheats.READS_CLOCK, "imports time"),
        (cheats.READS_WORKLOAD, "imports gc"),
        (cheats.LOADS_WORKLOAD, "imports aioserve.lab.zoo.standing"),
        (cheats.READS_FILE, "uses open"),
        (cheats.STARTS_PROCESS, "imports os"),
        (cheats.CONNECTS, "imports socket"),
        (cheats.HIDES, "uses getattr for an attribute whose name is not written there"),
    ],
)
def test_a_cheat_is_refused_by_its_text_with_the_line(source: str, words: str) -> None:
    with pytest.raises(Failed, match=words) as found:
        look(source, "mine.py")
    assert found.value.failure == "refused"
    assert str(found.value).startswith("mine.py:")


def test_text_that_is_no_python_is_told_apart() -> None:
    with pytest.raises(Failed) as found:
        look(cheats.NONSENSE, "mine.py")
    assert found.value.failure == "unparsable"


@pytest.mark.parametrize("name", sorted(available_policies().keys() - {"composed"}))
def test_policies_that_ship_are_not_refused(name: str) -> None:
    look(read_policy(name), f"{name}.py")


def test_lengths_that_are_known_show_in_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the policy in the process of the workload, which the lab does not do."""
    monkeypatch.setattr(trials, "outcome_of", lambda _, workload, *more: simulated_here(workload))
    workload = load_workload("documents", 7).cut(limit=120)
    with pytest.raises(Failed, match="the policy has seen what is still to come") as found:
        trials.foresight(cast(Guest, None), workload)
    assert found.value.failure == "foresight"


class Knows(ChunkedPrefillScheduler):
    """Serves the shortest reply first, as it is told all lengths."""

    lengths: ClassVar[dict[str, int]] = {}

    def order(self, request: Request) -> Any:
        return self.lengths[request.request_id]


def simulated_here(workload: Workload) -> RunOutcome:
    """The outcome of a run in this process, with all that it needs to be known."""
    Knows.lengths = workload.output_tokens
    [candidate] = load_policies([f"{Knows.__module__}:{Knows.__qualname__}"])
    return simulate(prepared(candidate, workload).config, workload)


def test_a_policy_that_patches_the_runner_hears_no_length(enclosure: Enclosure) -> None:
    honest = cheats.policy(order="(200, request.arrival_time)")
    assert tried(enclosure, cheats.READS_LENGTHS) == tried(enclosure, honest)


@pytest.mark.parametrize("way", cheats.WALKS)
def test_a_walk_finds_no_lengths_and_no_arrivals(enclosure: Enclosure, way: str) -> None:
    found = tried(enclosure, cheats.WALKS[way])
    assert found.failure == "failed", found
    assert "found []" in found.story


# Everything that a process of pytest holds is much to walk through.
@pytest.mark.parametrize("way", mostly_slow(cheats.WALKS, but=["the heap", "frames", "tasks"]))
def test_the_same_walk_finds_them_where_the_workload_is(tmp_path: Path, way: str) -> None:
    path = tmp_path / "walks.py"
    path.write_text(cheats.WALKS[way])
    workload = load_workload("documents", 7).cut(limit=20)
    [candidate] = load_policies([str(path)])
    with pytest.raises(AioserveError) as found:
        simulate(prepared(candidate, workload).config, workload)
    story = f"{found.value} {found.value.__cause__}"
    assert [name for name in cheats.SECRET if f"'{name}'" in story], story


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (cheats.WRITES_THE_RESULT, "what it says is no answer"),
        (cheats.TAKES_MORE_TOKENS, "tokens in a step, and 512 may be"),
        (cheats.MAKES_BLOCKS, "block 3000 of 3000|block [3-5][0-9]{3} of 3000"),
        (cheats.HANDS_BLOCKS_OUT_TWICE, "is handed out, and a request holds it"),
        (cheats.CLAIMS_PREFIXES, "request 0 (begins behind|computes)"),
    ],
    ids=["result", "tokens", "blocks", "twice", "prefixes"],
)
def test_what_cannot_be_is_not_believed(enclosure: Enclosure, source: str, words: str) -> None:
    found = tried(enclosure, source)
    assert found.failure == "forged", found
    assert re.search(words, found.story), found.story


def test_a_policy_that_stops_its_clocks_costs_what_it_costs(enclosure: Enclosure) -> None:
    honest, slow = (
        enclosure.run(Task(source, "mine.py", "cost", {"waiting": 20}, 600))
        for source in (cheats.WIDE, cheats.STOPS_THE_CLOCKS)
    )
    assert honest.failure == slow.failure == "", (honest, slow)
    assert slow.value["ratio"] > honest.value["ratio"] + 1


@pytest.mark.parametrize(
    ("what", "failure", "words"),
    [("raise ValueError('full')", "failed", "full"), ("os._exit(3)", "died", "exit code 3")],
)
def test_a_policy_that_fails_while_its_cost_is_measured_leaves_no_process(
    enclosure: Enclosure, what: str, failure: str, words: str
) -> None:
    """Its process and that of the reference, which takes turns with it, both end."""
    before = _descendants()
    fails = f"\n        if len(self.running) >= 1000: {what}"
    source = cheats.policy("import os\n", first=fails)
    source = source.replace("self.new_step(512)", "self.new_step()")
    found = enclosure.run(Task(source, "mine.py", "cost", {"waiting": 20}, 600))
    assert (found.failure, enclosure.is_over) == (failure, False), found
    assert words in found.story
    assert _descendants() == before
    assert tried(enclosure, cheats.HONEST).failure == "", "the next one is tried as before"


def _descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("policy", "workload"),
    mostly_slow(
        [
            ("chunked_prefill", "agents"),
            ("fcfs", "documents"),
            ("latency_budget", "code"),
            ("mlfq", "tenants"),
            ("deadline", "chat"),
        ],
        but=[("chunked_prefill", "agents"), ("mlfq", "tenants")],
    ),
)
def test_a_run_is_the_same_wherever_the_policy_is(
    enclosure: Enclosure, policy: str, workload: str
) -> None:
    arguments = {"workload": workload, "seed": 7, "requests": 50}
    found = enclosure.run(Task(read_policy(policy), "mine.py", "run", arguments, 600))
    assert found.failure == "", found
    same = load_workload(workload, 7).cut(limit=50)
    name = available_policies()[policy].value
    [candidate] = load_policies([name])
    expected = measure_run(simulate(prepared(candidate, same).config, same), same)
    assert found.value == msgspec.json.decode(msgspec.json.encode(expected))  # NaN is null


@pytest.mark.parametrize("source", [cheats.HONEST, read_policy("zoo.svf")], ids=["plain", "svf"])
def test_a_policy_that_knows_nothing_of_the_future_passes(
    enclosure: Enclosure, source: str
) -> None:
    """One of them orders by the room that the longest request leaves."""
    found = tried(enclosure, source, "foresight")
    assert (found.failure, found.story) == ("", "")
    assert found.value > 0


def test_a_clock_breaks_the_contract(enclosure: Enclosure) -> None:
    found = tried(enclosure, cheats.READS_CLOCK, "first_rules")
    assert found.failure == "broken"
    assert "Broken rule: " in found.story


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (cheats.READS_WORKLOAD, "gc.get_objects"),
        (cheats.READS_FILE, "opens the file '/etc/hostname'"),
        (cheats.WRITES_FILE, "opens the file 'found'"),
        (cheats.STARTS_PROCESS, "os.system"),
        (cheats.CONNECTS, "socket.connect"),
    ],
)
def test_what_a_candidate_reaches_for_ends_its_process(
    enclosure: Enclosure, source: str, words: str
) -> None:
    found = tried(enclosure, source)
    assert found.failure == "caught", found
    assert words in found.story
    assert "mine.py:" in found.story


def test_a_candidate_that_hangs_is_ended(enclosure: Enclosure) -> None:
    assert tried(enclosure, cheats.HANGS, seconds=1).failure == "time"
    assert tried(enclosure, cheats.HONEST).failure == "", "the next one is tried as before"


NEVER = """
from aioserve.scheduler import BaseScheduler
class Never(BaseScheduler):
    def schedule(self):
        return self.new_step().output()
    def next_wake(self):
        return float("inf")
"""


def test_a_candidate_that_is_never_to_be_asked_again_has_failed(enclosure: Enclosure) -> None:
    verdict = tried(enclosure, NEVER, seconds=20)
    assert (verdict.failure, enclosure.is_over) == ("forged", False), verdict


@pytest.mark.parametrize(("sent", "failure"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "time")])
def test_a_process_that_is_lost_is_a_verdict_and_is_over(
    monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, failure: str
) -> None:
    before = {process.pid for process in psutil.Process().children()}
    with Enclosure() as lost:
        (pid,) = {process.pid for process in psutil.Process().children()} - before
        monkeypatch.setattr("aioserve.lab.evaluate.enclosure.BOOT_SECONDS", 1.0)
        os.kill(pid, sent)
        verdict = tried(lost, read_policy("fcfs"), seconds=0.0)
        assert (verdict.failure, lost.is_over) == (failure, True), verdict


def test_a_candidate_gets_no_more_memory_than_it_may_have(enclosure: Enclosure) -> None:
    found = tried(enclosure, cheats.HOARDS, megabytes=1024)
    assert found.failure in ("memory", "failed"), found
    assert "Memory" in found.story or "MB" in found.story


def test_candidates_have_no_network(enclosure: Enclosure) -> None:
    source = cheats.policy(
        "import sys\n",
        first="\n        if 'nt' in self.book.__class__.__name__: pass\n"
        "        raise ValueError(sys.modules['socket'].if_nameindex())",
    )
    if enclosure.has_network:
        pytest.skip("the kernel gives no user namespaces: the hook alone keeps candidates off")
    assert "'lo'" in tried(enclosure, source).story
