"""How many draft tokens pay: each is sent along if its chance is worth its time.

A step of D tokens takes T seconds, and a token more in it c seconds. A draft that turns out right
with chance p is a gain if p / c > D / T. So on an idle engine, where a step costs the same for one
token or eight, long drafts pay; in a full batch, which computes no token for nothing, none do. What
making a draft takes is added to c. Knows chances and times; knows nothing about where drafts come
from.
"""

import math
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)

# What is believed of a request before the first of its drafts is verified: a chance, and
# the number of drafts in which it counts as seen. Guesses.
FIRST_CHANCE, FIRST_TRIED = 0.5, 2.0
MEMORY = 0.8  # weight of a verification against the one after it
# Weight of a step, or of a verification of any request's, against the next: half after 34.
STEP_MEMORY = 0.98
# Variance of the sizes of steps, to their mean square, from which on a line through them means
# something: below, what else differs between them decides. A guess.
LEAST_SPREAD = 1e-3
FORGETTING = 0.98  # and while its drafts are not sent: they may have become better
# Of drafts that do not seem to pay, the first token of one in this many is sent: what is never
# tried is never learned.
TRIAL_INTERVAL = 64
# Steps in which the first guesses of a request must repay the reading of its text. A guess.
REPAID_IN = 128
TRIAL_SHARE = 0.01  # of the time of steps, for trials of a draft model that pays for no request
# Of the time of steps, what searches and wrong drafts may cost in all before something is gained.
LOSS_SHARE = 0.005
# What was gained pays for later losses up to this many steps: then a text that no longer repeats
# itself is noticed soon. A guess.
MOST_CREDIT = 4.0
# A loss of more than this many steps counts as this many, so that drafts rest for at most
# MOST_DEBT / LOSS_SHARE steps: one search of a long text, or one long stall, must not end the
# drafts of all requests. A guess.
MOST_DEBT = 1.0
# Tokens that agreed before a draft, from which on it is of a higher class: where more agreed, more
# drafts are right.
CLASSES = (6, 12)
MOST_CHANCE = 0.95  # that is believed of a draft before a search: dearer tokens are not worth one
LEAST_BELIEF = 0.5  # in what is known of a class, however much is known of a request


class _Record:
    """A record of how often the recent drafts of a request were right."""

    __slots__ = ("belief", "right", "tried")

    def __init__(self) -> None:
        self.right = self.tried = 0.0
        self.belief = FIRST_TRIED  # weight of what was believed before; it fades as well

    def chance(self, first: float) -> float:
        """`first`: of one that was never tried."""
        return (self.right + first * self.belief) / (self.tried + self.belief)

    def note(self, num_drafts: int, num_right: int, memory: float = MEMORY) -> None:
        self.right = memory * self.right + num_right
        self.tried = memory * self.tried + min(num_right + 1, num_drafts)
        self.belief *= memory

    def forget_some(self) -> None:
        self.right *= FORGETTING
        self.tried *= FORGETTING
        self.belief += (1 - FORGETTING) * (FIRST_TRIED - self.belief)


class _StepCost:
    """A line through the recent steps: seconds = base + tokens * slope, in both directions.

    Least squares of the relative error, with weights that fade.
    """

    def __init__(self) -> None:
        self._known: tuple[float, float] | None = None
        # Sums of 1, tokens, tokens ** 2, seconds and tokens * seconds, each over seconds ** 2.
        self._sums = [0.0] * 5

    def add(self, num_tokens: int, seconds: float) -> None:
        values = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        pairs = zip(self._sums, values, strict=True)
        self._sums = [STEP_MEMORY * old + new / seconds**2 for old, new in pairs]

    def seconds(self, num_tokens: int) -> float:
        """Return seconds that a step of this many tokens takes; 0 if none was seen."""
        weight, _, _, seconds, _ = self._sums
        if not weight:
            return 0.0
        if (line := self._line()) is None:
            return seconds / weight
        base, slope = line
        return base + slope * num_tokens

    def share(self, num_tokens: int) -> float:
        """Return what one of `num_tokens` costs of their step, times their number: 1 if a step
        costs nothing besides its tokens, or as long as steps of different sizes were not seen. If
        drafts were free until then, they could fill every step to its limit, and none would ever be
        seen.
        """
        if (line := self._line()) is None:
            return 1.0
        base, slope = line
        of_tokens = slope * num_tokens
        return of_tokens / (of_tokens + base) if of_tokens else 0.0

    def _line(self) -> tuple[float, float] | None:
        """Base and slope, neither below 0, as they were when steps last differed in size; None if
        they never did.
        """
        weight, tokens, squares, seconds, products = self._sums
        spread = weight * squares - tokens**2
        if spread <= LEAST_SPREAD * weight * squares:
            return self._known
        slope = (weight * products - tokens * seconds) / spread
        self._known = max((seconds - slope * tokens) / weight, 0.0), max(slope, 0.0)
        return self._known


