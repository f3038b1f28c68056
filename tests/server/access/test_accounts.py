"""How much a key may have, and when it may come again, on a clock that is set by hand."""

import pytest

from aioserve.errors import ForbiddenError, KeyLimitError
from aioserve.server.access.accounts import Accounts
from aioserve.server.access.keys import ONE, Claim, Rights


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(accounts: Accounts, claim: Claim = ONE) -> float:
    with pytest.raises(KeyLimitError) as caught:
        accounts.enter("ann", claim)
    return caught.value.retry_after


def test_a_key_gets_so_many_requests_at_once_and_hears_when_one_will_have_ended():
    clock = Clock()
    accounts = Accounts(lambda name: Rights(max_requests=2), clock)
    entered = [accounts.enter("ann"), accounts.enter("ann")]
    accounts.enter("ben")  # another's do not count
    assert refused(accounts) == 1  # nothing of it has ended yet: nobody knows
    for clock.now in (5.0, 10.0, 15.0, 20.0):
        accounts.leave("ann", entered.pop())
        entered.append(accounts.enter("ann"))
    assert 2 <= refused(accounts) <= 6  # one in five seconds, of late
    accounts.leave("ann", entered.pop())
    accounts.enter("ann")
    assert accounts.num_running("ann") == 2
    assert accounts.num_running("nobody") == 0


def test_a_bucket_of_a_minutes_tokens_may_be_overdrawn_and_is_then_paid_back():
    clock = Clock()
    accounts = Accounts(lambda name: Rights(tokens_per_minute=60), clock)
    accounts.enter("ann")
    accounts.charge("ann", 59)
    accounts.enter("ann")  # a token is left
    accounts.charge("ann", 31)
    assert refused(accounts) == pytest.approx(30)
    clock.now = 29
    assert refused(accounts) == pytest.approx(1)
    clock.now = 30.5
    accounts.enter("ann")
    clock.now = 1e6  # it holds a minute's, however long nothing is asked
    accounts.enter("ann")
    accounts.charge("ann", 90)
    assert refused(accounts) == pytest.approx(30)
    assert accounts.num_tokens == {"ann": 180}


def test_other_limits_hold_from_the_next_request_on():
    clock, limit = Clock(), [60]
    accounts = Accounts(lambda name: Rights(tokens_per_minute=limit[0]), clock)
    accounts.enter("ann")
    accounts.charge("ann", 60)
    refused(accounts)
    limit[0] = 120
    accounts.enter("ann")
    accounts.charge("ann", 60)
    assert refused(accounts) == pytest.approx(1)
    accounts.charge("ann", 60)
    assert refused(accounts) == pytest.approx(30)
    limit[0] = 60  # what is owed takes as long to pay
    assert refused(accounts) == pytest.approx(30)
    limit[0] = None
    accounts.enter("ann")
    accounts.charge("ann", 10_000)
    limit[0] = 60  # nothing is owed of a time without a limit
    accounts.enter("ann")


async def test_what_has_entered_leaves_however_it_ends():
    accounts = Accounts(lambda name: Rights(max_requests=1))

    async def fail():
        async with accounts.entered("ann"):
            assert accounts.num_running("ann") == 1
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await fail()
    async with accounts.entered("ann"):
        with pytest.raises(KeyLimitError):
            async with accounts.entered("ann"):
                pass
        assert accounts.num_running("ann") == 1
    assert accounts.num_running("ann") == 0


def test_sequences_are_counted_and_not_bodies():
    clock = Clock()
    accounts = Accounts(lambda name: Rights(max_requests=4), clock)
    three = accounts.enter("ann", Claim(num_sequences=3, is_one=False))
    assert accounts.num_running("ann") == 3
    refused(accounts, Claim(num_sequences=2, is_one=False))
    accounts.enter("ann")
    refused(accounts)
    clock.now = 10
    accounts.leave("ann", three)
    assert accounts.num_running("ann") == 1
    accounts.enter("ann", Claim(num_sequences=3, is_one=False))
    with pytest.raises(ForbiddenError, match=r"have 4 requests running .* would be 5, ") as caught:
        accounts.enter("ann", Claim(num_sequences=5, is_one=False))
    assert caught.value.param == "n"


def test_the_most_that_a_request_may_take_is_held_and_what_it_did_not_use_given_back():
    clock = Clock()
    accounts = Accounts(lambda name: Rights(tokens_per_minute=60), clock)
    first = accounts.enter("ann", Claim(num_tokens=40, request_id="cmpl-1"))
    assert refused(accounts, Claim(num_tokens=30)) == pytest.approx(10)
    second = accounts.enter("ann", Claim(2, 20, False, "cmpl-2"))
    accounts.charge("ann", 10, "cmpl-1")
    accounts.charge("ann", 5, "cmpl-2-0-1")  # a sample of one of its prompts
    assert refused(accounts) == 1  # what is held is no other's
    accounts.leave("ann", first)
    accounts.leave("ann", second)
    accounts.leave("ann", accounts.enter("ann", Claim(num_tokens=45)))
    assert refused(accounts, Claim(num_tokens=46)) == pytest.approx(1)
    accounts.charge("ann", 55, "cmpl-1")  # it has ended: what comes late is taken from the bucket
    assert refused(accounts) == pytest.approx(10)
    assert accounts.num_tokens == {"ann": 70}


def test_one_sequence_longer_than_a_minute_needs_a_full_bucket_and_more_of_them_are_refused():
    clock = Clock()
    accounts = Accounts(lambda name: Rights(tokens_per_minute=60), clock)
    with pytest.raises(ForbiddenError, match=r"60 tokens a minute, .* may take 61: ") as caught:
        accounts.enter("ann", Claim(2, 61, False))
    assert caught.value.param == "max_tokens"
    long = accounts.enter("ann", Claim(num_tokens=500, request_id="a"))
    accounts.charge("ann", 90, "a")
    accounts.leave("ann", long)
    assert refused(accounts) == pytest.approx(30)  # it is 30 in debt
    clock.now = 60
    assert refused(accounts, Claim(num_tokens=500)) == pytest.approx(30)
    clock.now = 90
    accounts.enter("ann", Claim(num_tokens=500))
