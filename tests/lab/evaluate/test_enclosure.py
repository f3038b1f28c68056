"""A candidate that cheats is refused by what it says, or caught by what it does."""

from collections.abc import Iterator

import pytest

from aioserve.lab.evaluate.enclosure import Enclosure, Failed, Task, Verdict, look
from aioserve.lab.evaluate.evaluator import read_policy
from aioserve.scheduler import available_policies
from tests.lab.evaluate import cheats

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


def test_lengths_that_are_read_without_a_trace_show_in_the_plans(enclosure: Enclosure) -> None:
    found = tried(enclosure, cheats.READS_LENGTHS, "foresight")
    assert found.failure == "foresight", found
    assert "the policy has seen what is still to come" in found.story


def test_a_policy_that_knows_nothing_of_the_future_passes(enclosure: Enclosure) -> None:
    found = tried(enclosure, cheats.HONEST, "foresight")
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
