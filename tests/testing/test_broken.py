"""The contract catches every planted bug, and says what is wrong, in which step, with whom: on a
screen, with a program that shows it again.
"""

import pytest

from aioserve.errors import PolicyError
from aioserve.scheduler import BaseScheduler
from aioserve.testing import ContractViolation
from aioserve.testing.contract import ClientRules, PolicyContract, PolicyRules, Subject
from tests.testing.broken import SoundScheduler
from tests.testing.unfair import CAUGHT_BY


def run_contract(policy: type[BaseScheduler]) -> None:
    max_examples = 400 if policy.__name__ in RARE else 40
    rules = {**vars(ClientRules), **vars(PolicyRules), **vars(PolicyContract)}
    if policy.__name__ in RARE:  # what has long lines of requests is found last: it tells the most
        rules = {**vars(PolicyRules), **vars(PolicyContract), **vars(ClientRules)}
    tests = [test for name, test in rules.items() if name.startswith("test_")]
    for test in tests:
        for pipeline_depth in (1, 2):
            test(PolicyContract(), Subject(policy, max_examples=max_examples), pipeline_depth)


def show(program: str) -> None:
    for _ in range(100):  # one of the policies rolls dice
        exec(program, {})


# Those that hypothesis takes longest to find, among many more days than the others get.
RARE = {
    *("RollsGlobalDice", "ThrowsOutThePrompts", "ExceedsTheBudget", "KeepsWrongDrafts"),
    *("BeginsWithoutItsWindow", "KeepsWindows", "KeepsStates", "RunsPastStopTokens"),
    *("GivesWindowsBackTooEarly", "SendsTheLastDrafts"),
}
# Those that take a third of a second of CPU or more.
LONG = {
    *("WalksThroughASet", "RefusesOnceBusy", "CountsItsReaders", "RemembersEverybody"),
    *("ComparesEveryPair", "PreemptsInVain", "PutsHolesInPrefixes", "OrdersByTheWallClock"),
    *("SitsOnHalfPrompts", "RejectsOnceFitted", "BeginsWithOldStates", "PrefetchesNothing"),
    *("HoldsWhatFailed", "ForgetsStates", "SplitsImages", "RejectsTheSecondTime"),
    *("Sleeps", "RanksByDice", "LosesTheLoading", "ForgetsEncoderInputs", "KeepsSlotsForNobody"),
    *("ForgetsWindows", "OffloadsOthers", "ForgetsWhoRan", "KeepsSlotsOfTheEnded"),
    *("ForgetsToLoad", "ForgetsMaxLoras", "NeverServesOffline", "DisguisesTimeouts"),
    *("DraftsToTheEnd", "TiresOfLongSteps", "RemembersDecodes", "FindsNoAge", "PausesToBreathe"),
    *("TakesSeatsAway", "ServesTheEnded", "FreesTheInFlight", "AgesIntoNothing"),
    *("IgnoresDeadlines", "SharesBetweenTenants", "SharesWhatIsNotComputed"),
    *("RemembersEveryClient", "AddsUpForEachAdmitted", "CountsInC"),
    *("LooksForItInAList", "KeepsInTheClass"),
    *("RemembersIds", "OrdersByAddress", "WalksTheHeap", "WalksTheTasks", "WalksBack"),
    *("LearnsBeforeTheEnd", "LetsNewcomersPass", "PredictsTheTruth", "ForeseesEnds"),
}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(
            broken, marks=[pytest.mark.slow] * (broken.__name__ in RARE | LONG), id=broken.__name__
        )
        for broken in CAUGHT_BY
    ],
)
def test_the_contract_catches(broken: type[BaseScheduler]) -> None:
    with pytest.raises((ContractViolation, PolicyError), match=CAUGHT_BY[broken]) as caught:
        run_contract(broken)
    (story,) = caught.value.__notes__
    assert len(story.splitlines()) <= 30
    assert max(map(len, story.splitlines())) <= 120
    _, program = story.split("To reproduce:\n")
    with pytest.raises(type(caught.value), match=CAUGHT_BY[broken]):
        show(program)


@pytest.mark.slow
def test_without_the_bug_nothing_is_caught() -> None:
    run_contract(SoundScheduler)


def test_every_planted_bug_is_named() -> None:
    assert len(CAUGHT_BY) >= 30
    assert all(broken.__doc__ != BaseScheduler.__doc__ and broken.__doc__ for broken in CAUGHT_BY)
