"""How many draft tokens pay: as many as give most tokens a second, of all that a step could verify.

A step of D rows takes T seconds and gives D tokens; with k draft tokens in it, of which S are
expected to be right, it takes T(k) and gives D + S. So on an idle engine, where a step costs the
same for one token or eight, long drafts pay; in a full batch, which computes no token for nothing,
none do; and where kernels compute rows in tiles, a few drafts of a full tile cost as much as many.
What making a draft takes is added to T(k). Knows chances and times; knows nothing about where
drafts come from.
"""

import math
from bisect import bisect, insort
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

# What is believed of a request before the first of its drafts is verified: a chance, and
# the number of drafts in which it counts as seen. Guesses.
FIRST_CHANCE, FIRST_TRIED = 0.5, 2.0
MEMORY = 0.8  # weight of a verification against the one after it
# Weight of a step, or of a verification of any request's, against the next: half after 34.
STEP_MEMORY = 0.98
# Largest to smallest size of steps from which on their times say what a token costs: below, what
# else differs between them decides. A guess.
LEAST_SPREAD = 1.2
# Steps for which what is known of a size counts at least, however old, and at most. Guesses.
LEAST_WEIGHT, MOST_WEIGHT = 4.0, 16.0
PACE_MEMORY = 0.5  # weight of a step's pace against the next. A guess.
MOST_SURPRISE = 2.0  # times what was expected; one stall must not say more of a size. A guess.
FORGETTING = 0.98  # and while its drafts are not sent: they may have become better
# Times as many tokens a second as without drafts: less is not worth the doubt. A guess.
LEAST_GAIN = 1.01
# Of so many steps in a row, the last is without drafts: what steps take changes, and what drafts
# cost is the difference. A guess.
COMPARED_IN = 32
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


class _Size:
    """The knowledge of steps of about one size."""

    __slots__ = ("seconds", "seen", "tokens", "weight")

    def __init__(self, tokens: float, seconds: float, seen: int) -> None:
        self.tokens, self.seconds, self.weight, self.seen = tokens, seconds, 1.0, seen


