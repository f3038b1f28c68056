"""The contract of formats catches every planted bug, and lets pass what has none."""

import pytest

from aioserve.features.formats import SHIPPED, ReplyFormat, load_format
from aioserve.testing.format_contract import FormatContract, FormatSubject
from aioserve.testing.violation import FormatViolation
from tests.formats.channels import ChannelFormat
from tests.testing.broken_formats import CAUGHT_BY

RULES = [rule for name, rule in vars(FormatContract).items() if name.startswith("test_")]
COSTLY = (  # of a planted bug that others catch they are not asked
    FormatContract.test_what_is_written_is_read_back,
    FormatContract.test_a_long_reply_costs_in_proportion_to_its_length,
)
RULES.sort(key=lambda rule: rule in COSTLY)


def run_contract(subject: FormatSubject) -> None:
    for rule in RULES:
        rule(FormatContract(), subject)


FORMATS = [*SHIPPED, "channels"]


def format_of(name: str) -> type[ReplyFormat]:
    return ChannelFormat if name == "channels" else load_format(name)


class TestShipped(FormatContract):
    # Of every format tests/formats/test_reading_time.py asks it by the clock.
    test_a_long_reply_costs_in_proportion_to_its_length = None  # type: ignore[assignment]

    @pytest.fixture(params=["hermes", "harmony"])
    def subject(self, request: pytest.FixtureRequest) -> FormatSubject:
        return FormatSubject(format_of(request.param), 20)


@pytest.mark.slow
class TestShippedAtLength(FormatContract):
    @pytest.fixture(params=FORMATS)
    def subject(self, request: pytest.FixtureRequest) -> FormatSubject:
        return FormatSubject(format_of(request.param), 1000)


# Those that take longest to find.
LONG = {
    *("GoesRoundForEver", "MakesTextsOfAllValues", "BindsNoArguments", "LooksAtAllPiecesAgain"),
    *("LeavesStrictCallsFree", "GivesOneIdToAll", "CopiesAllText", "SwallowsContentAfterACall"),
    *("BeginsWithMoreThanAToken", "BindsSeveralCalls", "WritesTokensAsText", "TrimsContent"),
    *("CallsWithoutTools", "BindsAnotherText"),
}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(
            broken,
            marks=[pytest.mark.slow] * (broken.__name__ in LONG),
            id=broken.__name__,
        )
        for broken in CAUGHT_BY
    ],
)
def test_the_contract_catches(broken: type[ReplyFormat]) -> None:
    with pytest.raises(FormatViolation, match=CAUGHT_BY[broken]) as caught:
        run_contract(FormatSubject(broken, 30))
    assert broken.__name__ in str(caught.value)


def test_every_planted_bug_is_named() -> None:
    assert len(CAUGHT_BY) >= 20
    assert all(broken.__doc__ for broken in CAUGHT_BY)
