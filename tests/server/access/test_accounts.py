"""How much a key may have, and when it may come again, on a clock that is set by hand."""

import pytest

from aioserve.errors import KeyLimitError
from aioserve.server.access.accounts import Accounts
from aioserve.server.access.keyring import Rights


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(accounts: Accounts) -> float:
    with pytest.raises(KeyLimitError) as caught:
        accounts.enter("ann")
    return caught.value.retry_after


def test_a_key_gets_so_many_requests_at_once_and_hears_when_one_will_have_ended():
    clock = Clock()
    accounts = Accounts(lambda name: Rights(max_requests=2), clock)
    accounts.enter("ann")
    accounts.enter("ann")
    accounts.enter("ben")  # another's do not count
    assert refused(accounts) == 1  # nothing of it has ended yet: nobody knows
    for clock.now in (5.0, 10.0, 15.0, 20.0):
        accounts.leave("ann")
        accounts.enter("ann")
    assert 2 <= refused(accounts) <= 6  # one in five seconds, of late
    accounts.leave("ann")
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