class _StepTimes:
    """Seconds of steps by their number of tokens: a curve, and at what pace the machine runs now.

    Kernels compute rows in tiles, so that the 17th may cost as much as the 16 before it: each size
    up to 16 is known apart, and 8 classes between a power of two and the next. Between the sizes
    that were seen the curve is straight. What changes the time of all sizes, as longer texts or
    other processes do, is the pace: sizes that were seen at different times can be compared.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # seconds at a pace of 1
        self._classes: list[int] = []  # the keys of those, in order
        self._pace = 1.0
        self._num_steps = 0
        self.num_changes = 0  # of the curve, but for the pace
        self._last: int | None = None  # class of the last step; None if it had prompts

    def add(self, num_tokens: int, seconds: float, *, has_prompts: bool = False) -> None:
        """Learn from a step. One after a step of its size says how the pace changes, one after
        a step of another size what the sizes differ by. With prompts come and go texts: what that
        does to the pace is seen in the step after them.
        """
        self._num_steps += 1
        number, last = _class_of(num_tokens), self._last
        self._last = None if has_prompts else number
        if (size := self._sizes.get(number)) is None:
            if self._classes and self._classes[0] < number < self._classes[-1]:
                expected = self.seconds(num_tokens)  # a stall must not pass for it
                seconds = min(max(seconds, expected / MOST_SURPRISE), expected * MOST_SURPRISE)
            self._sizes[number] = _Size(num_tokens, seconds / self._pace, self._num_steps)
            insort(self._classes, number)
            self.num_changes += 1
            return
        surprise = seconds / (size.seconds * self._pace)
        surprise = min(max(surprise, 1 / MOST_SURPRISE), MOST_SURPRISE)
        share = 0.0
        if has_prompts or last not in (None, number):
            faded = size.weight * STEP_MEMORY ** (self._num_steps - size.seen)
            size.weight = min(max(faded, LEAST_WEIGHT), MOST_WEIGHT) + 1
            share = 1 / size.weight
            size.tokens += (num_tokens - size.tokens) * share
            size.seconds *= surprise**share
            self.num_changes += 1
        size.seen = self._num_steps
        if not has_prompts:
            self._pace *= surprise ** ((1 - share) * (PACE_MEMORY if last is not None else 1.0))

    def seconds(self, num_tokens: int) -> float:
        """Return seconds that a step of this many tokens takes; 0 if none was seen."""
        if not (classes := self._classes):
            return 0.0
        above = bisect(classes, _class_of(num_tokens))
        if above and self._sizes[classes[above - 1]].tokens > num_tokens:
            above -= 1
        if 0 < above < len(classes):
            left, right = (self._sizes[number] for number in classes[above - 1 : above + 1])
            slope = (right.seconds - left.seconds) / (right.tokens - left.tokens)
        else:  # beyond what was seen
            left, right = self._sizes[classes[0]], self._sizes[classes[-1]]
            slope = 0.0
            if self.says_price:
                slope = max((right.seconds - left.seconds) / (right.tokens - left.tokens), 0.0)
            left = right if above else left
        return self._pace * max(left.seconds + slope * (num_tokens - left.tokens), 0.0)

    @property
    def says_price(self) -> bool:
        """Whether steps of different sizes were seen. If drafts were free until then, they could
        fill every step to its limit, and none would ever be seen.
        """
        if not self._classes:
            return False
        first, last = self._sizes[self._classes[0]], self._sizes[self._classes[-1]]
        return last.tokens >= LEAST_SPREAD * first.tokens

    def curve(self, begin: int, end: int) -> list[tuple[float, float]]:
        """Return sizes from `begin` to `end` with their seconds, which are straight between them
        and do not fall: what a larger step was done in, a smaller one is believed to be. Too low a
        belief is soon corrected, as it is tried; one too high would not be.
        """
        within = self._classes[bisect(self._classes, _class_of(begin + 1) - 1) :]
        points = [(float(begin), self.seconds(begin))]
        for size in map(self._sizes.__getitem__, within):
            if size.tokens >= end:
                break
            if size.tokens > begin:
                points.append((size.tokens, size.seconds * self._pace))
        points.append((float(end), self.seconds(end)))
        least = math.inf
        for index in range(len(points) - 1, -1, -1):
            size_, seconds = points[index]
            least = min(least, seconds)
            points[index] = size_, least
        return points


def _class_of(num_tokens: int) -> int:
    """Return the class of a size, larger for larger ones: a new one begins after each 16, 32, 48
    and 64 tokens.
    """
    shift = max((num_tokens - 1).bit_length() - 4, 0)
    return (num_tokens - 1 >> shift) + 8 * shift


class DraftLength:
    """Tell it what each step cost, and of each draft that was `verified`; ask for the `limits` of
    the next ones.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        #: By request, what the policy asks for after this step, whether it pays or not.
        self.asked: Mapping[Any, int] = {}
        self._times = _StepTimes()
        self._records: dict[Hashable, _Record] = {}
        self._num_withheld = 0
        self._num_rows = 1  # of the last step
        self._num_drafts = 0  # tokens that were verified since
        self._num_steps = 0  # in a row that had drafts
        self._making = 0.0  # seconds that it takes to make a token of a draft
        self._priced = (0, 0, 0.0)  # rows, changes of the curve and making of the price
        #: The least chance that pays, as things stand, if many drafts have it.
        self.price = 0.0

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step is done; the next one may have as many rows."""
        seconds = max(seconds, 1e-6)
        self._settle(num_rows, num_tokens, seconds)
        self._times.add(num_tokens, seconds, has_prompts=num_tokens > num_rows + self._num_drafts)
        self._num_rows = num_rows
        self._num_steps = self._num_steps + 1 if self._num_drafts else 0
        self._num_drafts = 0
        if (shape := (num_rows, self._times.num_changes, self._making)) != self._priced:
            self._priced, self.price = shape, self._least_price()

    def _settle(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Count what was spent and gained since the last step, before its time is learned."""

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        """Record how many draft tokens were sent and accepted."""
        self._num_drafts += num_drafts
        self._record(request).note(num_drafts, num_right)

    def forget_times(self) -> None:
        """Forget measured times: the steps so far were none like those that come."""
        self._times, self.price, self._priced = _StepTimes(), 0.0, (0, 0, 0.0)

    def limits(self, requests: Mapping[K, Any]) -> dict[K, int]:
        """Return the most draft tokens of each of `requests` that are worth sending now, for some
        of them perhaps none; what is asked for is among them.
        """
        asked = self._asked_of(requests)
        first = self._first_chance()
        found = {
            request: _Found(record := self._record(request), record.chance(first), self.max_tokens)
            for request in requests
            if request not in asked
        }
        limits = asked | self._paying(found, sum(asked.values()))
        return limits | self._tried(found, limits)

    def forget(self, request: Hashable) -> None:
        """Drop the record of a request that has left, or whose id is reused."""
        self._records.pop(request, None)

    def _record(self, request: Hashable) -> _Record:
        return self._records.setdefault(request, _Record())

    def _first_chance(self) -> float:
        return FIRST_CHANCE

    def _asked_of(self, requests: Iterable[K]) -> dict[K, int]:
        asked = self.asked
        return {r: min(asked[r], self.max_tokens) for r in requests if r in asked} if asked else {}

    def _paying(self, found: "Mapping[K, _Found]", num_asked: int) -> dict[K, int]:
        """Return the numbers of draft tokens with which most tokens come a second, those that are
        0 left out. `num_asked`: other draft tokens of the step, which are sent in any case.
        """
        if not found:
            return {}
        tokens = [
            (its.chance**number, request)
            for request, its in found.items()
            for number in range(1, its.most + 1)
        ]
        tokens.sort(key=itemgetter(0), reverse=True)
        limits: dict[K, int] = {}
        for _, request in tokens[: self._best_number([chance for chance, _ in tokens], num_asked)]:
            limits[request] = limits.get(request, 0) + 1
        for request, its in found.items():
            if request not in limits and its.chance < self.price:
                its.record.forget_some()
        return limits

    def _best_number(self, chances: Sequence[float], num_asked: int) -> int:
        """Return how many draft tokens are best sent, of those with these chances, the best
        first.
        """
        if not self._times.says_price:  # no step was seen, or none of another size
            return sum(chance >= self.price for chance in chances)
        if self._compares:
            return 0
        begin, right = self._num_rows + num_asked, float(self._num_rows)
        curve = iter(self._times.curve(begin, begin + len(chances)))
        (size, seconds), (above, longer) = next(curve), next(curve)
        best, best_number = LEAST_GAIN * right / seconds, 0
        for number, chance in enumerate(chances, 1):
            while above < begin + number:
                size, seconds, (above, longer) = above, longer, next(curve)
            taken = seconds + (longer - seconds) * (begin + number - size) / (above - size)
            right += chance
            if (rate := right / (taken + number * self._making)) > best:
                best, best_number = rate, number
        return best_number

    @property
    def _compares(self) -> bool:
        """Whether the next step has no drafts but those that are asked for, so that its time can be
        compared.
        """
        return self._num_steps % COMPARED_IN == COMPARED_IN - 1

    def _least_price(self) -> float:
        """Return what a draft token costs at least, in tokens that it would have to gain: 1 as long
        as steps of different sizes were not seen.
        """
        if not self._times.says_price:
            return 1.0
        rows = self._num_rows
        (_, without), *more = self._times.curve(rows, rows * (1 + self.max_tokens))
        extra = min((each - without) / (size - rows) for size, each in more if size >= rows + 1)
        return (extra + self._making) * rows / without

    def _tried(self, found: "Mapping[K, _Found]", limits: Mapping[K, int]) -> dict[K, int]:
        """Return one token for some of those that are withheld."""
        if self._compares:
            return {}
        return {request: 1 for request in found if request not in limits and self._is_tried()}

    def _is_tried(self) -> bool:
        self._num_withheld += 1
        return not self._num_withheld % TRIAL_INTERVAL