class DraftLength:
    """Tell it what each step cost, and of each draft that was `verified`; ask for the `limit` of a
    request's next one.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        #: By request, what the policy asks for after this step, whether it pays or not.
        self.asked: Mapping[Any, int] = {}
        self._cost = _StepCost()
        self._records: dict[Hashable, _Record] = {}
        self._num_withheld = 0
        self.price = 0.0  # the least chance that pays, as things stand

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step is done; the next one may have as many rows."""
        self._cost.add(num_tokens, max(seconds, 1e-6))
        self.price = self._cost.share(num_rows)
        self._settle(num_rows, seconds)

    def _settle(self, num_rows: int, seconds: float) -> None:
        """Count what was spent and gained since the last step."""

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        """Record how many draft tokens were sent and accepted."""
        self._record(request).note(num_drafts, num_right)

    def forget_times(self) -> None:
        """Forget measured times: the steps so far were none like those that come."""
        self._cost, self.price = _StepCost(), 0.0

    def limit(self, request: Hashable) -> int:
        """Return the most draft tokens that pay for it now, if none are `asked` for: the n-th is
        right with chance ** n.
        """
        if (asked := self.asked.get(request)) is not None:
            return min(asked, self.max_tokens)
        if limit := self._paying(request):
            return limit
        self._num_withheld += 1
        return 0 if self._num_withheld % TRIAL_INTERVAL else 1

    def forget(self, request: Hashable) -> None:
        """Drop the record of a request that has left, or whose id is reused."""
        self._records.pop(request, None)

    def _record(self, request: Hashable) -> _Record:
        return self._records.setdefault(request, _Record())

    def _first_chance(self) -> float:
        return FIRST_CHANCE

    def _paying(self, request: Hashable) -> int:
        record = self._record(request)
        return self._paying_by(record, record.chance(self._first_chance()))

    def _paying_by(self, record: _Record, chance: float) -> int:
        if chance < self.price:
            record.forget_some()
            return 0
        if chance >= 1.0 or self.price <= 0.0:
            return self.max_tokens
        return min(int(math.log(self.price) / math.log(chance)), self.max_tokens)