class _Found(NamedTuple):
    """A draft that could be sent: the chance of each token after right ones, and their number."""

    record: _Record
    chance: float
    most: int


class TextDraftLength(DraftLength):
    """The length of drafts that are found in texts, for which the texts have to be searched.

    Ask `may_look` before a search, ask for the `limits` of what was found, then tell what all that
    took. A request has a record for each class of agreement, which begins as what is known of all
    requests. Drafts that a policy asks for are outside the budget, and say nothing about other
    requests.
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
        #: Seconds that may be lost now; below 0, more was lost than may be.
        self._credit = 0.0
        # Since the last step: seconds of searches, and draft tokens that nobody asked for.
        self._searching = 0.0
        self._num_sent = self._num_right = 0

    def may_look(self) -> bool:
        """Return whether drafts are to be looked for after this step; `is_open` then says whether
        also for requests for which none are `asked`. To be asked once a step.
        """
        self._is_trial = False
        self.is_open = self._credit >= 0.0 and not self._compares and self._may_pay()
        return self.is_open or any(self.asked.values())

    def looked(self, seconds: float) -> None:
        """Record what a search took for requests for which no drafts are `asked`."""
        self._searching += seconds

    def limits(self, requests: Mapping[K, tuple[int, int]]) -> dict[K, int]:
        """`requests`: by request, the tokens of its text that were found again, and the number of
        those behind, which are its draft.
        """
        asked = self._asked_of(requests)
        found, classes = dict[K, _Found](), dict[K, int]()
        for request, (agreed, most) in requests.items():
            own = classes[request] = sum(agreed >= least for least in CLASSES)
            if request not in asked:
                record = self._record((request, own))
                chance = record.chance(self._by_class[own].chance(FIRST_CHANCE))
                found[request] = _Found(record, chance, min(most, self.max_tokens))
        limits = asked | self._paying(found, sum(asked.values()))
        limits |= self._tried(found, limits)
        for request in limits:
            self._sent[request] = classes[request], request in asked
        return limits

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        self._num_drafts += num_drafts
        found, was_asked = self._sent.get(request, (0, False))
        record = self._record((request, found))
        record.note(num_drafts, num_right)
        record.belief = max(record.belief, LEAST_BELIEF)
        if was_asked:
            return
        self._by_class[found].note(num_drafts, num_right, STEP_MEMORY)
        self._num_sent += num_drafts
        self._num_right += num_right

    def forget(self, request: Hashable) -> None:
        self._sent.pop(request, None)
        for found in range(len(self._by_class)):
            super().forget((request, found))

    def forget_times(self) -> None:
        super().forget_times()
        self._credit = self._searching = 0.0
        self._num_sent = self._num_right = 0

    def _settle(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        spent = self._searching
        if self._num_sent:
            whole, without, plain = map(
                self._times.seconds, (num_tokens, num_tokens - self._num_sent, num_rows)
            )
            whole = min(max(seconds, whole / MOST_SURPRISE), whole * MOST_SURPRISE)
            spent += whole - without - plain * self._num_right / num_rows
        credit = self._credit + LOSS_SHARE * seconds - spent
        self._credit = max(min(credit, MOST_CREDIT * seconds), -MOST_DEBT * seconds)
        self._searching, self._num_sent, self._num_right = 0.0, 0, 0

    def _is_tried(self) -> bool:
        is_trial, self._is_trial = self._is_trial, False
        return super()._is_tried() or is_trial

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
        self._draft_times = _StepTimes()
        self._seconds_since_trial = 0.0  # of steps
        self._all = _Record()

    def forget_times(self) -> None:
        super().forget_times()
        self._draft_times, self._seconds_since_trial = _StepTimes(), 0.0

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """Record a pass of the draft model over this many tokens."""
        self._draft_times.add(num_tokens, max(seconds, 1e-6))

    def _settle(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A pass of the drafting model makes one guess for each row."""
        self._seconds_since_trial += seconds
        self._making = self._draft_times.seconds(num_rows) / num_rows

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        super().verified(request, num_drafts, num_right)
        self._all.note(num_drafts, num_right, STEP_MEMORY)

    def limits(self, requests: Mapping[K, int]) -> dict[K, int]:
        """`requests`: by request, the tokens that the model has to read first. If drafts pay for
        none, now and then one token for the request of which it has to read fewest.
        """
        asked = self._asked_of(requests)
        unread = {request: own for request, own in requests.items() if request not in asked}
        first = self._first_chance()
        found = {
            request: _Found(record := self._record(request), record.chance(first), self.max_tokens)
            for request, own in unread.items()
            if self._repays(request, own)
        }
        asked = {request: limit for request, limit in asked.items() if limit}
        limits = asked | self._paying(found, sum(asked.values()))
        if limits or not unread or self._compares:
            return limits
        request = min(unread, key=unread.__getitem__)
        if self._draft_times.seconds(unread[request]) > TRIAL_SHARE * self._seconds_since_trial:
            return {}
        self._seconds_since_trial = 0.0
        return {request: 1}

    def _repays(self, request: Hashable, num_unread: int) -> bool:
        """Return whether guesses for it are worth reading its text first."""
        if num_unread <= self.max_tokens + 1:  # what was said since the last guess
            return True
        gain = self._record(request).chance(self._first_chance()) - self.price
        of_row = self._times.seconds(self._num_rows) / self._num_rows or math.inf
        return gain * of_row * REPAID_IN >= self._draft_times.seconds(num_unread)

    def _first_chance(self) -> float:
        return self._all.chance(FIRST_CHANCE)