class TextDraftLength(DraftLength):
    """The length of drafts that are found in texts, for which the texts have to be searched.

    Ask `may_look` before a search, tell what it took, then ask for the `limit` of what was found. A
    request has a record for each class of agreement, which begins as what is known of all requests.
    Drafts that a policy asks for are outside the budget, and say nothing about other requests.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._by_class = [_Record() for _ in range(len(CLASSES) + 1)]
        # By request, the class of its last draft, and whether a policy asked for it.
        self._sent: dict[Hashable, tuple[int, bool]] = {}
        #: Whether drafts that no policy asks for are to be looked for after this step.
        self.is_open = True
        self._num_rests = 0  # steps without a search, as no draft would pay
        self._is_trial = False  # one token is to be tried after this step, though it does not pay
        self._row_seconds = 0.0  # of a step, for one of its rows
        #: Seconds that may be lost now; below 0, more was lost than may be.
        self._credit = 0.0
        self._spent = 0.0  # seconds since the last step, less what was gained

    def may_look(self) -> bool:
        """Return whether drafts are to be looked for after this step; `is_open` then says whether
        also for requests for which none are `asked`. To be asked once a step.
        """
        self._is_trial = False
        self.is_open = self._credit >= 0.0 and self._may_pay()
        return self.is_open or any(self.asked.values())

    def looked(self, seconds: float) -> None:
        """Record what a search took for requests for which no drafts are `asked`."""
        self._spent += seconds

    def limit(self, request: Hashable, agreed: int = 0) -> int:
        """Return how many draft tokens are worth their cost at most, after `agreed` tokens of the
        text that were found again.
        """
        found = sum(agreed >= least for least in CLASSES)
        if (asked := self.asked.get(request)) is not None:
            self._sent[request] = found, True
            return min(asked, self.max_tokens)
        record, of_all = self._record((request, found)), self._by_class[found]
        limit = self._paying_by(record, record.chance(of_all.chance(FIRST_CHANCE)))
        if not limit:
            self._num_withheld += 1
            limit = int(self._is_trial or not self._num_withheld % TRIAL_INTERVAL)
            self._is_trial = False
        if limit:
            self._sent[request] = found, False
        return limit

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        found, was_asked = self._sent.get(request, (0, False))
        record = self._record((request, found))
        record.note(num_drafts, num_right)
        record.belief = max(record.belief, LEAST_BELIEF)
        if was_asked:
            return
        self._by_class[found].note(num_drafts, num_right, STEP_MEMORY)
        self._spent += (num_drafts * self.price - num_right) * self._row_seconds

    def forget(self, request: Hashable) -> None:
        self._sent.pop(request, None)
        for found in range(len(self._by_class)):
            super().forget((request, found))

    def forget_times(self) -> None:
        super().forget_times()
        self._row_seconds = self._credit = self._spent = 0.0

    def _settle(self, num_rows: int, seconds: float) -> None:
        self._row_seconds = self._cost.seconds(num_rows) / num_rows
        credit = self._credit + LOSS_SHARE * seconds - self._spent
        self._credit = max(min(credit, MOST_CREDIT * seconds), -MOST_DEBT * seconds)
        self._spent = 0.0

    def _may_pay(self) -> bool:
        """Return whether drafts would pay if they were nearly all right; if not, now and then, and
        then one token is tried.
        """
        if self.price < MOST_CHANCE:
            return True
        self._num_rests += 1
        self._is_trial = not self._num_rests % TRIAL_INTERVAL
        return self._is_trial


class ModelDraftLength(DraftLength):
    """The length of drafts that a model makes, for all requests at once, which takes time itself.

    How often it is right is a property of the model: what is seen of one request is what is
    believed of the next.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._draft_cost = _StepCost()
        self._seconds_since_trial = 0.0  # of steps
        self._row_seconds = math.inf  # of a step, for one of its rows
        self._all = _Record()

    def forget_times(self) -> None:
        super().forget_times()
        self._draft_cost, self._seconds_since_trial = _StepCost(), 0.0

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """Record a pass of the draft model over this many tokens."""
        self._draft_cost.add(num_tokens, max(seconds, 1e-6))

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A pass of the drafting model makes one guess for each row."""
        super().stepped(num_rows, num_tokens, seconds)
        self._seconds_since_trial += seconds
        self._row_seconds = self._cost.seconds(num_rows) / num_rows
        self.price += self._draft_cost.seconds(num_rows) / self._cost.seconds(num_rows)

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        super().verified(request, num_drafts, num_right)
        self._all.note(num_drafts, num_right, STEP_MEMORY)

    def limits(self, num_unread: Mapping[K, int]) -> dict[K, int]:
        """Return the limits of the requests for which drafts are asked, or else pay. If they pay
        for none, now and then one token for the request of whose tokens the model has to read
        fewest first.
        """
        asked = {r: min(self.asked[r], self.max_tokens) for r in num_unread if r in self.asked}
        num_unread = {r: unread for r, unread in num_unread.items() if r not in asked}
        limits = {
            request: limit
            for request, unread in num_unread.items()
            if (limit := self._paying(request)) and self._repays(request, unread)
        }
        limits |= {request: limit for request, limit in asked.items() if limit}
        if limits or not num_unread:
            return limits
        request = min(num_unread, key=num_unread.__getitem__)
        if self._draft_cost.seconds(num_unread[request]) > TRIAL_SHARE * self._seconds_since_trial:
            return {}
        self._seconds_since_trial = 0.0
        return {request: 1}

    def _repays(self, request: Hashable, num_unread: int) -> bool:
        """Return whether guesses for it are worth reading its text first."""
        if num_unread <= self.max_tokens + 1:  # what was said since the last guess
            return True
        gain = self._record(request).chance(self._first_chance()) - self.price
        return gain * self._row_seconds * REPAID_IN >= self._draft_cost.seconds(num_unread)

    def _first_chance(self) -> float:
        return self._all.chance(FIRST_CHANCE)
